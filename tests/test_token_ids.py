"""Token ids with the real vocabularies equal those of the official code (tests/data/token_ids.json).

The vocabularies are data files of two packages (requirements-vocab.txt), which are read and never imported.
"""

import base64
import gzip
import importlib.metadata
import json
import warnings
from pathlib import Path

import pytest
from transformers import CLIPTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from kandinsky5_nabla.pipeline.text import (
    check_prefix_length,
    prompt_prefix_length,
    tokenize_clip,
    tokenize_qwen,
)

EXPECTED = json.loads((Path(__file__).parent / "data" / "token_ids.json").read_text(encoding="utf-8"))
PREFIX = 129
CASES = EXPECTED["cases"]
NAMES = [case["prompt"][:20] or "empty" for case in CASES]
CLIP_MERGES = 49152 - 256 - 2  # the file holds more lines than the published model uses


class QwenVocabulary(TikTokenConverter):
    """Derives vocabulary and merges from a file of `base64(token) rank` lines, without the package tiktoken."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: Path) -> dict[bytes, int]:
        lines = (line.split() for line in tiktoken_url.read_bytes().splitlines())
        return {base64.b64decode(token): int(rank) for token, rank in lines}


def data_file(distribution: str, name: str) -> Path:
    files = importlib.metadata.files(distribution) or []
    return next(Path(file.locate()) for file in files if file.name == name)


@pytest.fixture(scope="module")
def qwen() -> Qwen2Tokenizer:
    vocabulary, merges = QwenVocabulary().extract_vocab_merges_from_model(data_file("dashscope", "qwen.tiktoken"))
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, extra_special_tokens=["<|im_start|>", "<|im_end|>"])


@pytest.fixture(scope="module")
def clip() -> CLIPTokenizer:
    packed = data_file("clip-anytorch", "bpe_simple_vocab_16e6.txt.gz").read_bytes()
    lines = gzip.decompress(packed).decode("utf-8").split("\n")
    merges = [tuple(line.split()) for line in lines[1 : CLIP_MERGES + 1]]
    symbols = list(bytes_to_unicode().values())
    words = [*symbols, *(symbol + "</w>" for symbol in symbols), *map("".join, merges)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=merges)


def quietly(tokenize, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the long case is cut, which has its own test
        return tokenize(*args)


def test_the_prefix_of_the_template_is_129_tokens(qwen):
    assert prompt_prefix_length(qwen) == EXPECTED["prefix_tokens"] == PREFIX
    check_prefix_length(qwen, PREFIX)


def test_the_special_tokens_have_the_published_ids(qwen, clip):
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert qwen.convert_tokens_to_ids(names) == [151643, 151644, 151645]
    assert (clip.bos_token_id, clip.eos_token_id, clip.pad_token_id) == (49406, 49407, 49407)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_qwens_ids_are_those_of_the_official_code(qwen, case):
    ids = quietly(tokenize_qwen, qwen, case["prompt"])
    expected = case["qwen_ids_after_prefix"]
    assert ids[PREFIX:][: len(expected)] == expected
    assert len(ids) == min(case["qwen_total"], PREFIX + 256)
    assert ids[-1] == 151645


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_clips_ids_are_those_of_the_official_code(clip, case):
    ids, mask = quietly(tokenize_clip, clip, case["prompt"])
    assert ids[: sum(mask)][: len(case["clip_ids_first"])] == case["clip_ids_first"]
    assert (len(ids), sum(mask)) == (77, case["clip_total"])
    assert ids[sum(mask) - 1] == 49407


def test_the_long_case_is_cut_for_both_encoders_and_the_warnings_have_the_lost_words(qwen, clip):
    case = CASES[-1]
    words = case["prompt"].split()
    assert case["qwen_total"] == PREFIX + len(words) + 1, "one token a word"
    with pytest.warns(UserWarning, match="Qwen reads 256") as record:
        ids = tokenize_qwen(qwen, case["prompt"])
    assert ids[PREFIX:] == [*case["qwen_ids_after_prefix"][:1], *[ids[PREFIX + 1]] * 254, 151645]
    assert str(record[0].message).endswith(f'"{" word" * (len(words) - 255)}"')
    with pytest.warns(UserWarning, match="CLIP reads 77") as record:
        tokenize_clip(clip, case["prompt"])
    assert str(record[0].message).endswith(f'"{" ".join(words[75:])}"')
