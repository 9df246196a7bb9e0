"""Two runs of one name: the second waits its turn or says so, and neither takes the other's latents or leavings."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline.files import complete_file, remove_leftovers
from kandinsky5_nabla.pipeline.frames_folder import complete_folder
from kandinsky5_nabla.scripts import generate

QUICK = ["--config", "demo", "--height", "64", "--width", "64", "--num-frames", "1"]
QUICK += ["--attention", "NABLA_REFERENCE", "--device", "cpu", "--seed", "1"]
CAT = [*QUICK, "--prompt", "a cat", "--output", "cat.mp4", "--steps", "2"]


@pytest.fixture
def other(tmp_path):
    """Another process that makes cat.mp4, with its state on the disk."""
    command = [sys.executable, generate.__file__, *CAT[:-1], "5000", "--checkpoint-every", "1"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "cat.k5" / "denoising.safetensors").exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield process
        process.kill()


IN_USE = "cat.k5: another process is making this video; wait for its end, or choose another --output"


def test_a_video_that_another_process_makes_is_left_to_it(here, other, tmp_path):
    for argv in (CAT, [*CAT, "--overwrite"], ["--resume", "cat.k5"]):
        code, _, err = here(*argv)
        assert (code, err) == (2, f"error: {IN_USE}\n"), argv
    assert other.poll() is None
    other.send_signal(signal.SIGKILL)
    other.wait()
    code, _, err = here("--resume", "cat.k5", "--dry-run")  # the lock went with the process
    assert code == 0, err


def test_a_row_that_another_process_makes_is_told_and_the_others_are_made(here, tmp_path, monkeypatch):
    (tmp_path / "rows.txt").write_text("a cat\na dog\n")
    rows = [*QUICK, "--steps", "2", "--prompts", "rows.txt"]
    real, calls, second = Kandinsky5Transformer.forward, [], []

    def forward(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 2:  # while the first row is made
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, generate.__file__, *rows]
            second.append(subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Kandinsky5Transformer, "forward", forward)
    code, _, err = here(*rows)
    [second] = second
    assert second.returncode == 1
    assert f"error: rows.txt line 1: rows/0001-a-{IN_USE.replace('cat.k5', 'cat-1.k5')}" in second.stderr.splitlines()
    assert "rows/0002-a-dog-1.mp4: " in second.stdout
    assert code == 1  # the second has made what this one was to make
    assert "error: rows.txt line 2: output rows/0002-a-dog-1.mp4: exists" in err
    assert len(calls) == 4  # which was noticed before the work
    assert sorted(path.name for path in (tmp_path / "rows").glob("*.mp4")) == ["0001-a-cat-1.mp4", "0002-a-dog-1.mp4"]
    assert here(*rows)[0] == 0
    assert [row["status"] for row in json.loads((tmp_path / "rows/manifest.json").read_text())["rows"]] == ["done"] * 2


@pytest.mark.parametrize("way", ["--resume", "--decode-only"])
def test_latents_of_another_run_are_refused(here, tmp_path, way):
    assert here(*CAT, "--keep-state")[0] == 0
    assert here(*CAT, "--output", "dog.mp4", "--seed", "2", "--keep-state")[0] == 0
    shutil.copy(tmp_path / "dog.k5/denoising.safetensors", tmp_path / "cat.k5")
    code, _, err = here(way, "cat.k5", "--overwrite")
    assert code == 2
    assert "cat.k5/denoising.safetensors is of another run than settings.json beside it: start the run anew" in err


def test_what_a_killed_process_left_of_writing_a_file_goes_with_the_next_run(here, tmp_path):
    class Killed(BaseException):
        pass

    def leave(name, context):
        path = tmp_path / name
        unlink, rmtree = type(path).unlink, shutil.rmtree
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(path), "unlink", lambda *args, **kwargs: None)
            patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            with pytest.raises(Killed), context(path, overwrite=False):
                raise Killed
        assert (unlink, rmtree) == (type(path).unlink, shutil.rmtree)

    for name in ("cat.mp4", "cat.json", "dog.mp4"):
        leave(name, complete_file)
    leave("cat", complete_folder)
    assert len(list(tmp_path.iterdir())) == 4
    remove_leftovers(tmp_path / "cat")
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / ".notes.mp4").touch()
    assert here(*CAT)[0] == 0
    left = [path for path in tmp_path.iterdir() if path.name not in ("cat.mp4", "cat.json", ".notes.mp4")]
    assert len(left) == 1  # that of the dog, which somebody else may be writing
