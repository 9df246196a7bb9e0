"""A denoising that goes on where it was: to the bit, from a file that is whole or not there."""

import json
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

from kandinsky5_nabla.pipeline.state import KIND, VERSION, load_state, save_state

SIZE = {"height": 128, "width": 128, "num_frames": 1, "num_inference_steps": 3, "output_type": "latent"}
LATENTS = torch.randn(1, 1, 4, 4, 6, generator=torch.Generator().manual_seed(0))


def denoised(pipe, **arguments):
    """Returns the final latents, and what a callback saw: (step, timestep, latents after it)."""
    seen = []

    def see(pipe, step, timestep, tensors):
        seen.append((step, float(timestep), tensors["latents"].clone()))

    return pipe("a cat", **SIZE, **arguments, callback_on_step_end=see).frames, seen


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_from_any_of_its_steps_is_the_rest_of_the_whole_run_to_the_bit(pipe, count):
    whole, seen = denoised(pipe, seed=3, num_videos_per_prompt=count)
    assert [step for step, _, _ in seen] == [0, 1, 2]
    for first in (1, 2, 3):
        latents = seen[first - 1][2]
        kept = latents.clone()
        rest, of_rest = denoised(pipe, latents=latents, first_step=first, num_videos_per_prompt=count)
        assert torch.equal(rest, whole)
        assert [entry[:2] for entry in of_rest] == [entry[:2] for entry in seen[first:]]
        assert torch.equal(latents, kept)  # what was given is not written to


def test_the_attention_of_a_resumed_run_sees_the_steps_of_the_whole_run(pipe):
    steps = []

    def see(module, args, kwargs):
        steps.append(kwargs["attn_metadata"].current_timestep)

    handle = pipe.transformer.register_forward_pre_hook(see, with_kwargs=True)
    try:
        denoised(pipe, latents=torch.zeros(1, 1, 16, 16, 6), first_step=1, guidance_scale=1)
    finally:
        handle.remove()
    assert steps == [1, 2]


def test_an_interrupted_call_goes_on_from_what_it_returned(pipe):
    def stop(pipe, step, timestep, tensors):
        pipe._interrupt = step == 1

    whole, _ = denoised(pipe, seed=3)
    stopped = pipe("a cat", **SIZE, seed=3, callback_on_step_end=stop).frames
    assert torch.equal(denoised(pipe, latents=stopped, first_step=2)[0], whole)


@pytest.mark.parametrize(
    ("first_step", "message"),
    [
        (-1, "first_step -1: must be a whole number from 0 to the 3 steps of the run"),
        (4, "first_step 4: must be"),
        (1.0, "first_step 1.0: must be"),
        (True, "first_step True: must be"),
        ("1", "first_step '1': must be"),
        (2, "first_step 2: needs latents=, as they were after 2 steps"),
    ],
)
def test_a_first_step_that_cannot_be_is_refused_before_anything_is_encoded(pipe, monkeypatch, first_step, message):
    def encode(*args, **kwargs):
        raise AssertionError("it came as far as encoding")

    monkeypatch.setattr(pipe, "encode_prompt", encode)
    with pytest.raises(ValueError, match=message):
        pipe("a cat", **SIZE, first_step=first_step)


def test_a_state_comes_back_as_it_was_with_what_else_a_run_keeps(tmp_path):
    state = {"latents": LATENTS, "completed": 2, "cache.0": torch.arange(3), "name": "é", "share": 0.1, "none": None}
    loaded = load_state(save_state(tmp_path / "state.safetensors", state))
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(loaded[name], value) if torch.is_tensor(value) else loaded[name] == value
    assert loaded["latents"].dtype == torch.float32
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"latents": LATENTS[0]}, "it has no latents"),
        ({"latents": LATENTS.half()}, "it has no latents"),
        ({"latents": LATENTS * torch.nan}, "its latents are not finite"),
        ({"completed": -1}, "completed -1 is no number of steps"),
        ({"completed": None}, "completed None is no number of steps"),
    ],
)
def test_what_is_no_state_is_not_saved(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        save_state(tmp_path / "state.safetensors", {"latents": LATENTS, "completed": 1, **changed})
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_state_before_it(tmp_path):
    path = save_state(tmp_path / "state.safetensors", {"latents": LATENTS, "completed": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"the state .*state\.safetensors cannot be written: .*File too large"):
            save_state(path, {"latents": torch.zeros(1, 1, 16, 16, 6), "completed": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_state(path)["completed"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_damaged_or_foreign_file_is_named(tmp_path):
    path = save_state(tmp_path / "state.safetensors", {"latents": LATENTS, "completed": 1})
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"state\.safetensors is damaged"):
        load_state(path)
    save_file({"latents": LATENTS}, path, metadata={"kind": '"other"'})
    with pytest.raises(ValueError, match=r"state\.safetensors is no state"):
        load_state(path)
    save_file({}, path, metadata={name: json.dumps(v) for name, v in {"kind": KIND, "version": VERSION}.items()})
    with pytest.raises(ValueError, match=r"state\.safetensors is damaged: it has no latents"):
        load_state(path)
    with pytest.raises(FileNotFoundError, match="there is no state"):
        load_state(tmp_path / "missing.safetensors")


@pytest.mark.parametrize("version", [0, VERSION + 1, "1", None])
def test_another_version_of_the_format_is_refused(tmp_path, version):
    path = save_state(tmp_path / "state.safetensors", {"latents": LATENTS, "completed": 1})
    metadata = {"kind": json.dumps(KIND), "version": json.dumps(version), "completed": "1"}
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(ValueError, match=f"this version reads {VERSION}: start the run anew"):
        load_state(path)
