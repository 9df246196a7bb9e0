"""How a run speaks: a line for each stage, what failed in it, and no noise of the libraries."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stage(name: str, spent: dict[str, float], title: str) -> Iterator[None]:
    """Announce a stage, record its seconds in `spent`, and on failure say what failed."""
    print(f"{title} ...", file=sys.stderr)
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{name} failed with {type(error).__name__}: {str(error).strip()}") from error
    spent[name] = time.perf_counter() - start


def speak_plainly() -> None:
    """Leave the terminal to this program: warnings as one line each, no bars and notes of the libraries."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # a line for each layer and prompt
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    handler = logging.StreamHandler()
    handler.addFilter(_name_warnings)
    logging.getLogger("kandinsky5_nabla").addHandler(handler)
    logging.getLogger("kandinsky5_nabla.attention").setLevel(logging.INFO)  # what it compiles, and for how long


def _name_warnings(record: logging.LogRecord) -> bool:
    """Let a line say that it is a warning, and others speak for themselves."""
    if record.levelno >= logging.WARNING:
        record.msg, record.args = f"warning: {record.getMessage()}", ()
    return True
