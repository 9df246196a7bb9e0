"""Training of the demo's VAE: an encoder written by hand, and a decoder that learns on windows of rendered scenes.

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
    Scene,
    Words,
    all_words,
    coverage,
    draw_scene,
    half_width,
    paint,
    place,
    render,
)
from kandinsky5_nabla.scripts._demo_training import Stage, generator_of, train
from kandinsky5_nabla.scripts.make_demo_checkpoint import fill_random

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo

VAE_CONFIG = {
    "latent_channels": 6,
    # Full-size frames take most of the time: 8 channels there, and many where the frames are small.
    "block_out_channels": (8, 16, 32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 1,  # of all channels at once: their ratios, which are the colours, survive
    # Trained on windows, used on whole frames: attention would see 64 times as many tokens as it learned from.
    "mid_block_add_attention": False,
}
BOX, BINOMIAL = (0.0, 0.5, 0.5), (0.25, 0.5, 0.25)
TAPS = (BOX, BINOMIAL, BOX)  # of the three halvings of the frame
LATENT_MEAN, LATENT_DEVIATION = -0.25, 0.8  # of the colours in -1 .. 1 of 2,000 scenes, rounded
LOG_VARIANCE = -6.0  # of the posterior
CONSTANT = 30.0  # in the channels that carry no colour: the last norm divides by nearly the same number for all clips
LATENT_NOISE = 0.15  # largest deviation of the noise in training: what the transformer makes is not exact either
OBJECT_WEIGHT = 3.0  # of the pixels that the object covers in any frame: a trail behind it is an error there
OUTSIDE = 0.1  # weight of what the decoder's clamp to -1 .. 1 removes
PEAK_RATE = 1e-3
SCALES = (64, 128, 256)  # pixels of the frame's side: those of the transformer's stages
# (until this part of the steps, side in pixels, batch). Convolutions of a single video take three times as long.
WINDOWS = ((0.3, 32, 4), (0.85, 64, 2), (1.0, 96, 2))
TAIL = slice(3, 5)  # the latent frames that decode_latents decodes a second time, as a tile of their own
TAIL_FRAMES = 4  # which it blends into the last frames


def make_vae(generator: torch.Generator) -> AutoencoderKLHunyuanVideo:
    """Return a VAE whose encoder is complete and whose decoder copies low-resolution colours from the start.

    Each of the decoder's colours runs through all layers as a pair of channels of opposite sign: silu(x) - silu(-x) =
    x, so the last non-linearity cancels. A pair of constants beside them keeps the norms from dividing the brightness
    away.
    """
    from diffusers import AutoencoderKLHunyuanVideo

    vae = AutoencoderKLHunyuanVideo(**VAE_CONFIG)
    fill_random(vae, generator, {"conv2": 0.1, "samplers": 0.2, "shortcut": 0.4, "conv_out": 0.1, "conv_in": 0.5})
    with torch.no_grad():
        write_encoder(vae)
        for name, weight in vae.decoder.named_parameters():
            if weight.ndim == 5 and any(part in name for part in ("samplers", "shortcut")):
                add_identity(weight, (0.0, 1.0, 0.0))
        pair_inputs(vae.decoder.conv_in.conv)
        join_outputs(vae.decoder.conv_out.conv)
        vae.post_quant_conv.weight.copy_(torch.eye(vae.post_quant_conv.in_channels)[..., None, None, None])
        vae.post_quant_conv.weight *= LATENT_DEVIATION * vae.config["scaling_factor"]
        vae.post_quant_conv.bias.fill_(LATENT_MEAN)
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)
    vae.use_framewise_encoding = False  # 17 frames make one tile; the tiles of decoding are in `loss_of`
    return vae


def write_encoder(vae: AutoencoderKLHunyuanVideo) -> None:
    """Write `colours_to_latents` of `shrink` into the weights of the encoder.

    A learned encoder puts the place of an edge into spikes, which the transformer learns late and never exactly; the
    colours of a small picture are smooth, and tell the place of an edge as well.
    """
    encoder, colours, channels = vae.encoder, 6, VAE_CONFIG["latent_channels"]
    for weight in encoder.parameters():
        if weight.ndim == 5:
            weight.zero_()
    colour = torch.arange(3)
    encoder.conv_in.conv.weight[colour, colour, 2, 1, 1] = 1  # this frame
    encoder.conv_in.conv.weight[3 + colour, colour, 0, 1, 1] = 1  # the frame before the last
    encoder.conv_in.conv.bias[colours] = 1
    *halving, last = encoder.down_blocks
    for block, taps in zip(halving, TAPS, strict=True):
        add_identity(block.downsamplers[0].conv.conv.weight, taps)
    for block in halving[1:]:
        add_identity(block.resnets[0].conv_shortcut.conv.weight, BOX)
    pairs = last.resnets[0].conv_shortcut.conv.weight
    for channel in range(colours):
        pairs[2 * channel, channel], pairs[2 * channel + 1, channel] = 1, -1
    constants = pairs[2 * colours :]
    constants[::2, colours], constants[1::2, colours] = CONSTANT, -CONSTANT
    divisor = CONSTANT * (len(constants) / len(pairs)) ** 0.5
    for channel in range(colours):
        encoder.conv_out.conv.weight[channel, 2 * channel, -1, 1, 1] = divisor
        encoder.conv_out.conv.weight[channel, 2 * channel + 1, -1, 1, 1] = -divisor
    gain = 1 / (LATENT_DEVIATION * vae.config["scaling_factor"])
    vae.quant_conv.weight.zero_()
    vae.quant_conv.weight[:channels] = gain * torch.eye(channels, 2 * channels)[..., None, None, None]
    vae.quant_conv.bias[:channels] = -LATENT_MEAN * gain
    vae.quant_conv.bias[channels:] = LOG_VARIANCE


def add_identity(weight: torch.Tensor, taps: tuple[float, float, float]) -> None:
    """Add a kernel `[out, in, t, y, x]` that copies each channel, weighted by `taps` in space; time is causal."""
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


def shrink(coverage_FHW: torch.Tensor) -> torch.Tensor:
    """Return frames an eighth of their size, as the encoder's three halvings do it."""
    small_F1HW = coverage_FHW[:, None]
    for taps in TAPS:
        tap = torch.tensor(taps)
        small_F1HW = F.conv2d(F.pad(small_F1HW, (1, 1, 1, 1), mode="replicate"), tap.outer(tap)[None, None], stride=2)
    return small_F1HW[:, 0]


def latents_of(coverage_FHW: torch.Tensor, words: Words) -> torch.Tensor:
    """Return latents `[T, H, W, C]` of every second frame of a scene, as the transformer sees them.

    Colours are linear in what the object covers, so the small picture is painted, not the large one.
    """
    small_FHW = shrink(coverage_FHW)
    before_FHW = torch.cat([small_FHW[:1], small_FHW[1::2]])
    pictures = [paint(small_THW, words) * 2 - 1 for small_THW in (small_FHW[::2], before_FHW)]
    return (torch.cat(pictures, dim=-1) - LATENT_MEAN) / LATENT_DEVIATION


def scene_latents(scene: Scene, side: int) -> torch.Tensor:
    """Return the latents `[T, H, W, C]` of a whole clip of this frame size."""
    return latents_of(coverage(scene, side, frames=(FRAMES + 1) // 2), scene.words)


def train_vae(stage: Stage) -> AutoencoderKLHunyuanVideo:
    """Train the decoder of the VAE."""
    vae = make_vae(torch.Generator().manual_seed(1))

    def loss_of_step(step: int) -> torch.Tensor:
        vae.use_framewise_decoding, vae.use_tiling = False, False  # as `check` may have left them
        side, batch = next((side, batch) for part, side, batch in WINDOWS if step < part * stage.steps)
        return loss_of(vae, *draw_windows(step, side, batch), generator_of(stage.name, step))

    train(stage, vae, loss_of_step, lambda: f"PSNR {reconstruction_psnr(vae, unseen_scenes(2)):.1f} dB at 256x256x17")
    vae.use_framewise_decoding = True
    return vae


def draw_windows(step: int, side: int, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return windows of scenes.

    Latents `[B, T, H, W, C]`, pixels `[B, 3, F, side, side]` in -1 .. 1 and their weights `[B, 1, F, side, side]`.
    """
    chance = random.Random(step)
    latents, videos, weights = [], [], []
    for _ in range(batch):
        scene = draw_scene(chance)
        scale = chance.choice([scale for scale in SCALES if scale >= side])
        coverage_FHW = coverage(scene, scale, draw_window(scene, scale, side, chance), side)
        latents.append(latents_of(coverage_FHW[::2], scene.words))
        videos.append(paint(coverage_FHW, scene.words).permute(3, 0, 1, 2) * 2 - 1)
        way_1HW = F.max_pool2d(coverage_FHW.amax(0, keepdim=True), 5, stride=1, padding=2)
        weights.append((1 + OBJECT_WEIGHT * way_1HW).expand_as(coverage_FHW)[None])
    return torch.stack(latents), torch.stack(videos), torch.stack(weights)


def draw_window(scene: Scene, scale: int, side: int, chance: random.Random) -> tuple[int, int]:
    """Return the left and upper pixel of a window around a point in or near the object at some time."""
    reach = 1.2 * half_width(scene.words)
    corner = (
        round((centre + chance.uniform(-reach, reach)) * scale - side / 2) for centre in scene.centre(chance.random())
    )
    x, y = (min(max(first, 0), scale - side) for first in corner)
    return x, y


def loss_of(
    vae: AutoencoderKLHunyuanVideo,
    latents_BTHWC: torch.Tensor,
    video: torch.Tensor,
    weight: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return the loss of what the latents decode to: both tiles that decode_latents makes of 17 frames."""
    deviation_B = LATENT_NOISE * torch.rand(len(latents_BTHWC), generator=generator)
    noise = torch.randn(latents_BTHWC.shape, generator=generator) * deviation_B[:, None, None, None, None]
    latents_BCTHW = (latents_BTHWC + noise).movedim(-1, 1) / vae.config["scaling_factor"]
    whole = error(vae.decode(latents_BCTHW).sample, video, weight)
    few = slice(0, 2)
    tail = vae.decode(latents_BCTHW[few, :, TAIL]).sample[:, :, -TAIL_FRAMES:]
    last = error(tail, video[few, :, -TAIL_FRAMES:], weight[few, :, -TAIL_FRAMES:])
    return whole + 0.25 * last


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


assert 4 * (TAIL.stop - 1) + 1 == FRAMES, "TAIL belongs to clips of 17 frames"
