"""NABLA's selection as Triton kernels keeps what the torch version keeps: in Triton's interpreter, and on a GPU.

Triton reads TRITON_INTERPRET when it is imported. Hence this file is also a script, which runs all cases in a process
of its own with that variable and saves the lists: `test_triton_selection.py LISTS.pt`.
"""

import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from kandinsky5_nabla.attention.lists import BlockLists
from kandinsky5_nabla.attention.order import BLOCK
from kandinsky5_nabla.attention.selection import BITS_OF_TWO, ROUNDS, smallest_kept

TOLERANCE = 1e-5  # of running sums: fp32 sums in another order
NEAR = 1e-5  # relative: shares that two implementations of exp may put in another order

EXACT_KEPT = 4, 8  # shares of 1/8 and 1/16 in the rows of `exact`


def random(R, N, generator):
    return 3 * torch.randn(R, N, generator=generator)


def correlated(R, N, generator):
    """Neighbouring blocks resemble each other, and each row looks at the blocks around its own."""
    columns = torch.randn(4, N, generator=generator).cumsum(-1) / math.sqrt(N)
    distance = (torch.arange(N) - torch.linspace(0, N - 1, R)[:, None]).abs()
    return 2 * torch.randn(R, 4, generator=generator) @ columns - distance / N * 20


def flat(R, N, generator):
    return torch.randn(R, 1, generator=generator).expand(R, N)


def one_hot(R, N, generator):
    hot = torch.randint(N, (R, 1), generator=generator)
    return torch.zeros(R, N).scatter_(1, hot, 200.0)


def subnormal(R, N, generator):
    """Few large shares, the others between the smallest float and the smallest normal one, or 0."""
    tiny = -87 - 18 * torch.rand(R, N, generator=generator)
    large = torch.rand(R, N, generator=generator) < 3 / N
    large[:, 0] = True
    return torch.where(large, torch.randn(R, N, generator=generator), tiny)


def exact(R, N, generator):
    """Shares that are powers of two in every implementation: 4 of 1/8 and 8 of 1/16 at random places, otherwise 0."""
    scores = torch.full((R, N), -1000.0)
    order = torch.rand(R, N, generator=generator).argsort(-1)
    ones, halves = EXACT_KEPT
    return scores.scatter_(1, order[:, :ones], 0.0).scatter_(1, order[:, ones : ones + halves], -math.log(2))


HEADS = (random, correlated, flat, one_hot, subnormal)


@dataclass(frozen=True)
class Case:
    """B batches of R rows with N entries each; a head a kind of scores, or `heads` heads of `head_dim` channels."""

    N: int
    P: float
    B: int = 1
    R: int = 6
    kinds: tuple = HEADS
    heads: int = 0
    head_dim: int = 0
    window: str = "one"
    padded: bool = False

    @property
    def H(self):
        return self.heads or len(self.kinds)

    @property
    def entries(self):
        return self.B * self.H * self.R * self.N


CASES = {  # a row takes the interpreter as long however many entries it has
    "P0.3": Case(1464, 0.3),
    "P0.5": Case(5003, 0.5, window="none"),
    "P0.6": Case(4100, 0.6),
    "P0.8": Case(5000, 0.8, window="each"),
    "P0.9": Case(1464, 0.9, R=12),
    "P0.95": Case(6000, 0.95, window="none"),
    "P0.99": Case(7001, 0.99),
    "P1": Case(3333, 1.0, window="none"),
    "batches": Case(600, 0.8, B=2, R=3, window="each"),
    "edges": Case(777, 0.9, B=2, R=3, padded=True),
    "edges-and-all": Case(100, 1.0, R=2, padded=True),
    "one-block": Case(1, 0.5, B=2, R=1, kinds=(random, flat)),
    "three-blocks": Case(3, 0.9, R=3, kinds=(random, correlated), window="none"),
    "a-warp-and-one": Case(33, 0.7, R=3),
    "exact": Case(500, 0.5, kinds=(exact,), window="none"),
    "just-below-exact": Case(500, 0.49999, kinds=(exact,), window="none"),
    "products": Case(130, 0.8, R=66, heads=1, head_dim=64),
    "products-of-odd-width": Case(65, 0.5, B=2, heads=3, head_dim=40, window="each", padded=True),
}
ALL_CASES = pytest.mark.parametrize("name", CASES)


def seeded(case):
    return torch.Generator().manual_seed(case.N + case.R)


def means(case):
    """R rows of q, and k, as `block_means` returns them: views of `[B, N, H, D]`."""
    q, k = 1.5 * torch.randn(2, case.B, case.N, case.H, case.head_dim, generator=seeded(case)).transpose(2, 3)
    return q[:, :, : case.R], k


def scores_of(case):
    if case.head_dim:
        q, k = means(case)
        return q @ k.transpose(-2, -1) / math.sqrt(case.head_dim)
    generator = seeded(case)
    heads = [kind(case.R, case.N, generator) for _ in range(case.B) for kind in case.kinds]
    return torch.stack(heads).view(case.B, case.H, case.R, case.N)


def window_of(case):
    if case.window == "each":  # another one in every head, in strides of its own
        return (torch.rand(case.B, case.R, case.N, case.H, generator=seeded(case)) < 0.1).movedim(-1, 1)
    window = (torch.arange(case.N) - torch.arange(case.R)[:, None]).abs() <= 1
    return window if case.window == "one" else torch.zeros_like(window)


def real_tokens_of(case):
    """Every seventh block is part padding, the last one among them."""
    return torch.arange(case.N * BLOCK) % (7 * BLOCK) != 5 if case.padded else None


def empty_lists(case, device):
    """Lists for R rows, with nothing in them that could be right."""
    shape = case.B, case.H, case.R, case.N
    kept = torch.ones(shape, dtype=torch.bool, device=device)
    lists = [torch.full(size, -7, dtype=torch.int32, device=device) for size in (shape[:3], shape) * (1 + case.padded)]
    return BlockLists(kept, *lists)


def run(case, device):
    from kandinsky5_nabla.attention.triton_selection import select_from_scores, select_with_triton

    lists = empty_lists(case, device)
    edge = None
    if case.padded:
        edge = ~real_tokens_of(case).unflatten(0, (-1, BLOCK)).all(1).to(device)
    rest = window_of(case).to(device), case.P, lists, edge
    if case.head_dim:
        q, k = (x.to(device) for x in means(case))
        select_with_triton(q, k, *rest)
    else:
        scores = lists.indices.view(torch.float32).copy_(scores_of(case))
        select_from_scores(scores, *rest)
    return lists


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    path = tmp_path_factory.mktemp("lists") / "lists.pt"
    command = [sys.executable, __file__, str(path)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: BlockLists(*tensors) for name, tensors in torch.load(path).items()}


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def lists(request, name):
    if request.param == "interpreter":
        return request.getfixturevalue("interpreted")[name]
    return BlockLists(*(tensor.cpu() for tensor in run(CASES[name], "cuda").tensors()))


def undecided(scores, P):
    """Entries that may be kept or not, in double precision: those above them hold P to within the tolerance.

    An entry is kept if and only if those that are larger hold no more than P.
    """
    if P == 1:
        return torch.zeros_like(scores, dtype=torch.bool)
    share = scores.double().softmax(-1)
    ascending = share.sort(-1).values
    mass_from = torch.nn.functional.pad(ascending.flip(-1).cumsum(-1).flip(-1), (0, 1))

    def mass(value, above):
        return mass_from.gather(-1, torch.searchsorted(ascending, value, right=above))

    ties = mass(share, above=False) - mass(share, above=True)
    most = mass(share * (1 - NEAR), above=True) - ties
    least = mass(share * (1 + NEAR), above=True)
    return (most + TOLERANCE > P) & (least - TOLERANCE <= P)


@ALL_CASES
def test_the_kernel_keeps_the_blocks_of_the_torch_version(name, lists):
    case = CASES[name]
    scores = scores_of(case)
    block_map = scores.softmax(-1)
    expected = (block_map >= smallest_kept(block_map, case.P)) | window_of(case)
    differs = lists.kept != expected
    either = undecided(scores, case.P)
    assert not (differs & ~either).any()
    assert differs.sum() <= 2
    if exact not in case.kinds:
        assert either.float().mean() < 1e-3  # otherwise the above would prove little


@ALL_CASES
def test_the_lists_are_those_of_the_kept_blocks(name, lists):
    case = CASES[name]
    expected = empty_lists(case, "cpu")
    expected.kept.copy_(lists.kept)
    expected.fill(real_tokens_of(case))
    for ours, torchs in zip(lists.tensors(), expected.tensors(), strict=True):
        assert torch.equal(ours, torchs)


@pytest.mark.parametrize(("name", "kept"), [("exact", sum(EXACT_KEPT)), ("just-below-exact", EXACT_KEPT[0])])
def test_a_sum_that_equals_P_does_not_exceed_it(name, kept, lists):
    assert (lists.counts == kept).all()


def test_more_than_a_million_entries_are_compared():
    assert sum(case.entries for case in CASES.values()) > 1_000_000


STRIDES = ("i32", "i32", "i32", "constexpr")  # the last one is 1
SIZES = {"H": "i32", "R": "i32", "N": "i32"}


def test_the_products_compile_for_an_h100_and_are_no_tf32(monkeypatch, tmp_path):
    """Needs no GPU, as the next test: the interpreter takes Python that the compiler refuses."""
    from kandinsky5_nabla.attention.triton_selection import DEPTH, TILE, _products

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"q": "*fp32", "k": "*fp32", "scores": "*fp32", "scale": "fp32", **SIZES}
    signature |= {"q_strides": STRIDES, "k_strides": STRIDES}
    ptx = ptx_for_an_h100(_products, signature, {"D": 64, "TILE": TILE, "DEPTH": DEPTH})
    assert "fma.rn.f32" in ptx
    assert "tf32" not in ptx


@pytest.mark.parametrize("edges", [False, True])
def test_the_selection_compiles_for_an_h100_and_reads_its_scores_before_it_writes(edges, monkeypatch, tmp_path):
    from kandinsky5_nabla.attention.triton_selection import _selection

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"scores": "*fp32", "sta": "*i8", "edge": "*i8", "kept": "*i8", "counts": "*i32", "indices": "*i32"}
    signature |= {"edge_counts": "*i32", "edge_indices": "*i32", "P": "fp32", **SIZES, "sta_strides": STRIDES}
    absent = {} if edges else {"edge": None, "edge_counts": None, "edge_indices": None}
    sizes = {"ROUNDS": ROUNDS, "BITS_OF_TWO": BITS_OF_TWO, "WIDTH": 512}
    ptx = ptx_for_an_h100(_selection, signature, {**sizes, **absent})
    last_score = list(re.finditer(r"ld\.global\S*b32", ptx))[-1]
    assert last_score.end() < ptx.rindex("bar.sync", 0, ptx.index("st.global"))


def ptx_for_an_h100(kernel, signature, constants):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place = {name: i for i, name in enumerate(kernel.arg_names)}
    units = {(place[name], 3): 1 for name, kind in signature.items() if kind == STRIDES}
    signature = {name: "constexpr" if name in constants else signature[name] for name in place}
    source = ASTSource(kernel, signature, {(place[name],): value for name, value in constants.items()} | units)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["ptx"]


if __name__ == "__main__":
    torch.save({name: run(case, "cpu").tensors() for name, case in CASES.items()}, sys.argv[1])
