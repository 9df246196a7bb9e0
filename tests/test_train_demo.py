"""Training of the demo: a stopped stage goes on to the same weights, every stage runs, the result is a checkpoint."""

import pytest
import torch
from safetensors.torch import load_file

from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
from kandinsky5_nabla.scripts import _demo_training
from kandinsky5_nabla.scripts._demo_scenes import Scene, Words, render
from kandinsky5_nabla.scripts._demo_training import Stage, train
from kandinsky5_nabla.scripts._demo_vae import encode, make_vae, scene_latents
from kandinsky5_nabla.scripts.train_demo import main

FEW = ["--threads=1", "--vae-steps=2", "--transformer-64-steps=1", "--transformer-128-steps=1"]
FEW += ["--transformer-256-steps=1"]


def linear_of(stage, **patched):
    """Train a small layer through the shared loop and return its weights."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 1)

    def loss_of_step(step):
        if step == patched.get("stop_at"):
            raise KeyboardInterrupt
        x = torch.randn(8, 4, generator=_demo_training.generator_of(stage.name, step))
        return (layer(x) - x.sum(-1, keepdim=True)).square().mean()

    train(stage, layer, loss_of_step, check=lambda: "fine")
    return layer.weight.detach().clone()


def test_a_stage_that_was_stopped_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(_demo_training, "SAVE_EVERY", 5)
    whole = linear_of(Stage("s", 20, 1e-2, tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        linear_of(Stage("s", 20, 1e-2, tmp_path / "stopped"), stop_at=13)
    resumed = linear_of(Stage("s", 20, 1e-2, tmp_path / "stopped"))
    assert torch.equal(resumed, whole)
    assert not torch.equal(linear_of(Stage("s", 10, 1e-2, tmp_path / "short")), whole)


@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize("words", [Words("triangle", "orange", "moving up", "gray", "small", "quickly")])
def test_latents_drawn_for_training_are_those_that_the_encoder_makes(words, side):
    scene = Scene(words, 0.4, 0.55)
    vae = make_vae(torch.Generator().manual_seed(0))
    with torch.no_grad():
        encoded_BTHWC = encode(vae, render(scene, side)[None])
    drawn_THWC = scene_latents(scene, side)
    assert drawn_THWC.shape == (5, side // 8, side // 8, 6)
    assert drawn_THWC.std() > 0.1  # something is there to be compared
    # fp32, through the divisions of a dozen norms: CONSTANT makes them equal for all clips to about 1e-4.
    torch.testing.assert_close(encoded_BTHWC[0], drawn_THWC, atol=5e-4, rtol=0)


def test_the_encoder_does_not_learn_and_the_decoder_does():
    vae = make_vae(torch.Generator().manual_seed(0))
    learns = {name.split(".")[0] for name, weight in vae.named_parameters() if weight.requires_grad}
    assert learns == {"decoder", "post_quant_conv"}


def test_all_stages_run_and_give_a_checkpoint_that_makes_a_video(tmp_path):
    output = tmp_path / "demo"
    threads = torch.get_num_threads()
    assert main(["all", "--work", str(tmp_path / "work"), "--output", str(output), *FEW]) == 0
    torch.set_num_threads(threads)
    assert sum(file.stat().st_size for file in output.rglob("*") if file.is_file()) < 12e6
    pipe = Kandinsky5NablaPipeline.from_pretrained(output)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.defaults.name == "demo"
    assert pipe.transformer.config["attention_type"] == "nabla"
    frames = pipe("a circle", height=128, width=128, num_frames=1, num_inference_steps=1, output_type="np").frames
    assert frames.shape == (1, 1, 128, 128, 3)
    before = load_file(output / "transformer" / "diffusion_pytorch_model.safetensors")
    assert main(["all", "--work", str(tmp_path / "work"), "--output", str(output), *FEW]) == 0  # nothing left to do
    after = load_file(output / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
