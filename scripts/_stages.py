"""The stages of a run: a line for each, what failed in it, and no noise of the libraries."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kandinsky5_nabla.scripts._failures import kind_of_failure
from kandinsky5_nabla.scripts._log import say


@contextmanager
def stage(name: str, spent: dict[str, float], title: str) -> Iterator[None]:
    """Announce a stage, record its seconds in `spent`, and on failure say what failed, with a kind of the catalogue."""
    say("stage", f"{title} ...", stage=name)
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        kind = kind_of_failure(error)
        raise kind(f"{name} failed with {type(error).__name__}: {str(error).strip()}") from error
    spent[name] = time.perf_counter() - start
    say("stage_done", f"{name} took {spent[name]:.1f} s", logging.DEBUG, stage=name, seconds=round(spent[name], 3))


def speak_plainly() -> None:
    """Leave the terminal to this program: no bars of the libraries, and their warnings through our logging alone."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_warning()
        library.disable_default_handler()
        library.disable_progress_bar()
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # a line for each layer and prompt


def say_what_runs(device: str, plan: dict[str, object]) -> None:
    """Say the versions and the machine, and put the plan beside them into the log."""
    from kandinsky5_nabla.scripts._benchmark import hardware
    from kandinsky5_nabla.scripts._record import versions

    installed, machine = versions(), hardware(device)
    line = f"{', '.join(' '.join(each) for each in installed.items())}; {device}: {machine}"
    say("run", line, logging.DEBUG, versions=installed, device=device, machine=machine, plan=plan)
