"""Frames that do not divide into 8x8 tiles: padded to whole tiles, and the padding is seen by nobody."""

import math

import pytest
import torch

from kandinsky5_nabla.attention import NablaAttentionMetadataBuilder, get_attention_backend, sta_mask
from kandinsky5_nabla.attention.order import from_blocks, tile_grid, to_blocks
from kandinsky5_nabla.attention.sdpa import dense_attention
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer

SHAPES = [(2, 9, 13), (3, 15, 16), (1, 24, 5), (2, 3, 3), (2, 16, 8)]
# fp32: sums in another order. bf16: the output is rounded once, and so are the probabilities in the kernel.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def metadata_of(shape, P):
    return NablaAttentionMetadataBuilder().build(0, sta_mask(tile_grid(shape), (1, 1, 1)), P, shape)


def draw_qkv(shape, heads=2, head_dim=32, seed=0):
    """q, k, v in raster order `[1, T, H, W, heads, D]`, q and k with strong means in each tile."""
    generator = torch.Generator().manual_seed(seed)
    T, H, W = shape
    grid = tile_grid(shape)
    means = 2 * torch.randn(2, *grid, heads, head_dim, generator=generator)
    means = means.repeat_interleave(8, 2).repeat_interleave(8, 3)[:, :, :H, :W]
    tokens = torch.randn(3, T, H, W, heads, head_dim, generator=generator)
    tokens[:2] += means
    return tokens[:, None]


def by_definition(qkv, shape, P):
    """NABLA over the real tokens alone, in double precision: each tile has those that it has."""
    q, k, v = (x[0].flatten(0, 2).double() for x in qkv)
    T, H, W = shape
    _, rows, columns = tile_grid(shape)
    t, y, x = torch.meshgrid(torch.arange(T), torch.arange(H), torch.arange(W), indexing="ij")
    block_of = ((t * rows + y // 8) * columns + x // 8).flatten()
    N = T * rows * columns
    out = torch.zeros_like(q)
    for h in range(q.shape[1]):
        qa, ka = (torch.stack([x[block_of == i, h].mean(0) for i in range(N)]) for x in (q, k))
        shares = torch.softmax(qa @ ka.T * q.shape[-1] ** -0.5, -1)
        ascending, order = shares.sort(-1)
        kept = torch.zeros(N, N, dtype=torch.bool).scatter(-1, order, ascending.cumsum(-1) >= 1 - P)
        kept |= torch.eye(N, dtype=torch.bool)
        seen = kept[block_of][:, block_of]
        scores = (q[:, h] @ k[:, h].T * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        out[:, h] = scores.softmax(-1) @ v[:, h]
    return out.view(T, H, W, *out.shape[1:])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("backend", ["NABLA_ATTN", "NABLA_REFERENCE"])
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_frames_equal_nabla_over_their_real_tokens(shape, backend, dtype):
    qkv = draw_qkv(shape).to(dtype)
    heads, head_dim = qkv.shape[-2:]
    metadata = metadata_of(shape, P=0.5)
    q, k, v = (to_blocks(x.flatten(4)).unflatten(-1, (heads, head_dim)) for x in qkv)
    if metadata.real_S is not None:
        for x in (q, k, v):
            x[:, ~metadata.real_S] = 100.0  # what the layers make of padding
    impl = get_attention_backend(backend).get_impl_cls()(heads, head_dim, head_dim**-0.5)
    out = from_blocks(impl.forward(q, k, v, metadata).flatten(2), shape)[0].unflatten(-1, (heads, head_dim))
    expected = by_definition(qkv, shape, P=0.5)
    assert (out.double() - expected).abs().max() < TOLERANCES[dtype]
    if math.prod(tile_grid(shape)) > 2:
        dense = dense_attention(*(x.flatten(1, 3) for x in qkv), head_dim**-0.5)
        assert (dense.view_as(expected).double() - expected).abs().max() > 0.1


def make_model():
    sizes = {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 24, "in_text_dim2": 20, "time_dim": 32}
    blocks = {"ff_dim": 64, "num_text_blocks": 1, "num_visual_blocks": 2, "model_dim": 64, "axes_dims": (8, 12, 12)}
    model = Kandinsky5Transformer(**sizes, **blocks, attention_type="nabla")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
    return model.eval()


def run(model, shape, metadata):
    generator = torch.Generator().manual_seed(1)
    T, H, W = shape
    with torch.no_grad():
        return model(
            torch.randn(1, T, 2 * H, 2 * W, 4, generator=generator),
            torch.randn(1, 5, 24, generator=generator),
            torch.randn(1, 20, generator=generator),
            torch.tensor([500.0]),
            attn_metadata=metadata,
        ).sample


@pytest.mark.parametrize("backend", ["NABLA_ATTN", "NABLA_REFERENCE"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_that_keeps_everything_is_the_dense_model_at_odd_sizes_too(shape, backend):
    model = make_model()
    dense = run(model, shape, None)
    model.set_attention_backend(backend)
    out = run(model, shape, metadata_of(shape, P=1.0))
    assert out.shape == dense.shape == (1, shape[0], 2 * shape[1], 2 * shape[2], 4)
    assert (out - dense).abs().max() < 1e-5 * dense.abs().max()


def test_a_video_of_an_odd_size_has_that_size(fresh_pipe):
    fresh_pipe.transformer.set_attention_backend("NABLA_ATTN")
    size = {"height": 144, "width": 80, "num_frames": 5, "num_inference_steps": 2, "seed": 1}
    sparse = fresh_pipe("a red square", **size, output_type="np").frames
    assert sparse.shape == (1, 5, 144, 80, 3)
    fresh_pipe.transformer.set_attention_backend("NABLA_REFERENCE")
    reference = fresh_pipe("a red square", **size, output_type="np").frames
    assert abs(sparse - reference).max() < 1e-3
    whole = fresh_pipe("a red square", **size, nabla_P=1.0, output_type="latent").frames
    fresh_pipe.transformer.set_attention_backend("SDPA")
    dense = fresh_pipe("a red square", **size, output_type="latent").frames
    assert (whole - dense).abs().max() < 1e-4 * dense.abs().max()


def test_two_geometries_in_turn_over_fifty_steps_compile_once_each():
    from torch._dynamo.utils import counters

    shapes = [(2, 9, 13), (2, 16, 8)]
    calls = {}
    for shape in shapes:
        q, k, v = (to_blocks(x.flatten(4)).unflatten(-1, (2, 32)) for x in draw_qkv(shape))
        calls[shape] = (q, k, v, metadata_of(shape, P=0.5))
    impl = get_attention_backend("NABLA_ATTN").get_impl_cls()(2, 32, 32**-0.5)
    for shape in shapes:
        impl.forward(*calls[shape])
    graphs = counters["stats"]["unique_graphs"]
    for step in range(50):
        for shape in shapes:
            for guided in (True, False)[: 1 + step % 2]:
                q, k, v, metadata = calls[shape]
                impl.forward(q + 0.1 * step, k, v if guided else -v, metadata)
    assert counters["stats"]["unique_graphs"] == graphs
