"""Nothing is lost: a run that was killed, stopped or ran out of anything goes on to the bytes of an undisturbed one."""

import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.scripts import generate
from kandinsky5_nabla.scripts._state import StateFolder

DEMO = load_preset("demo").local_folder
STEPS = 4
QUICK = ["--config", "demo", "--height", "128", "--width", "128", "--num-frames", "1", "--steps", str(STEPS)]
QUICK += ["--attention", "NABLA_REFERENCE", "--device", "cpu"]
CAT = [*QUICK, "--prompt", "a cat", "--seed", "5", "--output", "cat.mp4"]
CALLS = 2  # of the transformer in a step, with guidance
KILLS = 3  # in the suite; `make soak` takes 50


@pytest.fixture
def finish(here, tmp_path):
    """Goes on by the command that an interrupted run has printed last; returns the calls of the transformer."""

    def run(err):
        command = shlex.split(err.splitlines()[-1].removeprefix("go on with: "))
        assert command[:2] == [sys.executable, generate.__file__]
        with at_call(0, None) as calls:
            code, _, err = here(*command[2:])
        assert code == 0, err
        assert not (tmp_path / "cat.k5").exists()
        return len(calls)

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run, made by a process of its own, with its state."""
    folder = tmp_path_factory.mktemp("whole")
    done = subprocess.run(program(*CAT, "--keep-state"), cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def program(*argv):
    return [sys.executable, generate.__file__, *argv]


def environment():
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # one thread, as in this process


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def same_files(folder, whole):
    """Whether video and record are those of the undisturbed run, byte for byte."""
    return all((folder / name).read_bytes() == (whole / name).read_bytes() for name in ("cat.mp4", "cat.json"))


def completed(folder):
    """The steps that a state has behind it; 0 before the first save, None where there is no state."""
    state = StateFolder(folder / "cat.k5")
    if not state.exists():
        return None
    latents = state.load()
    return 0 if latents is None else latents["completed"]


@contextmanager
def at_call(number, act):
    """Lets something happen before a call of the real transformer, numbered from 1; yields the list of the calls."""
    calls, real = [], Kandinsky5Transformer.forward

    def forward(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == number:
            act(self)
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kandinsky5Transformer, "forward", forward)
        yield calls


@contextmanager
def in_decoding(act):
    """Lets something happen before the real VAE decodes; `act` gets the VAE."""
    real = AutoencoderKLHunyuanVideo.decode

    def decode(self, *args, **kwargs):
        act(self)
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoencoderKLHunyuanVideo, "decode", decode)
        yield


def interrupt(model):
    signal.raise_signal(signal.SIGINT)


def fail(error):
    def act(*_):
        raise error

    return act


@contextmanager
def disk_that_fills_up():
    """Yields a function after which no file can grow beyond 500 bytes; afterwards all is as before."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# Killed


def test_a_run_killed_at_any_moment_goes_on_to_the_same_bytes_with_only_the_steps_that_were_left(tmp_path, whole, soak):
    chance, resumed = random.Random(0), 0
    for i in range(KILLS if soak == 1 else 50):
        folder, moment = tmp_path / str(i), chance.randint(0, STEPS)
        folder.mkdir()
        with subprocess.Popen(
            program(*CAT, "--checkpoint-every", str(chance.randint(1, 2))),
            cwd=folder,
            env=environment(),
            stderr=subprocess.DEVNULL,
        ) as process:
            while ((done := completed(folder)) is None or done < moment) and process.poll() is None:
                time.sleep(0.01)
            time.sleep(chance.random() * 0.3)
            process.kill()
        done = completed(folder)
        if done is not None:
            resumed += 1
            command = program("--resume", "cat.k5", "--report", "report.json")
            again = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
            assert again.returncode == 0, again.stderr
            [video] = json.loads((folder / "report.json").read_text())
            assert calls_in(video["report"]) == CALLS * (STEPS - done)
        assert same_files(folder, whole)
        assert completed(folder) is None
    assert resumed > 0


def calls_in(report):
    """The calls of the transformer that a report is of: each has gone through every layer."""
    rows = [] if report is None else report["steps_of_layers"]
    return sum(len(row["density_of_calls"]) for row in rows if row["layer"] == 0)


# Stopped


def test_ctrl_c_saves_after_the_step_and_prints_the_command_that_goes_on(tmp_path, whole):
    with subprocess.Popen(
        program(*CAT, "--checkpoint-every", "1", "--json"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell ignores SIGINT for what it starts in the background, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        while not completed(tmp_path) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    done = completed(tmp_path)
    assert process.returncode == 130, err
    *said, problem, command = err.splitlines()
    assert "stopping after this step (once more: at once) ..." in said
    assert problem == f"error: interrupted; the state after step {done} of {STEPS} is kept in cat.k5"
    command = command.removeprefix("go on with: ")
    expected = {"exit_code": 130, "problems": [problem.removeprefix("error: ")], "kinds": ["InterruptedRun"]}
    expected["go_on"] = command
    assert json.loads(out) == {"error": expected}
    assert names(tmp_path) == ["cat.k5"]
    again = subprocess.run(command, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert same_files(tmp_path, whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_and_two_end_it_at_once(here, finish, tmp_path, whole, number):
    def once(model):
        signal.raise_signal(number)

    def twice(model):
        signal.raise_signal(number)
        signal.raise_signal(number)

    with at_call(CALLS + 1, once):  # in step 2, which is finished and saved
        code, _, err = here(*CAT)
    assert code == 130, err
    assert completed(tmp_path) == 2
    with at_call(1, twice) as calls:
        code, _, err = here("--resume", "cat.k5")
    assert (code, len(calls)) == (130, 1)
    assert completed(tmp_path) == 2
    assert finish(err) == CALLS * (STEPS - 2)
    assert same_files(tmp_path, whole)


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("the compiler ended"), 130), (OSError("disk full"), 1)])
def test_what_a_terminals_ctrl_c_breaks_in_the_step_is_part_of_the_stop_but_no_save_that_fails(here, error, code):
    def broken(model):
        interrupt(model)
        raise error

    with at_call(1, broken):
        assert here(*CAT)[0] == code


def test_an_interrupt_in_the_last_step_or_while_decoding_loses_no_step(here, finish, tmp_path, whole):
    with at_call(CALLS * STEPS, interrupt):
        code, _, err = here(*CAT)
    assert code == 130, err
    assert completed(tmp_path) == STEPS
    with in_decoding(interrupt):
        code, _, err = here("--resume", "cat.k5")
    assert code == 130, err
    assert finish(err) == 0
    assert same_files(tmp_path, whole)


def test_what_was_begun_before_a_stop_is_kept_for_each_of_several_videos(here, finish, tmp_path):
    several = [*QUICK, "--prompt", "a cat", "--num-videos", "3", "--seed", "5", "--output", "cat.mp4"]
    with at_call(CALLS * STEPS + 1, interrupt):
        code, out, err = here(*several, "--json")
    assert code == 130
    error = json.loads(out)["error"]
    assert error["problems"] == [
        f"interrupted; the state after step 1 of {STEPS} is kept in cat-2.k5; not begun: cat-3.mp4"
    ]
    assert [video["file"] for video in json.loads(out)["videos"]] == ["cat-1.mp4"]
    assert names(tmp_path) == ["cat-1.json", "cat-1.mp4", "cat-2.k5"]
    assert finish(err) == CALLS * (STEPS - 1)
    assert here(*QUICK, "--prompt", "a cat", "--seed", "6", "--output", "single.mp4")[0] == 0
    assert (tmp_path / "cat-2.mp4").read_bytes() == (tmp_path / "single.mp4").read_bytes()


# Failed


def test_when_decoding_fails_the_latents_are_kept_and_make_the_same_video(here, finish, tmp_path, whole):
    with in_decoding(fail(RuntimeError("something broke:\n  badly"))):
        code, out, err = here(*CAT)
    assert (code, out) == (1, "")
    assert err.splitlines()[-3:-1] == [
        "decoding ...",
        "error: decode failed with RuntimeError: something broke: badly; "
        f"the state after step {STEPS} of {STEPS} is kept in cat.k5 (--debug shows the traceback)",
    ]
    assert names(tmp_path) == ["cat.k5"]
    assert finish(err) == 0
    assert same_files(tmp_path, whole)


def test_the_traceback_is_shown_with_debug_alone_and_the_error_is_one_json_object(here):
    with in_decoding(fail(RuntimeError("broken"))):
        assert "Traceback" not in here(*CAT)[2]
        code, out, err = here(*CAT, "--debug", "--overwrite", "--json")
    assert code == 1
    assert "Traceback" in err
    assert "raise error\nRuntimeError: broken\n" in err
    problem, command = err.splitlines()[-2:]
    assert problem.endswith("is kept in cat.k5")
    assert command.endswith("--resume cat.k5 --overwrite --json --debug")
    error = {"exit_code": 1, "problems": [problem.removeprefix("error: ")], "kinds": ["StageError"]}
    assert json.loads(out) == {"error": {**error, "go_on": command.removeprefix("go on with: ")}}


def test_a_name_that_is_taken_while_the_video_is_made_is_not_overwritten(here, tmp_path, whole):
    with in_decoding(lambda vae: (tmp_path / "cat.mp4").write_text("precious")):
        code, _, err = here(*CAT)
    assert code == 1
    assert err.splitlines()[-2].startswith("error: export failed with TakenError: cat.mp4 exists")
    code, _, err = here("--resume", "cat.k5")
    assert code == 2
    assert "output cat.mp4: exists; choose another name or add --overwrite" in err
    assert (tmp_path / "cat.mp4").read_text() == "precious"
    assert here("--resume", "cat.k5", "--overwrite")[0] == 0
    assert same_files(tmp_path, whole)


def test_a_run_that_ended_between_its_mp4_and_its_record_is_finished_without_overwrite(here, tmp_path, whole):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "cat.json").unlink()
    code, _, err = here("--resume", "cat.k5")
    assert code == 0, err
    assert same_files(tmp_path, whole)
    assert names(tmp_path) == ["cat.json", "cat.mp4"]


@pytest.mark.parametrize("where", ["state", "denoise", "export"])
def test_a_full_disk_is_a_clear_error_and_costs_nothing_that_was_saved(here, finish, tmp_path, whole, where):
    with disk_that_fills_up() as fill:
        if where == "state":
            fill()
        full_at = CALLS * 2 + 1 if where == "denoise" else 0
        with at_call(full_at, fill), in_decoding(fill if where == "export" else lambda vae: None):
            code, _, err = here(*CAT, "--checkpoint-every", "1")
    assert code == 1
    assert "Traceback" not in err
    if where == "state":
        assert "error: state failed with" in err.splitlines()[-1]
        assert names(tmp_path) == []
        return
    assert f"error: {where} failed with" in err.splitlines()[-2]
    assert names(tmp_path) == ["cat.k5"]
    assert completed(tmp_path) == (2 if where == "denoise" else STEPS)
    assert finish(err) == (CALLS * (STEPS - 2) if where == "denoise" else 0)
    assert same_files(tmp_path, whole)


def test_a_folder_that_becomes_read_only_is_a_clear_error_and_costs_nothing_that_was_saved(tmp_path, whole):
    import ctypes

    def obey():
        """Take from root the right to write where nobody may; for others there is nothing to take."""
        ctypes.CDLL(None).prctl(24, 1)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE

    state = tmp_path / "cat.k5"
    with subprocess.Popen(
        program(*CAT, "--checkpoint-every", "1"),
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=obey,
    ) as process:
        while not completed(tmp_path) and process.poll() is None:
            time.sleep(0.01)
        state.chmod(0o555)
        _, err = process.communicate(timeout=300)
    state.chmod(0o755)
    done = completed(tmp_path)
    assert process.returncode == 1, err
    problem, command = err.splitlines()[-2:]
    assert "error: denoise failed with WriteError: the state cat.k5/denoising.safetensors cannot be written" in problem
    assert f"the state after step {done} of {STEPS} is kept in cat.k5" in problem
    command = command.removeprefix("go on with: ")
    again = subprocess.run(command, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert same_files(tmp_path, whole)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no folder that nobody can write to")
def test_a_folder_that_nobody_can_write_to_is_refused_before_anything_is_loaded(here):
    code, _, err = here(*CAT, "--output", "/proc/self/cat.mp4")
    assert code == 2
    assert err.startswith("error: output folder /proc/self: cannot be written to")
    code, _, err = here(*CAT, "--cache-dir", "/proc/self/new/cache")
    assert code == 2
    assert err.startswith("error: cache folder /proc/self: cannot be written to")


def test_nan_stops_with_the_step_and_keeps_the_last_good_state(here, tmp_path):
    def poison(model):
        with torch.no_grad():
            model.out_layer.out_layer.bias.fill_(torch.nan)

    with at_call(CALLS * 2 + 1, poison):
        code, _, err = here(*CAT, "--checkpoint-every", "1", "--dtype", "float16")
    assert code == 1
    assert f"the latents after step 3 of {STEPS} (first in out_layer.out_layer) are not finite" in err
    assert "Likely cause: float16, which ends at 65504 (try bfloat16 or float32)" in err
    assert f"the state after step 2 of {STEPS} is kept in cat.k5" in err
    assert completed(tmp_path) == 2
