"""How much memory each stage of a run takes, and which way of offloading fits.

Plain Python, so that `--dry-run` loads neither torch nor a weight. Weights are counted from configs and headers,
activations by the tensors that are alive together at the worst point of a stage; scripts/measure_memory.py compares
both with reality. GB are 1e9 bytes.

Legend: L text tokens, S visual tokens, M model dim, F feed-forward dim, N blocks of 64 tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..configs.errors import MemoryPlanError, SettingsError
from ..configs.tiles import Tile, next_smaller, vae_tiles
from .sizes import BYTES, QUANTISED, Sizes

GB = 1e9
TILE = 8
"""Side of a block in tokens, as `attention.order` has it, which loads torch."""
TEXT_TOKENS = 400
"""Of the longest prompt: the template's 129, 256 of the user, and what closes it."""
WAYS = (("none", False), ("none", True), ("model", False), ("group", False), ("sequential", False))
"""What `auto` tries, fastest first: the way of `--offload`, and whether parts are released between the stages."""
MARGIN = {"cuda": 0.8 * GB, "cpu": 0.5 * GB}
"""What is not counted: kernels and workspaces of cuBLAS, cuDNN and Triton; on a CPU code and caches."""
FRAGMENTATION = 0.1
"""Share of the activations that the allocator loses between blocks."""


@dataclass(frozen=True)
class Run:
    """What decides on the memory of a run besides the checkpoint.

    Attributes:
        height, width: pixels.
        num_frames: frames of the video.
        device: "cpu" or "cuda".
        dtype: what is computed in: "float32", "bfloat16" or "float16".
        text_encoder_dtype: as `dtype`, or "int8" or "nf4"; None is `dtype`.
        dit_dtype: "fp8", or None or `dtype`.
        attention: name of the backend.
        videos: made one after the other; of one alone the transformer can be released before decoding.
        batch: videos in one forward. Guidance adds nothing: its two forwards come one after the other.
        tile: of the VAE.
        expand: the text encoder rewrites the prompts first, for which it needs its output head.
    """

    height: int
    width: int
    num_frames: int
    device: str = "cuda"
    dtype: str = "bfloat16"
    text_encoder_dtype: str | None = None
    dit_dtype: str | None = None
    attention: str = "NABLA_ATTN"
    videos: int = 1
    batch: int = 1
    tile: Tile = dataclasses.field(default_factory=lambda: vae_tiles()[0])
    expand: bool = False


@dataclass(frozen=True)
class Stage:
    """Bytes on the device in a stage, at its worst point: weights that lie there, and activations."""

    name: str
    weights: int
    activations: int

    @property
    def total(self) -> int:
        """Both."""
        return self.weights + self.activations


@dataclass(frozen=True)
class MemoryPlan:
    """A way of offloading that fits.

    Attributes:
        offload: "none", "model", "group" or "sequential".
        release: whether the text encoders are dropped before denoising, and with one video the transformer before
            decoding.
        run: what was planned for.
        stages: text, denoise, decode.
        budget: bytes that were free.
    """

    offload: str
    release: bool
    run: Run
    stages: tuple[Stage, ...]
    budget: float

    @property
    def needed(self) -> float:
        """Bytes of the largest stage, with the margin."""
        return _needed(self.stages, self.run.device)

    @property
    def title(self) -> str:
        """What was chosen, and what it needs of what is free."""
        way = f"offload {_way(self.offload, self.release)}, VAE tile {self.run.tile.name}"
        return f"memory: {way}, at most {self.needed / GB:.1f} of {self.budget / GB:.1f} GB"

    def line(self) -> str:
        """Return the plan with the GB of each stage in one line."""
        return f"{self.title} ({', '.join(f'{stage.name} {stage.total / GB:.1f}' for stage in self.stages)})"

    def lines(self) -> list[str]:
        """Return the plan with weights and activations of each stage in lines of their own."""
        stages = [
            f"  {s.name}: {s.weights / GB:.1f} GB of weights + {s.activations / GB:.1f} GB = {s.total / GB:.1f} GB"
            for s in self.stages
        ]
        return [self.title, *stages, f"  margin: {(self.needed - max(s.total for s in self.stages)) / GB:.1f} GB"]


def estimate(sizes: Sizes, run: Run, offload: str = "none", release: bool = False) -> tuple[Stage, Stage, Stage]:
    """Return the bytes on the device in the stages text, denoise and decode.

    With `release` all parts start on the device, and leave it when no later stage needs them.
    """
    activations = text_activations(sizes, run), denoise_activations(sizes, run), decode_activations(sizes, run)
    weights = _weights(sizes, run, offload, release)
    stages = zip(("text", "denoise", "decode"), weights, activations, strict=True)
    text, denoise, decode = (Stage(*stage) for stage in stages)
    return text, denoise, decode


def _weights(sizes: Sizes, run: Run, offload: str, release: bool) -> tuple[int, int, int]:
    """Return the bytes of the weights on the device in each stage."""
    text_dtype, dit_dtype = run.text_encoder_dtype or run.dtype, run.dit_dtype or run.dtype
    text = sizes.text_encoder.nbytes(text_dtype, _text_compute(run))
    clip = sizes.text_encoder_2.nbytes(run.dtype, run.dtype)
    dit = sizes.transformer.nbytes(dit_dtype, run.dtype)
    vae = sizes.vae.nbytes(_vae_dtype(run), _vae_dtype(run))
    if offload == "model":
        return max(text, clip), dit, vae
    whole = text_dtype in QUANTISED  # bitsandbytes moves a model only as a whole; CLIP drives it out, and stays
    leaf, stays = (text, clip) if whole else (math.ceil(sizes.text_encoder.leaf * BYTES[text_dtype]), 0)
    if offload == "group":  # the VAE stays; one group computes, and the next is on its way
        block, outside = (part.nbytes(dit_dtype, run.dtype) for part in (sizes.block, sizes.outside))
        return vae + (leaf if whole else 2 * leaf), stays + vae + outside + 2 * block, stays + vae
    if offload == "sequential":
        layers = sizes.transformer.leaf * BYTES[run.dtype], sizes.vae.leaf * BYTES[_vae_dtype(run)]
        return leaf, stays + math.ceil(layers[0]), stays + math.ceil(layers[1])
    everything = text + clip + dit + vae
    if not release:
        return everything, everything, everything
    return everything, dit + vae, vae if run.videos == 1 else dit + vae


def text_activations(sizes: Sizes, run: Run) -> int:
    """Return the bytes in Qwen's feed-forward of one prompt: gate, up and their product `[L, F]`, and the stream.

    Prompts are encoded one by one. nf4 unpacks a weight to the dtype that is computed in. The output head is as
    large as the table of embeddings, the largest layer, and is not quantised.
    """
    compute = BYTES[_text_compute(run)]
    tokens = TEXT_TOKENS * (3 * sizes.text_ff_dim + 6 * sizes.text_dim) * compute
    tokens += sizes.text_encoder.leaf * compute if run.expand else 0
    return tokens + (sizes.text_dim * sizes.text_ff_dim * compute if run.text_encoder_dtype in QUANTISED else 0)


def latent_size(run: Run) -> tuple[int, int, int]:
    """Return latent frames, rows and columns."""
    return (run.num_frames - 1) // 4 + 1, run.height // 8, run.width // 8


def denoise_activations(sizes: Sizes, run: Run) -> int:
    """Return the bytes in a visual block, at the worst of the points below; `models.layers` has the code.

    Alive at all of them: the block's input and the embedded video, which `forward` holds, the RoPE table and latents.
    """
    b, nabla, on_cpu = BYTES[run.dtype], run.attention != "SDPA", run.device == "cpu"
    T, H, W = (math.ceil(size / patch) for size, patch in zip(latent_size(run), sizes.patch_size, strict=True))
    N = T * math.ceil(H / TILE) * math.ceil(W / TILE)
    S = N * TILE**2 if nabla else T * H * W
    X = run.batch * S * sizes.model_dim  # numbers in a tensor [B, S, M]
    latents = run.batch * math.prod(latent_size(run))
    held = (X + run.batch * T * H * W * sizes.model_dim) * b + 4 * S * sizes.head_dim
    held += latents * (3 * 4 * sizes.channels + b * sizes.in_channels)  # noise, latents, first velocity; model's input
    lists = 0
    if nabla:
        edges = bool(H % TILE or W % TILE)
        lists = run.batch * sizes.heads * N**2 * (9 if edges else 5) + N**2
    # Attention._heads for k: modulated x, q, projected k; in fp32 RMSNorm's input, output and two temporaries.
    heads = 3 * X * b + 4 * X * (3 if b == 4 else 4)
    # Attention.forward: modulated x, q, k, v, the result; NABLA's kernel on a CPU copies q, k, v to fp32, on CUDA
    # the result is copied back to the order of the tokens.
    attend = 5 * X * b + lists
    if nabla:
        attend = 4 * X * b + 4 * 4 * X + lists if on_cpu else 6 * X * b + lists
    if run.attention == "NABLA_REFERENCE":  # scores, scaled scores, masked scores, two masks
        attend += 10 * run.batch * sizes.heads * S**2
    # FeedForward: x, modulated x, both sides of the GELU.
    feed_forward = 2 * X * b + 2 * run.batch * S * sizes.ff_dim * b + lists
    if run.dit_dtype == "fp8":  # a layer's weights in the dtype that is computed in
        feed_forward += sizes.model_dim * sizes.ff_dim * b
    return held + max(heads + lists, attend, feed_forward)


def decode_activations(sizes: Sizes, run: Run) -> int:
    """Return the bytes in the decoder on the last tile, beside the tiles before it; or where they are put together.

    A tile with its neighbours' overlap is kept until the end, in the VAE's dtype; on a CPU the fp32 frames follow.
    """
    b, tile = BYTES[_vae_dtype(run)], run.tile
    frames, rows, columns = latent_size(run)
    if frames > tile.frames // 4:
        frames = tile.frames // 4 + 1
    shape = frames, min(rows, tile.side // 8), min(columns, tile.side // 8)
    video = 3 * run.num_frames * run.height * run.width
    kept, share = video, 1.0
    if latent_size(run)[0] > tile.frames // 4:
        kept = video * (tile.frames + 1) / tile.frame_stride
        share = min(1.0, (tile.frames + 1) / run.num_frames)
    now = decoder_numbers(sizes.vae_channels, shape) + kept + video * share * (tile.side / tile.stride) ** 2
    together = kept + video
    after = 3 * video * 4 if run.device == "cpu" else 0  # frames, scaled frames, frames as an array
    return math.ceil(max(now * b, together * b, after))


def decoder_numbers(channels: tuple[int, ...], shape: tuple[int, int, int]) -> int:
    """Return the numbers alive at the worst point of the HunyuanVideo decoder, for latents of `shape` `(T, H, W)`."""
    t, h, w = shape
    before, points = channels[-1], []
    for level, after in enumerate(reversed(channels)):
        volume, padded = t * h * w, (t + 2) * (h + 2) * (w + 2)
        # First block: its input, the activation, that padded, the convolution's own copy, and its output.
        points.append(2 * before * volume + 2 * before * padded + after * volume)
        if level < 3:
            t, h, w = 2 * t - 1 if level >= len(channels) - 3 else t, 2 * h, 2 * w
            # Upsampling: its input, the later frames, all frames, those padded, the copy, and the output.
            points.append(after * (volume + 3 * t * h * w + 2 * (t + 2) * (h + 2) * (w + 2)))
        before = after
    return max(points)


def choose(sizes: Sizes, run: Run, budget: float, offload: str = "auto") -> MemoryPlan:
    """Return the plan of a run in `budget` bytes: the way that was named, or with "auto" the first of `WAYS` that fits.

    Raises:
        ValueError: if it does not fit; the message has a table of all ways, and the smallest change that fits.
    """
    ways = [(way, release, estimate(sizes, run, way, release)) for way, release in _ways(run, offload)]
    for way, release, stages in ways:
        if _needed(stages, run.device) <= budget:
            return MemoryPlan(way, release, run, stages, budget)
    least = min(_needed(stages, run.device) for _, _, stages in ways)
    table = [_row(way, release, estimate(sizes, run, way, release), run) for way, release in _ways(run, "auto")]
    raise MemoryPlanError(
        f"--offload {offload} needs {least / GB:.1f} GB, and {budget / GB:.1f} GB are free. In GB, with the margin: "
        f"{'; '.join(table)}. {remedy(sizes, run, budget, offload)}"
    )


def _ways(run: Run, offload: str) -> list[tuple[str, bool]]:
    """Return the ways to try: on a CPU there is nowhere to offload to, but what is done with can be released."""
    possible = [way for way in WAYS if run.device != "cpu" or way[0] == "none"]
    ways = [way for way in possible if offload in ("auto", way[0])]
    if not ways:
        names = dict.fromkeys(["auto", *(way for way, _ in possible)])
        raise SettingsError(f"--offload {offload}: must be one of {', '.join(names)} on {run.device}")
    return ways


def remedy(sizes: Sizes, run: Run, budget: float, offload: str) -> str:
    """Return what would fit: another way, and the first change that is enough by itself, or with all small dtypes."""

    def fits(changed: Run, way: str = offload) -> bool:
        return any(_needed(estimate(sizes, changed, *one), run.device) <= budget for one in _ways(run, way))

    half = _in_bfloat16(run)
    smallest = dataclasses.replace(half, tile=vae_tiles()[-1], text_encoder_dtype="nf4", dit_dtype="fp8")
    together = f"--text-encoder-dtype nf4 --dit-dtype fp8 --vae-tile {smallest.tile.name}"
    together = together if half is run else f"--dtype bfloat16 {together}"
    combined = [(together, smallest), *((f"{together} {text}", changed) for text, changed in _changes(smallest))]
    found = ["--offload auto"] if offload != "auto" and fits(run, "auto") else []
    change = next((text for text, changed in itertools.chain(_changes(run), combined) if fits(changed)), None)
    found += [] if change is None else [change]
    return f"What would fit: {', or '.join(found) or 'no change that is known here'}"


def _changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Yield changes of a run that need less memory, as arguments of the command line, the smallest change first."""
    replace = dataclasses.replace
    if run.attention == "NABLA_REFERENCE":  # whose scores are whole matrices
        yield "--attention NABLA_ATTN", replace(run, attention="NABLA_ATTN")
    if (half := _in_bfloat16(run)) is not run:
        yield "--dtype bfloat16", half
    quantised = ("int8", "nf4")
    done = quantised.index(run.text_encoder_dtype) + 1 if run.text_encoder_dtype in quantised else 0
    for dtype in quantised[done:]:
        yield f"--text-encoder-dtype {dtype}", replace(run, text_encoder_dtype=dtype)
    if run.dit_dtype != "fp8":
        yield "--dit-dtype fp8", replace(run, dit_dtype="fp8")
    tile = run.tile
    while (tile := next_smaller(tile)) is not None:
        yield f"--vae-tile {tile.name}", replace(run, tile=tile)
    for frames in range(run.num_frames - 4, 0, -4):
        yield f"--num-frames {frames}", replace(run, num_frames=frames)
    for height in range(run.height - 16, 0, -16):
        width = run.width * height // (16 * run.height) * 16
        if width:
            yield f"--height {height} --width {width}", replace(run, height=height, width=width)


def _in_bfloat16(run: Run) -> Run:
    """Return a run in fp32 as one in bf16, with the dtypes that follow it; the same object where it is not in fp32."""
    if run.dtype != "float32":
        return run
    following = {name: "bfloat16" for name in ("text_encoder_dtype", "dit_dtype") if getattr(run, name) == "float32"}
    return dataclasses.replace(run, dtype="bfloat16", **following)


def _needed(stages: tuple[Stage, ...], device: str) -> float:
    """Return the bytes of the largest stage, with what is not counted."""
    return max(stage.total + FRAGMENTATION * stage.activations for stage in stages) + MARGIN[device]


def _row(way: str, release: bool, stages: tuple[Stage, ...], run: Run) -> str:
    per_stage = ", ".join(f"{stage.name} {_needed((stage,), run.device) / GB:.1f}" for stage in stages)
    return f"{_way(way, release)}: {per_stage}"


def _way(way: str, release: bool) -> str:
    return f"{way} with release" if release else way


def _vae_dtype(run: Run) -> str:
    return "float32" if run.device == "cpu" else "bfloat16"


def _text_compute(run: Run) -> str:
    """Return what the text encoder computes in, as `precision.compute_dtype` has it."""
    if run.text_encoder_dtype in QUANTISED:
        return "float32" if run.device == "cpu" else "bfloat16"
    return run.text_encoder_dtype or run.dtype


def budget(device: str) -> int:
    """Return the bytes that are free now: of the CUDA device, or what the system calls available."""
    if device == "cpu":
        import psutil

        return psutil.virtual_memory().available
    import torch

    return torch.cuda.mem_get_info(device)[0]
