"""The demo checkpoint has the published layout, loads with the real classes and can be written again."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo, FlowMatchEulerDiscreteScheduler
from safetensors import safe_open
from transformers import CLIPTextModel, CLIPTokenizer, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from kandinsky5_nabla.models.text_encoder import QwenTextEncoder
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline.text import clean_prompt, encode_prompts
from kandinsky5_nabla.scripts.make_demo_checkpoint import captions, main

DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo"
LAYOUT = {
    "README.md",
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/generation_config.json",
    "text_encoder/model.safetensors",
    "text_encoder_2/config.json",
    "text_encoder_2/model.safetensors",
    "tokenizer/preprocessor_config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer_2/tokenizer.json",
    "tokenizer_2/tokenizer_config.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
}


def read_json(name: str) -> dict:
    return json.loads((DEMO / name).read_text(encoding="utf-8"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_file_of_the_layout_is_there_and_none_besides_so_no_pickle():
    assert set(files(DEMO)) == LAYOUT


def test_all_files_together_stay_under_12_megabytes():
    assert sum(len(content) for content in files(DEMO).values()) < 12e6


def test_the_class_names_are_the_published_ones():
    index = read_json("model_index.json")
    assert index.pop("_diffusers_version")
    assert index.pop("preset") == "demo"
    assert index == {
        "_class_name": "Kandinsky5T2VPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "text_encoder_2": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "Qwen2VLProcessor"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "transformer": ["diffusers", "Kandinsky5Transformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLHunyuanVideo"],
    }
    assert read_json("transformer/config.json")["_class_name"] == "Kandinsky5Transformer3DModel"
    assert read_json("vae/config.json")["_class_name"] == "AutoencoderKLHunyuanVideo"
    assert read_json("text_encoder/config.json")["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("text_encoder", Qwen2_5_VLForConditionalGeneration),
        ("text_encoder_2", CLIPTextModel),
        ("transformer", Kandinsky5Transformer),
        ("vae", AutoencoderKLHunyuanVideo),
    ],
)
def test_each_model_loads_with_its_class_and_holds_what_its_file_holds(folder, kind):
    model = kind.from_pretrained(DEMO / folder)
    (weights,) = (DEMO / folder).glob("*.safetensors")
    with safe_open(weights, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    assert sum(tensor.numel() for tensor in stored.values()) == sum(p.numel() for p in model.parameters())
    assert all(tensor.isfinite().all() for tensor in stored.values())
    assert {tensor.dtype for tensor in stored.values()} <= {torch.float16, torch.float32}


def test_the_scheduler_carries_the_shift():
    assert FlowMatchEulerDiscreteScheduler.from_pretrained(DEMO / "scheduler").config["shift"] == 5.0


def test_the_parts_fit_each_other():
    transformer, vae = read_json("transformer/config.json"), read_json("vae/config.json")
    text, pooled = read_json("text_encoder/config.json")["text_config"], read_json("text_encoder_2/config.json")
    assert transformer["in_visual_dim"] == transformer["out_visual_dim"] == vae["latent_channels"]
    assert transformer["in_text_dim"] == text["hidden_size"]
    assert transformer["in_text_dim2"] == pooled["hidden_size"]
    qwen = Qwen2Tokenizer.from_pretrained(DEMO / "tokenizer")
    clip = CLIPTokenizer.from_pretrained(DEMO / "tokenizer_2")
    assert len(qwen) == text["vocab_size"] < 600
    assert len(clip) == pooled["vocab_size"] < 700
    assert pooled["eos_token_id"] == clip.eos_token_id


def test_the_embeddings_of_captions_have_a_size_of_about_one():
    embeddings = encode_prompts(
        list(captions())[::60],
        Qwen2Tokenizer.from_pretrained(DEMO / "tokenizer"),
        QwenTextEncoder.from_pretrained(DEMO / "text_encoder", dtype=torch.float32),
        CLIPTokenizer.from_pretrained(DEMO / "tokenizer_2"),
        CLIPTextModel.from_pretrained(DEMO / "text_encoder_2", dtype=torch.float32),
    )
    assert embeddings.prompt_embeds[embeddings.mask].std().item() == pytest.approx(1, abs=0.1)
    assert embeddings.pooled.std().item() == pytest.approx(1, abs=0.2)
    assert embeddings.pooled.mean().item() == pytest.approx(0, abs=0.1)


@torch.no_grad()
def test_the_velocity_depends_on_the_latents_the_text_and_the_time():
    transformer = Kandinsky5Transformer.from_pretrained(DEMO / "transformer")
    generator = torch.Generator().manual_seed(0)

    def velocity(latents: float = 0.0, text: float = 0.0, pooled: float = 0.0, time: float = 500.0) -> torch.Tensor:
        return transformer(
            base["latents"] + latents, base["text"] + text, base["pooled"] + pooled, torch.tensor([time])
        ).sample

    shapes = {"latents": (1, 1, 16, 16, 13), "text": (1, 9, 64), "pooled": (1, 64)}
    base = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    start = velocity()
    assert 0.1 < start.std() < 10
    for change in [{"latents": 0.5}, {"text": 0.5}, {"pooled": 0.5}, {"time": 900.0}]:
        assert (velocity(**change) - start).std() > 0.01, change


def test_the_decoder_of_random_latents_gives_pictures_of_a_usual_range():
    vae = AutoencoderKLHunyuanVideo.from_pretrained(DEMO / "vae")
    latents = torch.randn((1, 6, 2, 4, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        frames = vae.decode(latents).sample
    assert frames.shape == (1, 3, 5, 32, 32)
    assert 0.1 < frames.std() < 2


def test_the_captions_are_clean_and_none_is_cut():
    texts = list(captions())
    assert len(texts) == 1260
    assert all(clean_prompt(text) == text and len(text) < 120 for text in texts)


def test_a_second_run_writes_the_same_bytes(tmp_path, capsys):
    for name in ("first", "second"):
        assert main(["--output", str(tmp_path / name)]) == 0
    first, second = files(tmp_path / "first"), files(tmp_path / "second")
    assert set(first) == LAYOUT
    assert first == second
    for name in ("tokenizer/tokenizer.json", "tokenizer_2/tokenizer.json"):
        assert json.loads(first[name])["model"] == read_json(name)["model"], "the shipped one is not the script's"


def test_an_existing_checkpoint_is_not_overwritten_unless_asked(capsys):
    before = files(DEMO)
    assert main(["--output", str(DEMO)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert files(DEMO) == before
