"""A result that stdout does not take: the run is made all the same, and its exit code and stderr tell."""

import json
import os
import subprocess
import sys

import pytest

from kandinsky5_nabla.scripts import generate

QUICK = ["--config", "demo", "--height", "64", "--width", "64", "--num-frames", "1", "--steps", "1", "--device", "cpu"]
QUICK += ["--attention", "NABLA_REFERENCE", "--prompt", "a cat", "--seed", "5"]
FULL = "error: stdout cannot be written (No space left on device)"

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full here")


def program(folder, stdout, *argv):
    """Runs the command line as a program; returns its exit code and the lines of stderr but for warnings."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, generate.__file__, *argv]
    done = subprocess.run(words, cwd=folder, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)
    return done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]


@pytest.mark.parametrize("argv", [["--list"], ["--version"], ["--help"], [*QUICK, "--dry-run", "--json"]])
def test_a_full_disk_is_an_error_of_one_line_and_a_closed_pipe_ends_quietly(tmp_path, argv):
    with open("/dev/full", "w") as full:
        assert program(tmp_path, full, *argv) == (1, [FULL])
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert program(tmp_path, writing, *argv) == (1, [])
    finally:
        os.close(writing)


def test_bad_input_keeps_its_exit_code_where_it_cannot_be_told_in_json(tmp_path):
    with open("/dev/full", "w") as full:
        code, lines = program(tmp_path, full, "--bad", "--json")
    assert (code, lines[0], len(lines)) == (2, FULL, 2)


def test_videos_whose_lines_cannot_be_printed_are_made_and_the_log_has_the_kind(tmp_path):
    with open("/dev/full", "w") as full:
        argv = [*QUICK, "--num-videos", "2", "--output", "cat.mp4", "--log", "run.jsonl", "--quiet"]
        assert program(tmp_path, full, *argv) == (1, [FULL])
    assert sorted(path.name for path in tmp_path.glob("*.mp4")) == ["cat-1.mp4", "cat-2.mp4"]
    events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["event"] == "error"] == ["WriteError"]
    assert (events[-1]["event"], events[-1]["exit_code"]) == ("done", 1)


def test_a_name_that_is_no_text_ends_no_run_that_is_complete(as_a_program, capsys):
    sys.stderr.reconfigure(errors="backslashreplace")  # as Python's own is
    assert generate.main([*QUICK, "--output=\udcff.mp4"]) == 0
    assert capsys.readouterr().out.startswith(r"\udcff.mp4: 64x64, 1 frame")
