"""The Kandinsky 5 diffusion transformer: text blocks, visual blocks with NABLA self-attention, output head.

Legend: B batch, T/H/W frames, rows, columns, C channels, L text tokens, S visual tokens, M model dim, E time dim.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from ..attention.abstract import AttentionBackend, AttentionMetadata
from ..attention.order import from_blocks, to_blocks
from ..attention.registry import get_attention_backend
from ..configs.errors import ArgumentError, BackendError, CheckpointError
from .layers import OutLayer, TextBlock, TextEmbeddings, TimeEmbeddings, VisualBlock, VisualEmbeddings
from .rope import Rope, rope_1d, rope_3d

PUBLISHED_CLASS_NAME = "Kandinsky5Transformer3DModel"
"""The class that config.json of a published checkpoint names, and that ours names when saved."""

DEFAULT_BACKENDS = {"nabla": "NABLA_ATTN", "regular": "SDPA"}
"""Attention backend by the config key `attention_type`."""


class Kandinsky5Transformer(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """Predicts the velocity of a latent video (numerics.md, "Transformer").

    Config keys and parameter names are those of the published files. The keys `attention_causal`,
    `attention_local`, `attention_glob` and `attention_window` are kept for the round trip; the official code
    does not read them either.

    Raises:
        ValueError: if the sizes do not fit together or an attention setting is not known.
    """

    _keep_in_fp32_modules = ("time_embeddings", "modulation")
    # What layerwise casting must leave alone; norms are on diffusers' own list, and the fp32 modules are added to it.
    _skip_layerwise_casting_patterns = ("text_embeddings", "visual_embeddings", "^out_layer")
    _no_split_modules = ("TextBlock", "VisualBlock")
    _repeated_blocks = ("TextBlock", "VisualBlock")

    @register_to_config
    def __init__(
        self,
        in_visual_dim: int = 16,
        in_text_dim: int = 3584,
        in_text_dim2: int = 768,
        time_dim: int = 512,
        out_visual_dim: int = 16,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        model_dim: int = 1792,
        ff_dim: int = 7168,
        num_text_blocks: int = 2,
        num_visual_blocks: int = 32,
        axes_dims: tuple[int, int, int] = (16, 24, 24),
        visual_cond: bool = False,
        attention_type: str = "regular",
        attention_causal: bool | None = None,
        attention_local: bool | None = None,
        attention_glob: bool | None = None,
        attention_window: int | None = None,
        attention_P: float | None = None,
        attention_wT: int | None = None,
        attention_wW: int | None = None,
        attention_wH: int | None = None,
        attention_add_sta: bool | None = None,
        attention_method: str | None = None,
    ) -> None:
        super().__init__()
        _check_config(self.config)
        head_dim = sum(axes_dims)
        pt, ph, pw = patch_size
        self.in_channels = 2 * in_visual_dim + 1 if visual_cond else in_visual_dim
        self.time_embeddings = TimeEmbeddings(model_dim, time_dim)
        self.text_embeddings = TextEmbeddings(in_text_dim, model_dim)
        self.pooled_text_embeddings = TextEmbeddings(in_text_dim2, time_dim)
        self.visual_embeddings = VisualEmbeddings(self.in_channels, model_dim, (pt, ph, pw))
        self.text_transformer_blocks = nn.ModuleList(
            TextBlock(model_dim, time_dim, ff_dim, head_dim) for _ in range(num_text_blocks)
        )
        self.visual_transformer_blocks = nn.ModuleList(
            VisualBlock(model_dim, time_dim, ff_dim, head_dim) for _ in range(num_visual_blocks)
        )
        self.out_layer = OutLayer(model_dim, time_dim, out_visual_dim, (pt, ph, pw))
        self.set_attention_backend(DEFAULT_BACKENDS[attention_type])

    @property
    def attention_backend(self) -> type[AttentionBackend]:
        """The backend of the visual self-attention."""
        return self._attention_backend

    def load_lora_adapter(self, pretrained_model_name_or_path_or_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a LoRA from a state dict, as in diffusers; `pipe.load_lora_weights` reads files, and checks them.

        Raises:
            ValueError: for anything but a dict: the inherited method reads pickle files, which can run code.
        """
        if not isinstance(pretrained_model_name_or_path_or_dict, dict):
            raise ArgumentError("load_lora_adapter takes a state dict; pipe.load_lora_weights reads files")
        return super().load_lora_adapter(pretrained_model_name_or_path_or_dict, *args, **kwargs)

    def set_attention_backend(self, backend: str) -> None:
        """Choose the backend of the visual self-attention, by a name of `list_attention_backends()`.

        It runs when `forward` is given its metadata; without metadata attention is dense.

        Raises:
            ValueError: if the name is unknown or the backend cannot run this model's head size.
        """
        chosen = get_attention_backend(backend, head_size=sum(self.config["axes_dims"]))
        for i, block in enumerate(self.visual_transformer_blocks):
            assert isinstance(block, VisualBlock)
            block.self_attention.set_impl(chosen.get_impl_cls(), f"visual_transformer_blocks.{i}.self_attention")
        self._attention_backend = chosen

    def reset_attention_backend(self) -> None:
        """Return to the backend that the config asks for."""
        self.set_attention_backend(DEFAULT_BACKENDS[self.config["attention_type"]])

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        pooled_projections: torch.Tensor,
        timestep: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None = None,
        scale_factor: tuple[float, float, float] = (1.0, 1.0, 1.0),
        attn_metadata: AttentionMetadata | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """Predict the velocity.

        Args:
            hidden_states: latents `[B, T, H, W, Cin]`, the conditioning channels of `visual_cond` included.
            encoder_hidden_states: Qwen embeddings `[B, L, in_text_dim]`.
            pooled_projections: CLIP embeddings `[B, in_text_dim2]`.
            timestep: sigma * 1000, fp32 `[B]`.
            encoder_attention_mask: bool `[B, L]`, True for real tokens; None means that all are real.
            scale_factor: divisors of the RoPE angles along t, h, w.
            attn_metadata: metadata of the chosen backend; None means dense attention.
            return_dict: return an output with `.sample`, else a tuple.

        Returns:
            The velocity `[B, T, H, W, Cout]` in the dtype of the model.

        Raises:
            ValueError: if a shape does not fit the model or the metadata is not that of this backend and shape.
        """
        visual_shape = self._check_inputs(hidden_states, attn_metadata)
        text_mask_BL = None if encoder_attention_mask is None else encoder_attention_mask.bool()
        if text_mask_BL is not None:  # whatever stands in the padding, NaN included, must not reach a sum
            encoder_hidden_states = encoder_hidden_states.masked_fill(~text_mask_BL[..., None], 0)

        time_BE = self.time_embeddings(timestep) + self.pooled_text_embeddings(pooled_projections)
        text_BLM = self._encode_text(encoder_hidden_states, time_BE, text_mask_BL)
        visual_BTHWM = self.visual_embeddings(hidden_states)
        rope = rope_3d(visual_shape, tuple(self.config["axes_dims"]), scale_factor, hidden_states.device)

        in_blocks = attn_metadata is not None and self._attention_backend.token_order == "blocks"
        visual_BSM, rope = _to_sequence(visual_BTHWM, rope, in_blocks)
        for block in self.visual_transformer_blocks:
            visual_BSM = block(visual_BSM, text_BLM, time_BE, rope, text_mask_BL, attn_metadata)
        visual_BTHWM = from_blocks(visual_BSM, visual_shape) if in_blocks else visual_BSM.unflatten(1, visual_shape)
        velocity_BTHWC = self.out_layer(visual_BTHWM, time_BE)
        return Transformer2DModelOutput(sample=velocity_BTHWC) if return_dict else (velocity_BTHWC,)

    def _encode_text(
        self, text: torch.Tensor, time_BE: torch.Tensor, text_mask_BL: torch.Tensor | None
    ) -> torch.Tensor:
        text_BLM = self.text_embeddings(text)
        rope = rope_1d(text_BLM.shape[1], sum(self.config["axes_dims"]), text_BLM.device)
        for block in self.text_transformer_blocks:
            text_BLM = block(text_BLM, time_BE, rope, text_mask_BL)
        return text_BLM

    def _check_inputs(
        self, hidden_states: torch.Tensor, attn_metadata: AttentionMetadata | None
    ) -> tuple[int, int, int]:
        """Return `(T, H, W)` in tokens."""
        if hidden_states.dim() != 5:
            raise ArgumentError(
                f"hidden_states {tuple(hidden_states.shape)}: latents are [B, T, H, W, C], channels last"
            )
        T, H, W, C = hidden_states.shape[1:]
        pt, ph, pw = self.config["patch_size"]
        if self.in_channels != C:
            raise ArgumentError(f"hidden_states have {C} channels; this model reads {self.in_channels}")
        if T % pt or H % ph or W % pw:
            raise ArgumentError(f"latents of {T}x{H}x{W} do not divide into patches of {pt}x{ph}x{pw}")
        visual_shape = (T // pt, H // ph, W // pw)
        if attn_metadata is None:
            return visual_shape
        backend = self._attention_backend
        # The exact class: under a dense backend a subclass that asks for sparsity would be ignored.
        if type(attn_metadata) is not backend.get_metadata_cls():
            raise BackendError(
                f"attention backend {backend.get_name()} reads {backend.get_metadata_cls().__name__}, "
                f"not {type(attn_metadata).__name__}; build it with {backend.get_builder_cls().__name__}"
            )
        expected = getattr(attn_metadata, "visual_shape", visual_shape)
        if tuple(expected) != visual_shape:
            raise BackendError(f"the attention metadata is for {expected} tokens, the latents have {visual_shape}")
        return visual_shape

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]  # no optional path
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        torch_dtype: torch.dtype | None = None,
        subfolder: str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Kandinsky5Transformer:
        """Load from a folder or a Hub repository, strictly: names and shapes must be those of the model.

        Args:
            pretrained_model_name_or_path: folder with config.json and safetensors, or a Hub id.
            torch_dtype: dtype of the weights, fp32 if None; the parts that numerics.md lists stay fp32.
            subfolder: folder inside it, such as "transformer".
            dtype: the newer name of `torch_dtype`, which it overrides.
            kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download` for the Hub. What
                `DiffusionPipeline.from_pretrained` passes besides is accepted where it asks for what is done here
                anyway, and refused otherwise.

        Raises:
            FileNotFoundError: if the config, the weights or a shard is missing.
            ValueError: if a tensor is missing, unexpected or of another shape, a file is damaged, or an argument
                cannot be honoured.
        """
        from .loading import load_transformer

        chosen = torch_dtype if dtype is None else dtype
        return load_transformer(cls, pretrained_model_name_or_path, chosen, subfolder, **kwargs)

    def to_json_string(self) -> str:
        """Return config.json under the published class name, so that diffusers opens what was saved."""
        config = json.loads(super().to_json_string())
        config["_class_name"] = PUBLISHED_CLASS_NAME
        return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _to_sequence(visual_BTHWM: torch.Tensor, rope: Rope, in_blocks: bool) -> tuple[torch.Tensor, Rope]:
    """Flatten the tokens to `[B, S, M]` in the backend's order, and put the RoPE table in the same order."""
    if not in_blocks:
        return visual_BTHWM.flatten(1, 3), rope
    shape = visual_BTHWM.shape[1:4]
    cos, sin = (to_blocks(table_SP.unflatten(0, shape)[None])[0] for table_SP in rope)
    return to_blocks(visual_BTHWM), Rope(cos, sin)


def _check_config(config: Any) -> None:
    """Refuse sizes that do not fit together and attention settings that nothing here implements."""
    axes, patch, model_dim = tuple(config.axes_dims), tuple(config.patch_size), config.model_dim
    reasons = []
    if len(axes) != 3 or any(dim < 2 or dim % 2 for dim in axes):
        reasons.append(f"axes_dims {axes} must be three even numbers, for t, h, w")
    elif model_dim % sum(axes):
        reasons.append(f"model_dim {model_dim} must be a multiple of the head dim {sum(axes)}")
    if len(patch) != 3 or min(patch) < 1:
        reasons.append(f"patch_size {patch} must be three numbers from 1, for t, h, w")
    if config.attention_type not in DEFAULT_BACKENDS:
        reasons.append(f"attention_type {config.attention_type!r} must be one of {list(DEFAULT_BACKENDS)}")
    if config.attention_type == "nabla" and config.attention_method not in (None, "topcdf"):
        reasons.append(f"attention_method {config.attention_method!r} must be 'topcdf'")
    if reasons:
        raise CheckpointError("this transformer config cannot be built: " + "; ".join(reasons))
