"""The kept blocks of one layer as lists of their indices, which is what a block-sparse kernel walks through.

Legend: B batch, H heads, N blocks; query blocks are rows, key blocks columns, S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .order import BLOCK

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ENTRIES_AT_ONCE = {"cpu": 2**18, "cuda": 2**24}
"""Entries of a block map that are worked on at once: on a CPU they stay in its cache, on CUDA they bound the memory."""


@dataclass(frozen=True)
class BlockLists:
    """The key blocks that each query block sees.

    Attributes:
        kept: the same as a block map, bool `[B, H, N, N]`.
        counts: how many blocks without padding are kept, int32 `[B, H, N]`.
        indices: which, ascending, int32 `[B, H, N, N]`; behind them come the others.
        edge_counts, edge_indices: likewise the kept blocks that are part padding; None where tokens divide into blocks.
    """

    kept: torch.Tensor
    counts: torch.Tensor
    indices: torch.Tensor
    edge_counts: torch.Tensor | None = None
    edge_indices: torch.Tensor | None = None

    @classmethod
    def empty(cls, B: int, H: int, N: int, device: torch.device | str, edges: bool = False) -> BlockLists:
        """Return lists to be filled: 5 bytes an entry of the block map, with edges 9."""
        kept = torch.empty(B, H, N, N, dtype=torch.bool, device=device)
        lists = [
            torch.empty(*shape, dtype=torch.int32, device=device) for shape in ((B, H, N), (B, H, N, N)) * (1 + edges)
        ]
        return cls(kept, *lists)

    def tensors(self) -> list[torch.Tensor]:
        """Return the fields that are there, in their order."""
        fields = self.kept, self.counts, self.indices, self.edge_counts, self.edge_indices
        return [tensor for tensor in fields if tensor is not None]

    @classmethod
    def of_map(cls, kept_BHNN: torch.Tensor, real_S: torch.Tensor | None = None) -> BlockLists:
        """Return the lists of a block map."""
        B, H, N, _ = kept_BHNN.shape
        lists = cls.empty(B, H, N, kept_BHNN.device, edges=real_S is not None)
        lists.kept.copy_(kept_BHNN)
        return lists.fill(real_S)

    def fill(self, real_S: torch.Tensor | None = None) -> BlockLists:
        """Make the lists from `kept` and return self; `real_S` (bool `[S]`) is False for padding."""
        if real_S is None:
            _compact(self.kept, None, self.counts, self.indices)
        else:
            edge_N = edge_blocks(real_S)
            assert self.edge_counts is not None
            assert self.edge_indices is not None
            _compact(self.kept, ~edge_N, self.counts, self.indices)
            _compact(self.kept, edge_N, self.edge_counts, self.edge_indices)
        return self

    def to_block_mask(self, real_S: torch.Tensor | None = None) -> BlockMask:
        """Return FlexAttention's `BlockMask` in a form that is right on every path.

        Compiled FlexAttention reads the lists and asks `mask_mod` in the blocks at the edges alone. Uncompiled
        FlexAttention ignores the lists and would be dense without a `mask_mod` that says the same (numerics.md,
        "FlexAttention"). `real_S` is False for padding.
        """
        from torch.nn.attention.flex_attention import BlockMask  # on use: imports of this package load no kernels

        kept_BHNN = self.kept

        def is_kept(b: torch.Tensor, h: torch.Tensor, q_token: torch.Tensor, kv_token: torch.Tensor) -> torch.Tensor:
            return kept_BHNN[b, h, q_token // BLOCK, kv_token // BLOCK]

        def is_kept_and_real(
            b: torch.Tensor, h: torch.Tensor, q_token: torch.Tensor, kv_token: torch.Tensor
        ) -> torch.Tensor:
            assert real_S is not None
            return is_kept(b, h, q_token, kv_token) & real_S[kv_token]

        if self.edge_counts is not None and self.edge_indices is not None:
            partial = self.edge_counts, self.edge_indices
        else:  # an empty list needs indices too: a view, since one tensor passed twice does not compile on the CPU
            partial = torch.zeros_like(self.counts), self.indices.view(self.indices.shape)
        return BlockMask.from_kv_blocks(
            *partial,
            full_kv_num_blocks=self.counts,
            full_kv_indices=self.indices,
            BLOCK_SIZE=BLOCK,
            mask_mod=is_kept if real_S is None else is_kept_and_real,
            compute_q_blocks=False,  # only the backward pass reads the transposed lists
        )


class Workspace:
    """The buffers that all layers of a run share: a layer's lists are read before the next layer makes its own."""

    def __init__(self) -> None:
        self._lists: BlockLists | None = None

    def lists(self, B: int, H: int, N: int, device: torch.device, edges: bool) -> BlockLists:
        """Return lists of this size, with the content of the last use."""
        lists = self._lists
        fits = lists is not None and lists.kept.shape == (B, H, N, N) and lists.kept.device == device
        if lists is None or not fits or (lists.edge_counts is not None) != edges:
            lists = self._lists = BlockLists.empty(B, H, N, device, edges)
        return lists


def edge_blocks(real_S: torch.Tensor) -> torch.Tensor:
    """Return bool `[N]`, True for the blocks that are part padding."""
    return ~real_S.unflatten(0, (-1, BLOCK)).all(1)


def rows_at_once(N: int, device: torch.device) -> int:
    """Return how many rows of a block map to work on at once."""
    return max(1, ENTRIES_AT_ONCE.get(device.type, ENTRIES_AT_ONCE["cuda"]) // N)


def _compact(
    kept_BHNN: torch.Tensor, among_N: torch.Tensor | None, counts_BHN: torch.Tensor, indices_BHNN: torch.Tensor
) -> None:
    """Write each row's kept columns, in ascending order and before the others, and how many they are.

    A prefix sum says where each column goes; nothing is sorted.
    """
    N = kept_BHNN.shape[-1]
    column_N = torch.arange(N, dtype=torch.int32, device=kept_BHNN.device)
    rows = rows_at_once(N, kept_BHNN.device)
    parts = (tensor.flatten(0, 2).split(rows) for tensor in (kept_BHNN, counts_BHN, indices_BHNN))
    for kept_RN, counts_R, indices_RN in zip(*parts, strict=True):
        kept_RN = kept_RN if among_N is None else kept_RN & among_N
        before_RN = kept_RN.cumsum(-1)
        counts_R.copy_(before_RN[:, -1])
        others_RN = (column_N - before_RN).add_(before_RN[:, -1:])
        place_RN = torch.where(kept_RN, before_RN.sub_(1), others_RN)
        indices_RN.scatter_(1, place_RN, column_N.expand_as(place_RN))
