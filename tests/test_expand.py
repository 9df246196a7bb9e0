"""Short prompts in detail: what Qwen writes is used if it is any good, recorded beside what was typed, and repeated."""

import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Tokenizer

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.configs.tiles import vae_tiles
from kandinsky5_nabla.models.text_encoder import QwenTextEncoder
from kandinsky5_nabla.models.writer import QwenWriter
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
from kandinsky5_nabla.pipeline.expand import DETAILED_WORDS, INSTRUCTION, expand_prompts, objection
from kandinsky5_nabla.pipeline.export import read_comment, read_video
from kandinsky5_nabla.pipeline.memory import MemoryPlan, Run, estimate
from kandinsky5_nabla.pipeline.offload import apply
from kandinsky5_nabla.pipeline.precision import compute_dtype, text_encoder_quantization
from kandinsky5_nabla.pipeline.sizes import sizes_of_folder
from kandinsky5_nabla.scripts import generate

DEMO = load_preset("demo").local_folder
WEIGHTS = "model.safetensors"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
TOKENIZER = Qwen2Tokenizer.from_pretrained(DEMO / "tokenizer")
WRITTEN = "The small yellow triangle moves slowly left over a plain white background, standing still in orange light"


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def rewrite(folder, change):
    """Writes another file of weights; those that were loaded from the old one stay as they are."""
    save_file(change(load_file(folder / WEIGHTS)), folder / "new", metadata={"format": "pt"})
    os.replace(folder / "new", folder / WEIGHTS)


def teach(folder, ids, end="<|im_end|>"):
    """Lets the text encoder in a checkpoint answer every prompt with these tokens, all of them different, and this one.

    Its layers do next to nothing, so that each token decides on the next one: the row of the head that points to where
    the token before lies.
    """
    chain = [*ids_of("\n"), *ids, *ids_of(end)]
    assert len({*chain[:-1]}) == len(chain) - 1

    def change(tensors):
        table_VD = torch.randn(tensors[EMBEDDINGS].shape, generator=torch.Generator().manual_seed(0))
        head_VD = torch.zeros_like(table_VD)
        head_VD.index_add_(0, torch.tensor(chain[1:]), torch.nn.functional.normalize(table_VD[chain[:-1]]))
        quiet = {name: tensor * 0.001 for name, tensor in tensors.items() if "o_proj" in name or "down_proj" in name}
        return {**tensors, **quiet, EMBEDDINGS: table_VD.half(), HEAD: head_VD.half()}

    rewrite(folder / "text_encoder", change)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo checkpoint with a Qwen that has learnt one answer."""
    folder = shutil.copytree(DEMO, tmp_path_factory.mktemp("expand") / "model")
    teach(folder, ids_of(WRITTEN))
    return folder


@pytest.fixture(scope="module")
def loaded(model):
    return Kandinsky5NablaPipeline.from_pretrained(model, preset="demo")


@pytest.fixture
def writing(model, loaded):
    """The pipeline of that checkpoint, and how to teach it another answer for the time of a test."""
    yield loaded, lambda *answer: teach(model, *answer)
    teach(model, ids_of(WRITTEN))


def warnings_of(pipe, prompts):
    """Returns the texts that are used, and what is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts = expand_prompts(pipe, prompts)
    return texts, [str(each.message) for each in caught]


def headless(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != HEAD}


# The answer


def test_qwen_reads_our_instruction_and_the_prompt_as_a_chat(loaded):
    read = []
    hook = loaded.text_encoder.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"]), with_kwargs=True
    )
    expand_prompts(loaded, " a\n red cat")
    hook.remove()
    chat = [("system", INSTRUCTION), ("user", "a red cat")]
    said = "".join(f"<|im_start|>{who}\n{text}<|im_end|>\n" for who, text in chat)
    assert read[0][0].tolist() == ids_of(f"{said}<|im_start|>assistant\n")
    assert {tuple(ids.shape) for ids in read[1:]} == {(1, 1)}  # each word is read once


def test_a_word_that_was_said_loses_to_one_that_is_nearly_as_likely(writing, model):
    pipe, answer_with = writing
    answer_with(ids_of("red square"))

    def stutter(tensors):
        red, head_VD = ids_of("red")[0], tensors[HEAD].float()
        itself_D = torch.nn.functional.normalize(tensors[EMBEDDINGS][red].float(), dim=0)
        head_VD[red] += (1.02 - head_VD[red] @ itself_D) * itself_D  # after red: red 1.02, square 1
        return {**tensors, HEAD: head_VD.half()}

    rewrite(model / "text_encoder", stutter)
    assert warnings_of(pipe, "a cat") == (["red square"], [])


def test_a_good_answer_is_used_for_each_prompt_in_its_place(loaded):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert expand_prompts(loaded, "a cat") == [WRITTEN]
        assert expand_prompts(loaded, ["a cat", " a\n dog ", "a cat"]) == [WRITTEN] * 3
    assert [each for each in gc.get_objects() if type(each) is QwenWriter] == []  # the head is gone


@pytest.mark.parametrize("offload", ["none", "model", "group", "sequential"])
def test_it_is_the_same_under_every_way_of_offloading(model, offload):
    pipe = Kandinsky5NablaPipeline.from_pretrained(model, preset="demo")
    run = Run(64, 64, 5, device="cpu", dtype="float32", attention="NABLA_REFERENCE", tile=vae_tiles()[0])
    apply(pipe, MemoryPlan(offload, False, run, (), 0), "cpu")
    assert warnings_of(pipe, "a cat") == ([WRITTEN], [])
    expected = pipe.encode_prompt(WRITTEN)  # what follows finds the encoder in its place
    assert torch.equal(pipe.encode_prompt(expand_prompts(pipe, "a cat")).prompt_embeds, expected.prompt_embeds)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "nf4"])
def test_it_is_the_same_in_every_dtype_of_the_encoder(model, dtype):
    computed, quantization = compute_dtype(dtype, "cpu"), text_encoder_quantization(dtype, "cpu")
    encoder = QwenTextEncoder.from_pretrained(model / "text_encoder", dtype=computed, quantization_config=quantization)
    pipe = Kandinsky5NablaPipeline.from_pretrained(model, preset="demo", text_encoder=encoder)
    assert expand_prompts(pipe, "a cat") == [WRITTEN]


BAD = {
    "nothing": ([], "is empty"),
    "a blank": (ids_of(" "), "is empty"),
    "a control character": (ids_of("\x01red square"), "is no text"),
    "half a letter": (ids_of("red square é")[:-1], "is no text"),
    "a token that is no text": (ids_of("red<|vision_start|> square"), "is no text"),
    "a word three times": (TOKENIZER.convert_tokens_to_ids(["red", "Ġred", "Ġ", "re", "d"]), "repeats itself"),
    "no end": (ids_of("red square"), "red", "does not end within 256 tokens"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_is_dropped_with_a_warning_that_says_why(writing, kind):
    pipe, answer_with = writing
    *answer, reason = BAD[kind]
    answer_with(*answer)
    assert warnings_of(pipe, "a\n cat") == (
        ["a\n cat"],
        [f'the prompt "a cat" is used as it is: what was written for it {reason}'],
    )


def test_an_answer_must_leave_room_for_the_end_and_for_the_trigger_words_of_loras(model, tmp_path):
    pipe = Kandinsky5NablaPipeline.from_pretrained(model, preset="demo")
    tokens = len(ids_of(WRITTEN)) + 1
    pipe.defaults = dataclasses.replace(pipe.defaults, max_sequence_length=tokens)
    assert warnings_of(pipe, "a cat") == ([WRITTEN], [])
    pipe.load_lora_weights(lora(tmp_path / "lora.safetensors"))
    texts, [warning] = warnings_of(pipe, "a cat")
    longer = len(ids_of(f"round and {WRITTEN}")) + 1
    assert texts == ["a cat"]
    assert warning.endswith(f"what was written for it has {longer} tokens, and a prompt has {tokens} at most")
    pipe.defaults = dataclasses.replace(pipe.defaults, max_sequence_length=tokens - 1)
    _, [warning] = warnings_of(pipe, "a cat")
    assert warning.endswith(f"does not end within {tokens - 1} tokens")


def lora(path):
    """A LoRA of the demo's transformer whose trigger words are "round and"."""
    weights = load_file(DEMO / "transformer" / "diffusion_pytorch_model.safetensors")
    layer = "visual_transformer_blocks.0.feed_forward.in_layer"
    out_features, in_features = weights[f"{layer}.weight"].shape
    pair = {"A": torch.full((2, in_features), 0.01), "B": torch.full((out_features, 2), 0.01)}
    tensors = {f"transformer.{layer}.lora_{name}.weight": weight for name, weight in pair.items()}
    save_file(tensors, path, metadata={"trigger": "round and"})
    return path


def test_prompts_that_are_detailed_or_empty_are_kept_and_said_so_and_the_head_is_not_needed(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    rewrite(tmp_path / "model" / "text_encoder", headless)
    pipe = Kandinsky5NablaPipeline.from_pretrained(tmp_path / "model", preset="demo")
    detailed = "word " * (DETAILED_WORDS + 1)
    kept, said = warnings_of(pipe, [detailed, " "])
    assert kept == [detailed, " "]
    assert [each.rpartition("used as it is: ")[2] for each in said] == [
        f"it has {DETAILED_WORDS + 1} words and is detailed already",
        "it is empty",
    ]
    with pytest.raises(ValueError, match="can read but not write"):
        expand_prompts(pipe, "word " * DETAILED_WORDS)


def test_a_pipeline_without_text_encoder_is_refused(loaded):
    parts = {name: part for name, part in loaded.components.items() if "text_encoder" not in name}
    with pytest.raises(ValueError, match="no text encoder"):
        expand_prompts(type(loaded)(**parts, preset="demo"), "a cat")


PIER = (
    "A fluffy orange tabby cat with bright green eyes walks slowly along the edge of a wooden pier at sunset. Its tail "
    "sways gently as it looks out over the calm water, where small waves catch the golden light. The camera follows "
    "from the side at a low angle, then rises to reveal distant hills under a pink sky, in a 24 fps, 4K close-up."
)
CAT = (
    "Пушистый рыжий кот с яркими глазами медленно идёт по краю деревянного пирса на закате. Его хвост мягко "
    "покачивается, когда он смотрит на спокойную воду, где волны ловят золотой свет. Камера следует за ним сбоку."
)
OBJECTIONS = {
    "": "is empty",
    " \n": "is empty",
    "a cat\x1b[31m": "is no text",
    "a cat \ufffd": "is no text",
    "a cat <|endoftext|>": "is no text",
    "{'a': [1, 2, 3], 'b': [4, 5, 6]}": "is no text",
    "... --- ...": "is no text",
    "red red, Red. red": "repeats itself",
    f"{PIER} {PIER}": "repeats itself",
    "A cat walks on a pier. " * 4: "repeats itself",
    "redsquare" * 20: "repeats itself",
    PIER: None,
    CAT: None,
    "हिमालय की चोटियों पर सुबह की धूप": None,
    "一只橘猫在日落时沿着木码头慢慢走": None,
}


@pytest.mark.parametrize("answer", OBJECTIONS)
def test_what_is_empty_repeated_or_no_text_is_told_from_paragraphs(answer):
    assert objection(answer) == OBJECTIONS[answer]


# The command line

QUICK = ["--height", "128", "--width", "128", "--num-frames", "1", "--steps", "2", "--seed", "5"]
QUICK += ["--attention", "NABLA_REFERENCE", "--device", "cpu", "--config", "demo"]


@pytest.fixture
def make(here):
    def run(*argv):
        code, out, err = here(*argv, "--json")
        assert code == 0, err
        return json.loads(out), err

    return run


def read(path):
    return json.loads(path.read_text())


def same(folder, one, other):
    return all((folder / f"{one}.{kind}").read_bytes() == (folder / f"{other}.{kind}").read_bytes() for kind in KINDS)


KINDS = ("mp4", "json")


def test_a_good_answer_is_printed_made_and_recorded_beside_what_was_typed(make, model, tmp_path):
    lora_file = lora(tmp_path / "lora.safetensors")
    argv = [*QUICK, "--model", model, "--lora", lora_file]
    result, err = make(*argv, "--prompt", "a cat", "--expand-prompt")
    assert f'"a cat" is expanded to: {WRITTEN}' in err.splitlines()
    [video] = result["videos"]
    texts = {"prompt": WRITTEN, "short_prompt": "a cat"}
    assert texts.items() <= video.items()
    assert texts.items() <= result["outputs"][0].items()
    assert "expand" in video["seconds"]
    record = read(tmp_path / "a-cat-5.json")  # the name comes from what was typed
    assert texts.items() <= record.items()
    assert json.loads(read_comment(tmp_path / "a-cat-5.mp4")) == record
    make(*argv, "--prompt", WRITTEN, "--output", "typed.mp4")
    assert read(tmp_path / "typed.json") == record | {"short_prompt": None}
    assert (read_video(tmp_path / "typed.mp4")[0] == read_video(tmp_path / "a-cat-5.mp4")[0]).all()


def test_a_record_with_both_texts_is_repeated_to_the_byte_and_never_expanded_again(make, model, tmp_path, monkeypatch):
    copy = shutil.copytree(model, tmp_path / "model")
    _, err = make(*QUICK, "--model", "model", "--prompt", "a cat", "--expand-prompt", "--output", "cat.mp4")
    assert WRITTEN in err
    make("--from", "cat.json", "--prompt", "a bird", "--expand-prompt")  # but for a new text, if that is asked for
    assert read(tmp_path / "a-bird-5.json") == read(tmp_path / "cat.json") | {"short_prompt": "a bird"}
    rewrite(copy / "text_encoder", headless)  # who would write again now fails
    make("--from", "cat.mp4", "--output", "again.mp4")
    assert same(tmp_path, "again", "cat")
    result, _ = make("--from", "cat.json", "--seed", "6")
    assert result["videos"][0]["file"] == "a-cat-6.mp4"
    assert read(tmp_path / "a-cat-6.json") == read(tmp_path / "cat.json") | {"seed": 6}
    make("--from", "cat.json", "--prompt", "a dog")
    assert read(tmp_path / "a-dog-5.json") == read(tmp_path / "cat.json") | {"prompt": "a dog", "short_prompt": None}


def test_a_state_keeps_both_texts_and_goes_on_without_writing(here, make, model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "model")
    make(*QUICK, "--model", "model", "--prompt", "a cat", "--expand-prompt", "--output", "cat.mp4", "--keep-state")
    rewrite(copy / "text_encoder", headless)
    for name in KINDS:
        (tmp_path / f"cat.{name}").rename(tmp_path / f"first.{name}")
    result, _ = make("--resume", "cat.k5", "--keep-state")
    assert same(tmp_path, "cat", "first")
    assert result["videos"][0]["short_prompt"] == "a cat"
    make("--decode-only", "cat.k5", "--output", "again.mp4")
    assert same(tmp_path, "again", "first")


def test_a_second_process_makes_the_same_bytes(make, model, tmp_path):
    argv = [*QUICK, "--model", str(model), "--prompt", "a cat", "--expand-prompt", "--output"]
    make(*argv, "first.mp4")
    program = [sys.executable, generate.__file__, *argv, "second.mp4"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert WRITTEN in done.stderr
    assert same(tmp_path, "second", "first")


def test_on_the_demo_what_is_written_is_dropped_with_a_warning_and_the_video_is_as_without(make, tmp_path):
    two = [*QUICK, "--prompt", "a cat", "--prompt", "a dog", "--overwrite"]
    plain, _ = make(*two, "--output", "plain.mp4")
    result, err = make(*two, "--output", "asked.mp4", "--expand-prompt")
    said = [line for line in err.splitlines() if line.startswith("warning: the prompt")]
    assert [line.partition(": what was written for it ")[0] for line in said] == [
        f'warning: the prompt "a {animal}" is used as it is' for animal in ("cat", "dog")
    ]
    assert "is expanded to" not in err
    assert same(tmp_path, "asked-1", "plain-1")
    assert same(tmp_path, "asked-2", "plain-2")
    without_files = [{**each, "file": None, "seconds": None} for each in plain["videos"]]
    assert [{**each, "file": None, "seconds": None} for each in result["videos"]] == without_files


def test_what_makes_it_impossible_is_refused_before_anything_is_loaded(here, make, model, tmp_path):
    texts, ask = tmp_path / "texts.safetensors", "--expand-prompt"
    base = [*QUICK, "--model", model, "--prompt", "a cat"]
    make(*base, "--output", "cat.mp4", "--save-embeds", texts, "--keep-state")
    bare = shutil.copytree(model, tmp_path / "bare")
    rewrite(bare / "text_encoder", headless)
    file = shutil.copy(DEMO / "transformer" / "diffusion_pytorch_model.safetensors", tmp_path / "mine.safetensors")
    parts = [word for part in ("vae", "text-encoder", "text-encoder-2") for word in (f"--{part}", bare)]
    headless_encoder = f"the text encoder in {bare / 'text_encoder'} can read but not write"
    refused = {
        (*base, "--embeds", texts): "the prompts of --embeds are encoded already; leave one of the two out",
        ("--resume", "cat.k5"): "--resume cat.k5 takes that run's text as it is; leave it out",
        ("--decode-only", "cat.k5"): "--decode-only cat.k5 takes that run's text as it is; leave it out",
        ("--from", "cat.mp4"): "--from cat.mp4 takes that run's text as it is; add --prompt TEXT, or leave it out",
        (*base, "--model", bare): headless_encoder,
        (*QUICK, "--model", file, *parts, "--prompt", "a cat"): headless_encoder,
    }
    for argv, reason in refused.items():
        code, out, err = here(*argv, ask)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith(f"error: --expand-prompt: {reason}")


def test_a_dry_run_says_that_it_would_expand_and_counts_the_head(here, checkpoint):
    sizes, run = sizes_of_folder(DEMO), Run(128, 128, 1, device="cpu", dtype="bfloat16", attention="SDPA")
    plain, asked = (estimate(sizes, dataclasses.replace(run, expand=expand)) for expand in (False, True))
    assert [after.total - before.total for before, after in zip(plain, asked, strict=True)] == [569 * 64 * 2, 0, 0]
    argv = [*QUICK, "--model", checkpoint, "--prompt", "a cat", "--dry-run", "--json"]
    plans = [json.loads(here(*argv, *asked)[1]) for asked in ([], ["--expand-prompt"])]
    assert [plan.get("expand_prompt") for plan in plans] == [None, True]
    assert plans[1]["outputs"] == plans[0]["outputs"]
