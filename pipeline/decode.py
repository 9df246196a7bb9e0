"""Latents to frames: the HunyuanVideo VAE with a fixed table of tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..configs.tiles import Tile, vae_tiles

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo


def vae_dtype(device: torch.device | str) -> torch.dtype:
    """Return the dtype that the VAE decodes in: fp32 on a CPU, bf16 elsewhere."""
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


@torch.no_grad()
def decode_latents(
    vae: AutoencoderKLHunyuanVideo, latents: torch.Tensor, device: torch.device | str, tile: Tile | None = None
) -> torch.Tensor:
    """Return the video `[B, 3, F, height, width]` in -1 .. 1, fp32 on the CPU, of latents `[B, T, H, W, C]`.

    Runs in `vae_dtype`; the VAE is cast if it came in another dtype. One video at a time, in tiles: `tile` is a row of
    the table, by default the first. Free memory is not looked at: another tile gives slightly other pixels.
    """
    dtype = vae_dtype(device)
    if vae.dtype != dtype:
        vae.to(dtype=dtype)  # pyright: ignore[reportCallIssue]
    vae.enable_tiling(**_tiling(tile or vae_tiles()[0]))
    z_BCTHW = latents.permute(0, 4, 1, 2, 3) / vae.config["scaling_factor"]
    # To the CPU first, clamped in place: a long video in fp32 is larger than the decoder's work on a tile.
    videos = [vae.decode(z[None].to(device, dtype), return_dict=False)[0].cpu().float().clamp_(-1, 1) for z in z_BCTHW]
    return videos[0] if len(videos) == 1 else torch.cat(videos)


def _tiling(tile: Tile) -> dict[str, int]:
    """Return a tile as the arguments of diffusers' `enable_tiling`."""
    return {
        "tile_sample_min_height": tile.side,
        "tile_sample_min_width": tile.side,
        "tile_sample_min_num_frames": tile.frames,
        "tile_sample_stride_height": tile.stride,
        "tile_sample_stride_width": tile.stride,
        "tile_sample_stride_num_frames": tile.frame_stride,
    }
