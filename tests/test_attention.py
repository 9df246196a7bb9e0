"""Attention backends: every sparse one equals the plain reference, and dense attention would not pass."""

import itertools
import math
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

from kandinsky5_nabla.attention import (
    AttentionMetadata,
    NablaAttentionMetadataBuilder,
    compiling,
    get_attention_backend,
    list_attention_backends,
    nabla_mask,
    nablaT_v2,
    sta_mask,
)
from kandinsky5_nabla.attention.order import BLOCK, block_order, from_blocks, real_tokens, tile_grid, to_blocks
from kandinsky5_nabla.attention.reference import MAX_SCORE_BYTES, masked_attention
from kandinsky5_nabla.attention.sdpa import dense_attention

SPARSE_BACKENDS = ["NABLA_ATTN", "NABLA_REFERENCE"]
# fp32: sums in another order. bf16, fp16: the output is rounded once, and so are the probabilities in the kernel.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def qkv(num_blocks, heads=2, head_dim=32, batch=1, dtype=torch.float32, seed=0):
    """q and k with strong block means, so that a small P keeps few blocks and leaving some out matters."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, num_blocks, 1, heads, head_dim)
    means = 2.0 * torch.randn(2, *shape, generator=generator)
    tokens = torch.randn(3, batch, num_blocks, BLOCK, heads, head_dim, generator=generator)
    q, k = (tokens[:2] + means).flatten(2, 3)
    return q.to(dtype), k.to(dtype), tokens[2].flatten(1, 2).to(dtype)


def run(backend, q, k, v, P, window=(1, 1, 1)):
    num_blocks = q.shape[1] // BLOCK
    scale = q.shape[-1] ** -0.5
    chosen = get_attention_backend(backend)
    impl = chosen.get_impl_cls()(q.shape[2], q.shape[3], scale)
    sta = sta_mask((num_blocks, 1, 1), window)
    metadata = NablaAttentionMetadataBuilder().build(0, sta, P, (num_blocks, 8, 8))
    return impl.forward(q, k, v, metadata), sta


def brute_force(q, k, v, sta, P):
    """NABLA as numerics.md says it, in double precision, row by row."""
    q, k, v = (x.double() for x in (q.float(), k.float(), v.float()))
    out = torch.zeros_like(q)
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[2])):
        qa, ka = (x[b, :, h].unflatten(0, (-1, BLOCK)).mean(1) for x in (q, k))
        shares = torch.softmax(qa @ ka.T * q.shape[-1] ** -0.5, -1)
        for row, share in enumerate(shares):
            kept, total = set(), 0.0
            for block in share.argsort().tolist():
                total += share[block].item()
                if total >= 1 - P:
                    kept.add(block)
            kept |= {share.argmax().item()} | set(sta[row].nonzero().flatten().tolist())
            tokens = torch.cat([torch.arange(i * BLOCK, (i + 1) * BLOCK) for i in sorted(kept)])
            rows = slice(row * BLOCK, (row + 1) * BLOCK)
            scores = q[b, rows, h] @ k[b, tokens, h].T * q.shape[-1] ** -0.5
            out[b, rows, h] = torch.softmax(scores, -1) @ v[b, tokens, h]
    return out


@pytest.mark.parametrize("backend", SPARSE_BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_blocks", "heads", "head_dim", "batch"), [(6, 2, 32, 1), (5, 3, 64, 2), (4, 1, 128, 1)])
def test_a_sparse_backend_equals_nabla_by_its_definition_and_dense_attention_does_not(
    backend, dtype, num_blocks, heads, head_dim, batch
):
    q, k, v = qkv(num_blocks, heads, head_dim, batch, dtype)
    out, sta = run(backend, q, k, v, P=0.5)
    expected = brute_force(q, k, v, sta, P=0.5)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() < TOLERANCES[dtype]
    dense = dense_attention(q, k, v, head_dim**-0.5)
    assert (dense.double() - expected).abs().max() > 0.1


def test_the_compiled_kernel_differs_from_dense_and_not_from_the_reference():
    q, k, v = qkv(20, heads=4)
    out, sta = run("NABLA_ATTN", q, k, v, P=0.5)
    reference = masked_attention(q, k, v, nabla_mask(q, k, sta, 0.5), 32**-0.5)
    assert (out - reference).abs().max() < 1e-5
    assert (out - dense_attention(q, k, v, 32**-0.5)).abs().max() > 0.1


def test_thirteen_sizes_in_one_process_stay_sparse():
    """Dynamo's own limit is eight graphs, past which FlexAttention would be dense or would raise."""
    for num_blocks in range(2, 15):
        q, k, v = qkv(num_blocks, heads=1, head_dim=16)
        out, sta = run("NABLA_ATTN", q, k, v, P=0.3)
        reference = masked_attention(q, k, v, nabla_mask(q, k, sta, 0.3), 16**-0.5)
        assert (out - reference).abs().max() < 1e-5, f"{num_blocks} blocks"
        assert (out - dense_attention(q, k, v, 16**-0.5)).abs().max() > 0.1, f"{num_blocks} blocks"
    assert not compiling._failed


def test_twelve_masks_of_one_size_share_one_graph():
    from torch._dynamo.utils import counters

    q, k, v = qkv(6, heads=2, head_dim=24)
    run("NABLA_ATTN", q, k, v, P=0.5)
    graphs = counters["stats"]["unique_graphs"]
    for seed in range(12):
        q, k, v = qkv(6, heads=2, head_dim=24, seed=seed)
        run("NABLA_ATTN", q, k, v, P=0.05 + 0.07 * seed)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_block_mask_is_right_under_uncompiled_flex_attention_too():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = qkv(5)
    sta = sta_mask((5, 1, 1), (1, 1, 1))
    block_mask = nablaT_v2(q, k, sta, thr=0.5)
    out = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask).transpose(1, 2)
    assert (out - brute_force(q, k, v, sta, 0.5)).abs().max() < 1e-5


def test_the_first_call_of_a_size_says_that_it_compiles_and_how_long_it_took(caplog):
    q, k, v = qkv(7, heads=2, head_dim=40)
    with caplog.at_level("INFO", logger="kandinsky5_nabla"):
        run("NABLA_ATTN", q, k, v, P=0.5)
        first = [record.getMessage() for record in caplog.records]
        run("NABLA_ATTN", q, k, v, P=0.6)
    assert [record.getMessage() for record in caplog.records] == first
    assert first[0].startswith("compiling block-sparse attention over 448 tokens for cpu")
    assert re.fullmatch(r"block-sparse attention over 448 tokens is compiled \(\d+\.\d s\)", first[-1])


def test_a_second_process_takes_the_compiled_kernel_from_the_disk(tmp_path):
    code = """
        import torch
        from torch._dynamo.utils import counters
        from kandinsky5_nabla.attention.flex import block_sparse_attention
        from kandinsky5_nabla.attention.lists import BlockLists
        q, k, v = torch.randn(3, 1, 256, 2, 16)
        with torch.no_grad():
            block_sparse_attention(q, k, v, BlockLists.of_map(torch.eye(4, dtype=torch.bool).expand(1, 2, 4, 4)), 0.25)
        print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
        """
    runs = [in_a_new_process(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert [run.stdout.split() for run in runs] == [["0", "1"], ["1", "0"]], runs[0].stderr + runs[1].stderr


def test_gradients_are_those_of_the_masked_reference():
    q, k, v = (x.requires_grad_() for x in qkv(4))
    out, sta = run("NABLA_ATTN", q, k, v, P=0.5)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    kept = nabla_mask(q.detach(), k.detach(), sta, 0.5)
    expected = torch.autograd.grad(masked_attention(q, k, v, kept, 32**-0.5).square().sum(), (q, k, v))
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def in_a_new_process(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_a_compiler_the_masked_reference_runs_and_says_so(tmp_path):
    result = in_a_new_process(
        """
        import torch
        from kandinsky5_nabla.attention.flex import block_sparse_attention
        from kandinsky5_nabla.attention.lists import BlockLists
        from kandinsky5_nabla.attention.reference import masked_attention
        q, k, v = torch.randn(3, 1, 256, 2, 16)
        kept = torch.eye(4, dtype=torch.bool).expand(1, 2, 4, 4)
        for _ in range(2):
            out = block_sparse_attention(q, k, v, BlockLists.of_map(kept), 0.25)
        assert torch.equal(out, masked_attention(q, k, v, kept, 0.25))
        q = torch.empty(1, 64 * 1024, 2, 16)
        try:
            block_sparse_attention(q, q, q, BlockLists.of_map(torch.ones(1, 2, 1024, 1024, dtype=torch.bool)), 0.25)
        except ValueError as error:
            print(error)
        """,
        PATH=str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("no C++ compiler") == 1
    assert "masked reference" in result.stderr
    assert "GiB" in result.stdout
    assert "needs a C++ compiler" in result.stdout


def test_a_compiler_that_fails_is_reported_and_the_masked_reference_runs(tmp_path):
    broken = tmp_path / "g++"
    broken.write_text('#!/bin/sh\ncase "$*" in *--version*) echo "g++ (GCC) 12.2.0";; *) exit 1;; esac\n')
    broken.chmod(0o755)
    result = in_a_new_process(
        """
        import torch
        from kandinsky5_nabla.attention.flex import block_sparse_attention
        from kandinsky5_nabla.attention.lists import BlockLists
        from kandinsky5_nabla.attention.reference import masked_attention
        q, k, v = torch.randn(3, 1, 256, 2, 16)
        kept = torch.eye(4, dtype=torch.bool).expand(1, 2, 4, 4)
        from kandinsky5_nabla.attention import nabla_mask, selection
        from kandinsky5_nabla.attention.reference import kept_by_sorting
        selection.WORTH_COMPILING = 1
        window = torch.eye(4, dtype=torch.bool)
        assert torch.equal(nabla_mask(q, k, window, 0.5), kept_by_sorting(q, k, window, 0.5))
        out = block_sparse_attention(q, k, v, BlockLists.of_map(kept), 0.25)
        assert torch.equal(out, masked_attention(q, k, v, kept, 0.25))
        """,
        CXX=str(broken),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert result.returncode == 0, result.stderr
    assert "its compilation failed" in result.stderr


def test_sixteen_thousand_tokens_run_in_less_than_two_gigabytes():
    """The scores of dense attention alone would be 8.6 GB."""
    result = in_a_new_process(
        """
        import resource, torch
        from kandinsky5_nabla.attention.flex import block_sparse_attention
        from kandinsky5_nabla.attention.lists import BlockLists
        q, k, v = torch.randn(3, 1, 16384, 8, 64)
        kept = torch.rand(1, 8, 256, 256) < 0.1
        kept |= torch.eye(256, dtype=torch.bool)
        with torch.no_grad():
            out = block_sparse_attention(q, k, v, BlockLists.of_map(kept), 0.125)
        assert out.isfinite().all()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        """
    )
    assert result.returncode == 0, result.stderr
    assert "masked reference" not in result.stderr
    assert int(result.stdout) * 1024 < 2e9


def test_the_reference_refuses_a_score_matrix_that_would_not_fit():
    blocks = 1024
    q = torch.empty(1, blocks * BLOCK, 1, 8)
    assert 4 * (blocks * BLOCK) ** 2 > MAX_SCORE_BYTES
    with pytest.raises(ValueError, match=r"65536 tokens.*16\.0 GiB"):
        masked_attention(q, q, q, torch.ones(1, 1, blocks, blocks, dtype=torch.bool), 1.0)


@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 2, 4), (5, 1, 2)])
@pytest.mark.parametrize("window", [(1, 1, 1), (3, 3, 3), (2, 5, 4), (11, 3, 3)])
def test_the_window_mask_is_its_definition(grid, window):
    blocks = list(itertools.product(*map(range, grid)))
    expected = [
        [all(abs(i - j) <= w // 2 for i, j, w in zip(a, b, window, strict=True)) for b in blocks] for a in blocks
    ]
    assert sta_mask(grid, window).tolist() == expected


@pytest.mark.parametrize(
    ("grid", "window"),
    [((0, 1, 1), (1, 1, 1)), ((1, 1, 1), (1, 0, 1)), ((2, 2), (3, 3, 3)), ((2, 2, 2), (float("nan"), 3, 3))],
)
def test_an_empty_grid_or_window_is_refused(grid, window):
    with pytest.raises(ValueError, match="at least 1"):
        sta_mask(grid, window)


def test_the_selection_is_made_in_fp32_from_half_precision_inputs():
    q, k, _ = qkv(40, dtype=torch.bfloat16)
    sta = torch.zeros(40, 40, dtype=torch.bool)
    assert torch.equal(nabla_mask(q, k, sta, 0.9), nabla_mask(q.float(), k.float(), sta, 0.9))


def test_p_of_one_keeps_everything_and_a_tiny_p_the_largest_block_alone():
    q, k, _ = qkv(12)
    nothing = torch.zeros(1, 1, 12, 12, dtype=torch.bool)
    assert nabla_mask(q, k, nothing, 1.0).all()
    assert (nabla_mask(q, k, nothing, 1e-9).sum(-1) == 1).all()
    assert nabla_mask(torch.zeros_like(q), torch.zeros_like(k), nothing, 0.5).all()  # all tie


@pytest.mark.parametrize("shape", [(12, 12), (1, 1, 12, 12)])
def test_the_window_broadcasts_over_batch_and_heads(shape):
    q, k, _ = qkv(12, heads=3, batch=2)
    window = sta_mask((12, 1, 1), (3, 1, 1))
    kept = nabla_mask(q, k, window.view(shape), 0.1)
    assert kept.shape == (2, 3, 12, 12)
    assert kept[:, :, window].all()


@pytest.mark.parametrize("P", [0.0, -0.5, 1.01, float("nan")])
def test_p_outside_its_range_is_refused(P):
    q, k, _ = qkv(2)
    with pytest.raises(ValueError, match=r"in \(0, 1\]"):
        nabla_mask(q, k, sta_mask((2, 1, 1), (1, 1, 1)), P)
    with pytest.raises(ValueError, match=r"in \(0, 1\]"):
        NablaAttentionMetadataBuilder().build(0, sta_mask((2, 1, 1), (1, 1, 1)), P, (2, 8, 8))


def test_shapes_that_do_not_fit_are_refused():
    q, k, _ = qkv(2)
    with pytest.raises(ValueError, match="multiple of 64"):
        nabla_mask(q[:, :100], k[:, :100], torch.ones(1, 1, dtype=torch.bool), 0.5)
    with pytest.raises(ValueError, match="does not fit 2 blocks"):
        nabla_mask(q, k, torch.ones(1, 1, dtype=torch.bool), 0.5)
    with pytest.raises(ValueError, match="make 2 blocks"):
        NablaAttentionMetadataBuilder().build(0, torch.ones(1, 1, dtype=torch.bool), 0.5, (2, 8, 8))
    with pytest.raises(ValueError, match="make 12 blocks"):
        NablaAttentionMetadataBuilder().build(0, torch.ones(1, 1, dtype=torch.bool), 0.5, (2, 15, 20))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 24), (2, 24, 8), (2, 9, 8), (1, 15, 20), (2, 1, 3)])
def test_block_order_has_an_exact_inverse(shape):
    x = torch.randn(2, *shape, 5)
    blocks, order = to_blocks(x), block_order(shape)
    assert torch.equal(from_blocks(blocks, shape), x)
    assert blocks.shape[1] == BLOCK * math.prod(tile_grid(shape))
    assert torch.equal(blocks[:, order >= 0], x.flatten(1, 3)[:, order[order >= 0]])
    assert not blocks[:, order < 0].any()


@pytest.mark.parametrize(("shape", "padded"), [((3, 16, 24), False), ((2, 9, 8), True), ((1, 8, 20), True)])
def test_the_real_tokens_are_those_of_the_frames(shape, padded):
    real = real_tokens(shape)
    assert (real is not None) is padded
    if real is not None:
        assert real.sum() == math.prod(shape)
        assert torch.equal(real, block_order(shape) >= 0)


@pytest.mark.parametrize("name", ["nabla_attn", "FLASH", "", "flex"])
def test_an_unknown_backend_is_refused_with_the_known_and_the_nearest(name):
    with pytest.raises(ValueError, match="unknown attention backend") as error:
        get_attention_backend(name)
    assert all(known in str(error.value) for known in list_attention_backends())


def test_the_nearest_backend_is_named():
    with pytest.raises(ValueError, match=r"did you mean NABLA_ATTN\?"):
        get_attention_backend("nabla_attn")


def test_all_reasons_why_a_backend_cannot_run_are_listed():
    with pytest.raises(ValueError, match="NABLA_ATTN cannot run this") as error:
        get_attention_backend(
            "NABLA_ATTN",
            head_size=36,
            dtype=torch.float64,
            causal=True,
            num_heads=4,
            num_kv_heads=2,
        )
    for reason in ("head size 36", "float64", "causal", "num_kv_heads"):
        assert re.search(reason, str(error.value))


@pytest.mark.parametrize("name", list_attention_backends())
def test_a_backend_names_its_four_classes_and_refuses_what_it_cannot_do(name):
    backend = get_attention_backend(name)
    assert backend.get_name() == name
    assert issubclass(backend.get_metadata_cls(), AttentionMetadata)
    assert backend.get_builder_cls()() is not None
    with pytest.raises(ValueError, match="causal"):
        backend.get_impl_cls()(4, 32, 1.0, causal=True)
    with pytest.raises(ValueError, match="num_kv_heads"):
        backend.get_impl_cls()(4, 32, 1.0, num_kv_heads=2)


def test_metadata_shares_its_tensors_when_it_becomes_a_dict():
    sta = sta_mask((2, 1, 1), (1, 1, 1))
    metadata = NablaAttentionMetadataBuilder().build(3, sta, 0.5, (2, 8, 8))
    fields = metadata.asdict_zerocopy(skip_fields={"P", "workspace"})
    assert set(fields) == {"current_timestep", "sta_mask", "visual_shape", "real_S"}
    assert fields["current_timestep"] == 3
    assert fields["sta_mask"].data_ptr() == sta.data_ptr()
    assert fields["sta_mask"].shape == (1, 1, 2, 2)
