"""The interface of an attention backend: its name, what it cannot run, its metadata and its implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch

from ..configs.errors import BackendError

TokenOrder = Literal["raster", "blocks"]
"""`raster`: frames, rows, columns. `blocks`: frames, then 8x8 tiles of tokens (see `attention.order`)."""


@dataclass(frozen=True)
class AttentionMetadata:
    """What an attention layer needs to know besides q, k and v; handed down as an argument of `forward`.

    Attributes:
        current_timestep: integer index of the denoising step, from 0.
    """

    current_timestep: int

    def asdict_zerocopy(self, skip_fields: Collection[str] | None = None) -> dict[str, Any]:
        """Return the fields as a dict that shares the tensors, without those in `skip_fields`."""
        skipped = skip_fields or ()
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in skipped}


MetadataT = TypeVar("MetadataT", bound=AttentionMetadata)


class AttentionMetadataBuilder(ABC, Generic[MetadataT]):
    """Builds the metadata of one denoising step."""

    def prepare(self) -> None:
        """Get ready for a new run."""

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> MetadataT:
        """Return the metadata of one step."""


class AttentionImpl(ABC, Generic[MetadataT]):
    """Runs attention for one layer. All tensors are `[B, L, H, D]`: batch, tokens, heads, head dim.

    Raises:
        ValueError: if the backend cannot honour the arguments; the message lists all reasons.
    """

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        **extra_impl_args: Any,
    ) -> None: ...

    def preprocess_qkv(self, qkv: torch.Tensor, attn_metadata: MetadataT) -> torch.Tensor:
        """Rearrange q, k or v before attention; the identity unless a backend needs its own layout."""
        return qkv

    @abstractmethod
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: MetadataT
    ) -> torch.Tensor:
        """Return the attention output `[B, L, H, D]` in the dtype of `query`."""

    def postprocess_output(self, output: torch.Tensor, attn_metadata: MetadataT) -> torch.Tensor:
        """Undo `preprocess_qkv` on the output."""
        return output


class AttentionBackend(ABC):
    """A way to compute self-attention over video tokens; a namespace that is never instantiated."""

    token_order: ClassVar[TokenOrder] = "raster"
    """The order in which the backend wants its tokens; the model permutes once per forward."""

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Return the name by which users choose this backend."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return the class that runs the attention."""

    @staticmethod
    @abstractmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """Return the class of the metadata that the implementation reads."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return the class that builds the metadata."""

    @classmethod
    def validate_configuration(
        cls,
        *,
        num_heads: int | None = None,
        head_size: int | None = None,
        dtype: torch.dtype | None = None,
        visual_shape: tuple[int, int, int] | None = None,
        causal: bool = False,
        num_kv_heads: int | None = None,
    ) -> list[str]:
        """Return every reason why this backend cannot run what is described; empty if it can.

        Facts that are left out are not checked. `visual_shape` is `(T, H, W)` in tokens.
        """
        reasons = []
        if causal:
            reasons.append("causal=True: attention over video tokens has no causal order; use causal=False")
        if num_kv_heads is not None and num_kv_heads != num_heads:
            reasons.append(f"num_kv_heads={num_kv_heads}: every head has its own keys, so {num_heads} is needed")
        if dtype is not None and dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reasons.append(f"dtype {dtype}: float32, bfloat16 and float16 are supported")
        return reasons

    @classmethod
    def require(cls, **facts: Any) -> None:
        """Raise a ValueError with every reason of `validate_configuration(**facts)`, if there is one."""
        reasons = cls.validate_configuration(**facts)
        if reasons:
            raise BackendError(f"attention backend {cls.get_name()} cannot run this: " + "; ".join(reasons))
