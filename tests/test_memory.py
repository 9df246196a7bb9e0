"""The memory plan: what is counted, which way is chosen, and what a refusal says."""

import dataclasses
import shutil
import subprocess
import sys

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo
from transformers import CLIPTextConfig, CLIPTextModel, Qwen2_5_VLTextConfig

from kandinsky5_nabla.attention import order
from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.configs.tiles import find_tile, vae_tiles
from kandinsky5_nabla.models.headers import DIFFUSERS_WEIGHTS
from kandinsky5_nabla.models.layers import Attention, Float32Module, Modulation
from kandinsky5_nabla.models.text_encoder import QwenTextEncoder
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline import memory, sizes
from kandinsky5_nabla.pipeline.memory import GB, WAYS, Run, budget, choose, estimate
from kandinsky5_nabla.pipeline.sizes import Part, part_of_folder, published_sizes, sizes_of_configs, sizes_of_folder
from kandinsky5_nabla.scripts import measure_memory

LITE, PRO = published_sizes("lite"), published_sizes("pro")
LITE_10S, PRO_10S_HD = Run(512, 768, 241), Run(768, 1280, 241)
BUDGETS = (12, 24, 48, 80, 141)
FULL = {
    name: {**config, "axes_dims": axes, "visual_cond": True}
    for name, config, axes in (
        ("lite", sizes.PUBLISHED_TRANSFORMERS["lite"], (16, 24, 24)),
        ("pro", sizes.PUBLISHED_TRANSFORMERS["pro"], (32, 48, 48)),
    )
}
ODD = {"model_dim": 96, "time_dim": 40, "ff_dim": 72, "num_text_blocks": 3, "num_visual_blocks": 1}
ODD |= {"axes_dims": (4, 4, 8), "in_text_dim": 20, "in_text_dim2": 12, "in_visual_dim": 5, "out_visual_dim": 7}
ODD |= {"patch_size": (2, 1, 3), "visual_cond": False}


def numbers(model):
    return sum(parameter.numel() for parameter in model.parameters())


def needed(sizes, run, offload="none", release=False):
    return memory._needed(estimate(sizes, run, offload, release), run.device)


@pytest.mark.parametrize("config", [FULL["lite"], FULL["pro"], ODD], ids=["lite", "pro", "odd"])
def test_the_formulas_count_the_transformer_exactly(config):
    with torch.device("meta"):
        model = Kandinsky5Transformer(**config)
    counted = sizes_of_configs(config)
    blocks = [*model.text_transformer_blocks, *model.visual_transformer_blocks]
    linear = [m for block in blocks for m in block.modules() if isinstance(m, torch.nn.Linear)]
    kept = {id(p) for module in model.modules() if isinstance(module, Float32Module) for p in module.parameters()}
    assert counted.transformer.numbers == numbers(model)
    assert counted.transformer.fp32 == sum(p.numel() for p in model.parameters() if id(p) in kept)
    assert counted.transformer.linear == sum(m.weight.numel() for m in linear if id(m.weight) not in kept)
    assert counted.block.numbers == numbers(model.visual_transformer_blocks[0])
    assert counted.outside.numbers == numbers(model) - sum(map(numbers, blocks))
    assert counted.in_channels == model.in_channels
    attentions = [numbers(module) for module in model.modules() if isinstance(module, Attention)]
    layers = [module.weight.numel() for module in linear if id(module.weight) not in kept]
    modulations = [2 * numbers(module) for module in model.modules() if isinstance(module, Modulation)]  # they are fp32
    assert counted.transformer.leaf == max(*attentions, *layers, *modulations)


def test_the_published_models_have_the_published_numbers_of_parameters():
    assert round(LITE.transformer.numbers / 1e9, 3) == 2.008
    assert round(PRO.transformer.numbers / 1e9, 3) == 19.311


def test_the_other_parts_count_as_models_built_from_the_published_configs():
    dims = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    qwen = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    with torch.device("meta"):
        models = [
            QwenTextEncoder(Qwen2_5_VLTextConfig(**qwen, num_attention_heads=28, num_key_value_heads=4)),
            CLIPTextModel(CLIPTextConfig(**dims, projection_dim=768)),
            AutoencoderKLHunyuanVideo(),
        ]
    for model, part in zip(models, (sizes.QWEN, sizes.CLIP, sizes.VAE), strict=True):
        assert part.numbers == numbers(model)
        assert part.leaf == max(parameter.numel() for parameter in model.parameters())
    for model, part in zip(models[:2], (sizes.QWEN, sizes.CLIP), strict=True):
        linear = [module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)]
        assert part.linear == sum(linear)


def test_a_folder_is_counted_as_it_is_loaded_without_reading_a_weight(pipe):
    counted = sizes_of_folder(load_preset("demo").local_folder)
    assert counted.transformer.numbers == numbers(pipe.transformer)
    assert counted.text_encoder.numbers == numbers(pipe.text_encoder)  # no vision tower, no output head
    assert counted.text_encoder_2.numbers == numbers(pipe.text_encoder_2)
    assert counted.vae.numbers == numbers(pipe.vae)
    assert counted.vae_channels == tuple(pipe.vae.config["block_out_channels"])


def test_a_folder_without_weights_or_with_a_broken_config_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        part_of_folder(tmp_path, DIFFUSERS_WEIGHTS)
    folder = shutil.copytree(load_preset("demo").local_folder, tmp_path / "copy")
    (folder / "text_encoder" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"text_encoder/config.json cannot be read"):
        sizes_of_folder(folder)


def test_what_is_not_loaded_need_not_be_there_and_is_not_counted(tmp_path):
    folder = shutil.copytree(load_preset("demo").local_folder, tmp_path / "copy")
    whole = sizes_of_folder(folder)
    shutil.rmtree(folder / "text_encoder")
    shutil.rmtree(folder / "text_encoder_2")
    without = sizes_of_folder(folder, ["text_encoder", "text_encoder_2"])
    assert without.text_encoder == without.text_encoder_2 == Part(0)
    assert (without.transformer, without.vae) == (whole.transformer, whole.vae)


def test_a_text_encoder_can_have_a_dtype_of_its_own():
    for dtype, nbytes in (("float32", 4), ("float16", 2)):
        run = dataclasses.replace(LITE_10S, text_encoder_dtype=dtype)
        assert estimate(LITE, run, "model")[0].weights == nbytes * LITE.text_encoder.numbers


@pytest.mark.parametrize(
    ("dtype", "compute", "nbytes"),
    [
        ("float32", "float32", 4000),
        ("bfloat16", "bfloat16", 4 * 100 + 2 * 900),
        ("fp8", "bfloat16", 4 * 100 + 800 + 2 * 100),
        ("int8", "float32", 4 * 100 + 800 + 4 * 100),
        ("nf4", "bfloat16", 4 * 100 + 450 + 2 * 100),
    ],
)
def test_a_part_keeps_its_fp32_and_small_are_its_linear_weights_alone(dtype, compute, nbytes):
    assert Part(1000, fp32=100, linear=800).nbytes(dtype, compute) == nbytes


def test_a_block_has_the_size_that_the_attention_gives_it():
    assert (memory.TILE, memory.TILE**2) == (order.TILE, order.BLOCK)


def test_the_plan_needs_no_torch():
    script = (
        "import sys; from kandinsky5_nabla.pipeline.memory import *; from kandinsky5_nabla.pipeline.sizes import *;"
        "choose(published_sizes('pro'), Run(512, 768, 121), 141e9); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("attention", ["NABLA_ATTN", "NABLA_REFERENCE", "SDPA"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_of_anything_never_needs_less(attention, device, dtype):
    # Sides are multiples of 128: others have padding, and with it a second pair of block lists.
    for way, release in WAYS if device == "cuda" else WAYS[:2]:
        at = {"device": device, "dtype": dtype, "attention": attention}
        for more in (
            [Run(512, 768, frames, **at) for frames in (1, 5, 13, 17, 21, 61, 121, 241, 509)],
            [Run(side, 768, 61, **at) for side in (128, 256, 384, 512, 1024, 2048)],
            [Run(512, side, 61, **at) for side in (128, 256, 384, 512, 1024, 2048)],
            [Run(512, 768, 61, **at, batch=batch) for batch in (1, 2, 3)],
            [Run(512, 768, 61, **at, videos=videos) for videos in (1, 2, 9)],
            [Run(512, 768, 61, **at, tile=tile) for tile in reversed(vae_tiles())],
        ):
            for stages in zip(*(estimate(LITE, run, way, release) for run in more), strict=True):
                totals = [stage.total for stage in stages]
                assert totals == sorted(totals), (way, release, more)


def test_each_way_needs_no_more_than_the_way_before_it():
    for checkpoint, run in ((LITE, LITE_10S), (PRO, PRO_10S_HD), (PRO, Run(512, 768, 121, attention="SDPA"))):
        totals = [needed(checkpoint, run, *way) for way in WAYS]
        assert totals == sorted(totals, reverse=True)


# Lite has 19.5 GB of weights in bf16, 14.1 of them Qwen, and 4.8 GB of activations.
#   12: Qwen alone is too much for "model"; in groups all stages are under 7 GB.
#   24: all weights lie there together, but not with the activations (25.5 GB): Qwen has to go first.
# Pro has 58.3 GB of weights, and 27 GB of activations at HD: 234,240 tokens of 4096 numbers, twelve times.
#   12, 24: the activations alone are too much, whatever is offloaded.
#   48: the transformer (43.4 GB) leaves no room for the activations, two of its blocks (1.3 GB) do.
#   80: 58.3 GB fit, and 43.9 + 27.5 GB do once Qwen is gone; all at once would be 89 GB.
@pytest.mark.parametrize(
    ("checkpoint", "run", "choices"),
    [
        (LITE, LITE_10S, ["group", "none with release", "none", "none", "none"]),
        (PRO, PRO_10S_HD, [None, None, "group", "none with release", "none"]),
    ],
    ids=["lite-10s-sd", "pro-10s-hd"],
)
def test_auto_takes_the_first_way_that_fits(checkpoint, run, choices):
    for gigabytes, choice in zip(BUDGETS, choices, strict=True):
        if choice is None:
            with pytest.raises(ValueError, match=f"--offload auto needs .* {gigabytes}.0 GB are free"):
                choose(checkpoint, run, gigabytes * GB)
            continue
        plan = choose(checkpoint, run, gigabytes * GB)
        assert memory._way(plan.offload, plan.release) == choice, gigabytes
        assert plan.needed <= gigabytes * GB


def test_a_quantised_text_encoder_makes_room_for_faster_ways():
    small = dataclasses.replace(LITE_10S, text_encoder_dtype="nf4")
    assert [choose(LITE, run, 12 * GB).offload for run in (LITE_10S, small)] == ["group", "none"]
    assert choose(LITE, small, 10.8 * GB).offload == "model"
    # It cannot be moved in pieces, and with the other ways it lies there as a whole.
    text = estimate(LITE, small, "group")[0].weights
    assert text > LITE.text_encoder.nbytes("nf4", "bfloat16")


def changes(run, message):
    """Yields the changes that a refusal names: their options, and run and way of offloading (None if as it was)."""
    fields = {"--text-encoder-dtype": "text_encoder_dtype", "--dit-dtype": "dit_dtype", "--num-frames": "num_frames"}
    fields |= {"--height": "height", "--width": "width", "--vae-tile": "tile"}
    for change in message.partition("What would fit: ")[2].split(", or "):
        words = change.split()
        given = dict(zip(words[::2], words[1::2], strict=True))
        values = {
            fields[name]: find_tile(value) if name == "--vae-tile" else int(value) if value.isdigit() else value
            for name, value in given.items()
            if name != "--offload"
        }
        yield list(given), dataclasses.replace(run, **values), given.get("--offload")


AUTO, TEXT, DIT, TILE = ["--offload"], ["--text-encoder-dtype"], ["--dit-dtype"], ["--vae-tile"]
FRAMES, SIZE = ["--num-frames"], ["--height", "--width"]


@pytest.mark.parametrize(
    ("checkpoint", "run", "gigabytes", "offload", "changed"),
    [
        (LITE, LITE_10S, 18, "none", [AUTO, TEXT]),
        (LITE, LITE_10S, 14, "model", [AUTO, TEXT]),
        (LITE, dataclasses.replace(LITE_10S, text_encoder_dtype="int8"), 12, "none", [AUTO, TEXT]),
        (PRO, PRO_10S_HD, 72, "model", [AUTO, DIT]),
        (LITE, dataclasses.replace(LITE_10S, num_frames=17), 4, "auto", [TILE]),
        (PRO, PRO_10S_HD, 24, "auto", [FRAMES]),
        (PRO, dataclasses.replace(PRO_10S_HD, num_frames=1, height=2048, width=2048), 2.4, "sequential", [SIZE]),
        (LITE, dataclasses.replace(LITE_10S, device="cpu"), 20, "auto", [TEXT]),
        (PRO, PRO_10S_HD, 40, "none", [AUTO, [*TEXT, *DIT, *TILE, *FRAMES]]),
    ],
)
def test_a_refusal_names_changes_and_with_each_the_run_fits(checkpoint, run, gigabytes, offload, changed):
    with pytest.raises(ValueError, match="What would fit: --") as caught:
        choose(checkpoint, run, gigabytes * GB, offload)
    named = list(changes(run, str(caught.value)))
    assert [options for options, _, _ in named] == changed, str(caught.value)
    for _, smaller, way in named:
        assert choose(checkpoint, smaller, gigabytes * GB, way or offload).needed <= gigabytes * GB


def test_the_change_is_the_smallest_of_its_kind():
    with pytest.raises(ValueError, match=r"What would fit: --num-frames \d+$") as caught:
        choose(PRO, PRO_10S_HD, 24 * GB)
    frames = int(str(caught.value).split()[-1])
    with pytest.raises(ValueError, match="GB are free"):
        choose(PRO, dataclasses.replace(PRO_10S_HD, num_frames=frames + 4), 24 * GB)


def test_a_refusal_shows_every_way_with_its_stages():
    with pytest.raises(ValueError, match="GB are free") as caught:
        choose(PRO, PRO_10S_HD, 12 * GB)
    for way in ("none: text", "none with release: text", "model: text", "group: text", "sequential: text"):
        assert way in str(caught.value)
    assert f"model: text {needed_text():.1f}, denoise" in str(caught.value)


def needed_text():
    return memory._needed((estimate(PRO, PRO_10S_HD, "model")[0],), "cuda") / GB


def test_where_nothing_would_fit_it_says_so():
    with pytest.raises(ValueError, match=r"What would fit: no change that is known here$"):
        choose(PRO, PRO_10S_HD, 1 * GB)


def test_the_masked_reference_gives_way_first():
    run = dataclasses.replace(LITE_10S, attention="NABLA_REFERENCE")
    with pytest.raises(ValueError, match=r"What would fit: --attention NABLA_ATTN$"):
        choose(LITE, run, 24 * GB)


def test_a_run_in_fp32_is_offered_bf16_first():
    dtypes = ("dtype", "text_encoder_dtype", "dit_dtype")
    run, half = (
        dataclasses.replace(LITE_10S, device="cpu", **dict.fromkeys(dtypes, dtype)) for dtype in ("float32", "bfloat16")
    )
    enough = needed(LITE, half, "none", True)
    with pytest.raises(ValueError, match=r"What would fit: --dtype bfloat16$"):
        choose(LITE, run, enough)
    with pytest.raises(ValueError, match=r"What would fit: --dtype bfloat16 --text-encoder-dtype nf4 --dit-dtype fp8"):
        choose(LITE, run, 0.6 * enough)


def test_a_named_way_that_does_not_fit_is_not_replaced_by_one_that_does():
    assert choose(PRO, PRO_10S_HD, 50 * GB).offload == "group"
    with pytest.raises(
        ValueError, match=r"--offload model needs 74.4 GB, and 50.0 GB are free.*What would fit: --offload auto, or --"
    ):
        choose(PRO, PRO_10S_HD, 50 * GB, "model")


@pytest.mark.parametrize("offload", ["model", "group", "sequential", "some"])
def test_on_a_cpu_there_is_nowhere_to_offload_to(offload):
    run = dataclasses.replace(LITE_10S, device="cpu", dtype="float32")
    with pytest.raises(ValueError, match=rf"--offload {offload}: must be one of auto, none on cpu"):
        choose(LITE, run, 1000 * GB, offload)


def test_on_a_cpu_releasing_is_what_makes_room():
    run = dataclasses.replace(LITE_10S, device="cpu", dtype="float32", num_frames=121)
    plan = choose(LITE, run, (needed(LITE, run, "none", True) + needed(LITE, run)) / 2)
    assert (plan.offload, plan.release) == ("none", True)


def test_the_transformer_stays_where_another_video_follows():
    one, two = (estimate(LITE, dataclasses.replace(LITE_10S, videos=n), "none", True)[2].weights for n in (1, 2))
    assert two - one == LITE.transformer.nbytes("bfloat16", "bfloat16")


def test_a_plan_tells_its_stages_in_gigabytes():
    plan = choose(LITE, LITE_10S, 24 * GB)
    text, denoise, decode = plan.stages
    lines = plan.lines()
    assert lines[0].startswith("memory: offload none with release, VAE tile 256x16, at most ")
    assert "of 24.0 GB" in lines[0]
    for stage, line in zip((text, denoise, decode), lines[1:4], strict=True):
        assert line.strip().startswith(f"{stage.name}: {stage.weights / GB:.1f} GB of weights")
        assert line.endswith(f"= {stage.total / GB:.1f} GB")
    totals = ", ".join(f"{stage.name} {stage.total / GB:.1f}" for stage in plan.stages)
    assert plan.line() == f"{lines[0]} ({totals})"


def test_the_budget_is_what_is_free_now():
    free = budget("cpu")
    ballast = torch.ones(100_000_000)
    assert free > 0
    assert budget("cpu") < free - ballast.nbytes / 4  # others use memory too; most of ours has to show


def test_padding_counts_as_tokens_and_dense_attention_has_none():
    padded, whole = (Run(side, 1280, 61, attention="NABLA_ATTN") for side in (720, 768))
    assert estimate(LITE, padded)[1].activations > 0.95 * estimate(LITE, whole)[1].activations
    padded, whole = (dataclasses.replace(run, attention="SDPA") for run in (padded, whole))
    assert estimate(LITE, padded)[1].activations < 0.95 * estimate(LITE, whole)[1].activations


def test_the_estimate_is_within_fifteen_percent_of_what_a_stage_takes():
    # A tile of the decoder: nearly all of it is activations; weights are counted exactly above.
    estimated, rise = measure_memory.in_own_process("large-tile")
    assert rise > 1
    assert estimated == pytest.approx(rise, rel=0.15)
