"""The transformer where golden numbers cannot see: diffusers' class, eps, batches, dtypes, backends, compilation."""

import dataclasses
import math

import pytest
import torch
from diffusers import Kandinsky5Transformer3DModel
from diffusers.models.transformers import transformer_kandinsky

from kandinsky5_nabla.attention import AttentionImpl, AttentionMetadata, NablaAttentionMetadataBuilder, sta_mask
from kandinsky5_nabla.models.layers import Attention, Modulation, TextEmbeddings, modulate
from kandinsky5_nabla.models.rope import rope_3d
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer

LITE_AXES, PRO_AXES = (16, 24, 24), (32, 48, 48)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = 1e-5  # fp32, absolute, on outputs of about 1: sums in another order


def make_model(axes_dims=LITE_AXES, **config):
    """A toy of two heads whose every weight matters: nothing is zero, norms are not the identity."""
    sizes = {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 24, "in_text_dim2": 20, "time_dim": 32}
    blocks = {"ff_dim": 64, "num_text_blocks": 1, "num_visual_blocks": 2, "model_dim": 2 * sum(axes_dims)}
    model = Kandinsky5Transformer(**{**sizes, **blocks, **config}, axes_dims=axes_dims)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        std = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.1
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        parameter.data = mean + std * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def make_inputs(model, visual_shape=(2, 3, 4), batch=2, text_length=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    T, H, W = visual_shape  # in tokens
    return {
        "hidden_states": torch.randn(batch, T, 2 * H, 2 * W, model.in_channels, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(batch, text_length, 24, generator=generator).to(dtype),
        "pooled_projections": torch.randn(batch, 20, generator=generator).to(dtype),
        "timestep": torch.tensor([937.5, 12.25])[:batch],
    }


def run(model, inputs, **options):
    with torch.no_grad():
        return model(**inputs, **options).sample


def make_metadata(visual_shape=(2, 8, 16), P=0.5):
    T, H, W = visual_shape
    return NablaAttentionMetadataBuilder().build(0, sta_mask((T, H // 8, W // 8), (1, 1, 1)), P, visual_shape)


class TorchWithoutBfloat16:
    """torch, but rounding to bf16 does nothing."""

    bfloat16 = torch.float32

    def __getattr__(self, name):
        return getattr(torch, name)


def run_diffusers(model, inputs, scale_factor):
    theirs = Kandinsky5Transformer3DModel(**{k: v for k, v in model.config.items() if not k.startswith("_")}).eval()
    theirs.load_state_dict(model.state_dict(), strict=True)
    T, H, W = inputs["hidden_states"].shape[1:4]
    return run(
        theirs,
        inputs,
        visual_rope_pos=[torch.arange(T), torch.arange(H // 2), torch.arange(W // 2)],
        text_rope_pos=torch.arange(inputs["encoder_hidden_states"].shape[1]),
        scale_factor=scale_factor,
    )


@pytest.mark.parametrize("visual_cond", [False, True])
@pytest.mark.parametrize("axes_dims", [LITE_AXES, PRO_AXES], ids=["lite", "pro"])
def test_the_transformer_equals_that_of_diffusers_but_for_its_rounding_of_q_and_k(axes_dims, visual_cond, monkeypatch):
    model = make_model(axes_dims, visual_cond=visual_cond, num_text_blocks=2)
    inputs, scale_factor = make_inputs(model), (1.0, 2.0, 3.16)
    out = run(model, inputs, scale_factor=scale_factor)
    assert (run_diffusers(model, inputs, scale_factor) - out).abs().max() > 10 * TOLERANCE
    monkeypatch.setattr(transformer_kandinsky, "torch", TorchWithoutBfloat16())
    torch.testing.assert_close(run_diffusers(model, inputs, scale_factor), out, rtol=0, atol=TOLERANCE)


class RecordingImpl(AttentionImpl):
    """Keeps the q that it is handed."""

    def __init__(self, *args, **kwargs):
        self.query = None

    def forward(self, query, key, value, attn_metadata):
        self.query = query
        return query


def query_of(attention, x_BSM, rope=None):
    """Return the query after norm and RoPE, and what the projection gave, in double precision."""
    attention.set_impl(RecordingImpl, "")
    with torch.no_grad():
        attention(x_BSM, rope=rope, attn_metadata=AttentionMetadata(0))
        return attention.impl.query, attention.to_query(x_BSM).unflatten(-1, (1, -1)).double()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_eps_of_rms_norm_is_that_of_fp32_in_every_dtype(dtype):
    attention = Attention(64, 64)
    torch.manual_seed(0)
    attention.to_query.weight.data = 1e-4 * torch.eye(64)  # eps is then the larger part of the mean square
    attention.to_query.bias.data.zero_()
    attention.query_norm.weight.data = 1 + 0.1 * torch.randn(64)
    query, projected = query_of(attention.to(dtype), torch.randn(1, 50, 64, dtype=dtype))
    mean_square = projected.square().mean(-1, keepdim=True)
    expected = projected / (mean_square + 2.0**-23).sqrt() * attention.query_norm.weight.double()
    assert query.dtype == dtype
    torch.testing.assert_close(query.double(), expected, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_is_exact_at_the_last_position_and_rounds_q_only_once(dtype):
    """With angles or tables in bf16 position 127 would be off by a quarter radian or by a second rounding."""
    attention = Attention(64, 64)
    torch.manual_seed(0)
    query, projected = query_of(
        attention.to(dtype),
        torch.randn(1, 128, 64, dtype=dtype),
        rope_3d((128, 1, 1), LITE_AXES, (1.0, 1.0, 1.0), torch.device("cpu")),
    )
    normed = projected / (projected.square().mean(-1, keepdim=True) + 2.0**-23).sqrt()
    pairs = torch.view_as_complex(normed.unflatten(-1, (-1, 2)).contiguous())
    angles = torch.zeros(128, 32, dtype=torch.double)
    angles[:, :8] = torch.outer(torch.arange(128.0), 10000 ** (-torch.arange(8, dtype=torch.double) / 8))
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)
    # fp32 angles of 127 rad are exact to 4e-6
    torch.testing.assert_close(query.double(), expected, rtol=0.51 * torch.finfo(dtype).eps, atol=3e-5)


def layer_norm_by_formula(x):
    x = x.double()
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()


def test_the_eps_of_layer_norm_is_1e_5_with_modulation():
    torch.manual_seed(0)
    x, shift, scale = 1e-3 * torch.randn(2, 7, 32), torch.randn(2, 1, 32), torch.randn(2, 1, 32)
    expected = layer_norm_by_formula(x) * (1 + scale.double()) + shift.double()
    torch.testing.assert_close(modulate(x, shift, scale).double(), expected, rtol=0, atol=1e-6)


def test_the_eps_of_layer_norm_is_1e_5_in_the_text_embeddings():
    torch.manual_seed(0)
    embeddings = TextEmbeddings(32, 32)
    embeddings.in_layer.weight.data *= 1e-3
    embeddings.in_layer.bias.data *= 1e-3
    embeddings.norm.weight.data, embeddings.norm.bias.data = torch.randn(2, 32)
    with torch.no_grad():
        x = torch.randn(2, 7, 32)
        expected = layer_norm_by_formula(embeddings.in_layer(x)) * embeddings.norm.weight + embeddings.norm.bias
        torch.testing.assert_close(embeddings(x).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", [None, "NABLA_REFERENCE"])
def test_a_batch_equals_its_single_runs_whatever_stands_in_the_padding(backend):
    model = make_model()
    metadata = None
    if backend is not None:
        model.set_attention_backend(backend)
        metadata = make_metadata()
    inputs, lengths = make_inputs(model, (2, 8, 16), text_length=7), (3, 7)
    inputs["encoder_hidden_states"][0, 3:] = torch.nan
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    together = run(model, inputs, encoder_attention_mask=mask, attn_metadata=metadata)
    for i, length in enumerate(lengths):
        single = {name: x[i : i + 1] for name, x in inputs.items()}
        single["encoder_hidden_states"] = single["encoder_hidden_states"][:, :length]
        alone = run(model, single, attn_metadata=metadata)
        torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=TOLERANCE)


def test_a_text_mask_of_ones_changes_nothing_and_may_be_of_integers():
    model = make_model()
    inputs = make_inputs(model)
    ones = torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(
        run(model, inputs, encoder_attention_mask=ones), run(model, inputs), rtol=0, atol=TOLERANCE
    )
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    out = run(model, inputs, encoder_attention_mask=mask.bool())
    assert torch.equal(run(model, inputs, encoder_attention_mask=mask), out)
    assert (out - run(model, inputs)).abs().max() > 1e-2


CASTS = {
    "to(bfloat16)": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "to(cpu, float16)": (lambda model: model.to("cpu", torch.float16), torch.float16),
    "half()": (lambda model: model.half(), torch.float16),
    "bfloat16()": (lambda model: model.bfloat16(), torch.bfloat16),
}


@pytest.mark.parametrize(("cast", "dtype"), CASTS.values(), ids=CASTS)
def test_a_cast_leaves_time_embedding_and_modulation_as_they_are(cast, dtype):
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after = cast(model).state_dict()
    assert model.dtype == dtype
    for name, tensor in before.items():
        kept = "time_embeddings" in name or "modulation" in name
        assert after[name].dtype == (torch.float32 if kept else dtype), name
        assert torch.equal(after[name], tensor.to(after[name].dtype)), name


# Relative to the norm of the output. Each activation is rounded to eps/2 and the model rounds some twenty times.
HALF_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 2.5e-3}


@pytest.mark.parametrize(("dtype", "tolerance"), HALF_TOLERANCES.items())
def test_in_half_precision_the_output_has_the_dtype_of_the_model_and_is_near_that_of_fp32(dtype, tolerance):
    model = make_model().to(dtype)
    inputs = make_inputs(model, dtype=dtype)
    out = run(model, inputs)
    assert out.dtype == dtype
    exact = run(model.float(), {name: x.float() for name, x in inputs.items()})  # same rounded weights and inputs
    assert exact.dtype == torch.float32
    assert (out - exact).norm() < tolerance * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_times_that_bf16_cannot_tell_apart_give_different_outputs(dtype):
    model = make_model().to(dtype)
    inputs = make_inputs(model, dtype=dtype)
    first, second = (run(model, {**inputs, "timestep": torch.tensor([t, t])}) for t in (999.5, 1000.0))
    assert torch.tensor(999.5).bfloat16() == torch.tensor(1000.0).bfloat16()
    assert (first - second).abs().max() > 1e-2


def test_time_embedding_and_modulation_are_computed_in_fp32_under_autocast():
    model = make_model()
    inputs = make_inputs(model)
    parts = [model.time_embeddings, *(module for module in model.modules() if isinstance(module, Modulation))]
    outputs = []
    for part in parts:
        part.register_forward_hook(lambda module, args, out: outputs.append((module, args, out)))
    with torch.autocast("cpu", torch.bfloat16):
        run(model, inputs)
    assert len(outputs) == len(parts) == 5
    for module, args, out in outputs.copy():  # the hooks see the calls below too
        with torch.no_grad():
            expected = module(*args)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)  # dtypes are compared too


def test_without_metadata_attention_is_dense_under_every_backend():
    model = make_model()
    inputs = make_inputs(model, (2, 8, 16), batch=1)
    dense = run(model, inputs)
    assert torch.equal(run(model, inputs, attn_metadata=AttentionMetadata(0)), dense)
    model.set_attention_backend("NABLA_REFERENCE")
    assert torch.equal(run(model, inputs), dense)
    assert (run(model, inputs, attn_metadata=make_metadata()) - dense).abs().max() > 0.1


@pytest.mark.parametrize("name", ["flex", "native", "_native_flash", "nabla_attn", None])
def test_a_backend_that_is_not_ours_is_refused_with_the_names_that_are(name):
    model = make_model()
    with pytest.raises(ValueError, match="known are NABLA_ATTN, NABLA_REFERENCE, SDPA"):
        model.set_attention_backend(name)
    assert model.attention_backend.get_name() == "SDPA"


def test_a_head_size_that_nabla_cannot_run_is_refused_before_any_forward():
    model = make_model(axes_dims=(48, 48, 48))
    with pytest.raises(ValueError, match="head size 144"):
        model.set_attention_backend("NABLA_ATTN")
    with pytest.raises(ValueError, match="head size 144"):
        make_model(axes_dims=(48, 48, 48), attention_type="nabla")


def test_reset_returns_to_the_backend_of_the_config():
    for attention_type, name in {"nabla": "NABLA_ATTN", "regular": "SDPA"}.items():
        model = make_model(attention_type=attention_type)
        assert model.attention_backend.get_name() == name
        model.set_attention_backend("NABLA_REFERENCE")
        model.reset_attention_backend()
        assert model.attention_backend.get_name() == name


def test_metadata_of_another_backend_or_size_is_refused():
    model = make_model()
    inputs = make_inputs(model, (2, 8, 16), batch=1)
    with pytest.raises(ValueError, match="SDPA reads AttentionMetadata, not NablaAttentionMetadata"):
        run(model, inputs, attn_metadata=make_metadata())  # P was asked for, so dense would not do
    model.set_attention_backend("NABLA_REFERENCE")
    with pytest.raises(ValueError, match="NABLA_REFERENCE reads NablaAttentionMetadata, not AttentionMetadata"):
        run(model, inputs, attn_metadata=AttentionMetadata(0))
    with pytest.raises(ValueError, match=r"is for \(1, 16, 16\) tokens, the latents have \(2, 8, 16\)"):
        run(model, inputs, attn_metadata=make_metadata((1, 16, 16)))


def nabla_model():
    return make_model(num_visual_blocks=1, attention_type="nabla")


def test_a_model_that_the_user_compiles_stays_sparse():
    model = nabla_model()
    inputs, metadata = make_inputs(model, (2, 8, 16), batch=1), make_metadata()
    # At a time of 937 the last digit of Inductor's exp alone would move the output by 1e-5.
    inputs["timestep"] = torch.tensor([12.25])
    dense, sparse = run(model, inputs), run(model, inputs, attn_metadata=metadata)
    out = run(torch.compile(model, fullgraph=True), inputs, attn_metadata=metadata)
    torch.testing.assert_close(out, sparse, rtol=0, atol=TOLERANCE)
    assert (out - dense).abs().max() > (sparse - dense).abs().max() / 2 > 0.05


def test_steps_and_sizes_under_a_users_compilation_stay_sparse_and_steps_share_a_graph():
    model = nabla_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    graphs = torch._dynamo.utils.counters["stats"]
    for visual_shape in ((2, 8, 16), (3, 8, 16)):
        inputs, metadata = make_inputs(model, visual_shape, batch=1), make_metadata(visual_shape)
        sparse = run(model, inputs, attn_metadata=metadata)
        for step in range(3):
            out = run(compiled, inputs, attn_metadata=dataclasses.replace(metadata, current_timestep=step))
            torch.testing.assert_close(out, sparse, rtol=0, atol=TOLERANCE)
            if step == 1:  # the first change of the step makes it a variable of the graph
                before = graphs["unique_graphs"]
        assert graphs["unique_graphs"] == before
        assert (run(model, inputs) - sparse).abs().max() > 0.05


BAD_LATENTS = {
    (1, 2, 4, 6, 9): "9 channels; this model reads 4",
    (1, 2, 5, 6, 4): "2x5x6 do not divide into patches of 1x2x2",
    (1, 2, 4, 7, 4): "2x4x7 do not divide into patches of 1x2x2",
    (1, 129, 2, 2, 4): "at most 128 positions",
    (1, 1, 2, 258, 4): "at most 128 positions",
    (2, 4, 6, 4): r"\[B, T, H, W, C\]",
}


@pytest.mark.parametrize(("shape", "rule"), BAD_LATENTS.items())
def test_latents_that_do_not_fit_are_refused_with_the_rule(shape, rule):
    model = make_model()
    inputs = {**make_inputs(model, batch=1), "hidden_states": torch.zeros(shape)}
    with pytest.raises(ValueError, match=rule):
        run(model, inputs)


BAD_CONFIGS = [
    ({"model_dim": 100}, "model_dim 100 must be a multiple of the head dim 64"),
    ({"axes_dims": (32, 32)}, r"axes_dims \(32, 32\) must be three even numbers"),
    ({"axes_dims": (15, 24, 25)}, "must be three even numbers"),
    ({"axes_dims": ()}, r"axes_dims \(\) must be three even numbers"),
    ({"patch_size": (2, 2)}, r"patch_size \(2, 2\) must be three"),
    ({"attention_type": "flash"}, r"attention_type 'flash' must be one of \['nabla', 'regular'\]"),
    ({"attention_type": "nabla", "attention_method": "topk"}, "attention_method 'topk' must be 'topcdf'"),
]


@pytest.mark.parametrize(("change", "rule"), BAD_CONFIGS)
def test_a_config_that_cannot_be_built_is_refused_with_the_rule(change, rule):
    with pytest.raises(ValueError, match=rule):
        Kandinsky5Transformer(**{"model_dim": 128, "num_visual_blocks": 1, **change})


PUBLISHED = {
    "lite": ({"visual_cond": True}, 2.008),
    "pro": (
        {
            "time_dim": 1024,
            "model_dim": 4096,
            "ff_dim": 16384,
            "num_text_blocks": 4,
            "num_visual_blocks": 60,
            "axes_dims": PRO_AXES,
            "visual_cond": True,
        },
        19.311,
    ),
}


@pytest.mark.parametrize(("config", "billions"), PUBLISHED.values(), ids=PUBLISHED)
def test_the_published_configs_have_the_published_number_of_parameters(config, billions):
    with torch.device("meta"):
        model = Kandinsky5Transformer(**config)
    assert math.isclose(model.num_parameters() / 1e9, billions, abs_tol=5e-4)
