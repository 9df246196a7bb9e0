"""The progress of a denoising: a bar on a terminal, few lines elsewhere, and numbers that are true."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
import threading
import time
from contextlib import contextmanager

import psutil
import pytest

from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.scripts import generate

QUICK = ["--config", "demo", "--height", "64", "--width", "64", "--num-frames", "1", "--guidance-scale", "1"]
QUICK += ["--attention", "NABLA_REFERENCE", "--device", "cpu"]
QUICK += ["--prompt", "a cat", "--seed", "5", "--output", "cat.mp4"]


@pytest.fixture
def here(as_a_program, capsys, tmp_path):
    """Runs the command line in this process, with a log; returns exit code, what the log has of steps, stderr."""

    def run(*argv):
        code = generate.main([*QUICK, "--log", "run.jsonl", *argv])
        lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
        return code, [line for line in lines if line["event"] == "step"], capsys.readouterr().err

    return run


@contextmanager
def steps_of(*seconds):
    """Makes calls of the transformer, one a step without guidance, take so long, on a clock that else stands still."""
    real, now, waiting = Kandinsky5Transformer.forward, 0.0, iter(seconds)

    def forward(self, *args, **kwargs):
        nonlocal now
        now += next(waiting)
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kandinsky5Transformer, "forward", forward)
        patch.setattr(time, "perf_counter", lambda: now)
        yield


def spoken(err):
    return [int(line.split()[1]) for line in err.splitlines() if line.startswith("step ")]


def test_without_a_terminal_the_first_and_last_step_have_a_line_and_between_them_one_in_ten_seconds(here):
    for seconds, expected in {10: [1, 2, 3, 4, 5, 6, 7, 8], 4: [1, 4, 7, 8], 1: [1, 8]}.items():
        with steps_of(*[seconds] * 8):
            code, _, err = here("--steps", "8", "--overwrite")
        assert (code, spoken(err)) == (0, expected)
    assert spoken(here("--steps", "1", "--overwrite")[2]) == [1]


def test_speed_and_time_left_leave_the_first_step_out_which_compiles(here):
    with steps_of(1000, 100, 300, 200):
        _, steps, err = here("--steps", "4")
    assert [step["seconds"] for step in steps] == [1000, 100, 300, 200]
    assert [step["steps_per_second"] for step in steps] == [0.001, 0.01, 0.005, 0.005]
    assert [step["seconds_left"] for step in steps] == [3000, 200, 200, 0]
    assert re.search(r"^step 3 of 4: 200\.00 s a step, 03:20 left, density 100\.0 %, \d+\.\d GB$", err, re.MULTILINE)


def test_the_memory_of_a_step_is_what_is_resident(here):
    _, steps, _ = here("--steps", "1")
    now = psutil.Process().memory_info().rss / 1e9
    assert steps[0]["memory_GB"] == pytest.approx(now, rel=0.3)


def test_a_run_that_goes_on_counts_from_the_step_where_it_was(here):
    with steps_of(1, 1), pytest.MonkeyPatch.context() as patch:
        real, calls = Kandinsky5Transformer.forward, []

        def forward(self, *args, **kwargs):
            calls.append(None)
            if len(calls) == 3:
                raise RuntimeError("broken")
            return real(self, *args, **kwargs)

        patch.setattr(Kandinsky5Transformer, "forward", forward)
        assert here("--steps", "5", "--checkpoint-every", "1")[0] == 1
    with steps_of(50, 5, 5):
        code, steps, err = here("--steps", "5", "--resume", "cat.k5")
    assert code == 0
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert steps[2]["seconds_left"] == 100
    assert spoken(err) == [3, 5]


# On a terminal


@pytest.fixture
def on_a_terminal(as_a_program, monkeypatch):
    """Runs the command line in this process, with stderr a terminal of 120 columns; returns what it got."""

    def run(*argv):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        shown = []
        reader = threading.Thread(target=_read_all, args=(ours, shown))
        reader.start()
        try:
            with os.fdopen(theirs, "w", buffering=1) as terminal, monkeypatch.context() as patch:
                patch.setattr(sys, "stderr", terminal)
                code = generate.main([*QUICK, *argv])
        finally:
            reader.join()
            os.close(ours)
        assert code in (0, 130)
        return b"".join(shown).decode().replace("\r\n", "\n")

    return run


def _read_all(terminal, shown):
    while True:
        try:
            shown.append(os.read(terminal, 4096))
        except OSError:  # its other end is closed
            return


def test_on_a_terminal_one_bar_shows_the_speed_the_time_left_the_density_and_the_memory(on_a_terminal):
    shown = on_a_terminal("--steps", "3")
    last = [line.split("\r")[-1] for line in shown.split("\n") if "denoise:" in line]
    assert len(last) == 1
    state = r"\d\d:\d\d<00:00, +\d+\.\d\d(it/s|s/it), density 100\.0 %, \d\.\d GB\]"
    assert re.fullmatch(rf"denoise: 100%\|\W+\| 3/3 \[{state}", last[0])
    assert spoken(shown) == []


def test_quietly_there_is_no_bar_and_at_length_a_line_for_each_step_beside_it(on_a_terminal):
    assert "denoise" not in on_a_terminal("--steps", "3", "--quiet")
    shown = on_a_terminal("--steps", "3", "--verbose", "--overwrite")
    assert len(re.findall(r"^(?:.*\r)?step \d of 3: ", shown, re.MULTILINE)) == 3
    assert "denoise: 100%" in shown


def test_a_line_beside_the_bar_stands_alone_and_the_bar_of_the_run_that_goes_on_begins_where_it_was(on_a_terminal):
    real = Kandinsky5Transformer.forward

    def forward(self, *args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kandinsky5Transformer, "forward", forward)
        shown = on_a_terminal("--steps", "3")
    assert re.search(r"\r +\rstopping after this step \(once more: at once\) \.\.\.\n", shown)
    counted = re.findall(r"\| (\d/3) \[", on_a_terminal("--steps", "3", "--resume", "cat.k5"))
    assert (counted[0], counted[-1]) == ("1/3", "3/3")
