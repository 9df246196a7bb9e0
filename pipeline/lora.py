"""LoRAs for the pipeline: checked against the transformer (`lora_files`), then applied by diffusers and peft.

peft is an extra and is imported by diffusers alone; nothing here imports torch or diffusers by itself.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configs.errors import ArgumentError, DependencyError, LoraError
from .lora_files import (
    LoraRequest,
    find_lora,
    linear_layers,
    lora_of_tensors,
    lora_problems,
    parameter_keys,
    parse_lora,
    peft_config,
    read_lora,
    with_triggers,
)

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from diffusers.loaders import KandinskyLoraLoaderMixin

    class _Loader(KandinskyLoraLoaderMixin, DiffusionPipeline):
        pass
else:
    _Loader = object  # diffusers' mixin follows among the pipeline's bases: this module stays light

__all__ = ["LoraMixin", "LoraRequest", "load_loras", "lora_problems", "parse_lora", "with_triggers"]

logger = logging.getLogger(__name__)


def load_loras(pipe: LoraMixin, requests: Sequence[LoraRequest]) -> list[str]:
    """Load LoRAs and let these act, with their scales, and no others; return the adapters' names.

    Raises:
        ValueError: with every problem of every LoRA, before any is loaded.
    """
    problems = lora_problems(requests, linear_layers(pipe.transformer))
    if problems:
        raise LoraError("; ".join(map(str, problems)))
    names = []
    for request in requests:
        names.append(pipe.new_adapter_name())
        pipe.load_lora_weights(request.path, adapter_name=names[-1])
    if names:
        pipe.set_adapters(names, [request.scale for request in requests])
    return names


class LoraMixin(_Loader):
    """LoRAs for a pipeline: diffusers' methods, with every check made before the transformer is changed.

    It stands before diffusers' `KandinskyLoraLoaderMixin` among the bases.
    """

    transformer: Any

    def load_lora_weights(
        self,
        pretrained_model_name_or_path_or_dict: str | Path | dict[str, torch.Tensor],
        adapter_name: str | None = None,
        hotswap: bool = False,
        **kwargs: Any,
    ) -> None:
        """Load a LoRA, which acts at scale 1 beside those that act already; `set_adapters` changes that.

        Adapters take the dtype of the layer that they change. A LoRA that does not say its alpha is taken to
        have its rank: W + B A.

        Args:
            pretrained_model_name_or_path_or_dict: safetensors file, folder, Hub id or state dict.
            adapter_name: what other methods call it; default_0, default_1, ... if None.
            hotswap: not supported.
            kwargs: as for `find_lora`.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is no LoRA of this transformer, it is no safetensors file, the name is taken,
                peft is not installed, or the transformer is not in a state to take it.
        """
        from safetensors.torch import load_file

        if hotswap or not kwargs.pop("use_safetensors", True):
            raise ArgumentError("load_lora_weights: hotswap=True and use_safetensors=False are not supported")
        source, name = pretrained_model_name_or_path_or_dict, self.new_adapter_name(adapter_name)
        transformer = self._transformer_for("load_lora_weights")
        if any(p.is_floating_point() and p.element_size() == 1 for p in transformer.parameters()):
            raise LoraError("the transformer is in fp8, and a LoRA would be cast to it too; load LoRAs first")
        if isinstance(source, dict):
            lora = lora_of_tensors(source)
        else:
            source = find_lora(source, **kwargs)
            lora = read_lora(source)
        targets = lora.targets(linear_layers(transformer))
        if not (lora.config or lora.alphas):
            logger.warning("%s does not say its alpha: it is taken to be its rank", lora.source)
        tensors = source if isinstance(source, dict) else load_file(source)
        active, trained = _active(transformer), [p for p in transformer.parameters() if p.requires_grad]
        self.load_lora_into_transformer(
            {f"transformer.{own}": tensors[key].detach().clone() for own, key in parameter_keys(targets).items()},
            transformer,
            adapter_name=name,
            _pipeline=self,
            low_cpu_mem_usage=True,  # draws no random numbers for tensors that are replaced at once
            metadata=peft_config(targets),
        )
        for parameter in trained:  # peft froze them
            parameter.requires_grad_(True)
        transformer.set_adapter([*active, name])
        self._triggers()[name] = lora.trigger

    def set_adapters(
        self,
        adapter_names: list[str] | str,
        adapter_weights: float | dict | list[float] | list[dict] | None = None,
    ) -> None:
        """Let these LoRAs act and no others, at scale 1 or at those given, as in diffusers.

        Raises:
            ValueError: if one is not loaded, a weight is no finite number, or LoRAs are fused: the layers would not ask
                for it.
        """
        self._transformer_for("set_adapters")
        for weight in _numbers(adapter_weights):
            if not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise LoraError(f"set_adapters: the weight {weight!r} must be a finite number, such as 0.8")
        named = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        loaded = list(getattr(self.transformer, "peft_config", {}))
        if not isinstance(named, (list, tuple)) or not all(name in loaded for name in named):
            raise LoraError(f"set_adapters: {adapter_names!r}: loaded are {', '.join(loaded) or 'none'}")
        super().set_adapters(adapter_names, adapter_weights)

    def delete_adapters(self, adapter_names: list[str] | str) -> None:
        """Remove some LoRAs.

        Raises:
            ValueError: if LoRAs are fused: their change would stay in the weights.
        """
        self._transformer_for("delete_adapters")
        super().delete_adapters(adapter_names)
        for name in [adapter_names] if isinstance(adapter_names, str) else adapter_names:
            self._triggers().pop(name, None)

    def unload_lora_weights(self) -> None:
        """Remove all LoRAs: the outputs are those from before, bit for bit. What was fused stays in the weights."""
        self._transformer_for("unload_lora_weights", fused=True)
        super().unload_lora_weights()
        for name in self._triggers().keys() - self.fused_loras:
            del self._triggers()[name]

    @property
    def lora_trigger_words(self) -> dict[str, str]:
        """The trigger words of the loaded and fused LoRAs that have some, by adapter."""
        return {name: words for name, words in self._triggers().items() if words}

    @property
    def acting_trigger_words(self) -> list[str]:
        """The trigger words of the LoRAs that act now: neither switched off nor at scale 0, or fused."""
        acting = {*_acting(self.transformer), *self.fused_loras}
        return [words for name, words in self.lora_trigger_words.items() if name in acting]

    def new_adapter_name(self, name: str | None = None) -> str:
        """Return the name for another LoRA: the one given, or the first of default_0, default_1, ... that is free.

        Raises:
            ValueError: if it is taken, or torch allows no module of that name.
        """
        taken = {*self._triggers(), *getattr(self.transformer, "peft_config", {})}
        if name is None:
            return next(free for i in range(len(taken) + 1) if (free := f"default_{i}") not in taken)
        from torch.nn import ModuleDict

        if name in taken:
            raise LoraError(f"adapter_name {name!r} is taken; taken are {', '.join(sorted(taken))}")
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name) or hasattr(ModuleDict, name):
            raise LoraError(f"adapter_name {name!r}: letters, digits, _ and - make a name, such as 'arc-left'")
        return name

    @classmethod
    def lora_state_dict(
        cls, pretrained_model_name_or_path_or_dict: str | Path | dict[str, torch.Tensor], **kwargs: Any
    ) -> Any:
        """Return the tensors of a LoRA as they are in its file, like diffusers, but from safetensors alone.

        Raises:
            ValueError: if it is no safetensors file.
        """
        source = pretrained_model_name_or_path_or_dict
        wanted = bool(kwargs.pop("return_lora_metadata", False))
        if not kwargs.pop("use_safetensors", True):
            raise ArgumentError("lora_state_dict: use_safetensors=False is not supported; pickle files can run code")
        if isinstance(source, dict):
            return super().lora_state_dict(source, return_lora_metadata=wanted)
        file = find_lora(source, **kwargs)
        return super().lora_state_dict(str(file.parent), weight_name=file.name, return_lora_metadata=wanted)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the pipeline.

        Raises:
            ValueError: if LoRAs are loaded, which the layout has no place for.
        """
        if any(_lora_layers(self.transformer)):
            raise LoraError("LoRAs are loaded: unload_lora_weights() before saving, after fuse_lora() to keep them")
        super().save_pretrained(save_directory, *args, **kwargs)

    def _triggers(self) -> dict[str, str]:
        return self.__dict__.setdefault("_lora_triggers", {})  # DiffusionPipeline's __init__ knows nothing of it

    def _transformer_for(self, method: str, fused: bool = False) -> Any:
        """Return the transformer, or raise a ValueError if the method would do nothing or harm to it."""
        from diffusers.utils import USE_PEFT_BACKEND

        if not USE_PEFT_BACKEND:
            raise DependencyError('LoRAs need peft: pip install "kandinsky5-nabla[lora]"')
        if hasattr(self.transformer, "_orig_mod"):  # diffusers' mixin passes over what is no ModelMixin
            raise LoraError(f"{method}: torch.compile hides the transformer; use pipe.transformer.compile() instead")
        if not fused and any(layer.merged for layer in _lora_layers(self.transformer)):
            raise LoraError(f"{method}: LoRAs are fused; call unfuse_lora(), or unload_lora_weights() to keep them so")
        return self.transformer


def _numbers(weights: Any) -> Iterator[Any]:
    """Yield the single weights of `set_adapters`, which may be nested by adapter and by block."""
    if isinstance(weights, (dict, list, tuple)):
        for each in weights.values() if isinstance(weights, dict) else weights:
            yield from _numbers(each)
    elif weights is not None:  # the default
        yield weights


def _lora_layers(transformer: Any) -> Iterator[Any]:
    """Yield peft's layers; none where the pipeline has no transformer at the moment."""
    modules = () if transformer is None else transformer.modules()
    return (module for module in modules if hasattr(module, "lora_A"))


def _active(transformer: Any) -> list[str]:
    """Return the adapters that `set_adapters` has chosen, in their order."""
    names = [name for layer in _lora_layers(transformer) for name in layer.active_adapters if name in layer.scaling]
    return list(dict.fromkeys(names))


def _acting(transformer: Any) -> set[str]:
    """Return the adapters that change an output."""
    layers = [layer for layer in _lora_layers(transformer) if not layer.disable_adapters]
    return {name for layer in layers for name in layer.active_adapters if layer.scaling.get(name)}
