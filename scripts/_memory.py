"""The memory of a command line's run, planned from what is known of its checkpoint before any weight is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from kandinsky5_nabla.configs import find_preset
from kandinsky5_nabla.configs.tiles import vae_tiles
from kandinsky5_nabla.models.headers import DIFFUSERS_WEIGHTS, TRANSFORMERS_WEIGHTS
from kandinsky5_nabla.pipeline.memory import WAYS, MemoryPlan, Run, budget, choose, remedy
from kandinsky5_nabla.pipeline.single_file import part_folder
from kandinsky5_nabla.pipeline.sizes import (
    Part,
    Sizes,
    part_of_folder,
    published_sizes,
    sizes_of_configs,
    sizes_of_folder,
)

if TYPE_CHECKING:
    from kandinsky5_nabla.scripts._checkpoint import Checkpoint
    from kandinsky5_nabla.scripts._setup import Setup

FAMILIES = ("lite", "pro")
NOTHING = Part(0)


def plan_memory(setup: Setup) -> MemoryPlan | None:
    """Return how the run is to be placed in the memory that is free now; None where the sizes are not known yet.

    None also for a run that only decodes, which has nothing to place beside the VAE.

    Raises:
        ValueError: if it does not fit; the message has the smallest change that does.
    """
    if "transformer" in setup.checkpoint.left_out:
        return None
    sizes = known_sizes(setup.checkpoint)
    if sizes is None:
        return None
    settings = setup.largest
    run = Run(
        settings.height,
        settings.width,
        settings.num_frames,
        device=setup.device.partition(":")[0],
        dtype=setup.dtype,
        text_encoder_dtype=setup.text_encoder_dtype,
        dit_dtype=setup.dit_dtype,
        attention=setup.attention or ("NABLA_ATTN" if setup.sparse else "SDPA"),
        videos=setup.num_videos,
        tile=setup.tile or vae_tiles()[0],
        expand=setup.expand_prompt,
    )
    return choose(sizes, run, budget(setup.device), setup.offload)


def less_for_denoising(setup: Setup) -> str:
    """Return what would fit where the denoising has run out of the memory that was planned for it.

    It names the next way to offload that takes a tenth less than the denoising was to take or, if there is none, what
    `choose` would.
    """
    plan, sizes = setup.memory, known_sizes(setup.checkpoint)
    assert plan is not None, "it runs, so it was planned"
    assert sizes is not None, "likewise"
    totals = {stage.name: stage.total for stage in plan.stages}
    less = plan.needed - max(totals.values()) + 0.9 * totals["denoise"]
    ways = list(dict.fromkeys(way for way, _ in WAYS))
    for way in ways[ways.index(plan.offload) + 1 :]:
        try:
            choose(sizes, plan.run, less, way)
        except ValueError:  # it does not fit, or is none on this device
            continue
        return f"What would fit: --offload {way}"
    return remedy(sizes, plan.run, less, "auto")


def known_sizes(checkpoint: Checkpoint) -> Sizes | None:
    """Return the sizes of a checkpoint's parts: from its files, or those of the published one that it is."""
    sizes = _all_sizes(checkpoint)
    if sizes is None or not checkpoint.without_text:
        return sizes
    return dataclasses.replace(sizes, text_encoder=NOTHING, text_encoder_2=NOTHING)


def _all_sizes(checkpoint: Checkpoint) -> Sizes | None:
    if checkpoint.folder is not None:
        return sizes_of_folder(checkpoint.folder, checkpoint.left_out)
    if checkpoint.file is not None:
        sizes = sizes_of_configs(checkpoint.configs["transformer"])
        given = {name: _given_part(name, folder) for name, folder in checkpoint.parts.items()}
        return dataclasses.replace(sizes, **given)
    preset = find_preset(checkpoint.model)
    family = None if preset is None else preset.name.partition("-")[0]
    return published_sizes(family) if family in FAMILIES else None


def _given_part(name: str, folder: Path) -> Part:
    return part_of_folder(part_folder(name, folder), DIFFUSERS_WEIGHTS if name == "vae" else TRANSFORMERS_WEIGHTS)
