"""Prompts to embeddings: the template, token ids and the two text encoders (shared stage 1)."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from ..configs.errors import CheckpointError, SettingsError
from .checks import is_whole, prompt_list

if TYPE_CHECKING:
    from transformers import CLIPTextModel, PreTrainedModel, PreTrainedTokenizerBase

# The checkpoints were trained on exactly this text, "promt" and "scren" included.
PROMPT_TEMPLATE = """\
<|im_start|>system
You are a promt engineer. Describe the video in detail.
Describe how the camera moves or shakes, describe the zoom and view angle, whether it follows the objects.
Describe the location of the video, main characters or objects and their action.
Describe the dynamism of the video and presented actions.
Name the visual style of the video: whether it is a professional footage, user generated content, \
some kind of animation, video game or scren content.
Describe the visual effects, postprocessing and transitions if they are presented in the video.
Pay attention to the order of key actions shown in the scene.<|im_end|>
<|im_start|>user
{}<|im_end|>"""
_PREFIX, _SUFFIX = PROMPT_TEMPLATE.split("{}")

DEFAULT_NEGATIVE_PROMPT = (
    "Static, 2D cartoon, cartoon, 2d animation, paintings, images, worst quality, low quality, ugly, "
    "deformed, walking backwards"
)

MAX_PROMPT_TOKENS = 256  # what the transformer was trained with, the closing <|im_end|> included
CLIP_TOKENS = 77  # the positions of CLIP's text model


@dataclass(frozen=True)
class TextEmbeddings:
    """What the transformer reads of B prompts.

    Attributes:
        prompt_embeds: `[B, L, D]`, Qwen's last hidden states, zeros behind each prompt's end.
        mask: `[B, L]` bool, True for a real token.
        pooled: `[B, D2]`, CLIP's pooled output.
    """

    prompt_embeds: torch.Tensor
    mask: torch.Tensor
    pooled: torch.Tensor


def clean_prompt(text: str) -> str:
    """Strip the ends and fold each run of white space to one blank; nothing else is repaired."""
    return " ".join(text.split())


def prompt_prefix_length(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return how many tokens of the template stand before the user's prompt."""
    return len(tokenizer(_PREFIX, add_special_tokens=False)["input_ids"])


def check_prefix_length(tokenizer: "PreTrainedTokenizerBase", expected: int | None) -> None:
    """Refuse a tokenizer that is not the one a checkpoint was trained with.

    Args:
        tokenizer: Qwen's tokenizer as loaded.
        expected: tokens before the prompt (129 for every published checkpoint); None checks nothing.

    Raises:
        ValueError: the tokenizer makes another number of tokens.
    """
    length = prompt_prefix_length(tokenizer)
    if expected is not None and length != expected:
        raise CheckpointError(
            f"the tokenizer makes {length} tokens of the template's prefix, the checkpoint was trained "
            f"with {expected}: use the tokenizer folder that was published with the checkpoint"
        )


def check_max_sequence_length(max_sequence_length: int) -> None:
    """Refuse a limit of user tokens that the checkpoints were not trained with.

    Raises:
        ValueError: max_sequence_length is not in 1..256.
    """
    if not is_whole(max_sequence_length) or not 1 <= max_sequence_length <= MAX_PROMPT_TOKENS:
        raise SettingsError(
            f"max_sequence_length={max_sequence_length!r}: use 1 to {MAX_PROMPT_TOKENS}, the longest prompt "
            "the checkpoints were trained with (the closing <|im_end|> counts)"
        )


def tokenize_qwen(
    tokenizer: "PreTrainedTokenizerBase", prompt: str, max_sequence_length: int = MAX_PROMPT_TOKENS
) -> list[int]:
    """Return the token ids of the template with the prompt in it.

    At most `max_sequence_length` ids follow the prefix. The last one is always `<|im_end|>`; the text that
    was cut before it is named in a warning.

    Raises:
        ValueError: max_sequence_length is not in 1..256.
    """
    check_max_sequence_length(max_sequence_length)
    text = _PREFIX + clean_prompt(prompt) + _SUFFIX
    ids, starts = _ids_and_starts(tokenizer, text, add_special_tokens=False)
    room = prompt_prefix_length(tokenizer) + max_sequence_length - 1
    if len(ids) - 1 <= room:
        return ids
    _warn_of_loss("Qwen", max_sequence_length, text[starts[room] : -len(_SUFFIX)])
    return ids[:room] + ids[-1:]


def tokenize_clip(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> tuple[list[int], list[int]]:
    """Return 77 token ids and their attention mask (1 = real), padded on the right.

    The end token is kept when a prompt is cut; what was lost is named in a warning.
    """
    text = clean_prompt(prompt)
    ids, starts = _ids_and_starts(tokenizer, text, add_special_tokens=True)
    room = CLIP_TOKENS - 1
    if len(ids) > CLIP_TOKENS:
        _warn_of_loss("CLIP", CLIP_TOKENS, text[starts[room] :])
        ids = ids[:room] + ids[-1:]
    padding = CLIP_TOKENS - len(ids)
    return ids + [cast(int, tokenizer.pad_token_id)] * padding, [1] * len(ids) + [0] * padding


@torch.no_grad()
def encode_prompts(
    prompts: str | Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    text_encoder: "PreTrainedModel",
    tokenizer_2: "PreTrainedTokenizerBase",
    text_encoder_2: "CLIPTextModel",
    max_sequence_length: int = MAX_PROMPT_TOKENS,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TextEmbeddings:
    """Encode B prompts; a batch equals its single runs bit for bit, because each prompt is encoded alone.

    Args:
        prompts: a text or a list of texts; an empty text is allowed, an empty list is not.
        tokenizer: Qwen's tokenizer.
        text_encoder: Qwen's language model; `last_hidden_state` is after its final norm.
        tokenizer_2: CLIP's tokenizer.
        text_encoder_2: CLIP's text model.
        max_sequence_length: the most tokens of a prompt, 1 to 256, `<|im_end|>` included.
        device: where to run and return; the text encoder's when None.
        dtype: of the embeddings; the text encoder's when None.

    Raises:
        ValueError: no prompts, a prompt that is not a text, or a bad max_sequence_length.
    """
    prompts = prompt_list(prompts)
    device = text_encoder.device if device is None else device
    dtype = text_encoder.dtype if dtype is None else dtype

    # Each text once, and one encoder after the other: with CPU offload each moves to the device once.
    texts = list(dict.fromkeys(prompts))
    qwen_ids = [tokenize_qwen(tokenizer, text, max_sequence_length) for text in texts]
    clip_ids = [tokenize_clip(tokenizer_2, text) for text in texts]
    prefix = prompt_prefix_length(tokenizer)
    embeds_LD = {
        text: _encode_qwen(text_encoder, ids, prefix, device) for text, ids in zip(texts, qwen_ids, strict=True)
    }
    pooled_D = {text: _encode_clip(text_encoder_2, *ids, device) for text, ids in zip(texts, clip_ids, strict=True)}
    lengths_B = torch.tensor([len(embeds_LD[prompt]) for prompt in prompts], device=device)
    positions_L = torch.arange(int(lengths_B.max()), device=device)
    return TextEmbeddings(
        prompt_embeds=pad_sequence([embeds_LD[prompt] for prompt in prompts], batch_first=True).to(device, dtype),
        mask=positions_L[None, :] < lengths_B[:, None],
        pooled=torch.stack([pooled_D[prompt] for prompt in prompts]).to(device, dtype),
    )


def _encode_qwen(
    text_encoder: "PreTrainedModel", ids: list[int], prefix: int, device: torch.device | str
) -> torch.Tensor:
    """Return the hidden states `[L, D]` behind the template's prefix."""
    hidden_1LD = text_encoder(input_ids=torch.tensor([ids], device=device), use_cache=False).last_hidden_state
    return hidden_1LD[0, prefix:]


def _encode_clip(
    text_encoder_2: "CLIPTextModel", ids: list[int], mask: list[int], device: torch.device | str
) -> torch.Tensor:
    """Return the pooled output `[D2]`."""
    output = text_encoder_2(
        input_ids=torch.tensor([ids], device=device), attention_mask=torch.tensor([mask], device=device)
    )
    return output.pooler_output[0]


def _ids_and_starts(
    tokenizer: "PreTrainedTokenizerBase", text: str, add_special_tokens: bool
) -> tuple[list[int], list[int]]:
    """Return the token ids of a text, uncut, and where in the text each token starts."""
    # verbose=False: transformers would warn of a text longer than the encoder, which is cut by our own rule.
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]


def _warn_of_loss(encoder: str, limit: int, lost: str) -> None:
    """Warn of the part of a prompt that an encoder does not see."""
    warnings.warn(f'{encoder} reads {limit} tokens of a prompt. This text was cut: "{lost}"', stacklevel=3)
