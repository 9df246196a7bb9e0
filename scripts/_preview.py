"""`--preview`: the map of a run's VAE, pictures while it denoises, and a contact sheet of the finished video."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from kandinsky5_nabla.configs.errors import NotFoundError, PreviewError
from kandinsky5_nabla.pipeline.export import to_uint8
from kandinsky5_nabla.pipeline.files import complete_file
from kandinsky5_nabla.pipeline.preview import PreviewMap, clean_estimate, preview_frames, shipped_maps, vae_fingerprint
from kandinsky5_nabla.pipeline.schedule import make_sigmas
from kandinsky5_nabla.scripts._log import say
from kandinsky5_nabla.scripts.contact_sheet import DEFAULT_COLUMNS, DEFAULT_FRAMES, contact_sheet, evenly_spaced

if TYPE_CHECKING:
    import torch

    from kandinsky5_nabla.pipeline.checks import Settings
    from kandinsky5_nabla.scripts._checkpoint import Checkpoint

PREVIEWS = 8
"""At most so many pictures in a run, besides that of its last step."""


def find_map(asked: Path | bool, checkpoint: Checkpoint) -> PreviewMap:
    """Return the map in a file, or (True) the one that comes with the package for the checkpoint's VAE.

    Opens no connection, and of the VAE reads one layer of a kilobyte.

    Raises:
        NotFoundError: if there is no such file.
        PreviewError: if the VAE is not on this machine, or there is no map of it; says what fits one.
    """
    try:
        folder = dataclasses.replace(checkpoint, offline=True).vae_folder()
        fingerprint = vae_fingerprint(folder)
    except (OSError, ValueError) as error:
        raise PreviewError(
            f"--preview: its colours are those of one VAE, which has to be here before the run: {error}; "
            f"once it is, `{fit_command('FOLDER')}` fits them, and --preview preview.json takes them"
        ) from error
    fit = f"`{fit_command(folder)}` fits one, and --preview preview.json takes it"
    if isinstance(asked, bool):
        fitting = [each for each in shipped_maps() if each.vae == fingerprint]
        if not fitting:
            raise PreviewError(f"--preview: no map from latents to colours is shipped for the VAE in {folder}; {fit}")
        return fitting[0]
    if not os.path.exists(asked):  # not Path's, which raises for a name that is too long
        raise NotFoundError(f"--preview {asked}: there is no such file; {fit}")
    try:
        found = PreviewMap.from_json(asked.read_text("utf-8-sig"))
    except OSError as error:
        raise PreviewError(f"--preview {asked}: cannot be read ({error.strerror}); {fit}") from error
    except ValueError as error:
        raise PreviewError(f"--preview {asked}: {error}; {fit}") from error
    if found.vae != fingerprint:
        raise PreviewError(f"--preview {asked}: was fitted for another VAE than the one in {folder}; {fit}")
    return found


def fit_command(folder: Path | str) -> str:
    """Return the command line that fits the map of a VAE."""
    return f"python scripts/fit_preview.py --model {shlex.quote(str(folder))} --output preview.json"


class Previews:
    """Draws the video that a run is heading for, every few steps; a picture that cannot be written ends no run.

    It works on the CPU, on copies: no number of the run, and nothing in its memory plan, depends on it.
    """

    def __init__(
        self, preview_map: PreviewMap, path: Path, settings: Settings, latents_BTHWC: torch.Tensor | None
    ) -> None:
        """Prepare to draw to `path`; the latents are those that a run goes on from, None for one that begins."""
        self._map, self._path, self._settings, self._before = preview_map, path, settings, latents_BTHWC
        self._sigmas = make_sigmas(settings.num_inference_steps, settings.shift)
        self._every = -(-settings.num_inference_steps // PREVIEWS)
        self._failed = False

    def __call__(self, step: int, latents_BTHWC: torch.Tensor) -> None:
        """Take the latents after a step, and draw where it is time for it.

        A run's very first step is never drawn: the noise before it is known to the pipeline alone.
        """
        after = latents_BTHWC.cpu()
        before, self._before = self._before, after
        due = (step + 1) % self._every == 0 or step + 1 == self._settings.num_inference_steps
        if before is None or not due or self._failed:
            return
        clean_BTHWC = clean_estimate(before, after, self._sigmas[step], self._sigmas[step + 1])
        try:
            self._draw(preview_frames(clean_BTHWC[0], self._map))
        except OSError as error:
            self._failed = True
            message = f"the preview {self._path} cannot be written ({error}); the run goes on without it"
            say("warning", message, logging.WARNING)

    def _draw(self, frames_THW3: np.ndarray) -> None:
        """Write a sheet of latent frames at the video's size, each with the number of the last frame that it is of."""
        total, size = len(frames_THW3), (self._settings.width, self._settings.height)
        ratio = (self._settings.num_frames - 1) // max(1, total - 1)
        shown = {
            ratio * t: np.asarray(Image.fromarray(frames_THW3[t]).resize(size, Image.Resampling.BICUBIC))
            for t in evenly_spaced(min(DEFAULT_FRAMES, total), total)
        }
        with complete_file(self._path, overwrite=True) as temporary:
            contact_sheet(shown, DEFAULT_COLUMNS).save(temporary)


def write_sheet(frames: Sequence[np.ndarray], path: Path, *, overwrite: bool) -> None:
    """Write the contact sheet of a video's frames, `[H, W, 3]` each; errors as those of `complete_file`."""
    numbers = evenly_spaced(min(DEFAULT_FRAMES, len(frames)), len(frames))
    with complete_file(path, overwrite=overwrite) as temporary:
        contact_sheet({number: to_uint8(frames[number]) for number in numbers}, DEFAULT_COLUMNS).save(temporary)
