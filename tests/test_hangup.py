"""A terminal that is closed while a run denoises costs no step, however many signals that sends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from kandinsky5_nabla.scripts import generate
from kandinsky5_nabla.scripts._interrupt import caught_interrupts
from kandinsky5_nabla.scripts._state import StateFolder

STEPS = 300
CAT = ["--config", "demo", "--height", "64", "--width", "64", "--num-frames", "1", "--steps", str(STEPS)]
CAT += ["--attention", "NABLA_REFERENCE", "--device", "cpu", "--guidance-scale", "1", "--prompt", "a cat"]
CAT += ["--seed", "5", "--output", "cat.mp4", "--checkpoint-every", "1"]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="no terminal hangs up here")


def completed(folder):
    state = StateFolder(folder / "cat.k5")
    latents = state.load() if state.exists() else None
    return 0 if latents is None else latents["completed"]


def start(folder, terminal, *prefix):
    """Starts the run in a session of its own, whose terminal this is, and waits for its third step."""
    import fcntl
    import termios

    process = subprocess.Popen(
        [*prefix, sys.executable, generate.__file__, *CAT],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    while completed(folder) < 3 and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None, process.returncode
    return process


def test_a_closed_terminal_ends_the_run_after_its_step_with_the_state_kept(tmp_path):
    window, terminal = os.openpty()
    with start(tmp_path, terminal) as process:
        os.close(terminal)
        os.close(window)  # the system hangs up, and nothing can be written any more
        assert process.wait(timeout=60) == 130
    assert 3 <= completed(tmp_path) < STEPS
    assert not (tmp_path / "cat.mp4").exists()


def test_a_run_under_nohup_goes_on(tmp_path):
    window, terminal = os.openpty()
    with start(tmp_path, terminal, "nohup") as process:
        os.close(terminal)
        os.close(window)
        done = completed(tmp_path)
        while completed(tmp_path) <= done + 2 and process.poll() is None:
            time.sleep(0.01)
        assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=60) == 130


def test_a_second_hangup_of_the_same_terminal_is_none_and_another_signal_still_ends_at_once():
    with caught_interrupts() as interrupts, interrupts.after_step():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    with caught_interrupts():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # while what the first one ended is put away
