"""The pipeline on the checkpoint inside the package: what users of diffusers expect, and what went wrong for them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler

from kandinsky5_nabla.pipeline.text import DEFAULT_NEGATIVE_PROMPT

SIZE = {"height": 128, "width": 128, "num_frames": 5, "num_inference_steps": 2}
LATENTS = (1, 2, 16, 16, 6)
# A batch sums in another order than a single run; two steps of guidance 5 carry 1e-6 to about 1e-5.
BATCH_TOLERANCE = {"rtol": 0, "atol": 1e-4}


def latents_of(pipe, *args, **kwargs):
    return pipe(*args, **{**SIZE, "seed": 7, "output_type": "latent", **kwargs}).frames


class Calls:
    """Counts a module's calls and keeps the arguments of each."""

    def __init__(self, module):
        self.arguments = []
        self._hook = module.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module, args, kwargs):
        self.arguments.append((args, kwargs))

    def __enter__(self):
        return self.arguments

    def __exit__(self, *_):
        self._hook.remove()


# Prompts and batches


def test_two_prompts_with_two_videos_each_equal_their_own_single_runs_in_order(pipe):
    prompts = ["a red square moving left", "a small blue circle standing still on a gray background"]
    batch = latents_of(
        pipe,
        prompts,
        seed=None,
        num_videos_per_prompt=2,
        generator=[torch.Generator().manual_seed(i) for i in range(4)],
    )
    assert batch.shape == (4, *LATENTS[1:])
    for i in range(4):
        alone = latents_of(pipe, prompts[i // 2], seed=None, generator=torch.Generator().manual_seed(i))
        torch.testing.assert_close(batch[i], alone[0], **BATCH_TOLERANCE)


def test_the_videos_of_a_seed_are_those_of_the_seeds_that_follow_it(pipe):
    batch = latents_of(pipe, "a circle", num_videos_per_prompt=3, seed=5)
    alone = latents_of(pipe, "a circle", seed=7)
    torch.testing.assert_close(batch[2], alone[0], **BATCH_TOLERANCE)


def test_one_generator_draws_the_noise_of_all_videos_in_turn(pipe):
    generator = torch.Generator().manual_seed(3)
    batch = latents_of(pipe, "a circle", num_videos_per_prompt=2, seed=None, generator=generator)
    generator.manual_seed(3)
    for i in range(2):
        alone = latents_of(pipe, "a circle", seed=None, generator=generator)
        torch.testing.assert_close(batch[i], alone[0], **BATCH_TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*This text was cut")
def test_a_short_prompt_beside_a_long_one_equals_its_single_run(pipe):
    short = "a red square moving left"
    batch = latents_of(pipe, [short, "word " * 300])
    torch.testing.assert_close(batch[0], latents_of(pipe, short)[0], **BATCH_TOLERANCE)


def embeddings(pipe, prompt, prefix=""):
    text = pipe.encode_prompt([prompt])
    return {
        f"{prefix}prompt_embeds": text.prompt_embeds,
        f"{prefix}prompt_embeds_mask": text.mask,
        f"{prefix}pooled_prompt_embeds": text.pooled,
    }


@pytest.mark.parametrize("garbage", [0.0, 50.0, float("nan")])
def test_embeddings_padded_to_512_equal_the_unpadded_ones_whatever_the_padding_holds(pipe, garbage):
    given = embeddings(pipe, "a red square moving left")
    padded = dict(given)
    L = given["prompt_embeds"].shape[1]
    padded["prompt_embeds"] = torch.full((1, 512, 64), garbage)
    padded["prompt_embeds"][:, :L] = given["prompt_embeds"]
    padded["prompt_embeds_mask"] = torch.arange(512)[None] < L
    expected = latents_of(pipe, "a red square moving left")
    assert torch.equal(latents_of(pipe, **given), expected)
    assert torch.equal(latents_of(pipe, **padded), expected)
    beside = {name: torch.cat([padded[name], padded[name]]) for name in padded}
    beside["prompt_embeds_mask"] = torch.cat([padded["prompt_embeds_mask"], torch.ones(1, 512, dtype=torch.bool)])
    beside["prompt_embeds"] = beside["prompt_embeds"].nan_to_num(0.5)
    beside["prompt_embeds"][0, L:] = garbage
    torch.testing.assert_close(latents_of(pipe, **beside)[0], expected[0], **BATCH_TOLERANCE)


def test_embeddings_without_a_mask_are_all_real(pipe):
    given = embeddings(pipe, "a circle") | embeddings(pipe, "a square", "negative_")
    expected = latents_of(pipe, "a circle", negative_prompt="a square")
    assert torch.equal(latents_of(pipe, **given), expected)
    del given["prompt_embeds_mask"], given["negative_prompt_embeds_mask"]
    assert torch.equal(latents_of(pipe, **given), expected)


def test_without_guidance_there_is_one_call_a_step_and_the_negative_prompt_is_never_encoded(pipe):
    with Calls(pipe.transformer) as calls, Calls(pipe.text_encoder) as encoded:
        latents_of(pipe, "a circle", guidance_scale=1.0, negative_prompt="a square", num_inference_steps=3)
    assert len(calls) == 3
    assert len(encoded) == 1
    with Calls(pipe.transformer) as calls, Calls(pipe.text_encoder) as encoded:
        latents_of(pipe, "a circle", guidance_scale=5.0, num_inference_steps=3)
    assert len(calls) == 6
    assert len(encoded) == 2


def test_the_negative_prompt_matters_and_defaults_to_the_authors(pipe):
    default = latents_of(pipe, "a circle")
    assert torch.equal(latents_of(pipe, "a circle", negative_prompt=DEFAULT_NEGATIVE_PROMPT), default)
    assert not torch.equal(latents_of(pipe, "a circle", negative_prompt=""), default)
    each = latents_of(pipe, ["a circle", "a circle"], negative_prompt=["", DEFAULT_NEGATIVE_PROMPT], seed=7)
    torch.testing.assert_close(each[0], latents_of(pipe, "a circle", negative_prompt="")[0], **BATCH_TOLERANCE)


def test_an_empty_prompt_is_allowed(pipe):
    assert latents_of(pipe, "").isfinite().all()


BAD_REQUESTS = {
    "empty list": ({"prompt": []}, "empty"),
    "no prompt": ({"prompt": None}, "prompt_embeds"),
    "not a text": ({"prompt": ["a", 3]}, "int"),
    "a number": ({"prompt": 5}, "must be a text or a list of texts, not int"),
    "a dict": ({"prompt": {"a": 1}}, "not dict"),
    "no valid text": ({"prompt": "\udcff"}, "not UTF-8"),
    "prompt and embeddings": ({"prompt_embeds": torch.zeros(1, 3, 64)}, "not both"),
    "embeddings alone": ({"prompt": None, "prompt_embeds": torch.zeros(1, 3, 64)}, "come together"),
    "pooled alone": ({"prompt": None, "pooled_prompt_embeds": torch.zeros(1, 64)}, "come together"),
    "embedding width": (
        {"prompt": None, "prompt_embeds": torch.zeros(1, 3, 65), "pooled_prompt_embeds": torch.zeros(1, 64)},
        r"must be \[B, L, 64\]",
    ),
    "no real token": (
        {
            "prompt": None,
            "prompt_embeds": torch.zeros(1, 3, 64),
            "pooled_prompt_embeds": torch.zeros(1, 64),
            "prompt_embeds_mask": torch.zeros(1, 3),
        },
        "at least one real token",
    ),
    "negatives": ({"prompt": ["a", "b", "c"], "negative_prompt": ["a", "b"]}, "2 negative prompts for 3"),
    "zero steps": ({"num_inference_steps": 0}, "steps 0"),
    "negative steps": ({"num_inference_steps": -4}, "steps -4"),
    "half steps": ({"num_inference_steps": 2.5}, "steps 2.5"),
    "zero frames": ({"num_frames": 0}, "nearest: 1"),
    "seven frames": ({"num_frames": 7}, "nearest: 5 or 9"),
    "many frames": ({"num_frames": 513}, "nearest: 509"),
    "zero height": ({"height": 0}, "nearest: 16"),
    "height": ({"height": 500}, "nearest: 496 or 512"),
    "width": ({"width": 2176}, "nearest: 2048"),
    "guidance": ({"guidance_scale": float("nan")}, "guidance scale nan"),
    "shift": ({"shift": 0.0}, "shift 0.0"),
    "one scale": ({"scale_factor": 2.0}, "three numbers"),
    "scale factor": ({"scale_factor": (1.0, 2.0)}, "three numbers"),
    "P": ({"nabla_P": 1.5}, "at most 1"),
    "videos": ({"num_videos_per_prompt": 0}, "videos 0"),
    "output type": ({"output_type": "gif"}, "pil, np, pt, latent"),
    "callback tensor": ({"callback_on_step_end_tensor_inputs": ["noise"]}, "noise"),
    "sequence type": ({"max_sequence_length": "a"}, "'a'"),
    "latents in diffusers layout": ({"latents": torch.zeros(1, 6, 2, 16, 16)}, "channels last"),
    "no latents": ({"latents": [1]}, "channels last"),
    "one callback tensor": ({"callback_on_step_end_tensor_inputs": "noise"}, "callback tensor 'noise'"),
    "many steps": ({"num_inference_steps": 10**6}, "from 1 to 10000"),
    "reference size": ({"height": 1024, "width": 1024, "num_frames": 61}, "Use NABLA_ATTN"),
    "sequence length": ({"max_sequence_length": 257}, "257"),
    "seed": ({"seed": -1}, "seed -1"),
    "seed type": ({"seed": 1.5}, "seed 1.5"),
    "seed and generator": ({"generator": torch.Generator()}, "not both"),
    "no generator": ({"seed": None, "generator": 42}, "must be a torch.Generator"),
    "generators": ({"seed": None, "generator": [torch.Generator()] * 2}, "2 generators for 1"),
    "latents": ({"latents": torch.zeros(1, 2, 16, 16, 9)}, r"must be a tensor \[B, T, H, W, 6\]"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_request_that_cannot_be_honoured_is_refused_before_anything_is_encoded(pipe, arguments, message):
    with Calls(pipe.text_encoder) as encoded, pytest.raises(ValueError, match=message):
        latents_of(pipe, **{"prompt": "a circle", **arguments})
    assert not encoded


def test_all_problems_of_a_request_are_named_at_once(pipe):
    with pytest.raises(ValueError, match="height 500") as error:
        latents_of(pipe, [], height=500, num_frames=7, output_type="gif", shift=-1.0)
    for part in ("height 500", "frames 7", "gif", "shift -1.0", "empty"):
        assert part in str(error.value)


def test_p_is_refused_where_attention_is_dense_and_sizes_may_be_finer(pipe):
    pipe.transformer.set_attention_backend("SDPA")
    with pytest.raises(ValueError, match="attention is dense"):
        latents_of(pipe, "a circle", nabla_P=0.5)
    assert latents_of(pipe, "a circle", height=80, width=112).shape == (1, 2, 10, 14, 6)
    with pytest.raises(ValueError, match="multiple of 16"):
        latents_of(pipe, "a circle", height=72)


def test_numpy_numbers_are_numbers(pipe):
    given = {
        "height": np.int64(128),
        "num_frames": np.int32(5),
        "guidance_scale": np.float32(1.5),
        "shift": np.float64(5),
    }
    assert torch.equal(latents_of(pipe, "a circle", **given), latents_of(pipe, "a circle"))


def test_one_text_is_one_prompt_for_encode_prompt_too(pipe):
    assert pipe.encode_prompt("a cat").prompt_embeds.shape[0] == 1


def test_a_scheduler_that_would_not_be_used_is_refused(fresh_pipe):
    fresh_pipe.scheduler = UniPCMultistepScheduler()
    with pytest.raises(ValueError, match="scheduler UniPCMultistepScheduler"):
        latents_of(fresh_pipe, "a circle")


@pytest.mark.parametrize(
    "returned",
    [{"latent": torch.zeros(LATENTS)}, torch.zeros(2), {"latents": None}, {"latents": torch.zeros(1)}],
    ids=["unknown name", "no dict", "none", "shape"],
)
def test_what_a_callback_returns_is_checked(pipe, returned):
    with pytest.raises(ValueError, match="a callback returned"):
        latents_of(pipe, "a circle", callback_on_step_end=lambda *_: returned)


# Shapes, types, state


def test_given_latents_are_not_written_to_and_give_the_same_video_twice(pipe):
    noise = torch.randn(LATENTS, generator=torch.Generator().manual_seed(7))
    copy = noise.clone()
    first = latents_of(pipe, "a circle", latents=noise, seed=None)
    assert torch.equal(noise, copy)
    assert torch.equal(latents_of(pipe, "a circle", latents=noise, seed=None), first)
    assert torch.equal(latents_of(pipe, "a circle", seed=7), first)


def test_the_size_follows_from_given_latents(pipe):
    latents = torch.randn(1, 3, 32, 16, 6)
    size = dict.fromkeys(("height", "width", "num_frames"))
    assert latents_of(pipe, "a circle", latents=latents, **size).shape == latents.shape


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()])
def test_the_transformer_may_be_cast_after_loading(fresh_pipe, cast):
    expected = latents_of(fresh_pipe, "a circle", guidance_scale=1.0)
    cast(fresh_pipe.transformer)
    latents = latents_of(fresh_pipe, "a circle", guidance_scale=1.0)
    assert latents.dtype == torch.float32
    # Half precision rounds each layer's output to 3 digits; flipped blocks move single values further.
    assert (latents - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_the_first_latent_frame_is_denoised_and_the_conditioning_is_zero_at_every_step(pipe):
    noise = torch.randn(LATENTS, generator=torch.Generator().manual_seed(7))
    seen = []

    def keep(pipe, step, timestep, tensors):
        seen.append(tensors["latents"])

    with Calls(pipe.transformer) as calls:
        latents_of(pipe, "a circle", num_inference_steps=3, callback_on_step_end=keep)
    assert (seen[0][:, 0] - noise[:, 0]).abs().max() > 1e-3
    assert len(calls) == 6
    for (hidden_states, *_), _ in calls:
        assert hidden_states.shape[-1] == 2 * 6 + 1
        assert not hidden_states[..., 6:].any()
        assert hidden_states[..., :6].any()


def test_the_model_sees_the_unrounded_time_in_fp32(fresh_pipe):
    fresh_pipe.transformer.to(torch.bfloat16)
    with Calls(fresh_pipe.transformer) as calls:
        latents_of(fresh_pipe, "a circle", guidance_scale=1.0, num_inference_steps=16, shift=5.0)
    times = [args[3] for args, _ in calls]
    assert all(t.dtype == torch.float32 for t in times)
    golden = json.loads((Path(__file__).parent / "data" / "timesteps.json").read_text())["steps16_shift5"]
    torch.testing.assert_close(torch.cat(times), torch.tensor(golden[:-1]), rtol=0, atol=1e-3)


def test_one_frame_is_a_video(pipe):
    frames = pipe("a circle", **{**SIZE, "num_frames": 1}, seed=7).frames
    assert len(frames[0]) == 1


def test_nabla_runs_as_asked_and_differs_from_dense(pipe):
    size = {"height": 256, "width": 256, "num_frames": 5}
    reference = latents_of(pipe, "a circle", nabla_P=0.3, **size)
    pipe.transformer.set_attention_backend("NABLA_ATTN")
    compiled = latents_of(pipe, "a circle", nabla_P=0.3, **size)
    torch.testing.assert_close(compiled, reference, **BATCH_TOLERANCE)
    pipe.transformer.set_attention_backend("SDPA")
    assert (latents_of(pipe, "a circle", **size) - reference).abs().max() > 0.1


def test_the_window_mask_is_built_once_and_each_call_gets_the_step_index(pipe):
    with Calls(pipe.transformer) as calls:
        latents_of(pipe, "a circle", num_inference_steps=3)
    metadata = [kwargs["attn_metadata"] for _, kwargs in calls]
    assert [m.current_timestep for m in metadata] == [0, 0, 1, 1, 2, 2]
    assert len({m.sta_mask.data_ptr() for m in metadata}) == 1
    assert {m.P for m in metadata} == {0.73}


def test_an_interrupt_ends_the_loop_at_once_and_nothing_is_decoded(pipe):
    def stop(pipe, step, timestep, tensors):
        pipe._interrupt = True

    with Calls(pipe.transformer) as calls, Calls(pipe.vae.decoder) as decoded:
        out = pipe("a circle", **{**SIZE, "num_inference_steps": 4}, seed=7, callback_on_step_end=stop)
    assert len(calls) == 2  # one step with guidance
    assert not decoded
    assert out.frames.shape == LATENTS
    assert pipe.interrupt
    assert latents_of(pipe, "a circle").isfinite().all()
    assert not pipe.interrupt


def test_a_callback_sees_each_step_and_may_replace_tensors(pipe):
    steps = []

    def zero(pipe, step, timestep, tensors):
        steps.append((step, round(float(timestep), 3), sorted(tensors)))
        return {"latents": torch.zeros_like(tensors["latents"])}

    names = ["latents", "prompt_embeds", "negative_prompt_embeds"]
    out = latents_of(pipe, "a circle", callback_on_step_end=zero, callback_on_step_end_tensor_inputs=names)
    assert steps == [(0, 1000.0, sorted(names)), (1, 833.333, sorted(names))]
    assert not out.any()


# Output


def test_the_four_output_types_show_the_same_video(pipe):
    latents = latents_of(pipe, "a circle")
    assert latents.shape == LATENTS
    assert latents.dtype == torch.float32
    pil = pipe("a circle", **SIZE, seed=7).frames
    array = pipe("a circle", **SIZE, seed=7, output_type="np").frames
    tensor = pipe("a circle", **SIZE, seed=7, output_type="pt").frames
    assert array.shape == (1, 5, 128, 128, 3)
    assert tensor.shape == (1, 5, 3, 128, 128)
    assert 0 <= array.min() < array.max() <= 1
    assert np.array_equal(array, tensor.permute(0, 1, 3, 4, 2).numpy())
    assert np.array_equal(np.stack([np.asarray(frame) for frame in pil[0]]), np.rint(array[0] * 255).astype(np.uint8))
    assert np.array_equal(pipe.decode(latents, "np"), array)
    assert isinstance(pipe("a circle", **SIZE, return_dict=False), tuple)


def test_decoding_does_not_depend_on_what_was_decoded_before(pipe):
    """The tiles are fixed: 320 pixels are two tiles a side, whatever state the VAE was left in."""
    latents = torch.randn(1, 2, 40, 40, 6, generator=torch.Generator().manual_seed(0))
    first = pipe.decode(latents, "np")
    pipe.vae.disable_tiling()
    assert np.array_equal(pipe.decode(latents, "np"), first)
