"""What only a CUDA device can show; deselected where there is none. Not run yet by anyone: see the README."""

import math

import pytest
import torch

from kandinsky5_nabla.attention import NablaAttentionMetadataBuilder, get_attention_backend, nabla_mask, sta_mask
from kandinsky5_nabla.attention.compiling import why_not_compiled
from kandinsky5_nabla.attention.lists import BlockLists
from kandinsky5_nabla.attention.order import real_tokens, tile_grid
from kandinsky5_nabla.attention.reference import kept_by_sorting, masked_attention
from kandinsky5_nabla.attention.sdpa import dense_attention
from kandinsky5_nabla.attention.selection import select_blocks

pytestmark = pytest.mark.gpu

# As on the CPU (test_attention.py); fp32 has room for the kernel's TF32 products.
TOLERANCES = {torch.float32: 5e-3, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_sparse_kernel_equals_the_reference_on_cuda_and_dense_attention_does_not(dtype, head_dim):
    generator = torch.Generator().manual_seed(0)
    means = 2 * torch.randn(2, 1, 20, 1, 4, head_dim, generator=generator)
    tokens = torch.randn(3, 1, 20, 64, 4, head_dim, generator=generator)
    tokens[:2] += means
    q, k, v = tokens.flatten(2, 3).to("cuda", dtype)
    window = sta_mask((20, 1, 1), (1, 1, 1), "cuda")
    metadata = NablaAttentionMetadataBuilder().build(0, window, 0.5, (20, 8, 8))
    impl = get_attention_backend("NABLA_ATTN").get_impl_cls()(4, head_dim, head_dim**-0.5)
    out = impl.forward(q, k, v, metadata)
    assert why_not_compiled("cuda") is None
    reference = masked_attention(q, k, v, nabla_mask(q, k, window, 0.5), head_dim**-0.5)
    assert (out - reference).abs().max() < TOLERANCES[dtype]
    assert (dense_attention(q, k, v, head_dim**-0.5) - reference).abs().max() > 0.1


@pytest.mark.parametrize("shape", [(4, 48, 64), (3, 45, 80)])
def test_the_triton_selection_keeps_what_the_sort_keeps_on_cuda(shape):
    N = math.prod(tile_grid(shape))
    generator = torch.Generator().manual_seed(0)
    means = 1.5 * torch.randn(2, 2, N, 1, 3, 64, generator=generator)
    q, k = (means + torch.randn(2, 2, N, 64, 3, 64, generator=generator)).flatten(2, 3).to("cuda", torch.bfloat16)
    window, real = sta_mask(tile_grid(shape), (3, 3, 3), "cuda"), real_tokens(shape, "cuda")
    lists = select_blocks(q, k, window, 0.7, real)
    differs = lists.kept != kept_by_sorting(q, k, window, 0.7, real)
    assert differs.float().mean() < 1e-4  # means in another order of sums: a block at the threshold may flip
    for made, expected in zip(BlockLists.of_map(lists.kept, real).tensors(), lists.tensors(), strict=True):
        assert torch.equal(made, expected)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_odd_frames_equal_the_reference_on_cuda(dtype):
    shape = (3, 15, 20)
    N = math.prod(tile_grid(shape))
    q, k, v = torch.randn(3, 1, 64 * N, 2, 64, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    metadata = NablaAttentionMetadataBuilder().build(0, sta_mask(tile_grid(shape), (1, 1, 1), "cuda"), 0.5, shape)
    impl = get_attention_backend("NABLA_ATTN").get_impl_cls()(2, 64, 64**-0.5)
    out = impl.forward(q, k, v, metadata)
    kept = impl.select(q, k, metadata).kept
    reference = masked_attention(q, k, v, kept, 64**-0.5, metadata.real_S)
    assert (out - reference)[:, metadata.real_S].abs().max() < TOLERANCES[dtype]


def test_a_seed_starts_from_the_same_noise_and_gives_the_same_video_on_cuda(fresh_pipe):
    fresh_pipe.transformer.set_attention_backend("SDPA")  # block choices could flip between devices
    request = {"height": 128, "width": 128, "num_frames": 5, "num_inference_steps": 2, "seed": 7}
    on_cpu = fresh_pipe("a red square", **request, output_type="latent").frames
    on_cuda = fresh_pipe.to("cuda")("a red square", **request, output_type="latent").frames.cpu()
    torch.testing.assert_close(on_cuda, on_cpu, rtol=0, atol=1e-2)


def test_model_offload_gives_the_video_of_a_run_without_it(fresh_pipe):
    request = {"height": 128, "width": 128, "num_frames": 5, "num_inference_steps": 2, "seed": 7}
    expected = fresh_pipe.to("cuda")("a red square", **request, output_type="latent").frames.cpu()
    fresh_pipe.to("cpu")
    fresh_pipe.enable_model_cpu_offload()
    offloaded = fresh_pipe("a red square", **request, output_type="latent").frames.cpu()
    torch.testing.assert_close(offloaded, expected, rtol=0, atol=1e-4)
