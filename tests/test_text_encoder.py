"""The text encoder reads whole Qwen2.5-VL checkpoints of both key layouts, and refuses what does not fit."""

import json
import logging
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.pipelines.pipeline_loading_utils import ALL_IMPORTABLE_CLASSES, load_sub_model
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from kandinsky5_nabla.models.text_encoder import QwenTextEncoder

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
