"""The text encoder reads whole Qwen2.5-VL checkpoints of both key layouts, and refuses what does not fit."""

import json
import logging
import re
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.pipelines.pipeline_loading_utils import ALL_IMPORTABLE_CLASSES, load_sub_model
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from kandinsky5_nabla.models.text_encoder import QwenTextEncoder
from kandinsky5_nabla.pipeline.precision import compute_dtype, text_encoder_quantization

PUBLISHED = Path(__file__).resolve().parent.parent / "configs" / "demo" / "text_encoder"
WEIGHTS = "model.safetensors"
# What DiffusionPipeline.from_pretrained passes to a transformers model.
DIFFUSERS_KWARGS = {
    "dtype": torch.float32,
    "device_map": None,
    "max_memory": None,
    "offload_folder": None,
    "use_safetensors": True,
    "low_cpu_mem_usage": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a published text_encoder folder, to change."""
    return Path(shutil.copytree(PUBLISHED, tmp_path / "text_encoder"))


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors), folder / WEIGHTS, metadata={"format": "pt"})


def to_newer_layout(tensors: dict) -> dict:
    """Rename the keys as the versions of transformers did that save `model.language_model.*`."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("model."):
            name = name.replace("model.", "model.language_model.", 1)
        elif name.startswith("visual."):
            name = f"model.{name}"
        renamed[name] = tensor
    return renamed


def hidden(encoder: QwenTextEncoder) -> torch.Tensor:
    ids = torch.randint(0, 560, (1, 20), generator=torch.Generator().manual_seed(0))
    return encoder(input_ids=ids, use_cache=False).last_hidden_state


@torch.no_grad()
def whole_model_hidden() -> torch.Tensor:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(PUBLISHED, dtype=torch.float32)
    ids = torch.randint(0, 560, (1, 20), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, output_hidden_states=True).hidden_states[-1]


def test_the_published_file_has_a_vision_tower_an_output_head_and_the_older_keys():
    names = set(load_file(PUBLISHED / WEIGHTS))
    assert "lm_head.weight" in names
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert any(name.startswith("visual.") for name in names)


@pytest.mark.parametrize("layout", ["older", "newer"])
@torch.no_grad()
def test_its_output_is_the_whole_models_last_hidden_state_bit_for_bit(folder, layout):
    if layout == "newer":
        rewrite(folder, to_newer_layout)
    encoder = QwenTextEncoder.from_pretrained(folder, **DIFFUSERS_KWARGS)
    assert torch.equal(hidden(encoder), whole_model_hidden())


def test_neither_the_vision_tower_nor_the_head_is_built_and_nothing_is_warned_of(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        encoder = QwenTextEncoder.from_pretrained(PUBLISHED, **DIFFUSERS_KWARGS)
    assert caplog.records == []
    assert {name.split(".")[0] for name, _ in encoder.named_parameters()} == {"embed_tokens", "layers", "norm"}
    assert not encoder.training
    assert encoder.dtype == torch.float32


def test_the_dtype_of_the_file_is_kept_when_none_is_asked_for():
    assert QwenTextEncoder.from_pretrained(PUBLISHED, dtype=None).dtype == torch.float16


def test_diffusers_loads_it_as_a_component_of_a_pipeline():
    encoder = load_sub_model(
        library_name=QwenTextEncoder.__module__,
        class_name="QwenTextEncoder",
        importable_classes=ALL_IMPORTABLE_CLASSES,
        pipelines=diffusers.pipelines,
        is_pipeline_module=False,
        pipeline_class=None,
        dtype=torch.bfloat16,
        provider=None,
        sess_options=None,
        device_map=None,
        max_memory=None,
        offload_folder=None,
        offload_state_dict=False,
        model_variants={},
        name="text_encoder",
        variant=None,
        low_cpu_mem_usage=True,
        cached_folder=PUBLISHED.parent,
        use_safetensors=True,
        provider_options=None,
        disable_mmap=False,
    )
    assert type(encoder) is QwenTextEncoder
    assert encoder.dtype == torch.bfloat16


@torch.no_grad()
def test_what_it_saved_itself_loads_again(tmp_path):
    encoder = QwenTextEncoder.from_pretrained(PUBLISHED, **DIFFUSERS_KWARGS)
    encoder.save_pretrained(tmp_path)
    again = QwenTextEncoder.from_pretrained(tmp_path, **DIFFUSERS_KWARGS)
    assert torch.equal(hidden(again), hidden(encoder))


@torch.no_grad()
def test_shards_with_an_index_load(tmp_path):
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(PUBLISHED, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    encoder = QwenTextEncoder.from_pretrained(tmp_path, **DIFFUSERS_KWARGS)
    assert torch.equal(hidden(encoder), whole_model_hidden())


@torch.no_grad()
def test_the_flat_config_of_older_checkpoints_loads(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= config.pop("text_config") | {"model_type": "qwen2_5_vl"}
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"]}
    config |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    (folder / "config.json").write_text(json.dumps(config))
    encoder = QwenTextEncoder.from_pretrained(folder, **DIFFUSERS_KWARGS)
    assert torch.equal(hidden(encoder), whole_model_hidden())


def without(name: str):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def test_a_missing_parameter_is_named(folder):
    rewrite(folder, without("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        QwenTextEncoder.from_pretrained(folder, **DIFFUSERS_KWARGS)


def test_a_parameter_of_another_shape_is_named_with_both_shapes(folder):
    rewrite(folder, lambda tensors: tensors | {"model.norm.weight": torch.ones(63)})
    with pytest.raises(ValueError, match=r"norm\.weight has the shape \[63\], the config asks for \[64\]"):
        QwenTextEncoder.from_pretrained(folder, **DIFFUSERS_KWARGS)


def test_a_file_with_more_layers_than_its_config_is_refused(folder):
    rewrite(folder, lambda tensors: tensors | {"model.layers.2.input_layernorm.weight": torch.ones(64)})
    with pytest.raises(ValueError, match=r"layers\.2\.input_layernorm\.weight is not in the model"):
        QwenTextEncoder.from_pretrained(folder, **DIFFUSERS_KWARGS)


def test_another_kind_of_model_is_refused():
    with pytest.raises(ValueError, match="qwen2_5_vl is needed"):
        QwenTextEncoder.from_pretrained(PUBLISHED.parent / "text_encoder_2")


def test_pickled_weights_are_not_read(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(OSError, match="safetensors"):
        QwenTextEncoder.from_pretrained(folder)
    with pytest.raises(ValueError, match="only safetensors"):
        QwenTextEncoder.from_pretrained(folder, use_safetensors=False)


# Relative error of the hidden states, as a norm, beside fp32. bf16 and fp16 round to 8 and 11 bits at each layer. int8
# rounds weights and inputs to 1/127 of a row's largest number: 0.7 % of the usual one each, for rows of 64. nf4 has 16
# levels for 64 weights that are scaled to their largest: 10 % of the usual one. Errors of independent weights neither
# cancel nor add up in a sum, so that a layer's output is as far off as they are; two layers were
# measured at 0.007, 0.0007, 0.015 and 0.14.
TOLERANCES = {"bfloat16": 0.02, "float16": 0.002, "int8": 0.04, "nf4": 0.25}
QUANTISED = ["int8", "nf4"]


def quantised(source: Path, name: str) -> QwenTextEncoder:
    asked = {"dtype": compute_dtype(name, "cpu"), "quantization_config": text_encoder_quantization(name, "cpu")}
    return QwenTextEncoder.from_pretrained(source, **DIFFUSERS_KWARGS | asked)


def linears(encoder: QwenTextEncoder) -> dict[str, torch.nn.Linear]:
    return {name: module for name, module in encoder.named_modules() if isinstance(module, torch.nn.Linear)}


@pytest.mark.parametrize("name", TOLERANCES)
@torch.no_grad()
def test_each_dtype_is_near_fp32_and_is_not_fp32(name):
    expected = hidden(QwenTextEncoder.from_pretrained(PUBLISHED, **DIFFUSERS_KWARGS))
    found = hidden(quantised(PUBLISHED, name))
    assert found.dtype == compute_dtype(name, "cpu")
    error = (found.float() - expected).norm() / expected.norm()
    assert TOLERANCES[name] / 20 < error < TOLERANCES[name]


@pytest.mark.parametrize("name", QUANTISED)
def test_every_linear_layer_is_quantised_and_nothing_else(name):
    encoder, plain = quantised(PUBLISHED, name), QwenTextEncoder.from_pretrained(PUBLISHED, **DIFFUSERS_KWARGS)
    assert linears(encoder).keys() == linears(plain).keys()
    for layer in linears(encoder).values():
        weights = layer.out_features * layer.in_features
        if name == "int8":  # a byte a weight, a scale a row
            assert (layer.weight.nbytes, layer.weight.SCB.numel()) == (weights, layer.out_features)
        else:  # half a byte a weight, a scale for 64
            assert (layer.weight.nbytes, layer.weight.quant_state.absmax.numel()) == (weights // 2, weights // 64)
    rest = {
        key: value for key, value in plain.state_dict().items() if key.removesuffix(".weight") not in linears(plain)
    }
    found = encoder.state_dict()
    assert all(torch.equal(found[key], value) for key, value in rest.items())
    assert {key.split(".")[-2] for key in rest} >= {"embed_tokens", "norm", "q_proj"}  # q_proj's bias


@pytest.mark.parametrize("name", QUANTISED)
@torch.no_grad()
def test_both_layouts_quantise_to_the_same(folder, name):
    expected = hidden(quantised(folder, name))
    rewrite(folder, to_newer_layout)
    assert torch.equal(hidden(quantised(folder, name)), expected)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # transformers': the stored one is used
@pytest.mark.parametrize("name", QUANTISED)
@torch.no_grad()
def test_a_quantised_encoder_that_was_saved_loads_again(tmp_path, name):
    encoder = quantised(PUBLISHED, name)
    encoder.save_pretrained(tmp_path)
    expected = hidden(encoder)
    assert torch.equal(hidden(QwenTextEncoder.from_pretrained(tmp_path, **DIFFUSERS_KWARGS)), expected)
    assert torch.equal(hidden(quantised(tmp_path, name)), expected)


@pytest.mark.parametrize("name", QUANTISED)
@torch.no_grad()
def test_the_language_model_of_a_whole_that_was_saved_quantised_loads(tmp_path, name):
    whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        PUBLISHED, dtype=torch.float32, quantization_config=text_encoder_quantization(name, "cpu")
    )
    whole.save_pretrained(tmp_path)
    encoder = QwenTextEncoder.from_pretrained(tmp_path, **DIFFUSERS_KWARGS)
    assert torch.equal(hidden(encoder), hidden(quantised(PUBLISHED, name)))


MISFITS = {
    r"layers\.1\.mlp\.up_proj\.weight is missing": without("model.layers.1.mlp.up_proj.weight"),
    r"layers\.1\.self_attn\.q_proj\.bias is missing": without("model.layers.1.self_attn.q_proj.bias"),
    r"layers\.0\.self_attn\.q_proj\.weight has the shape \[63, 64\], the config asks for \[64, 64\]": (
        lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.weight": torch.ones(63, 64)}
    ),
    r"layers\.0\.mlp\.up_proj\.weight has the shape \[64, 128\], the config asks for \[128, 64\]": (
        lambda tensors: tensors | {"model.layers.0.mlp.up_proj.weight": torch.ones(64, 128)}
    ),
    r"norm\.weight has the shape \[63\], the config asks for \[64\]": (
        lambda tensors: tensors | {"model.norm.weight": torch.ones(63)}
    ),
    r"layers\.2\.mlp\.up_proj\.weight is not in the model": (
        lambda tensors: tensors | {"model.layers.2.mlp.up_proj.weight": torch.ones(128, 64)}
    ),
    r"layers\.0\.mlp\.up_proj\.weight\.absmax is not in the model": (
        lambda tensors: tensors | {"model.layers.0.mlp.up_proj.weight.absmax": torch.ones(128)}
    ),
}


@pytest.mark.parametrize("name", ["float32", *QUANTISED])
@pytest.mark.parametrize("reason", MISFITS)
def test_what_does_not_fit_is_named_in_every_dtype(folder, reason, name):
    rewrite(folder, MISFITS[reason])
    with pytest.raises(ValueError, match=reason):
        quantised(folder, name)


@pytest.mark.parametrize("name", ["float32", *QUANTISED])
def test_everything_that_does_not_fit_is_named_at_once(folder, name):
    for change in MISFITS.values():
        rewrite(folder, change)
    with pytest.raises(ValueError, match="does not fit its config: ") as error:
        quantised(folder, name)
    problems = str(error.value).split(": ", 1)[1].split("; ")
    assert len(problems) == len(MISFITS)
    assert all(any(re.match(reason, problem.removeprefix("model.")) for problem in problems) for reason in MISFITS)


DAMAGES = {
    "nf4": {
        r"up_proj\.weight has 4096 bytes and 64 scales, not 4096 and 128": (
            "layers.0.mlp.up_proj.weight.absmax",
            lambda scales: scales[:64].clone(),
        ),
        r"up_proj\.weight has 4095 bytes and 128 scales": (
            "layers.0.mlp.up_proj.weight",
            lambda packed: packed[1:].clone(),
        ),
    },
    "int8": {
        r"up_proj\.weight is torch\.int8 with 127 scales, not int8 with 128": (
            "layers.0.mlp.up_proj.SCB",
            lambda scales: scales[1:].clone(),
        ),
        r"up_proj\.weight has the shape \[127, 64\], the config asks for \[128, 64\]": (
            "layers.0.mlp.up_proj.weight",
            lambda weight: weight[1:].clone(),
        ),
    },
}


@pytest.mark.parametrize(("name", "reason"), [(name, reason) for name, cases in DAMAGES.items() for reason in cases])
def test_stored_weights_whose_scales_do_not_fit_are_named(tmp_path, name, reason):
    quantised(PUBLISHED, name).save_pretrained(tmp_path)
    key, damage = DAMAGES[name][reason]
    rewrite(tmp_path, lambda tensors: tensors | {key: damage(tensors[key])})
    with pytest.raises(ValueError, match=reason):
        QwenTextEncoder.from_pretrained(tmp_path, **DIFFUSERS_KWARGS)


@pytest.mark.parametrize(("stored", "asked"), [("int8", "nf4"), ("nf4", "int8")])
def test_a_quantised_encoder_does_not_pass_for_another(tmp_path, stored, asked):
    quantised(PUBLISHED, stored).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"is stored as .*{stored} and cannot become .*{asked}"):
        quantised(tmp_path, asked)


@pytest.mark.parametrize("flat", [True, False])
def test_weights_that_something_else_has_quantised_are_refused(folder, flat):
    config = json.loads((folder / "config.json").read_text())
    if flat:
        config = config["text_config"]
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantised by gptq: only bitsandbytes"):
        QwenTextEncoder.from_pretrained(folder, **DIFFUSERS_KWARGS)
