"""Fit the linear map from a VAE's latents to colours that `generate.py --preview` draws with.

The VAE encodes clips that are made here, of overlapping discs that drift; the map is the least squares fit of their
colours, averaged over what each latent stands for. It prints how near it comes to clips that it was not fitted to.

Legend: F frames, H/W rows and columns, T latent frames, C channels, N latents.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kandinsky5_nabla.configs.errors import CheckpointError, InterruptedRun, NotFoundError, UsageError
from kandinsky5_nabla.scripts._arguments import Parser, fail, fail_running

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKLHunyuanVideo

    from kandinsky5_nabla.pipeline.preview import PreviewMap

CLIPS, UNSEEN = 12, 4
FRAMES, SIDE = 13, 128  # of a clip; the VAE encodes so few frames, of so few pixels, in one piece
DISCS = 60  # of a clip, those behind the others included
LARGEST, SMALLEST = 0.5, 0.03  # radius, in parts of the side
DRIFT = 0.3  # the longest way of a disc from the first to the last frame, likewise
SHADE = 0.3  # how much a disc's colour may change from its middle to its edge
DIGITS = 5  # after the point: the last ones depend on the machine


def draw_clip(seed: int) -> torch.Tensor:
    """Return a clip `[F, H, W, 3]` in 0 .. 1: discs of all sizes and colours, shaded, with edges of one pixel."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    time_F11 = torch.linspace(-0.5, 0.5, FRAMES)[:, None, None]
    pixels = (torch.arange(SIDE) + 0.5) / SIDE
    clip_FHW3 = torch.rand(3, generator=generator).expand(FRAMES, SIDE, SIDE, 3)
    for _ in range(DISCS):
        x, y, dx, dy, size, angle = torch.rand(6, generator=generator).tolist()
        colour, shade = torch.rand(2, 3, generator=generator)
        radius = 1 / (1 / LARGEST + size * (1 / SMALLEST - 1 / LARGEST))  # small ones more often, as in photographs
        right_FHW = pixels[None, None, :] - x - DRIFT * (2 * dx - 1) * time_F11
        down_FHW = pixels[None, :, None] - y - DRIFT * (2 * dy - 1) * time_F11
        covered_FHW1 = ((radius - torch.hypot(right_FHW, down_FHW)) * SIDE + 0.5).clamp(0, 1)[..., None]
        along_FHW1 = ((right_FHW + (2 * angle - 1) * down_FHW) / radius).clamp(-1, 1)[..., None]
        disc_FHW3 = (colour + SHADE * (2 * shade - 1) * along_FHW1).clamp(0, 1)
        clip_FHW3 = clip_FHW3 + covered_FHW1 * (disc_FHW3 - clip_FHW3)
    return clip_FHW3


def pool(clip_FHW3: torch.Tensor, temporal_ratio: int, spatial_ratio: int) -> torch.Tensor:
    """Return the mean colours `[T, H, W, 3]` of what each latent stands for; the first frame has one of its own."""
    import torch
    from torch.nn.functional import avg_pool2d

    small_FHW3 = avg_pool2d(clip_FHW3.movedim(-1, 1), spatial_ratio).movedim(1, -1)
    later_THW3 = small_FHW3[1:].unflatten(0, (-1, temporal_ratio)).mean(1)
    return torch.cat([small_FHW3[:1], later_THW3])


def pairs(vae: AutoencoderKLHunyuanVideo, seeds: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return latents `[N, C]` of the clips of some seeds, and the colours `[N, 3]` that belong to them; in fp64."""
    import torch
    from tqdm import tqdm

    from kandinsky5_nabla.scripts._demo_vae import encode

    ratios = vae.config["temporal_compression_ratio"], vae.config["spatial_compression_ratio"]
    latents, colours = [], []
    for seed in tqdm(seeds, desc="encode", disable=None):
        clip_FHW3 = draw_clip(seed)
        latents.append(encode(vae, clip_FHW3[None].to(vae.device))[0].flatten(0, 2).cpu())
        colours.append(pool(clip_FHW3, *ratios).flatten(0, 2))
    return torch.cat(latents).double(), torch.cat(colours).double()


def fit(latents_NC: torch.Tensor, colours_N3: torch.Tensor, vae: str) -> PreviewMap:
    """Return the map of least squares, for the VAE of this fingerprint."""
    import torch

    from kandinsky5_nabla.pipeline.preview import PreviewMap

    with_one = torch.nn.functional.pad(latents_NC, (0, 1), value=1.0)
    rows = torch.linalg.lstsq(with_one, colours_N3).solution.tolist()
    *weights, bias = (tuple(round(number, DIGITS) for number in row) for row in rows)
    return PreviewMap(vae, tuple(weights), bias)


def residual(preview_map: PreviewMap, latents_NC: torch.Tensor, colours_N3: torch.Tensor) -> tuple[float, float]:
    """Return the RMSE of the map in levels of 255, and R^2, the share of the colours' variance that it explains."""
    import torch

    predicted = latents_NC @ latents_NC.new_tensor(preview_map.weights) + latents_NC.new_tensor(preview_map.bias)
    error = ((predicted - colours_N3) ** 2).mean()
    return 255 * torch.sqrt(error).item(), 1 - (error / colours_N3.var(0, correction=0).mean()).item()


def fit_vae(folder: Path) -> tuple[PreviewMap, float, float]:
    """Return the map of the VAE in a folder, and its residual on clips that it was not fitted to.

    It encodes on CUDA where there is that.

    Raises:
        CheckpointError: if the VAE cannot be loaded.
    """
    import torch
    from diffusers import AutoencoderKLHunyuanVideo

    from kandinsky5_nabla.pipeline.preview import vae_fingerprint
    from kandinsky5_nabla.pipeline.safety import check_part, check_part_weights

    if problems := check_part("vae", folder) or check_part_weights("vae", folder):
        raise CheckpointError("; ".join(problems))
    vae = AutoencoderKLHunyuanVideo.from_pretrained(folder, torch_dtype=torch.float32, use_safetensors=True)
    vae.to(device="cuda" if torch.cuda.is_available() else "cpu")  # pyright: ignore[reportCallIssue]
    found = fit(*pairs(vae, range(CLIPS)), vae_fingerprint(folder))
    return found, *residual(found, *pairs(vae, range(CLIPS, CLIPS + UNSEEN)))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(prog="fit_preview.py", description=(__doc__ or "").partition("\n\nLegend")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER", help="a checkpoint in the Diffusers layout, or its VAE")
    add("--output", type=Path, required=True, metavar="MAP.json", help="what generate.py --preview MAP.json takes")
    add("--overwrite", action="store_true", help="replace an existing file")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the map and print its residual; return 0, 2 for bad input, 1 where something failed, 130 interrupted."""
    try:
        return _main(build_parser().parse_args(argv))
    except UsageError as error:
        return fail(2, [error])
    except KeyboardInterrupt:
        return fail(130, [InterruptedRun("interrupted")])


def _main(args: argparse.Namespace) -> int:
    from kandinsky5_nabla.pipeline.files import complete_file
    from kandinsky5_nabla.pipeline.single_file import part_folder
    from kandinsky5_nabla.scripts._outputs import named_file_problems

    problems = named_file_problems("output", args.output, "preview.json", args.overwrite)
    folder = None
    try:
        folder = part_folder("vae", args.model)
    except OSError as error:
        problems.append(NotFoundError(f"--model {args.model}: {error}"))
    if problems or folder is None:
        return fail(2, problems)
    try:
        found, levels, explained = fit_vae(folder)
        with complete_file(args.output, overwrite=args.overwrite) as temporary:
            temporary.write_text(found.to_json(), encoding="utf-8")
    except Exception as error:
        return fail_running(error, args.debug)
    print(f"{args.output}: on {UNSEEN} other clips RMSE {levels:.1f} of 255, R^2 {explained:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
