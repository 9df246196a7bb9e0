"""Loading and saving the transformer: both ways between diffusers and us, strict, and in no more memory than needed."""

import contextlib
import json
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from diffusers import Kandinsky5Transformer3DModel
from safetensors.torch import load_file, save_file

from kandinsky5_nabla.models.headers import DIFFUSERS_WEIGHTS as WEIGHTS
from kandinsky5_nabla.models.loading import load_single_transformer
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer

TOY = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 24,
    "in_text_dim2": 20,
    "time_dim": 32,
    "model_dim": 64,
    "ff_dim": 96,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (8, 12, 12),
    "attention_type": "nabla",
    "attention_P": 0.9,
}
SHARD_SIZE = "100KB"


def make_model(cls=Kandinsky5Transformer, seed=0, **config):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(**{**TOY, **config})
        for parameter in model.parameters():
            parameter.data.normal_()
    return model.eval()


@pytest.fixture
def folder(tmp_path):
    make_model().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    make_model().save_pretrained(tmp_path, max_shard_size=SHARD_SIZE)
    return tmp_path


def assert_same_weights(actual, expected):
    actual, expected = actual.state_dict(), expected.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name  # raises where a tensor is still on meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_size", ["1GB", SHARD_SIZE])
def test_what_was_saved_is_loaded_bit_for_bit_from_one_file_or_from_shards(shard_size, dtype, tmp_path):
    model = make_model().to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 if shard_size == SHARD_SIZE else (tmp_path / WEIGHTS).is_file()
    loaded = Kandinsky5Transformer.from_pretrained(tmp_path, torch_dtype=dtype)
    assert_same_weights(loaded, model)
    assert not loaded.training
    assert {key: loaded.config[key] for key in TOY} == {**TOY, "axes_dims": list(TOY["axes_dims"])}


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_a_single_file_is_loaded_as_its_folder_is(dtype, folder):
    loaded = load_single_transformer(folder / WEIGHTS, TOY, dtype)
    assert_same_weights(loaded, Kandinsky5Transformer.from_pretrained(folder, torch_dtype=dtype))
    assert not loaded.training


@pytest.mark.parametrize("shard_size", ["1GB", SHARD_SIZE])
def test_diffusers_opens_what_we_save(shard_size, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert json.loads((tmp_path / "config.json").read_text())["_class_name"] == "Kandinsky5Transformer3DModel"
    theirs, report = Kandinsky5Transformer3DModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert_same_weights(theirs, model)


@pytest.mark.parametrize("shard_size", ["1GB", SHARD_SIZE])
def test_we_open_what_diffusers_saves(shard_size, tmp_path):
    theirs = make_model(Kandinsky5Transformer3DModel)
    theirs.save_pretrained(tmp_path / "transformer", max_shard_size=shard_size)
    assert_same_weights(Kandinsky5Transformer.from_pretrained(tmp_path, subfolder="transformer"), theirs)


@pytest.mark.parametrize("keyword", ["torch_dtype", "dtype"])
def test_loading_in_half_precision_is_casting_after_loading(keyword, folder):
    loaded = Kandinsky5Transformer.from_pretrained(folder, **{keyword: torch.bfloat16})
    assert_same_weights(loaded, make_model().to(torch.bfloat16))
    assert loaded.time_embeddings.in_layer.weight.dtype == torch.float32
    assert loaded.out_layer.out_layer.weight.dtype == torch.bfloat16


def test_without_a_dtype_half_precision_files_are_loaded_in_fp32(tmp_path):
    model = make_model().half()
    model.save_pretrained(tmp_path)
    assert_same_weights(Kandinsky5Transformer.from_pretrained(tmp_path), model.float())


def test_a_model_can_be_saved_over_its_own_files_and_changed_without_changing_them(folder):
    model = Kandinsky5Transformer.from_pretrained(folder)  # fp32 weights lie in the mapped file
    model.save_pretrained(folder)
    assert_same_weights(model, make_model())
    model.out_layer.out_layer.weight.data.zero_()
    assert_same_weights(Kandinsky5Transformer.from_pretrained(folder), make_model())


def test_the_arguments_that_diffusers_passes_to_every_model_are_accepted(folder):
    implied = dict.fromkeys(("device_map", "max_memory", "offload_folder", "variant", "use_safetensors"))
    loaded = Kandinsky5Transformer.from_pretrained(
        folder, low_cpu_mem_usage=True, offload_state_dict=False, use_flashpack=False, disable_mmap=False, **implied
    )
    assert_same_weights(loaded, make_model())


REFUSED = {
    "device_map": ("auto", "device_map='auto': only None is supported"),
    "variant": ("fp16", "variant='fp16': only None is supported"),
    "use_safetensors": (False, "use_safetensors=False: only None or True is supported"),
    "low_cpu_mem_usage": (False, "low_cpu_mem_usage=False: only None or True is supported"),
    "ignore_mismatched_sizes": (True, "ignore_mismatched_sizes=True: no such argument"),
    "torch_dtype": (torch.int8, "torch.float32, torch.bfloat16, torch.float16 are supported"),
    "dtype": ("bfloat16", "'bfloat16': torch.float32, torch.bfloat16, torch.float16 are supported"),
}


@pytest.mark.parametrize(("argument", "value", "rule"), [(name, *rest) for name, rest in REFUSED.items()])
def test_an_argument_that_cannot_be_honoured_is_refused_with_the_rule(argument, value, rule, folder):
    with pytest.raises(ValueError, match=rule):
        Kandinsky5Transformer.from_pretrained(folder, **{argument: value})


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, edit):
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def edit_index(folder, edit):
    index = json.loads((folder / f"{WEIGHTS}.index.json").read_text())
    edit(index)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


BIAS = "out_layer.out_layer.bias"
BAD_WEIGHTS = {
    "missing": (lambda tensors: tensors.pop(BIAS), f"in 1 tensors: {BIAS} is missing"),
    "unexpected": (lambda tensors: tensors.update(extra=torch.ones(1)), "in 1 tensors: extra is unexpected"),
    "shape": (
        lambda tensors: tensors.update({BIAS: torch.ones(5)}),
        rf"{BIAS} has shape \[5\], the config asks for \[16\]",
    ),
    "integers": (
        lambda tensors: tensors.update({BIAS: torch.ones(16, dtype=torch.int8)}),
        f"{BIAS} is I8, not floating point",
    ),
}


@pytest.mark.parametrize(("edit", "problem"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_weights_that_do_not_fit_the_config_are_refused_by_name(edit, problem, folder):
    edit_weights(folder, edit)
    with pytest.raises(ValueError, match=problem):
        Kandinsky5Transformer.from_pretrained(folder)
    with pytest.raises(ValueError, match=problem):
        load_single_transformer(folder / WEIGHTS, TOY, None)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_visual_blocks": 10**9}, "num_visual_blocks is 1000000000, and the files hold"),
        ({"num_text_blocks": 10**9}, "num_text_blocks is 1000000000, and the files hold"),
        ({"model_dim": 10**30 * 32}, "cannot be built"),
        ({"ff_dim": "wide"}, "cannot be built"),
    ],
)
def test_a_config_that_no_memory_or_time_would_do_for_is_refused_at_once(changes, problem, folder):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=problem):
        Kandinsky5Transformer.from_pretrained(folder)


def test_a_config_with_a_key_that_we_do_not_know_is_refused(folder):
    edit_config(folder, attention_sinks=4)
    with pytest.raises(ValueError, match=r"config\.json: unknown keys attention_sinks"):
        Kandinsky5Transformer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_folder_without_config_or_weights_is_refused_by_the_file(name, folder):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        Kandinsky5Transformer.from_pretrained(folder)


def test_a_shard_that_is_missing_is_named_before_anything_is_read(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"missing: {shard.name}"):
        Kandinsky5Transformer.from_pretrained(sharded)


@pytest.mark.parametrize("remaining", [-1, 20, 4, 0])
def test_a_shard_that_is_cut_short_is_named(remaining, sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:remaining])
    with pytest.raises(ValueError, match=f"{shard.name} is cut short or damaged"):
        Kandinsky5Transformer.from_pretrained(sharded)


@pytest.mark.parametrize("outside", ["../outside.safetensors", "/outside.safetensors", "deeper/outside.safetensors"])
def test_an_index_that_points_outside_its_folder_is_refused(outside, sharded):
    edit_index(sharded, lambda index: index["weight_map"].update({BIAS: outside}))
    with pytest.raises(ValueError, match=f"names {outside}; shards lie beside their index"):
        Kandinsky5Transformer.from_pretrained(sharded)


def test_an_index_without_a_weight_map_is_refused(sharded):
    edit_index(sharded, lambda index: index.pop("weight_map"))
    with pytest.raises(ValueError, match="has no weight_map"):
        Kandinsky5Transformer.from_pretrained(sharded)


@contextlib.contextmanager
def address_space_limited_to(extra_bytes):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_weights_of_another_size_are_refused_with_both_shapes_before_memory_is_taken(tmp_path):
    make_model().save_pretrained(tmp_path)
    edit_config(tmp_path, model_dim=1792, ff_dim=7168, num_visual_blocks=32, axes_dims=[16, 24, 24])  # Lite: 8 GB
    both = r"out_layer.out_layer.weight has shape \[16, 64\], the config asks for \[16, 1792\]"
    with address_space_limited_to(2**30), pytest.raises(ValueError, match=both):
        Kandinsky5Transformer.from_pretrained(tmp_path)


@linux
def test_loading_takes_the_memory_of_the_weights_once(tmp_path):
    make_model(model_dim=1024, ff_dim=4096, axes_dims=(32, 48, 48)).save_pretrained(tmp_path)
    script = f"""
        import torch
        from kandinsky5_nabla.models.transformer import Kandinsky5Transformer

        def memory(key):
            lines = open("/proc/self/status").read().splitlines()
            return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

        before = memory("VmRSS")
        model = Kandinsky5Transformer.from_pretrained({str(tmp_path)!r})
        total = sum(parameter.sum() for parameter in model.parameters())  # reads every page
        print(memory("VmHWM") - before)
        """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    size = (tmp_path / WEIGHTS).stat().st_size
    assert size > 100e6
    assert 0.9 * size < int(result.stdout) < 1.5 * size  # pages of the mapped file count as well
