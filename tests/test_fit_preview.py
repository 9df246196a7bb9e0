"""The map from latents to colours: it shows what the VAE would decode, and belongs to that VAE alone."""

import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo
from safetensors.torch import load_file, save_file

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.pipeline.preview import SHIPPED, PreviewMap, preview_frames, shipped_maps, vae_fingerprint
from kandinsky5_nabla.scripts import fit_preview, generate
from kandinsky5_nabla.scripts._demo_vae import scene_latents, unseen_scenes

DEMO = load_preset("demo").local_folder


@pytest.fixture
def vae(tmp_path):
    """A copy of the demo's VAE, and a function that changes some of its tensors."""
    folder = shutil.copytree(DEMO / "vae", tmp_path / "model" / "vae")

    def change(function):
        [file] = folder.glob("*.safetensors")
        save_file({name: function(name, tensor) for name, tensor in load_file(file).items()}, file)

    return folder, change


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def correlation(one, other):
    return np.corrcoef(np.ravel(one), np.ravel(other))[0, 1]


def test_the_demos_map_is_shipped_and_belongs_to_its_vae():
    [shipped] = shipped_maps()
    assert shipped.vae == vae_fingerprint(DEMO / "vae")
    assert PreviewMap.from_json((SHIPPED / "demo.json").read_text()) == shipped
    assert (SHIPPED / "demo.json").read_text() == shipped.to_json()


@pytest.mark.usefixtures("as_a_program")  # one thread
def test_the_preview_of_a_scenes_latents_is_the_decoded_scene_in_small(pipe):
    [_, scene], [shipped] = unseen_scenes(2), shipped_maps()  # a coloured one
    latents_THWC = scene_latents(scene, 128)
    preview = preview_frames(latents_THWC, shipped)
    assert (preview.shape, preview.dtype) == ((5, 16, 16, 3), np.uint8)
    decoded = torch.from_numpy(pipe.decode(latents_THWC[None], "np")[0])
    small = fit_preview.pool(decoded, 4, 8).numpy()
    assert correlation(preview, small) > 0.95
    assert correlation(preview[..., ::-1], small) < 0.5
    assert np.abs(preview / 255 - small).mean() < 0.05


@pytest.mark.usefixtures("as_a_program")  # one thread
def test_the_map_reaches_clips_that_it_was_not_fitted_to_and_a_fit_finds_it_again():
    [shipped] = shipped_maps()
    vae = AutoencoderKLHunyuanVideo.from_pretrained(DEMO / "vae")
    *two, unseen = fit_preview.CLIPS - 2, fit_preview.CLIPS - 1, fit_preview.CLIPS
    levels, explained = fit_preview.residual(shipped, *fit_preview.pairs(vae, [unseen]))
    assert levels < 12
    assert explained > 0.95
    again = fit_preview.fit(*fit_preview.pairs(vae, two), shipped.vae)
    assert np.abs(np.subtract(again.weights, shipped.weights)).max() < 0.06


@pytest.mark.usefixtures("as_a_program")  # one thread
def test_clips_are_those_of_their_seed_and_are_pooled_over_what_a_latent_stands_for():
    clip = fit_preview.draw_clip(3)
    assert torch.equal(clip, fit_preview.draw_clip(3))
    assert not torch.equal(clip, fit_preview.draw_clip(4))
    assert 0 <= clip.min() < 0.1 < 0.9 < clip.max() <= 1
    assert not torch.equal(clip[0], clip[-1])  # it moves
    cells_THW3 = torch.rand(3, 2, 4, 3)
    frames = torch.cat([cells_THW3[:1], cells_THW3[1:].repeat_interleave(4, 0)])
    frames[5] += 0.4  # of the last latent's four frames the first
    pooled = fit_preview.pool(frames.repeat_interleave(8, 1).repeat_interleave(8, 2), 4, 8)
    cells_THW3[2] += 0.1
    assert torch.allclose(pooled, cells_THW3, atol=1e-6)


def test_the_least_squares_fit_finds_a_map_that_there_is():
    latents = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    there = PreviewMap("x", ((0.1, 0.2, 0.3), (0.0, -0.1, 0.5), (1.0, 0.0, 0.0), (0.25, 0.5, 0.125)), (0.5, 0.4, 0.3))
    colours = latents @ latents.new_tensor(there.weights) + latents.new_tensor(there.bias)
    assert fit_preview.fit(latents, colours, "x") == there
    assert fit_preview.residual(there, latents, colours) == pytest.approx((0, 1), abs=1e-9)
    levels, explained = fit_preview.residual(PreviewMap("x", ((0.0,) * 3,) * 4, there.bias), latents, colours)
    assert levels == pytest.approx(255 * torch.sqrt(((colours - colours.new_tensor(there.bias)) ** 2).mean()).item())
    assert explained < 0.1


def test_the_script_writes_a_map_that_a_run_takes(vae, as_a_program, monkeypatch, tmp_path, capsys):
    folder, change = vae
    change(lambda name, tensor: tensor * 1.5 if name == "quant_conv.weight" else tensor)
    monkeypatch.setattr(fit_preview, "CLIPS", 2)
    monkeypatch.setattr(fit_preview, "UNSEEN", 1)
    assert fit_preview.main(["--model", "model", "--output", "map.json"]) == 0
    assert capsys.readouterr().out.startswith("map.json: on 1 other clips RMSE ")
    assert PreviewMap.from_json((tmp_path / "map.json").read_text()).vae == vae_fingerprint(folder)
    shutil.copytree(DEMO, tmp_path / "model", dirs_exist_ok=True, ignore=shutil.ignore_patterns("vae"))
    run = ["--config", "demo", "--model", "model", "--prompt", "a cat", "--device", "cpu", "--dry-run"]
    assert generate.main([*run, "--preview", "map.json"]) == 0
    assert generate.main([*run, "--preview"]) == 2


def test_what_the_script_cannot_do_is_refused_with_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept.json").write_text("precious")
    refused = {
        ("--model", "missing", "--output", "map.json"): "--model missing: vae missing: neither missing/vae/config.json",
        ("--model", DEMO, "--output", "kept.json"): "output kept.json: exists; choose another name or add --overwrite",
        ("--model", DEMO, "--output", "map.txt"): "output map.txt: must be a name that ends in .json",
        ("--model", DEMO): "the following arguments are required: --output",
    }
    for argv, message in refused.items():
        assert fit_preview.main([*map(str, argv)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.startswith(f"error: {message}")) == ("", True), err
    assert names(tmp_path) == ["kept.json"]
    shutil.copytree(DEMO / "vae", tmp_path / "vae")
    (tmp_path / "vae" / "config.json").write_text("{}")
    assert fit_preview.main(["--model", "vae", "--output", "map.json"]) == 1
    assert capsys.readouterr().err.startswith("error: the weights in vae do not fit their config")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: [], "holds no map of a preview"),
        (lambda values: values | {"kind": "a record"}, "holds no map of a preview"),
        (lambda values: values | {"format": 2}, "holds a map of the format 2; this version reads 1"),
        (lambda values: values | {"more": 1}, "holds a damaged map: more missing or unknown"),
        (lambda values: values | {"vae": None}, "vae is None"),
        (lambda values: values | {"weights": []}, r"weights are \[\]"),
        (lambda values: values | {"weights": [[1, 2, 3], [1, 2]]}, "weights of channel 1 must be three numbers"),
        (lambda values: values | {"bias": [0, 0, float("nan")]}, r"bias must be three numbers, not \[0, 0, nan\]"),
    ],
)
def test_a_file_that_is_no_map_is_refused(change, message):
    values = json.loads((SHIPPED / "demo.json").read_text())
    with pytest.raises(ValueError, match=message):
        PreviewMap.from_json(json.dumps(change(values)))


def test_latents_of_another_width_are_refused():
    with pytest.raises(ValueError, match="these latents have 16 channels, and the map has 6"):
        preview_frames(torch.zeros(1, 2, 2, 16), *shipped_maps())


def test_a_vae_is_told_by_its_encoders_end_and_its_factor_not_by_its_decoder_or_its_precision(vae):
    folder, change = vae
    change(lambda name, tensor: tensor.float() * 1.1)  # numbers that half precision has to round
    known = vae_fingerprint(folder)
    change(lambda name, tensor: tensor + 1 if name.startswith(("decoder", "post_quant")) else tensor)
    assert vae_fingerprint(folder) == known
    change(lambda name, tensor: tensor.half())
    assert vae_fingerprint(folder) == known
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"scaling_factor": 0.5}))
    assert vae_fingerprint(folder) != known
    (folder / "config.json").write_text(json.dumps(config))
    change(lambda name, tensor: -tensor if name == "quant_conv.bias" else tensor)
    assert vae_fingerprint(folder) != known
