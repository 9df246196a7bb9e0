"""Converting between the layouts: the same bytes both ways, all or nothing, and nothing lost."""

import contextlib
import json
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from diffusers import Kandinsky5Transformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
from kandinsky5_nabla.scripts.convert import main

DEMO = Path(load_preset("demo").model)
DEMO_FILE = DEMO / "transformer" / "diffusion_pytorch_model.safetensors"
FORMAT = {"format": "pt"}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command line in a folder of its own; returns its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def convert(*arguments):
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return convert


def tree(folder=Path()):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def raw_tensors(files):
    """Returns dtype, shape and bytes of all tensors."""
    raw = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                tensor = weights.get_tensor(name)
                raw[name] = (
                    tensor.dtype,
                    tensor.shape,
                    tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes(),
                )
    return raw


@pytest.mark.parametrize(("size", "files"), [("5GB", 1), ("1MB", 4), ("1KB", 50)])
def test_the_demo_is_the_same_bytes_after_both_ways_in_any_number_of_files(size, files, run):
    assert run(DEMO, "original.safetensors")[0] == 0
    assert Path("original.safetensors").read_bytes() == DEMO_FILE.read_bytes()
    code, printed = run("original.safetensors", "folder", "--config", "demo", "--max-shard-size", size)
    assert code == 0, printed
    weights = list(Path("folder", "transformer").glob("*.safetensors"))
    assert len(weights) >= files if files > 1 else len(weights) == 1
    assert raw_tensors(weights) == raw_tensors([DEMO_FILE])
    assert [safe_open(file, framework="pt").metadata() for file in weights] == [FORMAT] * len(weights)
    assert run("folder", "back.safetensors")[0] == 0
    assert Path("back.safetensors").read_bytes() == DEMO_FILE.read_bytes()


def test_the_folder_has_the_demos_config_and_both_libraries_open_it(run):
    assert run(DEMO_FILE, "folder", "--config", "demo", "--max-shard-size", "1MB")[0] == 0
    config = json.loads(Path("folder", "transformer", "config.json").read_text())
    assert config == json.loads((DEMO / "transformer" / "config.json").read_text())
    expected = load_file(DEMO_FILE)
    for cls in (Kandinsky5Transformer, Kandinsky5Transformer3DModel):
        state = cls.from_pretrained("folder", subfolder="transformer").state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor.float()) for name, tensor in expected.items())


def test_with_the_other_parts_the_folder_is_the_whole_checkpoint(run, pipe):
    code, printed = run(DEMO_FILE, "folder", "--config", "demo", "--parts", DEMO)
    assert code == 0, printed
    files = {name.removeprefix("folder/"): content for name, content in tree(Path("folder")).items()}
    expected = {name.removeprefix(f"{DEMO}/"): content for name, content in tree(DEMO).items()}
    assert files.keys() == expected.keys() - {"README.md"}
    for name, content in files.items():
        same = (
            json.loads(content) == json.loads(expected[name]) if name.endswith(".json") else content == expected[name]
        )
        assert same, name
    again = Kandinsky5NablaPipeline.from_pretrained("folder")
    assert again.resolve_settings() == pipe.resolve_settings()


def test_shift_and_preset_are_those_of_the_transformer_and_not_of_the_parts(run, tmp_path):
    preset = load_preset("lite-t2v-10s-sft")
    shutil.copyfile(DEMO_FILE, preset.original_file)
    assert run(preset.original_file, "folder", "--parts", DEMO)[0] == 0
    assert json.loads(Path("folder", "scheduler", "scheduler_config.json").read_text())["shift"] == preset.shift == 10
    assert json.loads(Path("folder", "model_index.json").read_text())["preset"] == preset.name
    config = json.loads(Path("folder", "transformer", "config.json").read_text())
    assert (config["attention_P"], config["attention_wT"], config["attention_wH"]) == (0.9, 11, 3)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
METADATA = [FORMAT, None, {}, {"author": 'é " \\ \n'}]


@pytest.mark.parametrize("size", ["5GB", "1MB"])
@pytest.mark.parametrize("metadata", METADATA, ids=str)
def test_a_file_of_any_dtypes_and_metadata_is_the_same_bytes_after_both_ways(metadata, size, run):
    tensors = load_file(DEMO_FILE)
    mixed = {name: tensor.to(DTYPES[i % len(DTYPES)]) for i, (name, tensor) in enumerate(tensors.items())}
    save_file(mixed, "original.safetensors", metadata=metadata)
    assert run("original.safetensors", "folder", "--config", "demo", "--max-shard-size", size)[0] == 0
    assert run("folder", "back.safetensors")[0] == 0
    assert Path("back.safetensors").read_bytes() == Path("original.safetensors").read_bytes()


def test_the_transformers_own_folder_is_converted_like_the_whole_checkpoint(run):
    assert run(DEMO / "transformer", "original.safetensors", "--to", "original")[0] == 0
    assert Path("original.safetensors").read_bytes() == DEMO_FILE.read_bytes()


@pytest.mark.parametrize("direction", ["original", "diffusers"])
def test_what_exists_is_replaced_only_when_asked(direction, run):
    source, dest = (DEMO, Path("made.safetensors")) if direction == "original" else (DEMO_FILE, Path("made"))
    preset = () if direction == "original" else ("--config", "demo")
    if direction == "original":
        dest.write_text("mine")
    else:
        (dest / "vae").mkdir(parents=True)
        (dest / "vae" / "mine").write_text("mine")
    before = tree()
    code, printed = run(source, dest, *preset)
    assert (code, tree()) == (2, before)
    assert "exists; choose another name or add --overwrite" in printed
    assert run(source, dest, *preset, "--overwrite")[0] == 0
    after = tree()
    assert after.keys() == (
        {"made.safetensors"}
        if direction == "original"
        else {"made/transformer/config.json", "made/transformer/diffusion_pytorch_model.safetensors"}
    )
    assert os.listdir() == [dest.name]


def test_an_empty_folder_may_become_the_checkpoint(run):
    Path("made").mkdir()
    assert run(DEMO_FILE, "made", "--config", "demo")[0] == 0
    assert os.listdir("made") == ["transformer"]


def demo_with(**changes):
    """Makes a copy of the demo's transformer with another config."""
    shutil.copytree(DEMO / "transformer", "changed")
    config = json.loads(Path("changed", "config.json").read_text())
    Path("changed", "config.json").write_text(json.dumps(config | changes))


def other_widths():
    shutil.copytree(DEMO, "parts")
    config = json.loads(Path("parts", "vae", "config.json").read_text())
    Path("parts", "vae", "config.json").write_text(json.dumps(config | {"latent_channels": 16}))


def users_folder():
    Path("made").mkdir()
    Path("made", "thesis.tex").write_text("mine")


def shard_outside():
    shutil.copytree(DEMO / "transformer", "changed")
    Path("changed", "diffusion_pytorch_model.safetensors").rename("moved.safetensors")
    index = {"weight_map": {"a": "../moved.safetensors"}}
    Path("changed", "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


VAE = DEMO / "vae" / "diffusion_pytorch_model.safetensors"
NO_CHANGE = os.getcwd
REFUSED = {
    "no source": (NO_CHANGE, ["nowhere", "made"], "nowhere is missing"),
    "no argument": (NO_CHANGE, [DEMO], "the following arguments are required: DEST"),
    "no preset": (NO_CHANGE, [DEMO_FILE, "made"], "no preset knows a file of this name"),
    "a wrong preset": (NO_CHANGE, [DEMO_FILE, "made", "--config", "light"], "unknown preset 'light'"),
    "a VAE": (NO_CHANGE, [VAE, "made", "--config", "demo"], "is no transformer of Kandinsky 5"),
    "a layout it has": (NO_CHANGE, [DEMO, "made", "--to", "diffusers"], "has that layout"),
    "a size": (NO_CHANGE, [DEMO_FILE, "made", "--config", "demo", "--max-shard-size", "5 shoes"], "shoes"),
    "no folder": (NO_CHANGE, [DEMO_FILE, "nowhere/made", "--config", "demo"], "nowhere: does not exist"),
    "another name": (NO_CHANGE, [DEMO, "made.bin"], "must be a name that ends in .safetensors"),
    "parts for a file": (
        NO_CHANGE,
        [DEMO, "made.safetensors", "--parts", DEMO],
        "--parts: is for the Diffusers layout",
    ),
    "no parts": (NO_CHANGE, [DEMO_FILE, "made", "--config", "demo", "--parts", "nowhere"], "nowhere is no folder"),
    "misfit": (lambda: demo_with(ff_dim=999), ["changed", "made.safetensors"], "the config asks for [999, 128]"),
    "unknown key": (lambda: demo_with(sinks=4), ["changed", "made.safetensors"], "unknown keys sinks"),
    "code": (lambda: demo_with(auto_map={"a": "b"}), ["changed", "made.safetensors"], "auto_map asks for code"),
    "outside": (shard_outside, ["changed", "made.safetensors"], "shards lie beside their index"),
    "widths": (other_widths, [DEMO_FILE, "made", "--config", "demo", "--parts", "parts"], "vae has latent_channels 16"),
    "no checkpoint": (
        users_folder,
        [DEMO_FILE, "made", "--config", "demo", "--overwrite"],
        "holds thesis.tex, which no",
    ),
    "into itself": (lambda: demo_with(), ["changed", "changed/made.safetensors"], "holds or lies in changed"),
}


@pytest.mark.parametrize(("prepare", "arguments", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_converted_is_refused_and_nothing_is_written(prepare, arguments, problem, run):
    prepare()
    before = tree()
    code, printed = run(*arguments)
    assert code == 2, printed
    assert problem in printed
    assert tree() == before


def test_all_problems_are_reported_at_once(run):
    other_widths()
    code, printed = run(DEMO_FILE, "nowhere/made", "--config", "demo", "--parts", "parts")
    assert code == 2
    assert "does not exist" in printed
    assert "latent_channels 16" in printed


@contextlib.contextmanager
def limited(kind, size):
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)


@pytest.mark.skipif(sys.platform == "win32", reason="limits of Unix")
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("direction", ["original", "diffusers"])
def test_what_cannot_be_written_to_its_end_leaves_everything_as_it_was(direction, exists, run):
    arguments = [DEMO, "made.safetensors"] if direction == "original" else [DEMO_FILE, "made", "--config", "demo"]
    if exists:
        assert run(*arguments)[0] == 0
    before = tree()
    with limited(resource.RLIMIT_FSIZE, 2**20):
        code, printed = run(*arguments, "--overwrite")
    assert code == 1, printed
    assert "File too large" in printed
    assert tree() == before
    assert os.listdir() == ([arguments[1]] if exists else [])
