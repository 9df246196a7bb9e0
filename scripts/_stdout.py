"""What is printed on stdout: where that cannot be written a run goes on, says so, and has another exit code."""

from __future__ import annotations

from kandinsky5_nabla.configs.errors import WriteError
from kandinsky5_nabla.scripts._log import say_error


class Stdout:
    """stdout, until something cannot be written there; what comes later is dropped.

    A pipe that its reader has closed is no error to speak of: that has read all it wanted.
    """

    def __init__(self) -> None:
        self._failed = False

    def print(self, text: str) -> None:
        """Print a text, at once."""
        if self._failed:
            return
        try:
            print(text, flush=True)
        except OSError as error:
            self._failed = True
            if not isinstance(error, BrokenPipeError):
                problem = WriteError(f"stdout cannot be written ({error.strerror})")
                say_error(problem, str(problem))

    def exit_code(self, code: int) -> int:
        """Return the exit code of a run that ended with `code`: 1 in place of 0 where its result was not printed."""
        return code or int(self._failed)
