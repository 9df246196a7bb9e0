"""Dense attention: torch's scaled_dot_product_attention, with an optional mask over the keys."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .abstract import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(q k^T * scale) v for q `[B, L, H, D]` and k, v `[B, S, H, D]`, in the dtype of `query`.

    `key_mask` is bool `[B, S]`, True for the keys to attend to; None means all of them.
    """
    q_BHLD, k_BHSD, v_BHSD = (x.transpose(1, 2) for x in (query, key, value))
    mask_B11S = None if key_mask is None else key_mask[:, None, None, :]
    out_BHLD = F.scaled_dot_product_attention(q_BHLD, k_BHSD, v_BHSD, attn_mask=mask_B11S, scale=softmax_scale)
    return out_BHLD.transpose(1, 2)


class SdpaAttentionBackend(AttentionBackend):
    """Dense attention over all tokens, in raster order."""

    @staticmethod
    def get_name() -> str:
        """Return "SDPA"."""
        return "SDPA"

    @staticmethod
    def get_impl_cls() -> type[SdpaAttentionImpl]:
        """Return `SdpaAttentionImpl`."""
        return SdpaAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """Return the base metadata: dense attention needs nothing but the step."""
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[SdpaAttentionMetadataBuilder]:
        """Return `SdpaAttentionMetadataBuilder`."""
        return SdpaAttentionMetadataBuilder


class SdpaAttentionMetadataBuilder(AttentionMetadataBuilder[AttentionMetadata]):
    """Builds the metadata of dense attention."""

    def build(self, current_timestep: int) -> AttentionMetadata:
        """Return the metadata of step `current_timestep`."""
        return AttentionMetadata(current_timestep)


class SdpaAttentionImpl(AttentionImpl[AttentionMetadata]):
    """Runs `dense_attention`; the metadata is not read."""

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
        SdpaAttentionBackend.require(num_heads=num_heads, head_size=head_size, causal=causal, num_kv_heads=num_kv_heads)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Return dense attention `[B, L, H, D]`."""
        return dense_attention(query, key, value, self.softmax_scale)
