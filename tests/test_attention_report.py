"""The record of what NABLA did equals what the masks say, and recording leaves no trace."""

import dataclasses
import itertools
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kandinsky5_nabla.attention import NablaAttentionMetadataBuilder, nabla_mask, sta_mask
from kandinsky5_nabla.attention.order import real_tokens, tile_grid
from kandinsky5_nabla.attention.reference import kept_by_sorting, masked_attention
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline.attention_report import (
    AttentionRecord,
    MapChoice,
    recorded_attention,
    report_of,
    watched_density,
)
from kandinsky5_nabla.scripts.make_demo_checkpoint import TRANSFORMER_CONFIG

LAYERS, B, H, D = 2, 2, 4, 32
WHOLE, PADDED = (3, 16, 16), (2, 9, 20)  # tokens: twelve blocks each, of the latter eight are part padding
WINDOW = (1, 3, 1)
SIZE = {"height": 128, "width": 256, "num_frames": 5, "num_inference_steps": 2, "seed": 7, "output_type": "latent"}


@pytest.fixture
def transformer():
    transformer = Kandinsky5Transformer(**TRANSFORMER_CONFIG | {"num_visual_blocks": LAYERS})
    transformer.set_attention_backend("NABLA_REFERENCE")
    return transformer


def impls(transformer):
    return [block.self_attention.impl for block in transformer.visual_transformer_blocks]


def metadata_of(shape=WHOLE, P=0.4, step=0):
    return NablaAttentionMetadataBuilder().build(step, sta_mask(tile_grid(shape), WINDOW), P, shape)


def qkv_of(seed, N=12):
    """Tokens whose blocks differ, so that the selection has a choice. With a gradient nothing is compiled."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(3, B, N, 1, H, D, generator=generator)
    tokens = means + torch.randn(3, B, N, 64, H, D, generator=generator)
    return tokens.flatten(2, 3).requires_grad_().unbind()


@pytest.mark.parametrize("backend", ["NABLA_REFERENCE", "NABLA_ATTN"])
@pytest.mark.parametrize("shape", [WHOLE, PADDED])
def test_a_record_says_what_the_mask_says_that_is_computed_directly(transformer, shape, backend):
    transformer.set_attention_backend(backend)
    metadata = metadata_of(shape, step=3)
    with recorded_attention(transformer) as records:
        for layer, impl in enumerate(impls(transformer)):
            impl.forward(*qkv_of(layer), metadata)
    assert [record.layer for record in records] == [0, 1]
    assert records[0].density != records[1].density
    for record in records:
        q, k, _ = qkv_of(record.layer)
        kept_BHNN = kept_by_sorting(q, k, metadata.sta_mask, metadata.P, real_tokens(shape))
        assert 0.1 < kept_BHNN.float().mean() < 0.9
        counts = kept_BHNN.sum(-1)
        assert record.density == pytest.approx(kept_BHNN.float().mean().item(), abs=1e-6)
        assert (record.row_min, record.row_max) == (counts.min(), counts.max())
        assert (record.step, record.call, record.batch, record.blocks) == (3, 0, B, 12)
        assert record.flops == kept_BHNN.sum() * 64 * 64 * 4 * D
        assert record.seconds_selecting > 0
        assert record.seconds_attending > 0


@pytest.mark.parametrize(
    ("window", "expected"),
    [(sta_mask((3, 2, 2), (1, 1, 1)), 1 / 12), (sta_mask((3, 2, 2), (3, 3, 3)), 7 / 9), (None, 0)],
)
def test_the_density_of_the_window_is_that_of_its_mask(transformer, window, expected):
    if window is None:  # a checkpoint without one
        window = torch.zeros(12, 12, dtype=torch.bool)
    metadata = NablaAttentionMetadataBuilder().build(0, window, 0.4, WHOLE)
    with recorded_attention(transformer) as records:
        impls(transformer)[0].forward(*qkv_of(0), metadata)
    assert records[0].window_density == pytest.approx(expected)


def test_the_dense_flops_are_those_that_torch_counts_in_dense_attention(transformer):
    q, k, v = (x.detach() for x in qkv_of(0))
    with recorded_attention(transformer) as records:
        impls(transformer)[0].forward(q, k, v, metadata_of(P=1.0))
    with FlopCounterMode(display=False) as counter:
        masked_attention(q, k, v, torch.ones(B, H, 12, 12, dtype=torch.bool), D**-0.5)
    assert records[0].dense_flops == counter.get_total_flops() == 4 * B * H * 768**2 * D
    assert records[0].flops == records[0].dense_flops
    assert (records[0].density, records[0].row_min) == (1, 12)


def test_a_run_of_the_pipeline_is_recorded_call_by_call_and_gives_the_same_latents(pipe):
    expected = pipe("a circle", **SIZE).frames
    with recorded_attention(pipe.transformer) as records:
        assert torch.equal(pipe("a circle", **SIZE).frames, expected)
    places = [(record.step, record.call, record.layer) for record in records]
    assert places == list(itertools.product(range(2), range(2), range(4)))


def test_the_calls_are_counted_anew_in_each_run_that_is_recorded(pipe):
    one_step = SIZE | {"num_inference_steps": 1}
    with recorded_attention(pipe.transformer) as records:
        pipe(["a circle", "a square"], **one_step, guidance_scale=1)
        pipe("a circle", **one_step)
    places = [(record.step, record.call, record.layer, record.batch) for record in records]
    without_guidance = [(0, 0, layer, 2) for layer in range(4)]
    assert places == without_guidance + [(0, call, layer, 1) for call in range(2) for layer in range(4)]


def test_the_block_map_that_was_asked_for_is_kept_from_being_overwritten(transformer):
    transformer.set_attention_backend("NABLA_ATTN")  # whose layers share the buffers of their lists
    metadata = metadata_of()
    steps = [dataclasses.replace(metadata, current_timestep=step) for step in range(3)]
    with recorded_attention(transformer, MapChoice(step=1, layer=0, head=2)) as records:
        for seed, (step, _, impl) in enumerate(itertools.product(steps, range(2), impls(transformer))):
            impl.forward(*qkv_of(seed), step)
    [record] = [record for record in records if record.block_map is not None]
    assert (record.step, record.call, record.layer) == (1, 0, 0)
    q, k, _ = qkv_of(4)  # the fifth of the calls
    assert torch.equal(record.block_map, nabla_mask(q, k, metadata.sta_mask, metadata.P)[0, 2])
    assert record.block_map.device.type == "cpu"


@pytest.mark.parametrize(
    ("choice", "match"),
    [((0, 2, 0), "layer 2: there are 2, from 0 to 1"), ((0, 0, 4), "head 4: there are 4"), ((0, -1, 0), "layer -1")],
)
def test_a_block_map_that_does_not_exist_is_refused(transformer, choice, match):
    with pytest.raises(ValueError, match=match), recorded_attention(transformer, MapChoice(*choice)):
        pass
    assert all("attend" not in vars(impl) for impl in impls(transformer))


def test_recording_ends_with_the_block_and_with_an_error_in_it(transformer):
    before = [dict(vars(impl)) for impl in impls(transformer)]
    with recorded_attention(transformer) as records:
        impls(transformer)[0].forward(*qkv_of(0), metadata_of())
    with pytest.raises(RuntimeError, match="stop"), recorded_attention(transformer):
        raise RuntimeError("stop")
    assert [dict(vars(impl)) for impl in impls(transformer)] == before
    impls(transformer)[0].forward(*qkv_of(0), metadata_of())
    assert len(records) == 1


def test_a_recording_inside_another_one_leaves_that_one_running(transformer):
    impl = impls(transformer)[1]
    with recorded_attention(transformer) as outer:
        with recorded_attention(transformer) as inner:
            impl.forward(*qkv_of(0), metadata_of())
        impl.forward(*qkv_of(1), metadata_of())
    assert (len(outer), len(inner)) == (2, 1)
    assert outer[0].density == inner[0].density != outer[1].density


@pytest.mark.parametrize("backend", ["NABLA_REFERENCE", "NABLA_ATTN"])
@pytest.mark.parametrize("shape", [WHOLE, PADDED])
def test_the_watched_density_is_the_mean_of_what_was_recorded_since_it_was_asked_for(transformer, shape, backend):
    transformer.set_attention_backend(backend)
    before = [dict(vars(impl)) for impl in impls(transformer)]
    with recorded_attention(transformer) as records, watched_density(transformer) as density:
        assert density() is None
        for step in range(2):
            for seed, impl in enumerate(impls(transformer)):
                impl.forward(*qkv_of(seed + 2 * step), metadata_of(shape, step=step))
            [first, second] = [record.density for record in records if record.step == step]
            assert density() == pytest.approx((first + second) / 2, abs=1e-12)
            assert first != second
        assert density() is None
    assert [dict(vars(impl)) for impl in impls(transformer)] == before


def test_a_run_whose_density_is_watched_gives_the_same_latents_and_dense_attention_has_none(pipe):
    expected = pipe("a circle", **SIZE).frames
    with watched_density(pipe.transformer) as density:
        assert torch.equal(pipe("a circle", **SIZE).frames, expected)
        assert 0 < density() < 1
    pipe.transformer.set_attention_backend("SDPA")
    with watched_density(pipe.transformer) as density:
        pipe("a circle", **SIZE)
        assert density() is None


def test_nothing_is_recorded_of_dense_attention_and_an_empty_report_is_an_error(pipe):
    pipe.transformer.set_attention_backend("SDPA")
    with recorded_attention(pipe.transformer) as records:
        pipe("a circle", **SIZE)
    assert records == []
    with pytest.raises(ValueError, match="no attention was recorded"):
        report_of(records)


def record_of(step, call, layer, **values):
    standard = {"batch": 1, "blocks": 10, "density": 0.5, "window_density": 0.1, "row_min": 2, "row_max": 9}
    times = {"seconds_selecting": 1.0, "seconds_attending": 3.0, "dense_flops": 1000}
    return AttentionRecord(step=step, call=call, layer=layer, **{**standard, **times, **values})


def test_a_report_has_the_totals_each_layer_and_each_of_its_steps():
    densities = {0: 0.25, 1: 0.75}  # of the calls; in the second step of the second layer 0.1 more
    records = [
        record_of(step, call, layer, density=densities[call] + 0.1 * layer * step, row_min=1 + layer, row_max=8 + step)
        for step, call, layer in itertools.product(range(2), range(2), range(2))
    ]
    report = report_of(records[::-1])
    totals = report["totals"]
    assert totals == {
        "layers": 2,
        "steps": 2,
        "density": pytest.approx(0.525),
        "window_density": pytest.approx(0.1),
        "seconds_selecting": 8,
        "seconds_attending": 24,
        "dense_flops": 8000,
        "flops": 4200,
        "flops_saved": pytest.approx(1 - 0.525),
    }
    assert [row["layer"] for row in report["layers"]] == [0, 1]
    first, second = report["layers"]
    assert (first["density_min"], first["density"], first["density_max"]) == (0.5, 0.5, 0.5)
    shares = [second[name] for name in ("density_min", "density", "density_max", "window_density")]
    assert shares == pytest.approx([0.5, 0.55, 0.6, 0.1])
    assert (second["row_min"], second["row_max"], second["blocks"]) == (2, 9, 10)
    rows = report["steps_of_layers"]
    assert [(row["layer"], row["step"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert rows[3]["density_of_calls"] == pytest.approx([0.35, 0.85])
    assert rows[3]["density"] == pytest.approx(0.6)
    assert (rows[3]["flops"], rows[3]["dense_flops"], rows[3]["seconds_attending"]) == (1200, 2000, 6)


def test_a_report_survives_json_as_it_is(pipe):
    with recorded_attention(pipe.transformer, MapChoice(0, 0, 0)) as records:
        pipe("a circle", **SIZE)
    report = report_of(records)
    assert json.loads(json.dumps(report)) == report
    assert report["totals"]["density"] == pytest.approx(sum(record.density for record in records) / len(records))
