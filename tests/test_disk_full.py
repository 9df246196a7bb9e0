"""A disk that is full at any write of a run, for real: a clear error, no file that is not whole, nothing lost.

The disk is a file system in memory, which a process can mount for itself, and fill until it takes no other page or no
other name. The runs are made there, in one process (`_walk`), each with a little more room than the one before, until
one of them finishes: so the disk has been full at each write, whichever those are.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import count
from pathlib import Path

import pytest

from kandinsky5_nabla.pipeline.codecs import CODECS
from kandinsky5_nabla.scripts import generate

QUICK = ["--config", "demo", "--height", "64", "--width", "64", "--num-frames", "1", "--steps", "2", "--device", "cpu"]
QUICK += ["--attention", "NABLA_REFERENCE", "--guidance-scale", "1", "--prompt", "a cat", "--seed", "5", "--keep-state"]
ALL = [*QUICK, "--save-embeds", "text.safetensors", "--report", "report.json", "--output", "cat.mp4"]
SEVERAL = ["--num-videos", "2", "--checkpoint-every", "1", *ALL]
EXPORTS = [[*QUICK, "--codec", name, "--output", f"cat{CODECS[name].suffix}"] for name in CODECS if name != "h264"]
# What there is too little of, where temporary files lie, what there is always room for, the command line.
WALKS = [("pages", "elsewhere", None, ALL), *(("pages", "elsewhere", "cat.k5", argv) for argv in EXPORTS)]
SOAK = [("pages", "there", None, ALL), ("names", "elsewhere", None, ALL), ("names", "there", None, ALL)]
SOAK += [("pages", "elsewhere", None, SEVERAL), ("names", "there", None, SEVERAL)]
SOAK += [("names", "elsewhere", None, [*ALL, "--codec", "frames", "--output", "cat"])]
STAGES = ["text", "state", "denoise", "export", "report"]  # those that write
WRITTEN = ["text.safetensors", "cat.k5/settings.json", "cat.k5/denoising.safetensors", "cat.mp4", "cat.json"]
NO_ROOM = "No space left on device"

can_mount = os.name == "posix" and subprocess.run("unshare -rm true", shell=True, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def walked(tmp_path_factory, soak):
    """Each walk, the files of its undisturbed run, and the runs on a disk that has too little room, in their order."""
    disk, walks = tmp_path_factory.mktemp("disk"), WALKS if soak == 1 else WALKS + SOAK
    on_it = [sys.executable, __file__, str(disk), json.dumps(walks)]
    mounted = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1M,nr_inodes=99 none "$0" && exec "$@"', str(disk)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*mounted, *on_it], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = []
    for walk, (whole, *runs, last) in zip(walks, map(json.loads, done.stdout.splitlines()), strict=True):
        assert (whole["code"], last["code"]) == (0, 0), whole["err"] + last["err"]
        assert last["files"].keys() == whole["files"].keys()
        assert_whole(last["files"], whole["files"])
        found.append((walk, whole["files"], runs))
    return found


def assert_whole(files, whole):
    """No file is there but those of the undisturbed run, and what may not differ is equal to the last byte."""
    assert files.keys() <= whole.keys()
    for name, content in files.items():
        if name == "report.json":  # it has seconds
            assert json.loads(content)[0].keys() == json.loads(whole[name])[0].keys()
        elif not name.endswith("denoising.safetensors"):  # of whichever step: what it leads to is compared
            assert content == whole[name], name


def stage_that_failed(run):
    """The stage of the only problem that a run reports, which is that the disk is full."""
    [problem] = [line for line in run["err"].splitlines() if line.startswith("error: ")]
    assert run["code"] == 1
    assert "Traceback" not in run["err"]
    assert NO_ROOM in problem
    return re.match(r"error: (\w+) failed with", problem)[1]


mounts = pytest.mark.skipif(not can_mount, reason="no process may mount a file system of its own here")


@mounts
def test_a_disk_that_is_full_at_any_write_is_a_clear_error_and_costs_nothing_that_was_written(walked):
    for walk, whole, runs in (each for each in walked if each[0][2] is None):
        if walk[0] == "names":  # where none fits, that is found before anything is loaded
            first = runs.pop(0)
            assert (first["code"], first["files"]) == (2, {})
            assert NO_ROOM in first["err"]
        stages = list(dict.fromkeys(map(stage_that_failed, runs)))
        assert stages in (STAGES, STAGES[:-1])  # what the export takes for a while may be enough for the report
        if walk in WALKS:  # each file was once the first for which there was no room
            assert {sum(name in run["files"] for name in WRITTEN) for run in runs} == {*range(len(WRITTEN) + 1)}
        for run in runs:
            assert_whole(run["files"], whole)
            assert run["after"]["code"] == 0, run["after"]["err"]
            assert_whole(run["after"]["files"], whole)
            states = [name for name in run["files"] if name.endswith(".k5")]
            assert all(f"{state}/settings.json" in run["files"] for state in states)  # otherwise it is none
            finished = run["after"]["files"].keys()
            assert all(state.replace(".k5", Path(walk[-1][-1]).suffix) in finished for state in states)
            assert states or finished == whole.keys()


@mounts
def test_a_disk_that_fills_up_while_a_video_is_written_costs_none_of_its_state_whatever_the_codec(walked):
    for (*_, argv), whole, runs in (each for each in walked if each[0][2] is not None):
        video, state = argv[-1], {name: whole[name] for name in whole if name.startswith("cat.k5")}
        assert {video in run["files"] for run in runs} == {False, True}  # no room for it, and then none for its record
        for run in runs:
            assert stage_that_failed(run) == "export"
            assert_whole(run["files"], whole)
            assert {name: content for name, content in run["files"].items() if name in state} == state
            assert run["after"]["code"] == 0, run["after"]["err"]
            assert run["after"]["files"] == whole


# In the process that has the disk


def _walk(filled, temporary, roomy, argv):
    """Make the undisturbed run and one for each amount of room, print what became of them and of what goes on."""
    tempfile.tempdir = os.path.abspath("tmp") if temporary == "there" else None
    fill = {"pages": _fill_pages, "names": _fill_names}[filled]
    _remove_all()
    runs, after = [_run(argv)], {}
    for room in count(0 if roomy is None else _pages(Path(roomy))):
        _remove_all()
        fill(room)
        run = _run(argv)
        fill(None)
        runs.append(run)
        if run["code"] == 0:
            return print(json.dumps(runs))
        kept = str(run["files"])
        if kept not in after:  # from equal files it goes on to equal files
            after[kept] = _run(_command_that_goes_on(run) or [*argv, "--overwrite"])
        run["after"] = after[kept]


def _run(argv):
    """Run the program; return its exit code, what it says, and the files and folders that are there afterwards."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as err:
        code = generate.main(argv)
    paths = [path for path in sorted(Path().rglob("*")) if path.parts[0] not in ("filling", "tmp")]
    return {"code": code, "err": err.getvalue(), "files": {str(path): _content(path) for path in paths}}


def _content(path):
    """Return what a file holds as text; safetensors writes its metadata in any order, which is sorted here."""
    content = b"" if path.is_dir() else path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little") if path.suffix == ".safetensors" else 0
    header = json.dumps(json.loads(content[8:start]), sort_keys=True) if start else ""
    return header + content[start:].decode("latin-1")


def _command_that_goes_on(run):
    last = run["err"].splitlines()[-1]
    return shlex.split(last)[5:] if last.startswith("go on with: ") else None


def _remove_all():
    for path in Path().iterdir():
        if path.is_file():
            path.unlink()
        elif path.name != "tmp":
            shutil.rmtree(path)


def _fill_pages(room):
    """Leave room for so many pages of content; None gives all of it back."""
    Path("filling").unlink(missing_ok=True)
    if room is not None:
        disk = os.statvfs(".")
        Path("filling").write_bytes(bytes((disk.f_bavail - room) * disk.f_frsize))
        assert os.statvfs(".").f_bavail == room


def _fill_names(room):
    """Leave room for so many files, folders and links; None gives all of it back."""
    if room is None:
        return shutil.rmtree("filling")
    os.mkdir("filling")
    for i in range(os.statvfs(".").f_favail - room):
        Path("filling", str(i)).touch()
    assert os.statvfs(".").f_favail == room


def _pages(folder):
    """Return how many pages the files of a folder take."""
    return sum(-(-path.stat().st_size // os.statvfs(".").f_frsize) for path in folder.iterdir())


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    os.mkdir("tmp")
    for each in json.loads(sys.argv[2]):
        _walk(*each)
