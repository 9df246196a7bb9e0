"""One way to speak: lines for people on stderr, and all of them with their numbers as JSON in a log.

Everything goes through Python's `logging`; what a run says itself through its logger `kandinsky5_nabla.run`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kandinsky5_nabla.configs.errors import OutputError, TakenError, UserError, WriteError

PACKAGE = "kandinsky5_nabla"
LIBRARIES = ("diffusers", "transformers")
_run = logging.getLogger(f"{PACKAGE}.run")


def say(event: str, message: str, level: int = logging.INFO, **fields: Any) -> None:
    """Say a line: on stderr if its level is shown there, and with its event and fields in the log, if there is one.

    Events: run, stage, stage_done, memory, step, video, done; notice, warning, error, traceback, go_on, interrupt.
    """
    _terminal()
    _run.log(level, message, extra={"event": event, "fields": fields})


def say_error(error: UserError, sentence: str, **fields: Any) -> None:
    """Say what is wrong, in one line, whatever the libraries say; the log has its kind and remedy, too."""
    about = {"kind": type(error).__name__, "remedy": error.remedy, **fields}
    say("error", " ".join(sentence.split()), logging.ERROR, **about)


def is_shown(level: int) -> bool:
    """Return whether stderr gets lines of a level."""
    return _terminal().level <= level


@contextmanager
def speaking(quiet: bool, verbose: bool, log: Path | None) -> Iterator[None]:
    """Let this package and its libraries speak within the body.

    Args:
        quiet: show warnings and errors alone.
        verbose: show everything, the warnings of libraries included.
        log: gets a JSON line for everything, whatever is shown; one that `log_problems` refuses gets none.
    """
    terminal, top = _terminal(), logging.getLogger(PACKAGE)
    level, show = top.level, warnings.showwarning
    files = [] if log is None or log_problems(log) else [_LogFile(log)]
    loggers = [logging.getLogger(name) for name in (PACKAGE, *LIBRARIES)]
    for logger in loggers:
        for handler in (terminal, *files):
            logger.addHandler(handler)
    terminal.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    top.setLevel(logging.DEBUG)
    warnings.showwarning = lambda message, *_: say("warning", str(message), logging.WARNING)
    try:
        yield
    finally:
        warnings.showwarning = show
        top.setLevel(level)
        terminal.setLevel(logging.INFO)
        for logger in loggers:
            for handler in (terminal, *files):
                logger.removeHandler(handler)
        for file in files:
            file.close()


def log_problems(path: Path | None) -> list[UserError]:
    """Return why no log can be appended to a file; its suffix keeps it apart from all other files of a run."""
    from kandinsky5_nabla.scripts._outputs import named_file_problems  # here: it loads torch

    if path is None:
        return []
    problems = named_file_problems("log", path, "run.jsonl", overwrite=True)
    if problems or not path.exists():
        return problems
    try:
        with path.open("ab"):
            pass
        if path.is_file() and not _is_log(path):
            return [TakenError(f"log {path}: holds something else than a log; name another file")]
    except OSError as error:
        return [OutputError(f"log {path}: cannot be written to ({error.strerror})")]
    return []


def _is_log(path: Path) -> bool:
    """Return whether a file is empty or begins as a log does."""
    with path.open("rb") as file:
        first = file.readline()
    try:
        return not first or {"time", "event"} <= json.loads(first).keys()
    except (ValueError, AttributeError, RecursionError):  # no JSON, no object, or too deep
        return False


def _terminal() -> _Terminal:
    """Return the handler of stderr; the first call brings it."""
    top = logging.getLogger(PACKAGE)
    for handler in top.handlers:
        if isinstance(handler, _Terminal):
            return handler
    top.addHandler(handler := _Terminal(logging.INFO))
    return handler


class _Terminal(logging.Handler):
    """Writes lines for people to what stderr is at that moment, above a bar that stands there."""

    def emit(self, record: logging.LogRecord) -> None:
        if not (_is_ours(record) or record.levelno >= logging.ERROR or self.level <= logging.DEBUG):
            return  # what libraries warn of is seldom for users
        event = _event(record)
        line = f"{event}: {_message(record)}" if event in ("warning", "error") else _message(record)
        # A terminal that is gone must not end a run; RuntimeError: a signal's line came while another was written.
        with suppress(OSError, ValueError, RuntimeError):
            if sys.stderr.isatty():
                from tqdm import tqdm

                tqdm.write(line, file=sys.stderr)
            else:
                print(line, file=sys.stderr, flush=True)


class _LogFile(logging.Handler):
    """Appends JSON lines, each handed to the system at once and as a whole: a killed process loses none."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file: int | None = None
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._append((json.dumps(_as_dict(record), default=str) + "\n").encode())
        except OSError as error:
            if not self._failed:
                self._failed = True  # first: the warning comes here, too
                what = f"the log {self._path} cannot be written ({error.strerror})"
                say("warning", f"{what}: the run goes on, and lines are missing there", logging.WARNING)

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":  # half a line of a machine that went down
                line = b"\n" + line
        written = os.write(self._file, line)
        if written < len(line):  # the disk is full: no half a line
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise WriteError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        super().close()


def _as_dict(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", {"logger": record.name})
    return {
        "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "event": _event(record),
        "message": _message(record),
        **fields,
    }


def _event(record: logging.LogRecord) -> str:
    """Return the event of a line; what was not said by `say` is a warning or a notice."""
    return getattr(record, "event", "warning" if record.levelno >= logging.WARNING else "notice")


def _message(record: logging.LogRecord) -> str:
    """Return the text of a line; a library's mistake in one must not end a run."""
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):
        return str(record.msg)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == PACKAGE
