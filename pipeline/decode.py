"""Latents to frames: the HunyuanVideo VAE with a fixed table of tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo

TILING = {
    "tile_sample_min_height": 256,
    "tile_sample_min_width": 256,
    "tile_sample_min_num_frames": 16,
    "tile_sample_stride_height": 192,
    "tile_sample_stride_width": 192,
    "tile_sample_stride_num_frames": 12,
}
"""Tiles in pixels and frames. Fixed, so that pixels do not depend on how much memory happens to be free."""


@torch.no_grad()
def decode_latents(vae: AutoencoderKLHunyuanVideo, latents: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return the video `[B, 3, F, height, width]` in -1 .. 1, fp32 on the CPU, of latents `[B, T, H, W, C]`.

    Runs in fp32 on a CPU and in bf16 elsewhere; the VAE is cast if it came in another dtype. One video at a time.
    """
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    if vae.dtype != dtype:
        vae.to(dtype=dtype)  # pyright: ignore[reportCallIssue]
    vae.enable_tiling(**TILING)
    z_BCTHW = latents.permute(0, 4, 1, 2, 3) / vae.config["scaling_factor"]
    videos = [vae.decode(z[None].to(device, dtype), return_dict=False)[0].float().cpu() for z in z_BCTHW]
    return torch.cat(videos).clamp(-1, 1)
