"""`Kandinsky5NablaPipeline`: a diffusers pipeline from a prompt to a video."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.loaders import KandinskyLoraLoaderMixin
from diffusers.video_processor import VideoProcessor
from transformers import CLIPTextModel, CLIPTokenizer, PreTrainedTokenizerBase

from ..configs import find_preset, load_preset
from ..configs.arguments import check_names, checked_path, folder_or_hub_id
from ..configs.errors import ArgumentError, TakenError
from ..configs.tiles import Tile
from ..models.loading import checked_dtype
from ..models.text_encoder import QwenTextEncoder
from ..models.transformer import Kandinsky5Transformer
from .arguments import check_device, check_parts, loader_arguments
from .callbacks import CALLBACK_TENSORS, callback_tensors, with_changes
from .checks import Geometry, Settings
from .components import LOADERS, to_loaders, to_published
from .decode import decode_latents
from .denoise import Guidance, NextStep, check_first_step, denoise
from .embeddings import GivenText, for_transformer, number_of_prompts, split_rows
from .hub import fetch
from .latents import check_latents, draw_noise, not_finite
from .lora import LoraMixin, with_triggers
from .output import Kandinsky5PipelineOutput
from .request import NO_TEXT_ENCODER, NO_TRANSFORMER, OUTPUT_TYPES, Request, check_output_type, resolve_request
from .safety import require_loadable
from .schedule import make_sigmas
from .text import TextEmbeddings, check_prefix_length, encode_prompts

logger = logging.getLogger(__name__)

FALLBACK_PRESET = "lite-t2v-10s-sft"
"""Whose defaults a checkpoint without a preset of its own gets."""

Callback = Callable[["Kandinsky5NablaPipeline", int, torch.Tensor, dict[str, Any]], "dict[str, Any] | None"]
"""Called as `callback(pipe, step, timestep, tensors)`; may return tensors that replace those it was given."""


class Kandinsky5NablaPipeline(LoraMixin, KandinskyLoraLoaderMixin, DiffusionPipeline):
    """Kandinsky 5 text-to-video with NABLA attention.

    Args:
        transformer: the velocity model; None for a pipeline that only decodes.
        vae: HunyuanVideo's VAE.
        text_encoder: Qwen2.5-VL's language model. This part and the next three may be None if every prompt comes
            as embeddings.
        tokenizer: Qwen's tokenizer.
        text_encoder_2: CLIP's text model.
        tokenizer_2: CLIP's tokenizer.
        scheduler: only its `shift` is read; the schedule itself is `pipeline.schedule`.
        preset: name of the preset whose values a call falls back to; `from_pretrained` finds it.

    Raises:
        ValueError: if a part is of another class, the preset is unknown, or the tokenizer is not the one the checkpoint
            was trained with.
    """

    model_cpu_offload_seq = "text_encoder->text_encoder_2->transformer->vae"
    _optional_components = ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "scheduler"]  # noqa: RUF012
    _callback_tensor_inputs = list(CALLBACK_TENSORS)  # noqa: RUF012

    def __init__(
        self,
        transformer: Kandinsky5Transformer | None,
        vae: AutoencoderKLHunyuanVideo,
        text_encoder: QwenTextEncoder | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder_2: CLIPTextModel | None = None,
        tokenizer_2: CLIPTokenizer | None = None,
        scheduler: FlowMatchEulerDiscreteScheduler | None = None,
        preset: str | None = None,
    ) -> None:
        super().__init__()
        parts = {
            "transformer": transformer,
            "vae": vae,
            "text_encoder": text_encoder,
            "tokenizer": tokenizer,
            "text_encoder_2": text_encoder_2,
            "tokenizer_2": tokenizer_2,
            "scheduler": scheduler,
        }
        check_parts(parts)
        self.register_modules(**parts)
        self.defaults = load_preset(preset or FALLBACK_PRESET)
        if preset is None:
            logger.warning("no preset is known for this checkpoint: the defaults are those of %s", FALLBACK_PRESET)
        else:
            self.register_to_config(preset=preset)
            if transformer is not None and self.defaults.attention_decided_by == "preset":
                transformer.set_attention_backend("NABLA_ATTN" if self.defaults.attention == "nabla" else "SDPA")
            if tokenizer is not None:
                check_prefix_length(tokenizer, self.defaults.prompt_prefix_tokens)
        self.video_processor = VideoProcessor(vae_scale_factor=vae.config["spatial_compression_ratio"])
        self._interrupt = False

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        num_videos_per_prompt: int = 1,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        seed: int | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        prompt_embeds_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_pooled_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds_mask: torch.Tensor | None = None,
        scale_factor: tuple[float, float, float] | None = None,
        shift: float | None = None,
        nabla_P: float | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        max_sequence_length: int | None = None,
        first_step: int = 0,
    ) -> Kandinsky5PipelineOutput | tuple[Any]:
        """Make videos of prompts. What is left out comes from the checkpoint's preset (`pipe.defaults`).

        Args:
            prompt: a text or several; or give `prompt_embeds`.
            negative_prompt: one for all, or one for each prompt; the authors' default if None.
            height: pixels, a multiple of 16; like `width` and `num_frames` it follows from
                `latents` where those are given.
            width: pixels.
            num_frames: 4k + 1.
            num_inference_steps: Euler steps.
            guidance_scale: w of classifier-free guidance; at 1 the negative prompt is never encoded.
            num_videos_per_prompt: n; the result is ordered p0 p0 p1 p1.
            generator: CPU generator of the noise, or one for each video.
            seed: in place of a generator; video i has the noise of seed + i.
            latents: noise `[B * n, T, H, W, C]` to start from, or with `first_step` a state; not written to.
            prompt_embeds: Qwen embeddings `[B, L, D]`, with `pooled_prompt_embeds`.
            pooled_prompt_embeds: CLIP embeddings `[B, D2]`.
            prompt_embeds_mask: `[B, L]`, true for real tokens; None means that all are.
            negative_prompt_embeds: as `prompt_embeds`, for B prompts or one for all.
            negative_pooled_prompt_embeds: as `pooled_prompt_embeds`.
            negative_prompt_embeds_mask: as `prompt_embeds_mask`.
            scale_factor: RoPE divisors along t, h, w.
            shift: s of the schedule.
            nabla_P: mass of the block map that NABLA keeps, in (0, 1].
            output_type: "pil", "np", "pt" or "latent" (`Kandinsky5PipelineOutput.frames`).
            return_dict: return an output object, else a tuple.
            callback_on_step_end: called as `callback(pipe, step, timestep, tensors)` after each step; may return a
                dict of replaced tensors, and may set `pipe._interrupt = True`: the loop ends at once and the latents
                are returned, nothing is decoded.
            callback_on_step_end_tensor_inputs: names of the tensors that it gets.
            max_sequence_length: limit of a prompt in tokens.
            first_step: steps that `latents`, as a callback or an interrupted call gave them, have behind them: the
                call goes on as the whole run would have, to the bit. Equal to the number of steps nothing is denoised.

        Raises:
            ValueError: with every problem of the request, before anything is encoded; or if latents become not finite.
        """
        request = resolve_request(
            self,
            GivenText(prompt, prompt_embeds, pooled_prompt_embeds, prompt_embeds_mask),
            GivenText(
                negative_prompt,
                negative_prompt_embeds,
                negative_pooled_prompt_embeds,
                negative_prompt_embeds_mask,
                prefix="negative_",
            ),
            latents=latents,
            generator=generator,
            seed=seed,
            max_sequence_length=max_sequence_length,
            output_type=output_type,
            callback=callback_on_step_end,
            callback_tensors=callback_on_step_end_tensor_inputs,
            height=height,
            width=width,
            num_frames=num_frames,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            shift=shift,
            scale_factor=scale_factor,
            nabla_P=nabla_P,
            num_videos=num_videos_per_prompt,
        )
        check_first_step(first_step, request.settings.num_inference_steps, latents)
        self._interrupt = False
        guidance = self._encode(request)
        latents = draw_noise(request.latent_shape, request.generators) if latents is None else latents
        latents = self._denoise(latents, guidance, request, first_step, callback_on_step_end)
        frames = latents if output_type == "latent" or self._interrupt else self.decode(latents, output_type)
        self.maybe_free_model_hooks()
        return Kandinsky5PipelineOutput(frames=frames) if return_dict else (frames,)

    def to(self, *args: Any, **kwargs: Any) -> Kandinsky5NablaPipeline:
        """Move or cast as `DiffusionPipeline.to` does; what cannot be done here is a DeviceError or DtypeError."""
        for given in (*args[:2], kwargs.get("device"), kwargs.get("dtype")):
            if isinstance(given, torch.dtype):
                checked_dtype(given)
            elif given is not None:
                check_device(given)
        return super().to(*args, **kwargs)

    @property
    def interrupt(self) -> bool:
        """Whether a callback has asked the running call to stop; it does so by `pipe._interrupt = True`."""
        return self._interrupt

    @property
    def geometry(self) -> Geometry:
        """How pixels and frames become tokens in this checkpoint, with the attention backend chosen now."""
        nabla = self.transformer.attention_backend.token_order == "blocks"
        return Geometry.from_configs(self.vae.config, self.transformer.config, nabla)

    def resolve_settings(self, **given: Any) -> Settings:
        """Return the numbers of a call (`Settings`): what is given and not None, else the checkpoint's.

        The checkpoint's shift is that of its scheduler_config.json and its P that of transformer/config.json, unless
        the preset decides on P; everything else is the preset's.
        """
        geometry = self.geometry
        decides = self.defaults.attention_decided_by == "checkpoint"
        P = self.transformer.config["attention_P"] if decides else None
        if given.get("shift") is None and self.scheduler is not None:
            given["shift"] = self.scheduler.config["shift"]
        if given.get("nabla_P") is None and geometry.nabla and P is not None:
            given["nabla_P"] = P
        return Settings.from_preset(self.defaults, geometry, **given)

    def encode_prompt(self, prompts: str | Sequence[str], max_sequence_length: int | None = None) -> TextEmbeddings:
        """Return the embeddings of B prompts, `[B, L, D]`, `[B, L]` and `[B, D2]` (`pipeline.text`)."""
        if self.transformer is None:
            raise ArgumentError(NO_TRANSFORMER)
        if None in (self.tokenizer, self.text_encoder, self.tokenizer_2, self.text_encoder_2):
            raise ArgumentError(NO_TEXT_ENCODER)
        return encode_prompts(
            prompts,
            self.tokenizer,
            self.text_encoder,
            self.tokenizer_2,
            self.text_encoder_2,
            max_sequence_length=(
                self.defaults.max_sequence_length if max_sequence_length is None else max_sequence_length
            ),
            device=self._execution_device,
            dtype=self.transformer.dtype,
        )

    def decode(self, latents: torch.Tensor, output_type: str = "pil", tile: Tile | None = None) -> Any:
        """Return the frames of latents `[B, T, H, W, C]`, as `Kandinsky5PipelineOutput.frames` describes.

        `tile` is a row of `configs.tiles`, by default the first: smaller ones take less memory.

        Raises:
            ValueError: if the latents have another shape or are not finite, or the output type is unknown.
        """
        check_latents(latents, self.vae.config["latent_channels"])
        check_output_type(output_type, OUTPUT_TYPES[:-1])
        if not isinstance(tile, Tile | None):
            raise ArgumentError(f"tile {tile!r}: must be a row of configs.tiles.vae_tiles()")
        if not torch.isfinite(latents).all():
            raise not_finite("that were to be decoded")
        video_BCFHW = decode_latents(self.vae, latents, self._execution_device, tile)
        return self.video_processor.postprocess_video(video_BCFHW, output_type)

    def _encode(self, request: Request) -> Guidance:
        """Encode what is not encoded yet, all of it at once, so that offloaded encoders move only once."""
        positive = request.positive
        if isinstance(positive, list):
            positive = with_triggers(positive, self.acting_trigger_words)
        sources = [source for source in (positive, request.negative) if source is not None]
        lists = [source for source in sources if isinstance(source, list)]
        rows = iter(())
        if lists:
            encoded = self.encode_prompt([text for texts in lists for text in texts], request.max_sequence_length)
            rows = iter(split_rows(encoded, [len(texts) for texts in lists]))
        count = number_of_prompts(request.positive) * request.settings.num_videos
        texts = []
        for source in sources:
            text = next(rows) if isinstance(source, list) else source
            repeats = count // number_of_prompts(text)
            texts.append(for_transformer(text, repeats, self._execution_device, self.transformer.dtype))
        return Guidance(texts[0], texts[1] if len(texts) == 2 else None, request.settings.guidance_scale)

    def _denoise(
        self,
        latents: torch.Tensor,
        guidance: Guidance,
        request: Request,
        first_step: int,
        callback: Callback | None,
    ) -> torch.Tensor:
        settings, metadata = request.settings, request.attn_metadata
        start = latents.to(self._execution_device, torch.float32)
        sigmas = make_sigmas(settings.num_inference_steps, settings.shift)
        with self.progress_bar(total=settings.num_inference_steps) as bar:  # pyright: ignore[reportCallIssue]
            bar.n = bar.initial = first_step  # of all steps, without a say in their speed

            def on_step_end(step: int, latents: torch.Tensor, guidance: Guidance) -> NextStep:
                bar.update()
                if callback is not None:
                    tensors = callback_tensors(latents, guidance, request.callback_tensors)
                    changed = callback(self, step, sigmas[step] * 1000, tensors)
                    latents, guidance = with_changes(latents, guidance, changed)
                return None if self._interrupt else (latents, guidance)

            return denoise(
                self.transformer, start, sigmas, guidance, settings.scale_factor, metadata, on_step_end, first_step
            )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> Kandinsky5NablaPipeline:
        """Load a checkpoint in the Diffusers layout: a folder, or a repository of the Hub.

        Args:
            pretrained_model_name_or_path: the folder or Hub id.
            kwargs: as for `DiffusionPipeline.from_pretrained` (`pipeline.arguments`). `torch_dtype` is fp32 if left
                out; the VAE is loaded in fp32 always and runs in bf16 on a GPU. `preset` names the preset of the
                call's defaults; if left out it is found by the repository's name or the folder's model_index.json.

        Raises:
            OSError: if the checkpoint cannot be fetched, or a file of it is missing.
            ValueError: if an argument is unknown or cannot be honoured, or the checkpoint is of another model, names
                code or a class that is not on the list, or has tensors that are damaged or do not fit; before any
                weights are read.
        """
        hub, kwargs = loader_arguments(kwargs)
        source = folder_or_hub_id(pretrained_model_name_or_path)
        preset = find_preset(source)
        if preset is not None:
            kwargs.setdefault("preset", preset.name)
        if not os.path.isdir(source):
            offline = bool(hub.pop("local_files_only"))
            source = str(fetch(source, **hub, offline=offline).folder)  # pyright: ignore[reportArgumentType]
        elif hub["revision"] is not None:
            raise ArgumentError(f"revision {hub['revision']!r}: of a repository of the Hub; {source} is a folder")
        require_loadable(Path(source), without=[name for name in LOADERS if name in kwargs])
        return super().from_pretrained(source, **kwargs)

    @classmethod
    def from_single_file(cls, file: str | os.PathLike, **kwargs: Any) -> Kandinsky5NablaPipeline:
        """Load a transformer of the original layout, one safetensors file, and its other parts.

        `kwargs` (preset, vae, text_encoder, text_encoder_2, torch_dtype, cache_dir, token, offline) and the errors
        are those of `pipeline.single_file.load_single_file`.
        """
        from .single_file import load_single_file

        parameters = inspect.signature(load_single_file).parameters.values()
        check_names("from_single_file", kwargs, [each.name for each in parameters if each.kind is each.KEYWORD_ONLY])
        return load_single_file(cls, file, **kwargs)

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Read model_index.json, with the classes that load its parts in place of the published ones."""
        loaded = super().load_config(*args, **kwargs)
        return (to_loaders(loaded[0]), *loaded[1:]) if isinstance(loaded, tuple) else to_loaders(loaded)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save all parts in the Diffusers layout, as safetensors; the other arguments are diffusers', by name.

        Raises:
            ValueError: for pickle files and variants, which `from_pretrained` would not read.
        """
        unreadable = {"safe_serialization": True, "variant": None}
        for name, only in unreadable.items():
            if args or kwargs.get(name, only) != only:
                raise ArgumentError(f"save_pretrained: only {name}={only} can be loaded again; leave it out")
        folder = checked_path("save_directory", save_directory)
        if folder.exists() and not folder.is_dir():
            raise TakenError(f"save_directory {folder}: is a file; name a folder")
        super().save_pretrained(folder, **kwargs)

    def to_json_string(self) -> str:
        """Return model_index.json with the published classes, so that diffusers opens what was saved."""
        return json.dumps(to_published(json.loads(super().to_json_string())), indent=2, sort_keys=True) + "\n"
