"""NABLA's selection without sorting keeps what the sort-based oracle keeps, and its lists say the same as its map."""

import math

import pytest
import torch

from kandinsky5_nabla.attention import lists as lists_module
from kandinsky5_nabla.attention import nabla_mask, sta_mask
from kandinsky5_nabla.attention import selection as selection_module
from kandinsky5_nabla.attention.lists import BlockLists, Workspace
from kandinsky5_nabla.attention.order import BLOCK, real_tokens, tile_grid
from kandinsky5_nabla.attention.reference import kept_by_sorting, largest_by_sorting
from kandinsky5_nabla.attention.selection import block_map, block_means, select_blocks, smallest_kept

EITHER_SIDE = 1e-5  # blocks whose running sum is this near to 1 - P may fall on either side: fp32 sums, other orders
SHARES = (0.3, 0.5, 0.7, 0.9, 0.99)
ROWS = 64  # of each kind, in the suite; `make soak` takes more


def random_rows(rows, N, generator):
    return torch.softmax(3 * torch.randn(rows, N, generator=generator), -1)


def correlated_rows(rows, N, generator):
    means = torch.randn(2, max(rows, N), 8, generator=generator).cumsum(1) / math.sqrt(N) * 2
    return torch.softmax(means[0, :rows] @ means[1, :N].T, -1)


def flat_rows(rows, N, generator):
    return torch.full((rows, N), 1 / N)


def one_hot_rows(rows, N, generator):
    return torch.eye(N)[torch.randint(N, (rows,), generator=generator)]


def dyadic_rows(rows, N, generator):
    """1/2, 1/4, ..., the last one twice: sums are exact, and P = 0.5 is met exactly."""
    halves = torch.tensor([0.5 ** min(i + 1, min(N, 20) - 1) for i in range(min(N, 20))] + [0.0] * (N - 20))
    return torch.stack([halves[torch.randperm(N, generator=generator)] for _ in range(rows)])


def subnormal_rows(rows, N, generator):
    """Most entries are below the smallest normal number, some of them zero."""
    return torch.softmax(40 * torch.randn(rows, N, generator=generator), -1)


def tied_rows(rows, N, generator):
    levels = torch.randint(1, 4, (rows, N), generator=generator).float()
    return levels / levels.sum(-1, keepdim=True)


KINDS = [random_rows, correlated_rows, flat_rows, one_hot_rows, dyadic_rows, subnormal_rows, tied_rows]


def sorted_rule(map_RN, P):
    """The oracle's kept set, and the entries that may fall on either side: near the threshold, or tied there.

    An entry is kept where the larger ones hold no more than P. Those that tie are kept together here, and one by
    one by the sort; so a value is near the threshold if the sum of the larger ones is.
    """
    kept = largest_by_sorting(map_RN, P)
    ascending, order = map_RN.sort(-1)
    sums = ascending.double().cumsum(-1)
    larger = sums[:, -1:] - sums.gather(-1, torch.searchsorted(ascending, ascending, right=True) - 1)
    near = (larger - P).abs() < EITHER_SIDE
    smallest = map_RN.masked_fill(~kept, 2.0).amin(-1, keepdim=True)
    return kept, torch.zeros_like(kept).scatter(-1, order, near) | (map_RN == smallest)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kept_sets_are_those_of_the_sort(kind, compiled, soak):
    generator = torch.Generator().manual_seed(0)
    entries = 0
    for N in (20, 120, 504, 1464):
        for _ in range(soak):
            map_RN = kind(ROWS, N, generator)
            for P in SHARES:
                kept = map_RN >= smallest_kept(map_RN, P, compiled)
                expected, either = sorted_rule(map_RN, P)
                assert not ((kept != expected) & ~either).any(), (N, P)
                assert kept[torch.arange(ROWS), map_RN.argmax(-1)].all()
                entries += kept.numel()
    print(f"{kind.__name__}: {entries} entries")


@pytest.mark.parametrize("kind", KINDS)
def test_the_kept_entries_hold_the_mass_and_none_is_spare(kind):
    map_RN = kind(ROWS, 504, torch.Generator().manual_seed(1)).double()
    for P in SHARES:
        smallest = smallest_kept(map_RN.float(), P)
        kept = map_RN >= smallest
        assert ((map_RN * kept).sum(-1) > P - EITHER_SIDE).all()
        assert ((map_RN * (map_RN > smallest)).sum(-1) <= P + EITHER_SIDE).all()


def test_everything_is_kept_at_one_even_what_rounding_would_lose():
    map_RN = subnormal_rows(8, 100, torch.Generator().manual_seed(0))
    assert (map_RN >= smallest_kept(map_RN, 1.0)).all()


def correlated_qkv(N, heads=3, batch=2, head_dim=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    means = 1.5 * torch.randn(2, batch, N, 1, heads, head_dim, generator=generator)
    tokens = torch.randn(2, batch, N, BLOCK, heads, head_dim, generator=generator)
    q, k = (means + tokens).flatten(2, 3).to(dtype)
    return q, k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("P", [0.3, 0.9, 1.0])
def test_the_whole_selection_equals_the_oracle(P, dtype):
    q, k = correlated_qkv(40, dtype=dtype)
    window = sta_mask((40, 1, 1), (3, 1, 1))
    kept, expected = nabla_mask(q, k, window, P), kept_by_sorting(q, k, window, P)
    assert torch.equal(kept, expected)
    assert P == 1 or 0.05 < kept.float().mean() < 0.9  # or the comparison would say nothing


def test_many_small_heads_and_one_large_head_are_worked_on_in_parts(monkeypatch):
    """Whatever fits at once, the kept blocks are the same."""
    q, k = correlated_qkv(30, heads=5)
    window = sta_mask((30, 1, 1), (1, 1, 1))
    whole = select_blocks(q, k, window, 0.5)
    for entries in (1, 30 * 7, 30 * 30 * 2, 30 * 30 * 3 + 5):
        monkeypatch.setitem(lists_module.ENTRIES_AT_ONCE, "cpu", entries)
        for part, expected in zip(select_blocks(q, k, window, 0.5).tensors(), whole.tensors(), strict=True):
            assert torch.equal(part, expected)


def test_a_large_map_is_selected_by_the_compiled_functions(monkeypatch):
    q, k = correlated_qkv(40)
    window = sta_mask((40, 1, 1), (1, 1, 1))
    expected = select_blocks(q, k, window, 0.5).kept.clone()
    names = []
    run_compiled = selection_module.run_compiled
    monkeypatch.setattr(selection_module, "WORTH_COMPILING", 1)
    monkeypatch.setattr(
        selection_module,
        "run_compiled",
        lambda function, name, *tensors, **options: (
            names.append(function.__name__) or run_compiled(function, name, *tensors, **options)
        ),
    )
    assert torch.equal(select_blocks(q, k, window, 0.5).kept, expected)
    assert set(names) == {"_mean_of_blocks", "_bisect"}
    real = real_tokens((1, 45, 64))  # 48 blocks
    q, k = correlated_qkv(48)
    expected = kept_by_sorting(q, k, torch.eye(48, dtype=torch.bool), 0.5, real)
    assert torch.equal(select_blocks(q, k, torch.eye(48, dtype=torch.bool), 0.5, real).kept, expected)
    assert "_mean_of_real_tokens" in names


def lists_agree_with_map(counts, indices, chosen):
    N = chosen.shape[-1]
    assert counts.dtype == indices.dtype == torch.int32
    assert torch.equal(counts, chosen.sum(-1, dtype=torch.int32))
    for count, row, kept in zip(counts.flatten(), indices.flatten(0, -2), chosen.flatten(0, -2), strict=True):
        assert row[:count].tolist() == kept.nonzero().flatten().tolist()
        assert row[count:].tolist() == (~kept).nonzero().flatten().tolist()
        assert row.sort().values.tolist() == list(range(N))


def test_the_lists_are_the_kept_columns_ascending_and_then_the_others():
    q, k = correlated_qkv(24)
    lists = select_blocks(q, k, sta_mask((24, 1, 1), (1, 1, 1)), 0.5)
    lists_agree_with_map(lists.counts, lists.indices, lists.kept)
    assert lists.edge_counts is None


def test_blocks_with_padding_have_lists_of_their_own():
    shape = (2, 12, 20)
    real = real_tokens(shape)
    N = math.prod(tile_grid(shape))
    q, k = correlated_qkv(N)
    lists = select_blocks(q, k, torch.eye(N, dtype=torch.bool), 0.5, real)
    edge = ~real.view(N, BLOCK).all(1)
    assert 0 < edge.sum() < N
    lists_agree_with_map(lists.counts, lists.indices, lists.kept & ~edge)
    lists_agree_with_map(lists.edge_counts, lists.edge_indices, lists.kept & edge)


def test_padding_counts_in_no_mean():
    shape = (1, 5, 8)
    real = real_tokens(shape)
    q, k = correlated_qkv(1)
    means = block_means(q, real)
    assert (means - q[:, real].mean(1)[:, :, None]).abs().max() < 1e-6
    q[:, ~real], k[:, ~real] = 1e3, -1e3
    assert torch.equal(block_means(q, real), means)
    assert block_map(q, k, real).shape == (2, 3, 1, 1)


def test_a_workspace_keeps_its_buffers_while_the_size_stays():
    workspace = Workspace()
    q, k = correlated_qkv(12)
    window = sta_mask((12, 1, 1), (1, 1, 1))
    first = select_blocks(q, k, window, 0.5, workspace=workspace)
    pointer = first.indices.data_ptr()
    again = select_blocks(k, q, window, 0.3, workspace=workspace)
    assert again.indices.data_ptr() == pointer
    assert torch.equal(again.kept, nabla_mask(k, q, window, 0.3))
    fewer = select_blocks(q[:1], k[:1], window, 0.5, workspace=workspace)
    assert fewer.kept.shape == (1, 3, 12, 12)


def test_lists_of_a_map_are_those_of_the_selection():
    q, k = correlated_qkv(12)
    lists = select_blocks(q, k, sta_mask((12, 1, 1), (1, 1, 1)), 0.5)
    for made, selected in zip(BlockLists.of_map(lists.kept).tensors(), lists.tensors(), strict=True):
        assert torch.equal(made, selected)


def test_nothing_is_sorted():
    q, k = correlated_qkv(40)
    with torch.profiler.profile() as profile:
        select_blocks(q, k, sta_mask((40, 1, 1), (1, 1, 1)), 0.5)
    names = {event.key for event in profile.key_averages()}
    assert "aten::cumsum" in names
    assert not [name for name in names if "sort" in name or "topk" in name]
