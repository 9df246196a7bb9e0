"""NaN and infinity: what stops being finite in a run ends it, with the step and the layer."""

import math
import re

import pytest
import torch

from kandinsky5_nabla.configs.errors import LoraError, NotFiniteError

CALL = {"height": 128, "width": 128, "num_frames": 5, "num_inference_steps": 2, "seed": 7, "output_type": "latent"}


@pytest.mark.parametrize(
    "layer",
    [
        "text_transformer_blocks.0.self_attention.to_value",
        "visual_transformer_blocks.1.cross_attention.key_norm",
        "visual_transformer_blocks.2.feed_forward.out_layer",
        "out_layer.out_layer",
    ],
)
def test_a_weight_that_is_no_number_is_an_error_that_names_step_and_layer(fresh_pipe, layer):
    with torch.no_grad():
        fresh_pipe.transformer.get_submodule(layer).weight.view(-1)[0] = torch.nan
    named = rf"the latents after step 1 of 2 \(first in {re.escape(layer)}\) are not finite .* damaged weights"
    with pytest.raises(NotFiniteError, match=named):
        fresh_pipe("a circle", **CALL)
    assert not any(module._forward_hooks for module in fresh_pipe.transformer.modules())


def test_the_layer_is_that_of_the_step_in_which_it_breaks(fresh_pipe):
    def damage(pipe, step, timestep, tensors):
        with torch.no_grad():
            pipe.transformer.visual_transformer_blocks[1].feed_forward.in_layer.weight[0] = torch.inf
        return tensors

    with pytest.raises(NotFiniteError, match=r"after step 2 of 2 \(first in visual_\w+\.1\.feed_forward\.in_layer\)"):
        fresh_pipe("a circle", **CALL, callback_on_step_end=damage)


def test_latents_beyond_all_numbers_are_an_error_without_a_layer(pipe):
    with pytest.raises(NotFiniteError, match="the latents after step 1 of 2 are not finite"):
        pipe("a circle", **CALL, guidance_scale=1e39)  # what the layers give is finite


@pytest.mark.parametrize("weights", [math.nan, [0.5, math.inf], {"visual": math.nan}, [{"visual": [-math.inf]}], "1"])
def test_a_loras_weight_that_is_no_number_is_refused(pipe, weights):
    with pytest.raises(LoraError, match=r"the weight .* must be a finite number"):
        pipe.set_adapters(["a", "b"], weights)


def test_latents_that_are_not_finite_are_not_decoded(pipe):
    with pytest.raises(NotFiniteError, match="the latents that were to be decoded are not finite"):
        pipe.decode(torch.full((1, 2, 16, 16, 6), torch.inf))
