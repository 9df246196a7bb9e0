"""Loading and saving whole pipelines: the published layout, the classes that are allowed, the preset that is found."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from kandinsky5_nabla import configs
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
from kandinsky5_nabla.pipeline.text import DEFAULT_NEGATIVE_PROMPT

DEMO = Path(configs.__file__).parent / "demo"


def load(source, **kwargs):
    pipe = Kandinsky5NablaPipeline.from_pretrained(source, **kwargs)
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.set_attention_backend("NABLA_REFERENCE")
    return pipe


def latents_of(pipe, *args, **kwargs):
    size = {"height": 128, "width": 128, "num_frames": 5, "num_inference_steps": 2}
    return pipe(*args, **size, seed=7, output_type="latent", **kwargs).frames


def embeddings(pipe, prompt, prefix=""):
    text = pipe.encode_prompt([prompt])
    return {
        f"{prefix}prompt_embeds": text.prompt_embeds,
        f"{prefix}prompt_embeds_mask": text.mask,
        f"{prefix}pooled_prompt_embeds": text.pooled,
    }


def test_what_is_saved_gives_the_same_video_and_opens_in_diffusers(pipe, tmp_path):
    expected = latents_of(pipe, "a circle")
    pipe.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.defaults.name == "demo"
    for name, tensor in pipe.transformer.state_dict().items():
        assert torch.equal(again.transformer.state_dict()[name], tensor)
    # Weights are mapped from the file, and the CPU's matrix products round by the alignment of what they read.
    torch.testing.assert_close(latents_of(again, "a circle"), expected, rtol=0, atol=1e-4)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == "Kandinsky5T2VPipeline"
    assert index["transformer"] == ["diffusers", "Kandinsky5Transformer3DModel"]
    theirs = DiffusionPipeline.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "Kandinsky5T2VPipeline"
    for name, tensor in pipe.transformer.state_dict().items():
        assert torch.equal(theirs.transformer.state_dict()[name], tensor)


def test_dtype_is_honoured_and_the_parts_of_numerics_stay_fp32():
    pipe = load(DEMO, torch_dtype=torch.bfloat16)
    assert pipe.transformer.dtype == pipe.text_encoder.dtype == pipe.text_encoder_2.dtype == torch.bfloat16
    assert pipe.transformer.time_embeddings.in_layer.weight.dtype == torch.float32
    assert pipe.vae.dtype == torch.float32
    assert latents_of(pipe, "a circle").isfinite().all()


def test_the_text_encoder_has_neither_vision_tower_nor_head(pipe):
    names = [name for name, _ in pipe.text_encoder.named_parameters()]
    assert names
    assert not [name for name in names if "visual" in name or "lm_head" in name]


def test_a_pipeline_without_text_encoders_takes_embeddings_alone(pipe):
    given = embeddings(pipe, "a circle") | embeddings(pipe, DEFAULT_NEGATIVE_PROMPT, "negative_")
    expected = latents_of(pipe, "a circle")
    parts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    bare = load(DEMO, **dict.fromkeys(parts))
    assert torch.equal(latents_of(bare, **given), expected)
    with pytest.raises(ValueError, match="no text encoder"):
        latents_of(bare, "a circle")


def copy_of_demo(folder, **changes):
    """A checkpoint folder that shares the demo's parts and has another model_index.json."""
    for part in DEMO.iterdir():
        if part.is_dir():
            (folder / part.name).symlink_to(part)
    index = json.loads((DEMO / "model_index.json").read_text()) | changes
    (folder / "model_index.json").write_text(json.dumps({k: v for k, v in index.items() if v is not None}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "StableDiffusionPipeline"}, "StableDiffusionPipeline"),
        ({"transformer": ["diffusers", "UNet2DModel"]}, "transformer is a diffusers.UNet2DModel"),
        ({"text_encoder": ["os", "system"]}, "text_encoder is a os.system"),
        ({"vae": None}, "vae is missing"),
    ],
)
def test_only_the_listed_classes_are_loaded(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        Kandinsky5NablaPipeline.from_pretrained(copy_of_demo(tmp_path, **changes))


def test_a_tokenizer_that_counts_the_template_otherwise_is_refused_for_a_published_checkpoint():
    with pytest.raises(ValueError, match="trained with 129"):
        Kandinsky5NablaPipeline.from_pretrained(DEMO, preset="lite-t2v-10s-sft")


def test_the_preset_is_found_by_folder_and_by_what_was_saved(tmp_path):
    assert Kandinsky5NablaPipeline.from_pretrained(DEMO).defaults.name == "demo"
    folder = copy_of_demo(tmp_path, preset="demo")
    assert Kandinsky5NablaPipeline.from_pretrained(folder).defaults.name == "demo"


def test_the_checkpoints_own_shift_wins_over_the_presets(pipe):
    assert pipe.resolve_settings().shift == pipe.scheduler.config.shift
    assert pipe.resolve_settings(shift=3.0).shift == 3.0


def test_the_checkpoints_own_p_wins_over_the_presets(fresh_pipe):
    bare = Kandinsky5NablaPipeline(**fresh_pipe.components)
    assert bare.resolve_settings().nabla_P == fresh_pipe.transformer.config.attention_P == 0.73
    assert bare.defaults.nabla_P == 0.9


def test_a_pipeline_without_a_preset_says_whose_defaults_it_takes(fresh_pipe, caplog):
    Kandinsky5NablaPipeline(**fresh_pipe.components)
    assert "defaults are those of lite-t2v-10s-sft" in caplog.text


@pytest.mark.parametrize("arguments", [{"variant": "fp16"}, {"safe_serialization": False}])
def test_what_could_not_be_loaded_again_is_not_saved(pipe, tmp_path, arguments):
    with pytest.raises(ValueError, match="can be loaded again"):
        pipe.save_pretrained(tmp_path / "saved", **arguments)
    assert not (tmp_path / "saved").exists()
