"""The command line with other parts: files of the original layout, LoRAs, smaller weights, saved embeddings, tiles."""

import json
import shutil

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo
from safetensors.torch import load_file, save_file

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.pipeline.export import read_video
from kandinsky5_nabla.scripts import generate

DEMO = load_preset("demo").local_folder
QUICK = ["--config", "demo", "--height", "128", "--width", "128", "--num-frames", "1", "--steps", "2"]
QUICK += ["--attention", "NABLA_REFERENCE", "--device", "cpu", "--seed", "5"]
CAT = ["--prompt", "a cat", "--output", "cat.mp4"]
LAYER = "visual_transformer_blocks.0.feed_forward.in_layer"


@pytest.fixture
def here(as_a_program, capsys):
    """Runs the command line in this process; returns exit code, stdout, stderr."""

    def run(*argv):
        code = generate.main([*QUICK, *map(str, argv)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def make(here, tmp_path):
    """Returns the pixels of a video."""

    def run(name, *argv):
        code, _, err = here("--output", f"{name}.mp4", *argv)
        assert code == 0, err
        return read_video(tmp_path / f"{name}.mp4")[0].astype(int)

    return run


def written_lora(path, scale):
    """A LoRA of one layer of the demo."""
    transformer = load_file(DEMO / "transformer" / "diffusion_pytorch_model.safetensors")
    out_features, in_features = transformer[f"{LAYER}.weight"].shape
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(shape, generator=generator) for shape in ((2, in_features), (out_features, 2)))
    save_file({f"transformer.{LAYER}.lora_A.weight": A, f"transformer.{LAYER}.lora_B.weight": scale * B}, path)
    return path


def test_a_transformer_in_a_file_of_its_own_makes_the_same_video_as_its_checkpoint(make, tmp_path):
    file = shutil.copy(DEMO / "transformer" / "diffusion_pytorch_model.safetensors", tmp_path / "mine.safetensors")
    parts = [word for part in ("vae", "text-encoder", "text-encoder-2") for word in (f"--{part}", DEMO)]
    assert (make("file", "--prompt", "a cat", "--model", file, *parts) == make("folder", "--prompt", "a cat")).all()


def test_saved_embeddings_make_the_same_videos_without_the_text_encoders(here, make, tmp_path):
    prompts = ["--prompt", "a red square", "--prompt", "a blue circle"]
    assert here(*prompts, "--output", "cat.mp4", "--save-embeds", "texts.safetensors")[0] == 0
    model = shutil.copytree(DEMO, tmp_path / "model", ignore=lambda _, names: [n for n in names if "text" in n])
    again = make("again", "--prompt", "a blue circle", "--model", model, "--embeds", "texts.safetensors")
    assert (again == read_video(tmp_path / "cat-2.mp4")[0]).all()
    code, out, _ = here("--output", "all.mp4", "--embeds", "texts.safetensors", "--dry-run", "--json")
    assert code == 0
    assert [video["prompt"] for video in json.loads(out)["outputs"]] == ["a red square", "a blue circle"]
    code, _, err = here("--prompt", "a tree", "--output", "all.mp4", "--embeds", "texts.safetensors")
    assert code == 2
    assert "the prompt 'a tree' is not among the saved ones" in err


def test_a_lora_changes_the_video_by_its_scale_and_is_recorded(here, make, tmp_path):
    lora = written_lora(tmp_path / "lora.safetensors", 1.0)
    before, off = make("a", "--prompt", "x"), make("b", "--prompt", "x", "--lora", f"{lora}:0")
    on = make("c", "--prompt", "x", "--lora", lora)
    assert abs(off - before).max() <= 1  # adding zeros may round
    assert abs(on - before).max() > 20
    assert f"{lora}:1" in (tmp_path / "c.mp4").read_bytes().decode(errors="ignore")


def test_a_lora_of_another_model_is_refused_before_any_weight_is_read(here, checkpoint, tmp_path):
    save_file({f"transformer.{LAYER}.lora_A.weight": torch.zeros(2, 7)}, tmp_path / "other.safetensors")
    code, _, err = here("--prompt", "x", "--model", checkpoint, "--lora", tmp_path / "other.safetensors")
    assert code == 2
    assert LAYER in err


@pytest.mark.parametrize(
    "choice",
    [
        ("--text-encoder-dtype", "nf4"),
        ("--text-encoder-dtype", "int8"),
        ("--dit-dtype", "fp8"),
        ("--dit-dtype", "bf16"),
        ("--vae-tile", "96x16"),
    ],
)
def test_smaller_weights_and_tiles_make_nearly_the_same_video(here, make, choice):
    difference = abs(make("small", "--prompt", "a red square", *choice) - make("whole", "--prompt", "a red square"))
    assert difference.max() > 0  # it is not ignored
    assert difference.mean() < 12  # of 255


def test_a_run_in_another_precision_says_so_in_its_plan(here):
    code, out, _ = here("--prompt", "x", "--dit-dtype", "fp8", "--text-encoder-dtype", "nf4", "--dry-run", "--json")
    plan = json.loads(out)
    assert code == 0
    assert (plan["dtype"], plan["dit_dtype"], plan["text_encoder_dtype"]) == ("float32", "fp8", "nf4")
    assert plan["memory"][0].startswith("memory: offload none, VAE tile 256x16")


BAD = {
    "--vae-tile 100": "VAE tile '100': must be one of 256x16, 192x16, 128x16, 96x16",
    "--text-encoder-dtype int3": "text encoder dtype 'int3': must be one of",
    "--dit-dtype int8": "transformer dtype 'int8': must be one of",
    "--lora missing.safetensors": "LoRA missing.safetensors: there is no such file",
    "--lora a.bin": "LoRA a.bin: there is no such file",
    "--lora owner/name:0.5": "LoRA owner/name: there is no such file; `hf download",
    "--lora twice --lora ./twice:0.5": "LoRA twice: is given 2 times, at 1 and 0.5; give it once, such as twice:1.5",
    "--cache-dir taken": "--cache-dir taken: is a file; name a folder",
    "--lora a.safetensors:x": "LoRA 'a.safetensors:x': the scale 'x' must be a finite number",
    "--embeds missing.safetensors": "--embeds: there is no file of embeddings missing.safetensors",
    "--save-embeds texts.json": "save-embeds texts.json: must be a name that ends in .safetensors",
    "--vae missing": "--vae: for a transformer in a file of its own",
    "--offline --model owner/name": "owner/name is not in the cache",
    "--model other.safetensors": "model other.safetensors is missing",
}


@pytest.mark.parametrize("argv", BAD)
def test_bad_parts_are_refused_before_anything_is_loaded(here, tmp_path, argv):
    (tmp_path / "taken").touch()
    (tmp_path / "twice").mkdir()
    code, _, err = here("--prompt", "x", *argv.split())
    assert code == 2
    [problem] = err.splitlines()
    assert problem.startswith(f"error: {BAD[argv]}")


def test_the_list_names_every_preset(here):
    code, out, _ = here("--list")
    assert code == 0
    for name in ("demo", "lite-t2v-10s-sft", "pro-t2v-5s-sft-hd"):
        assert name in out


@pytest.mark.parametrize(
    ("part", "changes", "problem"),
    [
        ("transformer", {"num_visual_blocks": 5}, "do not fit their config in 24 tensors"),
        ("transformer", {"patch_size": [1, 2]}, "patch_size (1, 2) must be three numbers"),
        ("vae", {"scaling_factor": 0}, "scaling_factor 0 must be a number above 0"),
    ],
)
def test_a_dry_run_refuses_what_the_run_could_not_load(here, checkpoint, tmp_path, part, changes, problem):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    config = model / part / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    code, _, err = here("--prompt", "x", "--model", model, "--dry-run")
    assert code == 2
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert problem in line


def test_a_repository_that_no_preset_knows_is_cautioned_against_with_the_nearest(capsys, as_a_program, tmp_path):
    (tmp_path / "owner").mkdir()
    names = ("kandinskylab/Kandinsky-5.0-T2V-Lite-sft-10s-Difusers", "owner/name")
    common = ["--prompt", "x", "--device", "cpu", "--dry-run", "--model"]
    said = []
    for name in names:
        assert generate.main([*common, name]) == 0
        said.append([line for line in capsys.readouterr().err.splitlines() if "no preset knows" in line])
    [[near], [unknown]] = said
    assert "did you mean kandinskylab/Kandinsky-5.0-T2V-Lite-sft-10s-Diffusers?; the defaults are those of" in near
    assert "there is no folder owner/name, so it is taken for a repository of the Hub" in unknown


def test_embeddings_of_another_width_are_refused_before_a_published_checkpoint_is_fetched(here, capsys):
    assert here("--prompt", "x", "--output", "x.mp4", "--save-embeds", "texts.safetensors")[0] == 0
    lite = load_preset("lite-t2v-10s-sft").model
    assert generate.main(["--model", lite, "--embeds", "texts.safetensors", "--device", "cpu", "--dry-run"]) == 2
    assert "this transformer reads 3584 and 768" in capsys.readouterr().err


def test_presets_and_versions_are_printed_as_json(here):
    code, out, _ = here("--list", "--json")
    assert (code, json.loads(out)["demo"]["num_frames"]) == (0, 17)
    code, out, _ = here("--version", "--json")
    assert (code, json.loads(out)["torch"]) == (0, torch.__version__)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), RuntimeError("DefaultCPUAllocator: can't allocate")])
def test_where_memory_runs_out_smaller_tiles_decode_and_are_recorded(here, tmp_path, monkeypatch, error):
    real = AutoencoderKLHunyuanVideo.decode

    def decode(self, *args, **kwargs):
        if self.tile_sample_min_height > 192:
            raise error
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(AutoencoderKLHunyuanVideo, "decode", decode)
        code, out, err = here(*CAT, "--json")
    assert (code, json.loads(out)["videos"][0]["vae_tile"]) == (0, "192x16"), err
    retried = (tmp_path / "cat.mp4").read_bytes()
    assert b'"vae_tile": "192x16"' in retried
    assert here(*CAT, "--overwrite", "--vae-tile", "192x16")[0] == 0
    assert (tmp_path / "cat.mp4").read_bytes() == retried
