"""Training of the demo's VAE: a near-identity start, windows of rendered scenes, standardised latents.

Legend: B videos, F frames, H/W rows and columns, C channels, T latent frames.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kandinsky5_nabla.pipeline.decode import decode_latents
from kandinsky5_nabla.scripts._demo_scenes import (
    FRAMES,
    RADIUS,
    Scene,
    all_words,
    coverage,
    draw_scene,
    paint,
    place,
    render,
)
from kandinsky5_nabla.scripts._demo_training import Stage, generator_of, train
from kandinsky5_nabla.scripts.make_demo_checkpoint import fill_random

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo

VAE_CONFIG = {
    "latent_channels": 8,
    # Full-size frames take most of the time: 8 channels there, and many where the frames are small.
    "block_out_channels": (8, 16, 32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 1,  # of all channels at once: their ratios, which are the colours, survive
    # Trained on windows, used on whole frames: attention would see 64 times as many tokens as it learned from.
    "mid_block_add_attention": False,
}
COLOUR_CHANNELS = 3  # the first latents, which the start makes low-resolution colours; the others are edges
# Standard deviation of the edges' latents, where the colours' is 1: as in pictures, the coarse is the larger. With 1
# for both, the transformer learned colours and shapes much later.
EDGE_DEVIATION = 0.4
LOG_VARIANCE = -6.0  # of the posterior, at the start
KL_WEIGHT = 2e-4
OBJECT_WEIGHT = 3.0  # of the pixels that the object covers in any frame: a trail behind it is an error there
OUTSIDE = 0.1  # weight of what the decoder's clamp to -1 .. 1 removes
PEAK_RATE = 5e-4  # at 1e-3 the latents grow and the pictures get worse
SCALES = (64, 128, 256)  # pixels of the frame's side: those of the transformer's stages
# (until this part of the steps, side in pixels, batch). Convolutions of a single video take three times as long.
WINDOWS = ((0.3, 32, 4), (0.88, 64, 2), (1.0, 96, 2))
TAIL = slice(3, 5)  # the latent frames that decode_latents decodes a second time, as a tile of their own
TAIL_FRAMES = 4  # which it blends into the last frames


def make_vae(generator: torch.Generator) -> AutoencoderKLHunyuanVideo:
    """Return a VAE that copies low-resolution colours from the start, with small residual branches and little noise.

    Each colour runs through all layers as a pair of channels of opposite sign: silu(x) - silu(-x) = x, so the last
    non-linearity cancels. A pair of constants beside them keeps the norms from dividing the brightness away.
    """
    from diffusers import AutoencoderKLHunyuanVideo

    vae = AutoencoderKLHunyuanVideo(**VAE_CONFIG)
    gains = {"conv2": 0.1, "samplers": 0.2, "shortcut": 0.4, "conv_out": 0.1, "conv_in": 0.5, "quant_conv": 0.0}
    fill_random(vae, generator, gains)
    with torch.no_grad():
        for name, weight in vae.named_parameters():
            if weight.ndim == 5 and any(part in name for part in ("samplers", "shortcut", "quant_conv")):
                add_identity(weight, (0.25, 0.5, 0.25) if "downsamplers" in name else (0.0, 1.0, 0.0))
        for half in (vae.encoder, vae.decoder):
            pair_inputs(half.conv_in.conv)
            join_outputs(half.conv_out.conv)
        channels = VAE_CONFIG["latent_channels"]
        vae.encoder.conv_out.conv.weight[channels:] = 0
        vae.quant_conv.bias[channels:] = LOG_VARIANCE
    vae.use_framewise_encoding = False  # 17 frames make one tile; the tiles of decoding are in `loss_of`
    return vae


def add_identity(weight: torch.Tensor, taps: tuple[float, float, float]) -> None:
    """Add a kernel `[out, in, t, y, x]` that copies each channel, smoothed by `taps` in space; time is causal."""
    tap = torch.tensor(taps if weight.shape[-1] == 3 else (1.0,))
    for channel in range(min(weight.shape[:2])):
        weight[channel, channel, -1] += tap[:, None] * tap[None, :]


def pair_inputs(conv: torch.nn.Conv3d) -> None:
    """Copy the first three channels into pairs of opposite sign, and make a pair of constants."""
    colour = torch.arange(3)
    conv.weight[: 3 * 2 + 2] = 0
    conv.weight[colour, colour, -1, 1, 1] = 1
    conv.weight[3 + colour, colour, -1, 1, 1] = -1
    conv.bias[6], conv.bias[7] = 2, -2


def join_outputs(conv: torch.nn.Conv3d) -> None:
    """Join the pairs of `pair_inputs` to the first three channels."""
    colour = torch.arange(3)
    conv.weight[colour, colour, -1, 1, 1] += 1
    conv.weight[colour, 3 + colour, -1, 1, 1] -= 1


def train_vae(stage: Stage) -> AutoencoderKLHunyuanVideo:
    """Train the VAE and fold the latents' mean and deviation into it."""
    vae = make_vae(torch.Generator().manual_seed(1))

    def loss_of_step(step: int) -> torch.Tensor:
        vae.use_framewise_decoding, vae.use_tiling = False, False  # as `check` may have left them
        side, batch = next((side, batch) for part, side, batch in WINDOWS if step < part * stage.steps)
        return loss_of(vae, *draw_windows(step, side, batch), generator_of(stage.name, step))

    train(stage, vae, loss_of_step, lambda: f"PSNR {reconstruction_psnr(vae, unseen_scenes(2)):.1f} dB at 256x256x17")
    vae.use_framewise_decoding = True
    standardise_latents(vae)
    return vae


def draw_windows(step: int, side: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows of scenes `[B, 3, F, side, side]` in -1 .. 1 and the weights of their pixels `[B, 1, F, H, W]`."""
    chance = random.Random(step)
    videos, weights = [], []
    for _ in range(batch):
        scene = draw_scene(chance)
        scale = chance.choice([scale for scale in SCALES if scale >= side])
        coverage_FHW = coverage(scene, scale, draw_window(scene, scale, side, chance), side)
        videos.append(paint(coverage_FHW, scene.words).permute(3, 0, 1, 2) * 2 - 1)
        way_1HW = F.max_pool2d(coverage_FHW.amax(0, keepdim=True), 5, stride=1, padding=2)
        weights.append((1 + OBJECT_WEIGHT * way_1HW).expand_as(coverage_FHW)[None])
    return torch.stack(videos), torch.stack(weights)


def draw_window(scene: Scene, scale: int, side: int, chance: random.Random) -> tuple[int, int]:
    """Return the left and upper pixel of a window around a point in or near the object at some time."""
    reach = 1.2 * RADIUS[scene.words.size]
    corner = (
        round((centre + chance.uniform(-reach, reach)) * scale - side / 2) for centre in scene.centre(chance.random())
    )
    x, y = (min(max(first, 0), scale - side) for first in corner)
    return x, y


def loss_of(
    vae: AutoencoderKLHunyuanVideo, video: torch.Tensor, weight: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Return the loss of videos `[B, 3, F, H, W]`: both tiles that decode_latents makes of 17 frames, and the KL."""
    posterior = vae.encode(video).latent_dist
    latents = posterior.sample(generator)
    whole = error(vae.decode(latents).sample, video, weight)
    few = slice(0, 2)
    tail = vae.decode(latents[few, :, TAIL]).sample[:, :, -TAIL_FRAMES:]
    last = error(tail, video[few, :, -TAIL_FRAMES:], weight[few, :, -TAIL_FRAMES:])
    kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
    return whole + 0.25 * last + KL_WEIGHT * kl


def error(decoded: torch.Tensor, video: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return weighted L1 plus half the MSE; what will be clamped counts little."""
    clamped = decoded.clamp(-1, 1)
    difference = clamped + OUTSIDE * (decoded - clamped) - video
    return (weight * (difference.abs() + 0.5 * difference**2)).mean() / weight.mean()


def unseen_scenes(count: int) -> list[Scene]:
    """Return scenes of held-out combinations: training drew none like them."""
    chance = random.Random(-1)
    words = list(all_words(held_out=True))
    return [place(chance.choice(words), chance) for _ in range(count)]


@torch.no_grad()
def encode(vae: AutoencoderKLHunyuanVideo, frames_BFHWC: torch.Tensor) -> torch.Tensor:
    """Return the latents `[B, T, H, W, C]` of clips `[B, F, H, W, 3]` in 0 .. 1, as the transformer sees them."""
    video_BCFHW = (frames_BFHWC.movedim(-1, 1) * 2 - 1).contiguous()
    mean_BCTHW = vae.encode(video_BCFHW).latent_dist.mean
    return mean_BCTHW.movedim(1, -1) * vae.config["scaling_factor"]


def reconstruct(vae: AutoencoderKLHunyuanVideo, frames_FHWC: torch.Tensor) -> torch.Tensor:
    """Return a clip `[F, H, W, 3]` in 0 .. 1 after encoding and the pipeline's decoding."""
    vae.use_framewise_decoding = True
    video_BCFHW = decode_latents(vae, encode(vae, frames_FHWC[None]), "cpu")
    return video_BCFHW[0].movedim(0, -1) / 2 + 0.5


def psnr(frames: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB of values in 0 .. 1."""
    return -10 * torch.log10(torch.mean((frames - reference) ** 2)).item()


def reconstruction_psnr(vae: AutoencoderKLHunyuanVideo, scenes: list[Scene], scale: int = 256) -> float:
    """Return the mean PSNR of whole clips, in dB."""
    clips = [render(scene, scale) for scene in scenes]
    return sum(psnr(reconstruct(vae, clip), clip) for clip in clips) / len(clips)


@torch.no_grad()
def standardise_latents(vae: AutoencoderKLHunyuanVideo) -> None:
    """Fold mean and deviation of each latent channel into the 1x1x1 convolutions on both sides.

    Afterwards latents times `scaling_factor`, which keeps its published value, have mean 0 and deviation 1 where they
    are colours, EDGE_DEVIATION where they are edges.
    """
    chance = random.Random(2)
    factor = vae.config["scaling_factor"]
    clips = torch.stack([render(draw_scene(chance), 128) for _ in range(48)])
    latents = torch.cat([encode(vae, few) / factor for few in clips.split(4)])
    std_C, mean_C = torch.std_mean(latents.flatten(0, 3), dim=0)
    gain_C = 1 / (std_C * factor)
    gain_C[COLOUR_CHANNELS:] *= EDGE_DEVIATION
    channels = len(gain_C)
    into, back = vae.quant_conv, vae.post_quant_conv
    into.weight[:channels] *= gain_C[:, None, None, None, None]
    into.bias[:channels] = (into.bias[:channels] - mean_C) * gain_C
    into.bias[channels:] += 2 * gain_C.log()  # the logarithm of the variance
    back.bias += back.weight[..., 0, 0, 0] @ mean_C
    back.weight /= gain_C[None, :, None, None, None]


assert 4 * (TAIL.stop - 1) + 1 == FRAMES, "TAIL belongs to clips of 17 frames"
