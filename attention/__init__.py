"""Attention backends for Kandinsky 5: NABLA block-sparse attention, its plain reference, and dense SDPA."""

from .abstract import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder
from .mask import nabla_mask, nablaT_v2, sta_mask
from .nabla import (
    NablaAttentionBackend,
    NablaAttentionImpl,
    NablaAttentionMetadata,
    NablaAttentionMetadataBuilder,
)
from .registry import get_attention_backend, list_attention_backends

__all__ = [
    "AttentionBackend",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "NablaAttentionBackend",
    "NablaAttentionImpl",
    "NablaAttentionMetadata",
    "NablaAttentionMetadataBuilder",
    "get_attention_backend",
    "list_attention_backends",
    "nablaT_v2",
    "nabla_mask",
    "sta_mask",
]
