"""A run's state on disk: a folder NAME.k5 beside NAME.mp4, from which the run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from kandinsky5_nabla.configs.errors import NotFoundError, StateError, TakenError
from kandinsky5_nabla.scripts._record import Record

if TYPE_CHECKING:
    import torch

    from kandinsky5_nabla.pipeline.embeds_file import EncodedTexts

SUFFIX = ".k5"
_SETTINGS, _TEXT, _DENOISING = "settings.json", "text.safetensors", "denoising.safetensors"
_PREVIEW, _LOCK = "preview.png", "lock"
_WRITTEN = r"\.[0-9a-f]{32}\.\w+", r"\.tmp\w{6}"  # ours, and those that safetensors gives a name in the end
_OURS = re.compile("|".join([*map(re.escape, (_SETTINGS, _TEXT, _DENOISING, _PREVIEW)), *_WRITTEN]))
"""Names of the files in it, those included that a killed process was writing; the lock goes by itself."""
_OF_DECODING = "vae_tile", "codec", "crf", "versions"
"""What the latents of a record do not depend on, or not so that they would be of no use."""


@dataclass(frozen=True)
class StateFolder:
    """The folder: settings.json, the encoded text, and the state of the denoising from its first save on.

    It is a state as soon as settings.json is there, which is written last. Nothing here imports torch by itself.
    """

    path: Path

    @classmethod
    def of(cls, output: Path) -> StateFolder:
        """Return the folder that belongs to a video."""
        return cls(output.with_suffix(SUFFIX))

    def __str__(self) -> str:
        return str(self.path)

    @property
    def text(self) -> Path:
        """The file of the encoded text (`pipeline.embeds_file`)."""
        return self.path / _TEXT

    @property
    def preview(self) -> Path:
        """The picture of what the denoising is heading for; nothing reads it."""
        return self.path / _PREVIEW

    def exists(self) -> bool:
        """Return whether a run can go on from it."""
        return os.path.isfile(self.path / _SETTINGS)  # not Path's, which raises for a name that is too long

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out within the body; the lock ends with the process, however that ends.

        A folder with nothing in it is gone afterwards.

        Raises:
            TakenError: if another process makes the video now.
            OSError: if the folder or a file in it cannot be made.
        """
        self.path.mkdir(exist_ok=True)
        lock = FileLock(self.path / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise TakenError(self.in_use_sentence()) from error
        try:
            yield
        finally:
            with suppress(OSError):
                (self.path / _LOCK).unlink()
            lock.release()
            with suppress(OSError):  # not empty
                self.path.rmdir()

    def in_use(self) -> bool:
        """Return whether another process makes the video now."""
        try:
            if os.path.isfile(self.path / _LOCK):
                with FileLock(self.path / _LOCK, timeout=0):
                    return False
        except Timeout:
            return True
        except OSError:  # nobody can write here
            pass
        return False

    def in_use_sentence(self) -> str:
        """Return what to say of a folder that is in use."""
        return f"{self}: another process is making this video; wait for its end, or choose another --output"

    def create(self, output: Path, record: Record, texts: EncodedTexts) -> None:
        """Begin a state in the folder, which is held, after what is left of an earlier one was removed.

        Raises:
            OSError, SafetensorError: if it cannot be written; nothing is left of it then.
            ValueError: if the text is not finite.
        """
        from kandinsky5_nabla.pipeline.embeds_file import save_embeds
        from kandinsky5_nabla.pipeline.state import flush

        self.remove()
        made_by = {"model": record.model or record.preset, "revision": record.revision}
        try:
            save_embeds(self.text, texts, **made_by, dtype=record.text_encoder_dtype)
            flush(self.text)
            self.write_settings(output, record)
            flush(self.path.parent)
        except BaseException:
            self.remove()
            raise

    def write_settings(self, output: Path, record: Record) -> None:
        """Write what is being made; an earlier settings.json is replaced."""
        from kandinsky5_nabla.pipeline.state import durable_file

        with durable_file(self.path / _SETTINGS) as temporary:
            settings = {"output": output.name, **record.as_dict()}
            temporary.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")

    def read_settings(self) -> tuple[Path, Record]:
        """Return the output and the record.

        Raises:
            FileNotFoundError: if there is no state.
            ValueError: if settings.json is damaged.
        """
        if not self.exists():
            raise NotFoundError(f"there is no state of a run in {self}")
        try:
            settings = json.loads((self.path / _SETTINGS).read_text("utf-8-sig"))
            if not isinstance(settings, dict):
                raise StateError("it is no JSON object")
            if not isinstance(output := settings.pop("output", None), str):
                raise StateError(f"output is {output!r}, no name")
            return self.path.with_name(output), Record.from_json(json.dumps(settings))
        except (ValueError, RecursionError) as error:
            raise StateError(f"{self.path / _SETTINGS} is damaged: {error}") from error

    def save(self, latents: torch.Tensor, completed: int) -> None:
        """Keep latents `[B, T, H, W, C]` after so many steps; those of an earlier step are replaced.

        Raises:
            OSError: if they cannot be written; what was kept before still is.
        """
        from kandinsky5_nabla.pipeline.state import save_state

        state = {"latents": latents.float(), "completed": completed, "run": self._run()}
        save_state(self.path / _DENOISING, state)

    def load(self) -> dict[str, Any] | None:
        """Return the state of the denoising (`pipeline.state`), or None before the first save.

        Raises:
            StateError: if it is damaged, or of another run than settings.json.
        """
        from kandinsky5_nabla.pipeline.state import load_state

        try:
            state = load_state(self.path / _DENOISING)
        except FileNotFoundError:
            return None
        if state.get("run") != self._run():
            settings = f"{_SETTINGS} beside it"
            raise StateError(f"{self.path / _DENOISING} is of another run than {settings}: start the run anew")
        return state

    def remove(self) -> None:
        """Remove our files, settings.json first: without it this is no state. Other files stay."""
        (self.path / _SETTINGS).unlink(missing_ok=True)
        for path in self.path.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink()

    def _run(self) -> str:
        """Return what tells the run of settings.json from others: a hash of all that its latents depend on."""
        record = self.read_settings()[1].as_dict()
        decides = {name: value for name, value in record.items() if name not in _OF_DECODING}
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]
