"""Files of a checkpoint that transformers and diffusers would take, and make a video of nothing with."""

import json
import math
import shutil

import pytest

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.pipeline.safety import TOKENIZER_FILES, WEIGHTS, check_folder


@pytest.fixture
def folder(tmp_path):
    """A copy of the demo checkpoint, to change."""
    return shutil.copytree(load_preset("demo").model, tmp_path / "checkpoint")


def the_problem(folder):
    problems = check_folder(folder)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize("part", ["tokenizer", "tokenizer_2"])
def test_a_tokenizer_without_words_is_refused(part, folder):
    for name in TOKENIZER_FILES:
        (folder / part / name).unlink(missing_ok=True)
    assert the_problem(folder) == f"{folder / part} has neither tokenizer.json nor vocab.json"
    for content in ("{}", '{"model": {"vocab": {}}}', '{"model": {"vocab": {"a": "b"}}}', '{"model": []}'):
        (folder / part / "tokenizer.json").write_text(content)
        assert the_problem(folder).endswith("tokenizer.json has no vocabulary, from words to numbers")


def test_a_tokenizer_of_another_model_is_refused(folder):
    file = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["word"] = 5000
    file.write_text(json.dumps(content))
    assert "has numbers up to 5000, and text_encoder knows" in the_problem(folder)


NUMBERS = {
    "scaling_factor": ("vae/config.json", [0, -1.5, True, "1", None, math.nan]),
    "shift": ("scheduler/scheduler_config.json", [0, -5, "5", None, math.inf]),
    "attention_P": ("transformer/config.json", [0, 1.5, False, [0.9]]),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, (_, values) in NUMBERS.items() for value in values])
def test_a_number_that_the_pipeline_cannot_use_is_refused_with_its_file(key, value, folder):
    file = folder / NUMBERS[key][0]
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    assert the_problem(folder).startswith(f"{file}: {key} {value!r} must be a number above 0")


def test_dense_attention_needs_no_p(folder):
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_type": "regular", "attention_P": None}))
    assert check_folder(folder) == []


def test_a_pointer_in_place_of_weights_is_named(folder):
    file = folder / "vae" / WEIGHTS["vae"]
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    assert the_problem(folder) == f"{file} only points to the weights; `git lfs pull` fetches them"
