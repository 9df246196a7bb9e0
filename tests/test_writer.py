"""The text encoder as a writer: the head of every published layout is found, and the whole model writes the same."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.models.text_encoder import QwenTextEncoder
from kandinsky5_nabla.models.writer import QwenWriter, find_head, read_head

DEMO = load_preset("demo").local_folder
PUBLISHED, WEIGHTS, HEAD = DEMO / "text_encoder", "model.safetensors", "lm_head.weight"
TOKENIZER = Qwen2Tokenizer.from_pretrained(DEMO / "tokenizer")


@pytest.fixture
def folder(tmp_path):
    """A copy of a published text_encoder folder, to change."""
    return Path(shutil.copytree(PUBLISHED, tmp_path / "text_encoder"))


def rewrite(folder, change):
    save_file(change(load_file(folder / WEIGHTS)), folder / "new", metadata={"format": "pt"})
    os.replace(folder / "new", folder / WEIGHTS)


def write(model):
    """Returns 20 tokens that a model writes."""
    ids = TOKENIZER("<|im_start|>user\na red square<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    ids_1L = torch.tensor([ids])
    penalty = {"do_sample": False, "repetition_penalty": 5.0}  # a tied head finds each token nearest to itself
    config = GenerationConfig(**penalty, max_new_tokens=20, eos_token_id=TOKENIZER.eos_token_id, pad_token_id=0)
    written = model.generate(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), generation_config=config)
    return written[0, len(ids) :].tolist()


def newer(tensors):
    """Rename the keys as the versions of transformers did that save `model.language_model.*`."""
    renamed = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in tensors.items()}
    return {re.sub(r"^visual\.", "model.visual.", name): tensor for name, tensor in renamed.items()}


def headless(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != HEAD}


def tie(folder, part):
    config = json.loads((folder / "config.json").read_text())
    (config if part is None else config[part])["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))


LAYOUTS = {
    "a head of its own": [],
    "a head of its own, newer keys": [newer],
    "tied": [headless],
    "tied, newer keys": [headless, newer],
    "tied by the text's config": [headless],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_what_the_whole_model_writes_for_every_published_layout(folder, layout):
    for change in LAYOUTS[layout]:
        rewrite(folder, change)
    if "tied" in layout:
        tie(folder, "text_config" if "text" in layout else None)
    encoder = QwenTextEncoder.from_pretrained(folder, dtype=torch.float32)
    writer = QwenWriter(encoder, read_head(folder, encoder.dtype, "cpu"))
    whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    expected = write(whole)
    assert len({*expected}) > 5  # random weights, but no loop that anything might give
    assert write(writer) == expected


def test_an_encoder_that_was_saved_without_its_head_is_refused_by_name(folder, tmp_path):
    QwenTextEncoder.from_pretrained(folder).save_pretrained(tmp_path / "own")
    rewrite(folder, headless)
    for saved in (folder, tmp_path / "own"):
        with pytest.raises(ValueError, match=rf"{re.escape(str(saved))} can read but not write.*\(lm_head\.weight\)"):
            find_head(saved)


@pytest.mark.parametrize("head", [torch.ones(569, 32), torch.ones(569, 64, dtype=torch.int8)], ids=["narrow", "int8"])
def test_a_head_that_does_not_fit_is_refused_with_both_shapes(folder, head):
    rewrite(folder, lambda tensors: {**tensors, HEAD: head})
    reason = f"output head of (F32|I8) {list(head.shape)}, not of floating point numbers [569, 64]"
    with pytest.raises(ValueError, match=reason.replace("[", r"\[")):
        find_head(folder)


def test_nothing_of_the_encoder_is_copied_or_changed():
    encoder = QwenTextEncoder.from_pretrained(PUBLISHED, dtype=torch.float32)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in encoder.state_dict().items()}
    config, parameters = encoder.config.to_dict(), {id(parameter) for parameter in encoder.parameters()}
    writer = QwenWriter(encoder, read_head(Path(encoder.name_or_path), encoder.dtype, "cpu"))
    assert {id(parameter) for parameter in writer.parameters()} - parameters == {id(writer.lm_head.weight)}
    write(writer)
    after = {name: (tensor.data_ptr(), tensor) for name, tensor in encoder.state_dict().items()}
    assert before.keys() == after.keys()
    assert all(before[name][0] == after[name][0] for name in before)
    assert all(torch.equal(before[name][1], after[name][1]) for name in before)
    assert encoder.config.to_dict() == config
