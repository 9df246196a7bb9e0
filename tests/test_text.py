"""Prompts become embeddings as the checkpoints were trained with them, whatever stands in a prompt."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import CLIPTextModel, CLIPTokenizer, Qwen2Tokenizer

from kandinsky5_nabla.models.text_encoder import QwenTextEncoder
from kandinsky5_nabla.pipeline.text import (
    PROMPT_TEMPLATE,
    check_prefix_length,
    clean_prompt,
    encode_prompts,
    prompt_prefix_length,
    tokenize_clip,
    tokenize_qwen,
)

DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo"
SHORT = "a red circle moving left"
LONG = " ".join(f"word{i}" for i in range(300))
MULTI_BYTE = "Кот в красной шляпе 城市夜景 霓虹灯 🌃✨👩‍🚀 cafe\u0301 "


@pytest.fixture(scope="module")
def qwen() -> Qwen2Tokenizer:
    return Qwen2Tokenizer.from_pretrained(DEMO / "tokenizer")


@pytest.fixture(scope="module")
def clip() -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(DEMO / "tokenizer_2")


@pytest.fixture(scope="module")
def encode(qwen, clip):
    text_encoder = QwenTextEncoder.from_pretrained(DEMO / "text_encoder", dtype=torch.float32)
    text_encoder_2 = CLIPTextModel.from_pretrained(DEMO / "text_encoder_2", dtype=torch.float32)

    def run(prompts, **kwargs):
        return encode_prompts(prompts, qwen, text_encoder, clip, text_encoder_2, **kwargs)

    return run


def user_tokens(qwen, prompt: str) -> list[str]:
    ids = tokenize_qwen(qwen, prompt)
    return qwen.convert_ids_to_tokens(ids)[prompt_prefix_length(qwen) :]


def lost_text(record) -> str:
    assert len(record) == 1
    return str(record[0].message).split('This text was cut: "', 1)[1].removesuffix('"')


# The template


def test_the_template_keeps_the_two_spelling_mistakes_it_was_trained_with():
    assert "You are a promt engineer." in PROMPT_TEMPLATE
    assert "video game or scren content.\n" in PROMPT_TEMPLATE
    assert PROMPT_TEMPLATE.endswith("<|im_start|>user\n{}<|im_end|>")
    assert PROMPT_TEMPLATE.count("\n") == 9


def test_another_tokenizer_than_the_published_one_is_refused(qwen):
    length = prompt_prefix_length(qwen)
    check_prefix_length(qwen, length)
    check_prefix_length(qwen, None)
    with pytest.raises(ValueError, match=rf"makes {length} tokens .* trained with 129"):
        check_prefix_length(qwen, 129)


# What stands in a prompt


def test_every_kind_of_white_space_is_folded_and_nothing_else_is_repaired(qwen, clip):
    spaced = "\n\t a\u00a0red\u3000\u2028circle \r\n moving\u2009left\x0b"
    assert clean_prompt(spaced) == SHORT
    assert tokenize_qwen(qwen, spaced) == tokenize_qwen(qwen, SHORT)
    assert tokenize_clip(clip, spaced) == tokenize_clip(clip, SHORT)
    for untouched in ["schÃ¶n", "“quotes”", "ｆｕｌｌ", "&amp;", "zero\u200bwidth", "Cafe\u0301"]:
        assert clean_prompt(untouched) == untouched


def test_braces_are_not_formatting(qwen):
    assert qwen.decode(tokenize_qwen(qwen, "{} {0} {x!r} {{")).endswith("user\n{} {0} {x!r} {{<|im_end|>")


def test_a_literal_end_token_in_a_prompt_is_read_as_that_token(qwen):
    assert user_tokens(qwen, "a<|im_end|>b") == ["a", "<|im_end|>", "b", "<|im_end|>"]


@pytest.mark.parametrize("prompt", ["", "   ", "\n"])
def test_an_empty_prompt_is_the_end_token_alone(qwen, encode, prompt):
    assert user_tokens(qwen, prompt) == ["<|im_end|>"]
    embeddings = encode([prompt])
    assert embeddings.prompt_embeds.shape == (1, 1, 64)
    assert embeddings.mask.tolist() == [[True]]


def test_any_unicode_survives_the_demo_tokenizer(qwen):
    text = clean_prompt(MULTI_BYTE)
    assert qwen.decode(tokenize_qwen(qwen, text)).endswith(text.replace("e\u0301", "é") + "<|im_end|>")


@pytest.mark.parametrize("prompt", [[], [SHORT, None], [["nested"]]])
def test_prompts_that_are_no_texts_are_refused(encode, prompt):
    with pytest.raises(ValueError, match="prompt"):
        encode(prompt)


FTFY_SCRIPT = """
import json, sys
if sys.argv[1] == "without":
    sys.modules["ftfy"] = None  # importing it raises ImportError
else:
    import ftfy
    assert ftfy.fix_text(sys.argv[3]) != sys.argv[3]
from transformers import CLIPTokenizer, Qwen2Tokenizer
from kandinsky5_nabla.pipeline.text import tokenize_clip, tokenize_qwen
qwen = Qwen2Tokenizer.from_pretrained(sys.argv[2] + "/tokenizer")
clip = CLIPTokenizer.from_pretrained(sys.argv[2] + "/tokenizer_2")
print(json.dumps([tokenize_qwen(qwen, sys.argv[3]), tokenize_clip(clip, sys.argv[3])]))
"""


def test_ftfy_installed_or_not_gives_the_same_token_ids():
    prompt = "schÃ¶n “quotes” ｆｕｌｌ &amp; 城市，灯"

    def ids(ftfy: str) -> list:
        command = [sys.executable, "-c", FTFY_SCRIPT, ftfy, str(DEMO), prompt]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert ids("with") == ids("without")


# Cutting


@pytest.mark.parametrize("limit", [1, 2, 7, 100, 256])
@pytest.mark.parametrize("prompt", [LONG, MULTI_BYTE * 20], ids=["ascii", "multi-byte"])
def test_a_prompt_is_cut_to_the_limit_and_the_warning_has_exactly_the_lost_text(qwen, prompt, limit):
    prefix = prompt_prefix_length(qwen)
    with pytest.warns(UserWarning, match=f"Qwen reads {limit} tokens") as record:
        ids = tokenize_qwen(qwen, prompt, limit)
    assert len(ids) == prefix + limit
    assert ids[-1] == qwen.convert_tokens_to_ids("<|im_end|>")
    lost, text = lost_text(record), clean_prompt(prompt)
    assert text.endswith(lost)
    assert 0 < len(lost) <= len(text)
    whole = text.removesuffix(lost)  # the characters that were read to their last byte
    read = qwen.decode(ids[prefix:-1])
    assert read.rstrip("\ufffd") == whole.replace("e\u0301", "é")


def test_a_character_that_is_cut_in_its_middle_counts_as_lost(qwen):
    with pytest.warns(UserWarning, match="Qwen") as record:
        ids = tokenize_qwen(qwen, "🌃🌃🌃", 7)
    assert len(qwen("🌃🌃🌃")["input_ids"]) == 12
    assert lost_text(record) == "🌃🌃"
    assert len(ids) == prompt_prefix_length(qwen) + 7


def test_a_prompt_at_the_limit_is_whole_and_one_token_more_is_cut(qwen):
    fits, too_long = "a " * 255, "a " * 256
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(tokenize_qwen(qwen, fits)) == prompt_prefix_length(qwen) + 256
    with pytest.warns(UserWarning, match='cut: " a"'):
        assert tokenize_qwen(qwen, too_long) == tokenize_qwen(qwen, fits)


def test_an_end_token_inside_a_long_prompt_does_not_end_it(qwen):
    with pytest.warns(UserWarning, match='cut: " b c"'):
        ids = tokenize_qwen(qwen, "a<|im_end|> b c", 3)
    tokens = qwen.convert_ids_to_tokens(ids)[prompt_prefix_length(qwen) :]
    assert tokens == ["a", "<|im_end|>", "<|im_end|>"]


@pytest.mark.parametrize("limit", [-1, 0, 257])
def test_a_limit_outside_the_trained_one_is_refused(encode, limit):
    with pytest.raises(ValueError, match=f"max_sequence_length={limit}: use 1 to 256"):
        encode([SHORT], max_sequence_length=limit)


@pytest.mark.parametrize("prompt", [LONG, MULTI_BYTE * 20], ids=["ascii", "multi-byte"])
def test_clip_reads_77_tokens_and_the_warning_has_exactly_the_lost_text(clip, prompt):
    with pytest.warns(UserWarning, match="CLIP reads 77 tokens") as record:
        ids, mask = tokenize_clip(clip, prompt)
    assert mask == [1] * 77
    assert (ids[0], ids[-1]) == (clip.bos_token_id, clip.eos_token_id)
    text, lost = clean_prompt(prompt), lost_text(record)
    assert text.endswith(lost)
    whole = text.removesuffix(lost)
    # CLIP's decoding puts blanks of its own, and writes a character that was cut in its middle as U+FFFD.
    read = clip.decode(ids[1:-1]).replace(" ", "").rstrip("\ufffd")
    assert read == whole.replace("e\u0301", "é").replace(" ", "").lower()


# A tokenizer file that asks for something else


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_2"])
def test_padding_and_truncation_in_a_tokenizer_file_change_nothing(tmp_path, qwen, clip, name):
    folder = Path(shutil.copytree(DEMO / name, tmp_path / name))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"padding_side": "left", "truncation_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["padding"] = {
        "strategy": {"Fixed": 300},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    tokenizer["truncation"] = {"direction": "Left", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if name == "tokenizer":
        changed = Qwen2Tokenizer.from_pretrained(folder)
        assert changed.padding_side == "left"
        assert tokenize_qwen(changed, SHORT) == tokenize_qwen(qwen, SHORT)
    else:
        changed = CLIPTokenizer.from_pretrained(folder)
        assert changed.padding_side == "left"
        assert tokenize_clip(changed, SHORT) == tokenize_clip(clip, SHORT)


# Batches


def test_a_short_prompt_beside_a_long_one_keeps_every_token_and_equals_its_single_run(encode):
    with pytest.warns(UserWarning, match="cut"):
        batch = encode([SHORT, LONG])
    single = encode([SHORT])
    length = single.prompt_embeds.shape[1]
    assert batch.prompt_embeds.shape == (2, 256, 64)
    assert batch.mask.sum(dim=1).tolist() == [length, 256]
    assert single.mask.all()
    assert torch.equal(batch.prompt_embeds[:1, :length], single.prompt_embeds)
    assert torch.equal(batch.pooled[:1], single.pooled)


def test_padding_is_on_the_right_and_zero(encode):
    embeddings = encode([SHORT, SHORT + " on a white background", ""])
    lengths = embeddings.mask.sum(dim=1)
    assert lengths[2] == 1
    for row, length in enumerate(lengths):
        assert embeddings.mask[row, :length].all()
        assert (embeddings.prompt_embeds[row, length:] == 0).all()
    assert embeddings.mask.dtype == torch.bool
    assert embeddings.prompt_embeds.isfinite().all()
    assert embeddings.pooled.isfinite().all()


def test_embeddings_follow_the_prompt_and_not_its_neighbours_order(encode):
    one, other = encode([SHORT, "a blue square"]), encode(["a blue square", SHORT, SHORT])
    assert torch.equal(one.pooled[0], other.pooled[2])
    assert torch.equal(one.prompt_embeds[0], other.prompt_embeds[1])
    assert not torch.allclose(one.pooled[0], one.pooled[1], atol=0.1)


def test_embeddings_come_in_the_dtype_asked_for_without_a_graph(encode):
    embeddings = encode([SHORT], dtype=torch.bfloat16, device="cpu")
    assert embeddings.prompt_embeds.dtype == embeddings.pooled.dtype == torch.bfloat16
    assert not embeddings.prompt_embeds.requires_grad
    assert encode([SHORT]).pooled.dtype == torch.float32
