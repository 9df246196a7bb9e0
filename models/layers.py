"""The layers of the Kandinsky 5 transformer; numerics.md, "Transformer", has the formulas.

Legend: B batch, L text tokens, S visual tokens, M model dim, H heads, D head dim, E time dim.
Attribute names are those of the published weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..attention.abstract import AttentionImpl, AttentionMetadata
from ..attention.sdpa import dense_attention
from .rope import Rope, apply_rope

LAYER_NORM_EPS = 1e-5


class Float32Module(nn.Module):
    """A module whose parameters stay fp32 under `.to(dtype)`, `.half()` and the like; devices change as usual."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Float32Module:
        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)  # type: ignore[return-value]  # nn.Module annotates Self loosely


def layer_norm_fp32(x: torch.Tensor) -> torch.Tensor:
    """Return LayerNorm without affine over the last axis, computed and returned in fp32."""
    return F.layer_norm(x.float(), x.shape[-1:], eps=LAYER_NORM_EPS)


def modulate(x: torch.Tensor, shift_B1M: torch.Tensor, scale_B1M: torch.Tensor) -> torch.Tensor:
    """Return LayerNorm(x) * (1 + scale) + shift, computed in fp32, in the dtype of `x` `[B, S, M]`."""
    return (layer_norm_fp32(x) * (1 + scale_B1M) + shift_B1M).to(x.dtype)


def gated_residual(x: torch.Tensor, gate_B1M: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return x + gate * out, computed in fp32, in the dtype of `x` `[B, S, M]`."""
    return (x.float() + gate_B1M * out.float()).to(x.dtype)


class TimeEmbeddings(Float32Module):
    """Sinusoidal embedding of sigma * 1000 and a two-layer MLP, all in fp32."""

    def __init__(self, model_dim: int, time_dim: int) -> None:
        super().__init__()
        self.model_dim = model_dim
        self.in_layer = nn.Linear(model_dim, time_dim)
        self.out_layer = nn.Linear(time_dim, time_dim)

    def forward(self, timestep_B: torch.Tensor) -> torch.Tensor:
        """Return fp32 `[B, E]` for fp32 times `[B]`."""
        half = self.model_dim // 2
        index = torch.arange(half, dtype=torch.float32, device=timestep_B.device)
        frequency = torch.exp(-math.log(10000.0) * index / half)
        angle = torch.outer(timestep_B.float(), frequency)
        with torch.autocast(timestep_B.device.type, enabled=False):
            hidden = self.in_layer(torch.cat([angle.cos(), angle.sin()], dim=-1))
            return self.out_layer(F.silu(hidden))


class TextEmbeddings(nn.Module):
    """A projection and an affine LayerNorm, for the token embeddings and for the pooled one."""

    def __init__(self, text_dim: int, model_dim: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(text_dim, model_dim)
        self.norm = nn.LayerNorm(model_dim, eps=LAYER_NORM_EPS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return `[..., M]` for `[..., text_dim]`."""
        hidden = self.in_layer(text)
        return self.norm(hidden).to(hidden.dtype)


class VisualEmbeddings(nn.Module):
    """A projection of patches of the latent video."""

    def __init__(self, visual_dim: int, model_dim: int, patch_size: tuple[int, int, int]) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.in_layer = nn.Linear(math.prod(patch_size) * visual_dim, model_dim)

    def forward(self, x_BTHWC: torch.Tensor) -> torch.Tensor:
        """Return tokens `[B, T/pt, H/ph, W/pw, M]`; the projection reads (pt, ph, pw, channel), channel fastest."""
        pt, ph, pw = self.patch_size
        x_BTtHhWwC = x_BTHWC.unflatten(3, (-1, pw)).unflatten(2, (-1, ph)).unflatten(1, (-1, pt))
        return self.in_layer(x_BTtHhWwC.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4))


class Modulation(Float32Module):
    """Shifts, scales and gates from the time vector, in fp32."""

    def __init__(self, time_dim: int, model_dim: int, num_params: int) -> None:
        super().__init__()
        self.num_params = num_params
        self.out_layer = nn.Linear(time_dim, num_params * model_dim)

    def forward(self, time_BE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `num_params` tensors, fp32 `[B, 1, M]`."""
        with torch.autocast(time_BE.device.type, enabled=False):
            return self.out_layer(F.silu(time_BE.float())).unsqueeze(1).chunk(self.num_params, dim=-1)


class HeadNorm(nn.RMSNorm):
    """RMSNorm of q or k, in fp32 whatever the dtype of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return fp32 in the shape of x, normalised over its last axis."""
        weight = self.weight.float()  # read inside the module's own forward, where offloading has put it in place
        return F.rms_norm(x.float(), weight.shape, weight, torch.finfo(torch.float32).eps)


class Attention(nn.Module):
    """Multi-head attention with RMSNorm on q and k, and RoPE where a table is given."""

    def __init__(self, model_dim: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = model_dim // head_dim, head_dim
        self.softmax_scale = 1 / math.sqrt(head_dim)
        self.to_query = nn.Linear(model_dim, model_dim)
        self.to_key = nn.Linear(model_dim, model_dim)
        self.to_value = nn.Linear(model_dim, model_dim)
        self.query_norm = HeadNorm(head_dim)
        self.key_norm = HeadNorm(head_dim)
        self.out_layer = nn.Linear(model_dim, model_dim)
        self.impl: AttentionImpl | None = None

    def set_impl(self, impl_cls: type[AttentionImpl], prefix: str) -> None:
        """Choose what runs when `forward` is given metadata."""
        self.impl = impl_cls(self.num_heads, self.head_dim, self.softmax_scale, prefix=prefix)

    def forward(
        self,
        x_BSM: torch.Tensor,
        context_BLM: torch.Tensor | None = None,
        rope: Rope | None = None,
        key_mask_BL: torch.Tensor | None = None,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Return `[B, S, M]`: attention of x to itself or to the context, over the keys that `key_mask_BL` allows.

        With `attn_metadata` the backend's implementation runs, without it dense attention.
        """
        context_BLM = x_BSM if context_BLM is None else context_BLM
        q_BSHD = self._heads(self.to_query(x_BSM), self.query_norm, rope)
        k_BLHD = self._heads(self.to_key(context_BLM), self.key_norm, rope)
        v_BLHD = self.to_value(context_BLM).unflatten(-1, (self.num_heads, -1))
        if attn_metadata is None:
            out_BSHD = dense_attention(q_BSHD, k_BLHD, v_BLHD, self.softmax_scale, key_mask_BL)
        else:
            out_BSHD = self._run_backend(q_BSHD, k_BLHD, v_BLHD, attn_metadata)
        return self.out_layer(out_BSHD.flatten(-2))

    def _heads(self, x_BSM: torch.Tensor, norm: nn.RMSNorm, rope: Rope | None) -> torch.Tensor:
        """Split into heads, normalise and rotate in fp32; round once, to the dtype of x."""
        x_BSHD = norm(x_BSM.unflatten(-1, (self.num_heads, -1)))
        return (x_BSHD if rope is None else apply_rope(x_BSHD, rope)).to(x_BSM.dtype)

    def _run_backend(
        self, q_BSHD: torch.Tensor, k_BSHD: torch.Tensor, v_BSHD: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        assert self.impl is not None, "set_impl comes before a forward with metadata"
        q, k, v = (self.impl.preprocess_qkv(x, metadata) for x in (q_BSHD, k_BSHD, v_BSHD))
        return self.impl.postprocess_output(self.impl.forward(q, k, v, metadata), metadata)


class FeedForward(nn.Module):
    """Linear, GELU (erf), Linear; no bias."""

    def __init__(self, dim: int, ff_dim: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(dim, ff_dim, bias=False)
        self.out_layer = nn.Linear(ff_dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., dim]` for `[..., dim]`."""
        return self.out_layer(F.gelu(self.in_layer(x)))


class TextBlock(nn.Module):
    """Self-attention and feed-forward over the text."""

    def __init__(self, model_dim: int, time_dim: int, ff_dim: int, head_dim: int) -> None:
        super().__init__()
        self.text_modulation = Modulation(time_dim, model_dim, 6)
        self.self_attention = Attention(model_dim, head_dim)
        self.feed_forward = FeedForward(model_dim, ff_dim)

    def forward(
        self, text_BLM: torch.Tensor, time_BE: torch.Tensor, rope: Rope, text_mask_BL: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the text `[B, L, M]`; positions outside the mask are not attended to."""
        shift_sa, scale_sa, gate_sa, shift_ff, scale_ff, gate_ff = self.text_modulation(time_BE)
        x = text_BLM
        x = gated_residual(
            x, gate_sa, self.self_attention(modulate(x, shift_sa, scale_sa), rope=rope, key_mask_BL=text_mask_BL)
        )
        return gated_residual(x, gate_ff, self.feed_forward(modulate(x, shift_ff, scale_ff)))


class VisualBlock(nn.Module):
    """Self-attention over the video, cross-attention to the text, feed-forward."""

    def __init__(self, model_dim: int, time_dim: int, ff_dim: int, head_dim: int) -> None:
        super().__init__()
        self.visual_modulation = Modulation(time_dim, model_dim, 9)
        self.self_attention = Attention(model_dim, head_dim)
        self.cross_attention = Attention(model_dim, head_dim)
        self.feed_forward = FeedForward(model_dim, ff_dim)

    def forward(
        self,
        visual_BSM: torch.Tensor,
        text_BLM: torch.Tensor,
        time_BE: torch.Tensor,
        rope: Rope,
        text_mask_BL: torch.Tensor | None,
        attn_metadata: AttentionMetadata | None,
    ) -> torch.Tensor:
        """Return the video tokens `[B, S, M]`, in the order they came in, which is that of `rope`."""
        shift_sa, scale_sa, gate_sa, shift_ca, scale_ca, gate_ca, shift_ff, scale_ff, gate_ff = self.visual_modulation(
            time_BE
        )
        x = visual_BSM
        x = gated_residual(
            x, gate_sa, self.self_attention(modulate(x, shift_sa, scale_sa), rope=rope, attn_metadata=attn_metadata)
        )
        x = gated_residual(
            x, gate_ca, self.cross_attention(modulate(x, shift_ca, scale_ca), text_BLM, key_mask_BL=text_mask_BL)
        )
        return gated_residual(x, gate_ff, self.feed_forward(modulate(x, shift_ff, scale_ff)))


class OutLayer(nn.Module):
    """Modulated norm, projection and the way back from patches to the latent video."""

    def __init__(self, model_dim: int, time_dim: int, visual_dim: int, patch_size: tuple[int, int, int]) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.modulation = Modulation(time_dim, model_dim, 2)
        self.out_layer = nn.Linear(model_dim, math.prod(patch_size) * visual_dim)

    def forward(self, visual_BTHWM: torch.Tensor, time_BE: torch.Tensor) -> torch.Tensor:
        """Return the velocity `[B, T*pt, H*ph, W*pw, C]`; the projection writes (C, pt, ph, pw), pw fastest."""
        T, H, W = visual_BTHWM.shape[1:4]
        shift, scale = self.modulation(time_BE)
        x_BSM = modulate(visual_BTHWM.flatten(1, 3), shift, scale)
        x_BTHWCthw = self.out_layer(x_BSM).unflatten(1, (T, H, W)).unflatten(-1, (-1, *self.patch_size))
        return x_BTHWCthw.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(1, 2).flatten(2, 3).flatten(3, 4)
