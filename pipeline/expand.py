"""Short prompts in detail, on request before stage 1: the Qwen that encodes prompts rewrites them first."""

from __future__ import annotations

import re
import unicodedata
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from ..configs.errors import ArgumentError
from ..models.writer import QwenWriter, read_head
from .checks import prompt_list, shortened
from .lora_files import with_triggers
from .text import clean_prompt

if TYPE_CHECKING:
    from .pipeline import Kandinsky5NablaPipeline

INSTRUCTION = """\
You write prompts for a model that makes videos from text.
The user has a short idea for a video. Rewrite it as one paragraph of 60 to 100 words in English.
Say what the subject looks like and how it moves, what surrounds it, where the camera is and how it moves, and how the \
light falls.
Keep every fact of the idea, contradict none, and tell only what can be seen.
Answer with the paragraph and nothing else."""

# The text that Qwen's chat template makes of a system's and a user's message; not every tokenizer brings the template.
_BEFORE = f"<|im_start|>system\n{INSTRUCTION}<|im_end|>\n<|im_start|>user\n"
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n"
_ENDS = ["<|im_end|>", "<|endoftext|>"]

DETAILED_WORDS = 60
"""A prompt of more words is detailed already."""
REPETITION_PENALTY = 1.05
"""That of Qwen2.5's own settings (generation_config.json)."""
MAX_COMPRESSION, MIN_DISTINCT = 2.4, 0.4
"""Of a text's bytes to those of its deflated form (paragraphs have 1.6 to 2; Whisper's limit is the same), and of its
different words to all (paragraphs have 0.6 to 0.9), which tells more of a few words."""


@torch.no_grad()
def expand_prompts(pipe: Kandinsky5NablaPipeline, prompts: str | Sequence[str]) -> list[str]:
    """Return prompts as the loaded text encoder rewrites them in detail; each one that it does not, as it is.

    What it finds most likely is taken word by word and nothing is drawn, so that the same prompt becomes the same
    text. A warning says why a prompt is kept: it is empty or detailed already, or the answer is empty, repeats itself,
    is no text, or is longer than a prompt may be (`pipe.defaults.max_sequence_length`, trigger words of LoRAs counted).

    The output head (1.1 GB in bf16) is read from the files that the text encoder came from, and is dropped afterwards.

    Args:
        pipe: with its text encoder, placed or offloaded in any way.
        prompts: a text or several.

    Raises:
        FileNotFoundError: if the text encoder did not come from a folder that is still there.
        ValueError: if there is no text encoder, or it was saved without its head (`models.writer.find_head`); for
            prompts that are no texts.
    """
    prompts, encoder = prompt_list(prompts), pipe.text_encoder
    if encoder is None:
        raise ArgumentError("this pipeline has no text encoder, which would expand the prompts")
    texts = {prompt: prompt for prompt in prompts}
    short = [prompt for prompt in texts if _is_short(prompt)]
    if short:
        head_VD = read_head(Path(encoder.name_or_path), encoder.dtype, pipe._execution_device)
        writer = QwenWriter(encoder, head_VD)
        texts |= {prompt: _expanded(pipe, writer, prompt) for prompt in short}
    return [texts[prompt] for prompt in prompts]


def objection(answer: str) -> str | None:
    """Return why an answer cannot be a prompt, whatever its length; None if it can."""
    if not answer.strip():
        return "is empty"
    if not _is_text(answer):
        return "is no text"
    words, written = re.findall(r"\w+", answer.lower()), answer.encode()
    too_few = len(set(words)) < MIN_DISTINCT * len(words)
    if too_few or len(written) > MAX_COMPRESSION * len(zlib.compress(written)):
        return "repeats itself"
    return None


def _is_short(prompt: str) -> bool:
    """Return whether a prompt is to be expanded; if not, a warning says why."""
    words = len(prompt.split())
    if 1 <= words <= DETAILED_WORDS:
        return True
    _warn_of(prompt, f"it has {words} words and is detailed already" if words else "it is empty")
    return False


def _expanded(pipe: Kandinsky5NablaPipeline, writer: QwenWriter, prompt: str) -> str:
    """Return Qwen's text for a prompt, or the prompt, with a warning, if that is no good one."""
    limit = pipe.defaults.max_sequence_length
    *ids, end = _answer(pipe, writer, prompt, limit)
    answer = clean_prompt(pipe.tokenizer.decode(ids))
    unfinished = end not in pipe.tokenizer.convert_tokens_to_ids(_ENDS)
    problem = f"does not end within {limit} tokens" if unfinished else objection(answer) or _excess(pipe, answer, limit)
    if problem is None:
        return answer
    _warn_of(prompt, f"what was written for it {problem}")
    return prompt


def _answer(pipe: Kandinsky5NablaPipeline, writer: QwenWriter, prompt: str, limit: int) -> list[int]:
    """Return the token ids of Qwen's answer, at most `limit`, its end included."""
    chat = _BEFORE + clean_prompt(prompt) + _BEHIND
    ids = pipe.tokenizer(chat, add_special_tokens=False)["input_ids"]
    ids_1L = torch.tensor([ids], device=writer.device)
    ends = pipe.tokenizer.convert_tokens_to_ids(_ENDS)
    config = GenerationConfig(
        do_sample=False,
        repetition_penalty=REPETITION_PENALTY,
        max_new_tokens=limit,
        eos_token_id=ends,
        pad_token_id=ends[-1],
    )
    inputs = {"input_ids": ids_1L, "attention_mask": torch.ones_like(ids_1L), "generation_config": config}
    answer_1L = writer.generate(**inputs)  # pyright: ignore[reportAttributeAccessIssue]
    return answer_1L[0, len(ids) :].tolist()


def _excess(pipe: Kandinsky5NablaPipeline, answer: str, limit: int) -> str | None:
    """Return that a text, with the LoRAs' trigger words and its end, has more tokens than a prompt may have."""
    [text] = with_triggers([answer], pipe.acting_trigger_words)
    count = len(pipe.tokenizer(text, add_special_tokens=False)["input_ids"]) + 1
    return f"has {count} tokens, and a prompt has {limit} at most" if count > limit else None


def _is_text(answer: str) -> bool:
    """Return whether it has no control, unassigned or replacement character and no token's name, and mostly letters."""
    seen = [character for character in answer if not character.isspace()]
    kinds = [unicodedata.category(character) for character in seen]
    letters = sum(kind[0] in "LM" for kind in kinds)
    damaged = "\ufffd" in answer or "<|" in answer or not {"Cc", "Cn", "Co", "Cs"}.isdisjoint(kinds)
    return not damaged and letters > 0.7 * len(seen)


def _warn_of(prompt: str, why: str) -> None:
    warnings.warn(f'the prompt "{shortened(clean_prompt(prompt))}" is used as it is: {why}', stacklevel=4)
