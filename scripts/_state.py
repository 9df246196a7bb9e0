"""A run's state on disk: a folder NAME.k5 beside NAME.mp4, from which the run goes on where it was."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kandinsky5_nabla.configs.errors import NotFoundError, StateError
from kandinsky5_nabla.scripts._record import Record

if TYPE_CHECKING:
    import torch

    from kandinsky5_nabla.pipeline.embeds_file import EncodedTexts

SUFFIX = ".k5"
_SETTINGS, _TEXT, _DENOISING = "settings.json", "text.safetensors", "denoising.safetensors"
_PREVIEW = "preview.png"
_WRITTEN = r"\.[0-9a-f]{32}\.\w+", r"\.tmp\w{6}"  # ours, and those that safetensors gives a name in the end
_OURS = re.compile("|".join([*map(re.escape, (_SETTINGS, _TEXT, _DENOISING, _PREVIEW)), *_WRITTEN]))
"""Names of the files in it, those included that a killed process was writing."""


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

    def create(self, output: Path, record: Record, texts: EncodedTexts) -> None:
        """Begin a state, after what is left of an earlier one was removed.

        Raises:
            OSError, SafetensorError: if it cannot be written; nothing is left of it then.
            ValueError: if the text is not finite.
        """
        from kandinsky5_nabla.pipeline.embeds_file import save_embeds
        from kandinsky5_nabla.pipeline.state import flush

        self.remove()
        self.path.mkdir(exist_ok=True)
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
            settings = json.loads((self.path / _SETTINGS).read_text("utf-8"))
            output = self.path.with_name(settings.pop("output"))
            return output, Record.from_json(json.dumps(settings))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateError(f"{self.path / _SETTINGS} is damaged: {error}") from error

    def save(self, latents: torch.Tensor, completed: int) -> None:
        """Keep latents `[B, T, H, W, C]` after so many steps; those of an earlier step are replaced.

        Raises:
            OSError: if they cannot be written; what was kept before still is.
        """
        from kandinsky5_nabla.pipeline.state import save_state

        save_state(self.path / _DENOISING, {"latents": latents.float(), "completed": completed})

    def load(self) -> dict[str, Any] | None:
        """Return the state of the denoising (`pipeline.state`), or None before the first save.

        Raises:
            ValueError: if it is damaged.
        """
        from kandinsky5_nabla.pipeline.state import load_state

        with suppress(FileNotFoundError):
            return load_state(self.path / _DENOISING)
        return None

    def remove(self) -> None:
        """Remove our files, settings.json first: without it this is no state. Other files stay, with the folder."""
        (self.path / _SETTINGS).unlink(missing_ok=True)
        if self.path.is_dir():
            for path in self.path.iterdir():
                if _OURS.fullmatch(path.name):
                    path.unlink()
            with suppress(OSError):  # not empty
                self.path.rmdir()
