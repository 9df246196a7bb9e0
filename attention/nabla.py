"""NABLA: block-sparse attention whose block mask is computed from q and k at every layer and step."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..configs.errors import BackendError
from .abstract import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder, TokenOrder
from .flex import block_sparse_attention
from .lists import BlockLists, Workspace
from .order import BLOCK, real_tokens, tile_grid
from .reference import kept_by_sorting, masked_attention, score_matrix_problem
from .selection import check_mass, select_blocks


@dataclass(frozen=True)
class NablaAttentionMetadata(AttentionMetadata):
    """What NABLA needs to know about a run and a step.

    Attributes:
        current_timestep: integer index of the denoising step.
        sta_mask: window mask, bool `[1, 1, N, N]`, built once per run (`attention.sta_mask`).
        P: mass of the block map to keep per row, in (0, 1].
        visual_shape: `(T, H, W)` in tokens; N = T * ceil(H/8) * ceil(W/8).
        real_S: bool `[64 N]`, False for the tokens that pad frames to whole tiles; None where there are none.
        workspace: buffers for the block lists, shared by all layers and steps.
    """

    sta_mask: torch.Tensor
    P: float
    visual_shape: tuple[int, int, int]
    real_S: torch.Tensor | None = None
    workspace: Workspace = field(default_factory=Workspace, compare=False)


class NablaAttentionMetadataBuilder(AttentionMetadataBuilder[NablaAttentionMetadata]):
    """Builds `NablaAttentionMetadata` and checks it once, so that the layers need not."""

    def build(
        self,
        current_timestep: int,
        sta_mask: torch.Tensor,
        P: float,
        visual_shape: tuple[int, int, int],
    ) -> NablaAttentionMetadata:
        """Return the metadata of one step; fields as in `NablaAttentionMetadata`.

        Raises:
            ValueError: if P is not in (0, 1], or the mask has another size.
        """
        check_mass(P)
        N = math.prod(tile_grid(visual_shape))
        if sta_mask.shape[-2:] != (N, N):
            raise BackendError(f"sta_mask {tuple(sta_mask.shape)}: {visual_shape} tokens make {N} blocks")
        T, H, W = visual_shape
        real_S = real_tokens((T, H, W), sta_mask.device)
        return NablaAttentionMetadata(current_timestep, sta_mask.reshape(1, 1, N, N), float(P), (T, H, W), real_S)


class NablaAttentionBackend(AttentionBackend):
    """NABLA on the block-sparse kernel (`attention.flex`)."""

    token_order: ClassVar[TokenOrder] = "blocks"

    @staticmethod
    def get_name() -> str:
        """Return "NABLA_ATTN"."""
        return "NABLA_ATTN"

    @staticmethod
    def get_impl_cls() -> type[NablaAttentionImpl]:
        """Return `NablaAttentionImpl`."""
        return NablaAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type[NablaAttentionMetadata]:
        """Return `NablaAttentionMetadata`."""
        return NablaAttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[NablaAttentionMetadataBuilder]:
        """Return `NablaAttentionMetadataBuilder`."""
        return NablaAttentionMetadataBuilder

    @classmethod
    def validate_configuration(cls, *, head_size: int | None = None, **facts: Any) -> list[str]:
        """Return the reasons why NABLA cannot run: besides the common ones, the head size."""
        reasons = super().validate_configuration(head_size=head_size, **facts)
        whole = isinstance(head_size, numbers.Integral)
        if head_size is not None and (not whole or head_size % 8 or not 8 <= head_size <= 128):
            reasons.append(f"head size {head_size!r}: multiples of 8 from 8 to 128 are supported")
        return reasons


class NablaAttentionImpl(AttentionImpl[NablaAttentionMetadata]):
    """Selects the blocks of one layer from its q and k, and attends to them alone."""

    backend: type[AttentionBackend] = NablaAttentionBackend

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        **extra_impl_args: Any,
    ) -> None:
        self.backend.require(num_heads=num_heads, head_size=head_size, causal=causal, num_kv_heads=num_kv_heads)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: NablaAttentionMetadata,
    ) -> torch.Tensor:
        """Return NABLA attention `[B, S, H, D]` for q and k after RoPE, in block order."""
        lists = self.select(query, key, attn_metadata)
        return self.attend(query, key, value, lists, attn_metadata.real_S)

    def select(self, query: torch.Tensor, key: torch.Tensor, attn_metadata: NablaAttentionMetadata) -> BlockLists:
        """Return the kept blocks; they are good until the next layer's selection."""
        metadata = attn_metadata
        return select_blocks(query, key, metadata.sta_mask, metadata.P, metadata.real_S, metadata.workspace)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lists: BlockLists,
        real_S: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend to the kept blocks; `real_S` as in `NablaAttentionMetadata`."""
        return block_sparse_attention(query, key, value, lists, self.softmax_scale, real_S)


class NablaReferenceBackend(NablaAttentionBackend):
    """NABLA on the plain reference: the oracle, for any machine, at dense cost."""

    @staticmethod
    def get_name() -> str:
        """Return "NABLA_REFERENCE"."""
        return "NABLA_REFERENCE"

    @staticmethod
    def get_impl_cls() -> type[NablaReferenceImpl]:
        """Return `NablaReferenceImpl`."""
        return NablaReferenceImpl

    @classmethod
    def validate_configuration(
        cls, *, num_heads: int | None = None, visual_shape: tuple[int, int, int] | None = None, **facts: Any
    ) -> list[str]:
        """Return the reasons of NABLA, and a score matrix that would not fit."""
        reasons = super().validate_configuration(num_heads=num_heads, visual_shape=visual_shape, **facts)
        if num_heads is not None and visual_shape is not None:
            tokens = math.prod(tile_grid(visual_shape)) * BLOCK
            problem = score_matrix_problem(1, tokens, num_heads)
            reasons += [problem] if problem else []
        return reasons


class NablaReferenceImpl(NablaAttentionImpl):
    """Selects by sorting and attends with `masked_attention`."""

    backend = NablaReferenceBackend

    @torch.no_grad()
    def select(self, query: torch.Tensor, key: torch.Tensor, attn_metadata: NablaAttentionMetadata) -> BlockLists:
        """Return the kept blocks, selected as numerics.md describes it."""
        metadata = attn_metadata
        kept_BHNN = kept_by_sorting(query, key, metadata.sta_mask, metadata.P, metadata.real_S)
        return BlockLists.of_map(kept_BHNN, metadata.real_S)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lists: BlockLists,
        real_S: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend to the kept blocks with the whole score matrix."""
        return masked_attention(query, key, value, lists.kept, self.softmax_scale, real_S)
