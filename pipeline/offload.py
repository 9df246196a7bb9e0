"""A memory plan put into effect, with diffusers' and accelerate's own mechanisms, and parts released between stages."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from ..configs.errors import ArgumentError
from ..models.layers import Attention
from .decode import vae_dtype
from .memory import MemoryPlan

if TYPE_CHECKING:
    from .pipeline import Kandinsky5NablaPipeline


def apply(pipe: Kandinsky5NablaPipeline, plan: MemoryPlan, device: torch.device | str) -> None:
    """Place a pipeline, loaded on the CPU, as the plan says: on the device, or offloaded to the CPU.

    The VAE is cast first, so that no fp32 copy of it lies on a GPU. `plan.release` is the caller's to follow, with
    `release` between the stages.
    """
    device = torch.device(device)
    pipe.vae.to(dtype=vae_dtype(device))  # pyright: ignore[reportCallIssue]
    if plan.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif plan.offload == "group":
        _offload_in_groups(pipe, device)
    elif plan.offload == "sequential":
        _offload_leaves(pipe, device)
    else:
        pipe.to(device)


def release(pipe: Kandinsky5NablaPipeline, *names: str) -> None:
    """Drop parts of a pipeline, such as "text_encoder", and give their memory back; the pipeline goes on without them.

    A call then needs `prompt_embeds`; without its transformer a pipeline can only `decode`. The memory is free once
    the caller holds no reference of his own. Parts that are gone already are passed over.

    Raises:
        ValueError: if a name is not that of a model of the pipeline.
    """
    models = ("text_encoder", "text_encoder_2", "transformer", "vae")
    unknown = [name for name in names if name not in models]
    if unknown:
        raise ArgumentError(f"release {', '.join(unknown)}: must be one of {', '.join(models)}")
    pipe.register_modules(**dict.fromkeys(names))
    pipe.maybe_free_model_hooks()  # model offload chains its parts: without this a neighbour's hook keeps them alive
    gc.collect()  # hooks and modules refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _offload_in_groups(pipe: Kandinsky5NablaPipeline, device: torch.device) -> None:
    """Offload the transformer block by block and the text encoders layer by layer; the VAE stays on the device.

    On CUDA the next group is on its way on a stream of its own while one computes.
    """
    from diffusers.hooks import apply_group_offloading

    streamed = device.type == "cuda"
    apply_group_offloading(
        pipe.transformer, device, offload_type="block_level", num_blocks_per_group=1, use_stream=streamed
    )
    if not _offload_quantised_text_encoder(pipe, device):
        for encoder in (pipe.text_encoder, pipe.text_encoder_2):
            if encoder is not None:
                apply_group_offloading(encoder, device, offload_type="leaf_level", use_stream=streamed)
    pipe.vae.to(device)


def _offload_leaves(pipe: Kandinsky5NablaPipeline, device: torch.device) -> None:
    """Offload every model layer by layer, as `enable_sequential_cpu_offload` does it but for our attention.

    That one moves a layer's weights when its `forward` runs. Our `Attention` reads the weights of its norms itself,
    so the whole of it is moved when it runs.
    """
    from accelerate import cpu_offload

    models = [pipe.transformer, pipe.vae]
    if not _offload_quantised_text_encoder(pipe, device):
        models += [model for model in (pipe.text_encoder, pipe.text_encoder_2) if model is not None]
    for model in models:
        own = len(model._parameters) > 0  # buffers follow only where the model has weights beside its layers
        cpu_offload(model, device, offload_buffers=own, preload_module_classes=[Attention.__name__])


def _offload_quantised_text_encoder(pipe: Kandinsky5NablaPipeline, device: torch.device) -> bool:
    """Offload both text encoders as wholes if Qwen is quantised, which cannot be moved in pieces; return whether it is.

    CLIP runs after Qwen and drives it out.
    """
    if not getattr(pipe.text_encoder, "is_quantized", False):
        return False
    from accelerate import cpu_offload_with_hook

    assert pipe.text_encoder is not None
    _, hook = cpu_offload_with_hook(pipe.text_encoder, device)
    if pipe.text_encoder_2 is not None:
        cpu_offload_with_hook(pipe.text_encoder_2, device, prev_module_hook=hook)
    return True
