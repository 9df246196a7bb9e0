"""A transformer of the original layout: its config from its shapes, its other parts, and what does not fit together."""

import contextlib
import json
import math
import re
import resource
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch

from kandinsky5_nabla.configs import load_preset, preset_names
from kandinsky5_nabla.models.architecture import config_from_headers
from kandinsky5_nabla.models.headers import read_headers
from kandinsky5_nabla.models.loading import load_single_transformer
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
from kandinsky5_nabla.pipeline.precision import text_encoder_quantization
from kandinsky5_nabla.pipeline.single_file import SOURCES, attention_of, preset_of_file

DEMO = Path(load_preset("demo").model)
DEMO_FILE = DEMO / "transformer" / "diffusion_pytorch_model.safetensors"
PARTS = ("vae", "text_encoder", "text_encoder_2")

# The published sizes, with which the parameters are as many as the authors say.
TEXT = {"in_visual_dim": 16, "out_visual_dim": 16, "in_text_dim": 3584, "in_text_dim2": 768}
SHARED = {**TEXT, "patch_size": (1, 2, 2), "visual_cond": True}
LITE = SHARED | {"time_dim": 512, "model_dim": 1792, "ff_dim": 7168, "axes_dims": (16, 24, 24)}
LITE |= {"num_text_blocks": 2, "num_visual_blocks": 32}
PRO = SHARED | {"time_dim": 1024, "model_dim": 4096, "ff_dim": 16384, "axes_dims": (32, 48, 48)}
PRO |= {"num_text_blocks": 4, "num_visual_blocks": 60}
PUBLISHED = {"lite": (LITE, 2.008), "pro": (PRO, 19.311)}


def shapes_of(config):
    with torch.device("meta"):
        return {name: list(tensor.shape) for name, tensor in Kandinsky5Transformer(**config).state_dict().items()}


def write_shapes(file, shapes, dtype="BF16"):
    """Writes a legal file whose tensors are all zero and take no room on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
    return file


def config_of(file, **attention):
    return config_from_headers(read_headers([file]), **attention)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_are_as_many_as_published_and_the_config_follows_from_their_shapes(name, tmp_path):
    config, billions = PUBLISHED[name]
    shapes = shapes_of(config)
    parameters = sum(map(math.prod, shapes.values()))
    assert round(parameters / 1e9, 3) == billions
    file = write_shapes(tmp_path / "model.safetensors", shapes)
    assert file.stat().st_size > 2 * parameters
    assert config_of(file, attention_type="nabla") == {**config, "attention_type": "nabla"}


SMALL = {**SHARED, "in_text_dim": 24, "in_text_dim2": 20, "time_dim": 32, "model_dim": 64, "ff_dim": 96}
SMALL |= {"num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (8, 12, 12)}
VARIANTS = [
    {},
    {"visual_cond": False},
    {"num_text_blocks": 0},
    {"num_visual_blocks": 12},
    {"axes_dims": (4, 6, 6)},
    {"in_visual_dim": 3, "out_visual_dim": 3},
    {"time_dim": 64, "ff_dim": 64, "in_text_dim": 64, "in_text_dim2": 64},  # all alike
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_size_is_told_apart_by_the_shapes(changes, tmp_path):
    config = SMALL | changes
    assert config_of(write_shapes(tmp_path / "model.safetensors", shapes_of(config))) == config


def test_the_demos_config_follows_from_its_file_and_its_preset():
    published = json.loads((DEMO / "transformer" / "config.json").read_text())
    config = config_of(DEMO_FILE, **attention_of(load_preset("demo")))
    assert json.loads(json.dumps(config)) == {k: v for k, v in published.items() if not k.startswith("_")}


@pytest.mark.parametrize("name", preset_names())
def test_every_presets_attention_is_one_that_the_transformer_knows(name):
    preset = load_preset(name)
    with torch.device("meta"):
        model = Kandinsky5Transformer(**(SMALL | attention_of(preset)))
    assert model.config["attention_P"] == preset.nabla_P
    assert model.attention_backend.get_name() == {"nabla": "NABLA_ATTN", "dense": "SDPA"}[preset.attention]


FIRST, NORM = "visual_embeddings.in_layer.weight", "visual_transformer_blocks.0.self_attention.query_norm.weight"
LAST = "visual_transformer_blocks.1.self_attention.query_norm.weight"
FOREIGN = {
    "a LoRA": (lambda s: {f"{FIRST}.lora_A.weight": [4, 132]}, f"looked for {FIRST} .*it is a LoRA"),
    "nothing": (lambda s: {}, "is no transformer of Kandinsky 5|no transformer"),
    "a tensor less": (lambda s: s.pop(FIRST) and s, f"looked for {FIRST} with 2 axes; it holds"),
    "other axes": (lambda s: {**s, FIRST: [4, 4, 4]}, f"looked for {FIRST} with 2 axes"),
    "renamed": (lambda s: {f"model.{name}": shape for name, shape in s.items()}, "such as model"),
    "other patches": (lambda s: {**s, FIRST: [64, 130]}, r"\[64, 130\] has to read C or"),
    "other channels": (lambda s: {**s, FIRST: [64, 36]}, r"\[64, 36\] has to read C or, with visual_cond, 2 C \+ 1"),
    "an odd head": (lambda s: {**s, NORM: [24]}, "a head dim is a multiple of 16"),
    "a gap": (lambda s: {n.replace("blocks.1.", "blocks.2."): v for n, v in s.items()}, r"blocks\.1 is missing"),
    "a block too far": (lambda s: {**s, LAST.replace("1", "999999999"): [32]}, r"there is a .*\.999999999"),
}


@pytest.mark.parametrize(("change", "problem"), FOREIGN.values(), ids=FOREIGN)
def test_a_file_that_tells_no_config_is_refused_with_what_was_looked_for(change, problem, tmp_path):
    file = write_shapes(tmp_path / "model.safetensors", change(shapes_of(SMALL)))
    with pytest.raises(ValueError, match=problem):
        config_of(file)


@pytest.mark.parametrize("part", PARTS)
def test_another_part_of_the_checkpoint_is_no_transformer(part):
    (file,) = (DEMO / part).glob("*.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"{file} is no transformer of Kandinsky 5")):
        config_of(file)


@contextlib.contextmanager
def data_limited_to(extra_bytes):
    """Limits what is allocated; mapping a file read-only is free, however large it is."""
    status = Path("/proc/self/status").read_text()
    used = 1024 * int(re.search(r"VmData:\s+(\d+)", status)[1])
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + extra_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("weights", "config"), [("pro", "lite"), ("lite", "pro")])
def test_weights_of_one_model_under_the_config_of_the_other_are_refused_before_memory_is_taken(
    weights, config, tmp_path
):
    file = write_shapes(tmp_path / "model.safetensors", shapes_of(PUBLISHED[weights][0]))
    config = PUBLISHED[config][0]
    theirs, asked = 2 * PUBLISHED[weights][0]["model_dim"], 2 * config["model_dim"]
    both = rf"modulation.out_layer.bias has shape \[{theirs}\], the config asks for \[{asked}\]"
    with data_limited_to(2**28), pytest.raises(ValueError, match=both):
        load_single_transformer(file, config, torch.bfloat16)


@pytest.mark.parametrize("key", ["num_text_blocks", "num_visual_blocks"])
def test_more_blocks_than_the_file_has_tensors_are_refused_before_one_is_built(key, tmp_path):
    file = write_shapes(tmp_path / "model.safetensors", shapes_of(SMALL))
    with pytest.raises(ValueError, match=f"{key} is 1000000000, and the files hold"):
        load_single_transformer(file, SMALL | {key: 10**9}, None)


def from_file(file=DEMO_FILE, **kwargs):
    return Kandinsky5NablaPipeline.from_single_file(file, **({"preset": "demo"} | dict.fromkeys(PARTS, DEMO) | kwargs))


def assert_is_the_demo(pipe, expected):
    for name in ("transformer", *PARTS):
        state = getattr(pipe, name).state_dict()
        assert state.keys() == getattr(expected, name).state_dict().keys()
        for key, tensor in getattr(expected, name).state_dict().items():
            assert torch.equal(state[key], tensor), f"{name} {key}"
    for name in ("tokenizer", "tokenizer_2"):
        assert getattr(pipe, name)("a red circle").input_ids == getattr(expected, name)("a red circle").input_ids
    assert pipe.defaults == expected.defaults
    assert pipe.resolve_settings() == expected.resolve_settings()
    attention = {key for key in expected.transformer.config if key.startswith("attention_")}
    assert {key: pipe.transformer.config[key] for key in attention} == {
        key: expected.transformer.config[key] for key in attention
    }


def test_a_file_with_the_parts_of_a_whole_checkpoint_is_that_checkpoint(pipe):
    assert_is_the_demo(from_file(), pipe)


@pytest.mark.parametrize("without", [("text_encoder", "text_encoder_2"), ("text_encoder",)])
def test_text_encoders_that_are_not_needed_are_neither_looked_for_nor_loaded(without, pipe, tmp_path):
    bare = from_file(without=without, **dict.fromkeys(without, tmp_path / "nowhere"))
    assert bare.text_encoder is bare.tokenizer is None
    assert (bare.text_encoder_2 is None) == (bare.tokenizer_2 is None) == ("text_encoder_2" in without)
    assert bare.resolve_settings() == pipe.resolve_settings()


def test_the_dtypes_are_those_that_were_asked_for_and_the_vaes_is_fp32():
    half = from_file(torch_dtype=torch.bfloat16, text_encoder_dtype=torch.float16)
    assert half.transformer.dtype == half.text_encoder_2.dtype == torch.bfloat16
    assert half.transformer.time_embeddings.in_layer.weight.dtype == half.vae.dtype == torch.float32
    assert half.text_encoder.dtype == torch.float16


def test_the_text_encoder_may_be_quantised():
    pipe = from_file(quantization_config=text_encoder_quantization("int8", "cpu"))
    assert pipe.text_encoder.layers[0].mlp.up_proj.weight.dtype == torch.int8


@pytest.fixture
def encoders(tmp_path):
    """The text encoders with their tokenizers in the same folder, as in their own repositories."""
    folders = {}
    for part, tokenizer in (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2")):
        folders[part] = shutil.copytree(DEMO / part, tmp_path / part)
        shutil.copytree(DEMO / tokenizer, folders[part], dirs_exist_ok=True)
    return folders


def test_a_part_may_be_given_itself_with_its_tokenizer_in_it_or_beside_it(pipe, encoders):
    own = {"vae": DEMO / "vae", "text_encoder": str(DEMO / "text_encoder")}
    assert_is_the_demo(from_file(**own, text_encoder_2=encoders["text_encoder_2"]), pipe)


@pytest.fixture
def cache(tmp_path, encoders):
    """A cache of the Hub's client that holds the repositories of `SOURCES`."""
    folders = {**encoders, "vae": DEMO / "vae"}
    for part, source in SOURCES.items():
        repository = tmp_path / "hub" / f"models--{source.repository.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        shutil.copytree(folders[part], repository / "snapshots" / ("0" * 40) / source.subfolder)
    return tmp_path / "hub"


def test_parts_that_are_not_given_come_from_their_repositories_offline_from_the_cache(pipe, cache):
    assert_is_the_demo(from_file(**dict.fromkeys(PARTS), cache_dir=cache, offline=True), pipe)


@pytest.mark.parametrize("part", PARTS)
def test_a_repository_that_is_not_in_the_cache_is_named_offline(part, cache):
    shutil.rmtree(next(cache.glob(f"*{SOURCES[part].repository.partition('/')[2]}")))
    with pytest.raises(FileNotFoundError, match=f"{SOURCES[part].repository} is not in the cache"):
        from_file(**dict.fromkeys(PARTS), cache_dir=cache, offline=True)


@pytest.mark.parametrize("part", PARTS)
def test_a_repositorys_weights_that_are_not_in_the_cache_are_named_offline(part, cache):
    (weights,) = cache.glob(f"*{SOURCES[part].repository.partition('/')[2]}/**/*.safetensors")
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=f"{weights.name} of {SOURCES[part].repository}"):
        from_file(**dict.fromkeys(PARTS), cache_dir=cache, offline=True)


def test_parts_of_other_widths_are_all_named_before_any_weights_are_read(tmp_path):
    folder = shutil.copytree(DEMO, tmp_path / "checkpoint")
    for file in folder.rglob("*.safetensors"):
        file.write_bytes(b"no weights")
    keys = {
        "vae": ("latent_channels", 16),
        "text_encoder": ("hidden_size", 3584),
        "text_encoder_2": ("hidden_size", 768),
    }
    for part, (key, value) in keys.items():
        config = json.loads((folder / part / "config.json").read_text())
        config.get("text_config", config)[key] = value
        (folder / part / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="cannot be loaded together") as error:
        from_file(**dict.fromkeys(PARTS, folder))
    assert "text_encoder has hidden_size 3584, and the transformer has in_text_dim 64" in str(error.value)
    assert "text_encoder_2 has hidden_size 768, and the transformer has in_text_dim2 64" in str(error.value)
    assert "vae has latent_channels 16, and the transformer has out_visual_dim 6" in str(error.value)


def test_a_part_that_is_unsafe_or_does_not_fit_its_config_is_refused(tmp_path):
    folder = shutil.copytree(DEMO, tmp_path / "checkpoint")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").rename(folder / "vae" / "pytorch_model.bin")
    config = json.loads((folder / "tokenizer" / "tokenizer_config.json").read_text())
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config | {"auto_map": {"a": "b.c"}}))
    with pytest.raises(ValueError, match=r"(?s)pytorch_model\.bin alone.*auto_map asks for code"):
        from_file(**dict.fromkeys(PARTS, folder))


REFUSED = {
    "missing": ("missing.safetensors", {}, FileNotFoundError, "missing.safetensors is missing"),
    "a folder": ("", {}, ValueError, "is a folder; from_pretrained"),
    "a pickle": ("model.ckpt", {}, ValueError, "only .safetensors files are read"),
    "no preset": (
        "model.safetensors",
        {"preset": None},
        ValueError,
        "no preset knows .*: demo, lite-t2v-10s-distilled16",
    ),
    "a wrong preset": ("model.safetensors", {"preset": "light"}, ValueError, "unknown preset 'light'"),
    "no VAE": ("model.safetensors", {"without": ["vae"]}, ValueError, "only text encoders can be left out"),
    "a dtype": ("model.safetensors", {"torch_dtype": torch.int8}, ValueError, "torch.float32, torch.bfloat16"),
    "no part": ("model.safetensors", {"vae": "nowhere"}, FileNotFoundError, r"vae nowhere: neither nowhere/vae/config"),
    "no tokenizer": ("model.safetensors", {"text_encoder": "alone"}, FileNotFoundError, "has a tokenizer"),
}


@pytest.mark.parametrize(("name", "changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_loaded_is_refused_with_the_rule(name, changes, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("model.safetensors", "model.ckpt"):
        Path(file).symlink_to(DEMO_FILE)
    shutil.copytree(DEMO / "text_encoder", "alone")
    with pytest.raises(error, match=message):
        from_file(tmp_path / name, **changes)


@pytest.mark.parametrize("name", [name for name in preset_names() if load_preset(name).original_file])
def test_the_preset_is_found_by_the_files_name(name):
    preset = load_preset(name)
    found = preset_of_file(Path("somewhere") / preset.original_file, None)
    assert (found.original_file, found.model) == (preset.original_file, preset.model)
    assert preset_of_file(Path("somewhere") / preset.original_file, name) == preset
