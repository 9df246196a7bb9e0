"""Write an untrained demo checkpoint: every part of a published one at toy width, with random weights.

The same versions of the libraries write the same bytes. `train_demo.py` trains the VAE and the transformer.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import CLIPTextModel, CLIPTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "configs" / "demo"
SEED = 5

QWEN_MERGES, CLIP_MERGES = 306, 131  # with bytes and special tokens: 569 and 645 tokens
QWEN_SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

MODEL_INDEX = {
    "_class_name": "Kandinsky5T2VPipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "text_encoder_2": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "Qwen2VLProcessor"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "transformer": ["diffusers", "Kandinsky5Transformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLHunyuanVideo"],
    "preset": "demo",  # ours: a copy of the folder finds its defaults; diffusers passes over it
}

TRANSFORMER_CONFIG = {
    "in_visual_dim": 6,
    "out_visual_dim": 6,
    "in_text_dim": 64,
    "in_text_dim2": 64,
    "time_dim": 64,
    "patch_size": [1, 2, 2],
    "model_dim": 128,
    "ff_dim": 256,
    "num_text_blocks": 1,
    "num_visual_blocks": 4,
    "axes_dims": [8, 12, 12],
    "visual_cond": True,
    "attention_type": "nabla",
    "attention_causal": False,
    "attention_local": False,
    "attention_glob": False,
    "attention_window": 3,
    "attention_P": 0.73,
    # The published window of 11, 3, 3 would cover all 20 blocks of a demo clip: NABLA would have nothing to do.
    "attention_wT": 1,
    "attention_wH": 1,
    "attention_wW": 1,
    "attention_add_sta": True,
    "attention_method": "topcdf",
}

QWEN_TEXT_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
}

QWEN_VISION_CONFIG = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
}

CLIP_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "projection_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 77,
}

# The published folder is a processor's: this is its part for images, which text-to-video never reads.
PREPROCESSOR_CONFIG = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "patch_size": 14,
    "processor_class": "Qwen2_5_VLProcessor",
    "temporal_patch_size": 2,
}

MODEL_CARD = """\
---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
---
# The demo checkpoint

A test piece, not Kandinsky: every part of a published Kandinsky 5 checkpoint with the same classes and file names,
at toy width. It lets the whole pipeline run in seconds on a CPU and without a download.

**Its weights are random, so its pictures are noise**: `scripts/train_demo.py` trains them. The tokenizers were trained
on captions of simple moving shapes.

`scripts/make_demo_checkpoint.py` writes this folder. Apache-2.0, like the rest of the repository.
"""

SHAPES = ("circle", "square", "triangle")
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white")
MOTIONS = ("moving left", "moving right", "moving up", "moving down", "standing still")
BACKGROUNDS = ("black", "white", "gray")
SIZES = ("small", "large")
SPEEDS = ("slowly", "quickly")
PHRASINGS = (
    "a {colour} {shape} {motion} on a {background} background",
    "a {size} {colour} {shape} {pace} on a {background} background",
    "A {colour} {shape} is {pace}.",
    "On a {background} background, a {size} {colour} {shape} is {motion}.",
    "{size} {colour} {shape}, {motion}, {background} background",
    "The {shape} is {colour} and it is {motion}. The background is {background}.",
    "The video shows a {colour} {shape} {pace} over a plain {background} background.",
    "{colour} {shape} {motion}",
)


def captions() -> Iterator[str]:
    """Yield a caption for every scene, the phrasings in turn."""
    scenes = itertools.product(SHAPES, COLOURS, MOTIONS, BACKGROUNDS, SIZES, SPEEDS)
    phrasings = itertools.cycle(PHRASINGS)
    for (shape, colour, motion, background, size, speed), phrasing in zip(scenes, phrasings):  # noqa: B905
        pace = motion if motion == "standing still" else f"{motion} {speed}"
        words = {"shape": shape, "colour": colour, "motion": motion, "background": background, "size": size}
        yield phrasing.format(**words, pace=pace).replace("a orange", "an orange")


def train_merges(tokenizer: "PreTrainedTokenizerBase", end_of_word: str, count: int) -> list[tuple[str, str]]:
    """Return the first byte-pair merges of the template and the captions, split as `tokenizer` splits."""
    from tokenizers import pre_tokenizers, trainers

    from kandinsky5_nabla.pipeline.text import DEFAULT_NEGATIVE_PROMPT, PROMPT_TEMPLATE

    backend = tokenizer.backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        end_of_word_suffix=end_of_word,
    )
    texts = [*captions(), *[PROMPT_TEMPLATE, DEFAULT_NEGATIVE_PROMPT] * 10]
    backend.train_from_iterator(texts, trainer)
    merges = json.loads(backend.to_str())["model"]["merges"]
    return [tuple(pair) for pair in merges[:count]]


def make_qwen_tokenizer() -> "Qwen2Tokenizer":
    """Return a tokenizer of Qwen's kind: 256 bytes, merges, special tokens."""
    from transformers import Qwen2Tokenizer

    merges = train_merges(Qwen2Tokenizer(), "", QWEN_MERGES)
    words = [*byte_symbols(), *("".join(pair) for pair in merges)]
    return Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=merges,
        extra_special_tokens=list(QWEN_SPECIAL_TOKENS),
        model_max_length=QWEN_TEXT_CONFIG["max_position_embeddings"],
    )


def make_clip_tokenizer() -> "CLIPTokenizer":
    """Return a tokenizer of CLIP's kind: 256 bytes inside and at the end of a word, merges, two special tokens."""
    from transformers import CLIPTokenizer

    merges = train_merges(CLIPTokenizer(), "</w>", CLIP_MERGES)
    symbols = byte_symbols()
    words = [*symbols, *(symbol + "</w>" for symbol in symbols), *("".join(pair) for pair in merges)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=merges,
        model_max_length=CLIP_CONFIG["max_position_embeddings"],
    )


def byte_symbols() -> list[str]:
    """Return the 256 printable characters that stand for bytes in byte-level BPE, in a fixed order."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def fill_random(module: "torch.nn.Module", generator: "torch.Generator", gains: dict[str, float]) -> None:
    """Fill a model with weights that keep activations at a size of about 1.

    Matrices and kernels get a standard deviation of gain / sqrt(fan in), embeddings and norms the gain itself,
    biases 0. `gains` gives the gain of the parameters whose name contains a key; it is 1 elsewhere.
    """
    import torch

    embeddings = {layer.weight for layer in module.modules() if isinstance(layer, torch.nn.Embedding)}
    with torch.no_grad():
        for name, weight in module.named_parameters():
            gain = next((gain for part, gain in gains.items() if part in name), 1.0)
            if weight.ndim < 2:
                weight.fill_(0.0 if name.endswith("bias") else gain)
                continue
            fan_in = 1 if weight in embeddings else math.prod(weight.shape[1:])
            weight.copy_(torch.randn(weight.shape, generator=generator) * (gain / math.sqrt(fan_in)))


def make_text_encoder(tokenizer: "Qwen2Tokenizer", generator: "torch.Generator") -> "torch.nn.Module":
    """Return a whole Qwen2.5-VL, vision tower included; its final norm gives hidden states of size 1."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    def token(name: str) -> int:
        return tokenizer.convert_tokens_to_ids(name)

    text_config = QWEN_TEXT_CONFIG | {
        "vocab_size": len(tokenizer),
        "bos_token_id": token("<|endoftext|>"),
        "eos_token_id": token("<|im_end|>"),
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=QWEN_VISION_CONFIG,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    fill_random(model, generator, {})
    return model


def make_text_encoder_2(tokenizer: "CLIPTokenizer", generator: "torch.Generator") -> "CLIPTextModel":
    """Return a CLIP text model whose pooled output has mean 0 and deviation 1 over the captions."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        **CLIP_CONFIG,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = CLIPTextModel(config).eval()
    fill_random(model, generator, {"position_embedding": 0.3})
    standardise_pooled(model, tokenizer)
    return model


def standardise_pooled(model: "CLIPTextModel", tokenizer: "CLIPTokenizer") -> None:
    """Fold the mean and the deviation of the captions' pooled outputs into the final norm."""
    import torch

    from kandinsky5_nabla.pipeline.text import tokenize_clip

    ids_BL = torch.tensor([tokenize_clip(tokenizer, text)[0] for text in itertools.islice(captions(), 0, None, 5)])
    with torch.no_grad():
        pooled_BD = model(input_ids=ids_BL).pooler_output
        deviation_D, mean_D = torch.std_mean(pooled_BD, dim=0)
        model.final_layer_norm.weight.copy_(1 / deviation_D)
        model.final_layer_norm.bias.copy_(-mean_D / deviation_D)


def make_transformer(generator: "torch.Generator") -> "torch.nn.Module":
    """Return a transformer whose output depends on all its inputs: small modulation, but not zero."""
    from kandinsky5_nabla.models.transformer import Kandinsky5Transformer

    transformer = Kandinsky5Transformer(**TRANSFORMER_CONFIG)
    # Random queries and keys of the usual size give a flat block map; larger ones give NABLA something to choose.
    fill_random(transformer, generator, {"modulation": 0.3, "self_attention.query_norm": 4.0})
    return transformer


def make_scheduler() -> Any:
    """Return the scheduler, whose config carries the shift of the times."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=5.0)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as the libraries write theirs."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_checkpoint(output: Path) -> None:
    """Write all parts into a folder in the Diffusers layout."""
    import diffusers
    import torch

    from kandinsky5_nabla.scripts._demo_vae import make_vae  # here: it takes `fill_random` from this file

    generator = torch.Generator().manual_seed(SEED)
    tokenizer, tokenizer_2 = make_qwen_tokenizer(), make_clip_tokenizer()
    models = {
        "text_encoder": make_text_encoder(tokenizer, generator),
        "text_encoder_2": make_text_encoder_2(tokenizer_2, generator),
        "vae": make_vae(generator),
        "transformer": make_transformer(generator),
    }
    output.mkdir(parents=True, exist_ok=True)
    for name, model in models.items():
        model.half().save_pretrained(output / name)
    tokenizer.save_pretrained(output / "tokenizer")
    tokenizer_2.save_pretrained(output / "tokenizer_2")
    make_scheduler().save_pretrained(output / "scheduler")
    write_json(output / "tokenizer" / "preprocessor_config.json", PREPROCESSOR_CONFIG)
    write_json(output / "model_index.json", MODEL_INDEX | {"_diffusers_version": diffusers.__version__})
    (output / "README.md").write_text(MODEL_CARD, encoding="utf-8")
    for weights in output.rglob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes files that only their owner can read


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, write the checkpoint and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the files of an existing checkpoint")
    options = parser.parse_args(arguments)
    if (options.output / "model_index.json").exists() and not options.overwrite:
        print(f"{options.output} holds a checkpoint: choose another folder or add --overwrite", file=sys.stderr)
        return 2
    write_checkpoint(options.output)
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
