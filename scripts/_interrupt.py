"""Ctrl-C, SIGTERM, or a terminal that is closed: a run that denoises ends after its step, any other at once."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kandinsky5_nabla.scripts._log import say

_HANGUP = getattr(signal, "SIGHUP", None)
"""Not every system has it."""


class Interrupts:
    """What the user has asked for.

    Attributes:
        requested: whether the run is to end after its step.
    """

    def __init__(self) -> None:
        self.requested = False
        self._waiting = False
        self._hung_up = False

    @contextmanager
    def after_step(self) -> Iterator[None]:
        """Let the first signal within the body ask, and the second one end it."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take a signal.

        Raises:
            KeyboardInterrupt: if the run is to end at once.
        """
        if number == _HANGUP:
            if self.requested or self._hung_up:  # of one terminal the shell and the system may each send one
                return
            self._hung_up = True
        if self.requested or not self._waiting:
            raise KeyboardInterrupt
        self.requested = True
        say("interrupt", "stopping after this step (once more: at once) ...", logging.WARNING)


@contextmanager
def caught_interrupts() -> Iterator[Interrupts]:
    """Handle the signals within the body, but for one that the process was started to ignore."""
    interrupts, before = Interrupts(), {}
    for number in (signal.SIGINT, signal.SIGTERM, *([] if _HANGUP is None else [_HANGUP])):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, interrupts.handle)
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
