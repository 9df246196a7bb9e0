"""Python calls that cannot be honoured: an error of the catalogue that names the value, before any heavy work."""

from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, Kandinsky5Transformer3DModel

from kandinsky5_nabla.configs import errors, load_preset
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
from kandinsky5_nabla.pipeline import pipeline as module

DEMO = Path(load_preset("demo").model)
SIZE = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 2}
LATENTS = (1, 2, 8, 8, 6)
EMBEDS = {"prompt_embeds": torch.zeros(1, 3, 64), "pooled_prompt_embeds": torch.zeros(1, 64)}
NAN = float("nan")


def latents_of(pipe, prompt="a circle", **kwargs):
    return pipe(prompt, **{**SIZE, "seed": 7, "output_type": "latent", **kwargs}).frames


@contextmanager
def refusing_to_run(model):
    """A forward of the model is a failure of the test."""
    hook = model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    try:
        yield
    finally:
        hook.remove()


# A call of the pipeline

BAD_CALLS = {
    "callback": ({"callback_on_step_end": 3}, errors.ArgumentError, "callback_on_step_end 3: must be a function"),
    "no callback tensors": ({"callback_on_step_end_tensor_inputs": None}, errors.ArgumentError, "None: must be a list"),
    "callback tensors": ({"callback_on_step_end_tensor_inputs": [["latents"]]}, errors.ArgumentError, "one of latents"),
    "NaN latents": ({"latents": torch.full(LATENTS, NAN)}, errors.ArgumentError, "latents: hold NaN"),
    "endless latents": ({"latents": torch.full(LATENTS, torch.inf)}, errors.ArgumentError, "latents: hold NaN or inf"),
    "whole latents": ({"latents": torch.ones(LATENTS).long()}, errors.ArgumentError, "int64: must be of torch.float32"),
    "guidance arrays": ({"guidance_scale": np.ones(2)}, errors.SettingsError, "guidance scale array"),
    "endless guidance": ({"guidance_scale": 10**400}, errors.SettingsError, "must be a number, 0 or more"),
    "true steps": ({"num_inference_steps": True}, errors.SettingsError, "steps True"),
    "true seed": ({"seed": True}, errors.SettingsError, "seed True"),
    "true length": ({"max_sequence_length": True}, errors.SettingsError, "max_sequence_length=True"),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_call_is_refused_before_a_step_is_made(pipe, arguments, kind, message):
    with refusing_to_run(pipe.transformer), pytest.raises(kind, match=message):
        latents_of(pipe, **arguments)


BAD_EMBEDS = {
    "embeds in lists": ({"prompt_embeds": [[[0.0]]]}, "prompt_embeds: must be a tensor, not list"),
    "pooled in lists": ({"pooled_prompt_embeds": [[0.0]]}, "pooled_prompt_embeds: must be a tensor, not list"),
    "mask in lists": ({"prompt_embeds_mask": [[1, 1, 1]]}, "prompt_embeds_mask: must be a tensor, not list"),
    "whole embeds": ({"prompt_embeds": torch.zeros(1, 3, 64).long()}, "prompt_embeds of torch.int64"),
    "whole pooled": ({"pooled_prompt_embeds": torch.zeros(1, 64).int()}, "pooled_prompt_embeds of torch.int32"),
    "NaN embeds": ({"prompt_embeds": torch.full((1, 3, 64), NAN)}, "prompt_embeds: holds NaN"),
    "NaN pooled": ({"pooled_prompt_embeds": torch.full((1, 64), NAN)}, "pooled_prompt_embeds: holds NaN"),
    "half mask": (
        {"prompt_embeds_mask": torch.full((1, 3), 0.5)},
        "prompt_embeds_mask: must hold true and false, or",
    ),
    "mask of 2": (
        {"prompt_embeds_mask": torch.tensor([[1, 2, 0]])},
        "prompt_embeds_mask: must hold true and false, or",
    ),
    "NaN mask": (
        {"prompt_embeds_mask": torch.tensor([[1, NAN, 0]])},
        "prompt_embeds_mask: must hold true and false, or",
    ),
}


@pytest.mark.parametrize("prefix", ["", "negative_"])
@pytest.mark.parametrize(("changes", "message"), BAD_EMBEDS.values(), ids=BAD_EMBEDS)
def test_embeddings_that_cannot_be_read_are_refused_before_a_step_is_made(pipe, changes, message, prefix):
    given = {prefix + name: value for name, value in (EMBEDS | changes).items()}
    with refusing_to_run(pipe.transformer), pytest.raises(errors.EmbedsError, match=prefix + message):
        latents_of(pipe, "a circle" if prefix else None, **given)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_may_be_of_any_type_that_tells_real_tokens_from_padding(pipe, dtype):
    real = torch.tensor([[True, True, False]])
    expected = latents_of(pipe, None, **EMBEDS, prompt_embeds_mask=real)
    assert torch.equal(latents_of(pipe, None, **EMBEDS, prompt_embeds_mask=real.to(dtype)), expected)


def test_whole_numbers_of_numpy_and_fractions_are_numbers_everywhere(pipe):
    whole = {name: np.int64(value) for name, value in SIZE.items()}
    given = {**whole, "seed": np.int64(7), "max_sequence_length": np.int32(200), "num_videos_per_prompt": np.int8(1)}
    found = latents_of(pipe, **given, guidance_scale=Fraction(3, 2), scale_factor=(np.float32(1), 2, Fraction(2)))
    assert torch.equal(found, latents_of(pipe, guidance_scale=1.5, scale_factor=(1, 2, 2), max_sequence_length=200))
    settings = pipe.resolve_settings(**whole, guidance_scale=np.float32(1.5))
    assert {type(getattr(settings, name)) for name in whole} == {int}
    assert type(settings.guidance_scale) is float


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"latents": np.zeros(LATENTS)}, "latents as ndarray; it must be a tensor"),
        ({"latents": torch.full(LATENTS, NAN)}, "latents that are not finite"),
    ],
    ids=["array", "NaN"],
)
def test_a_callback_may_not_return_what_the_next_step_cannot_use(pipe, returned, message):
    with pytest.raises(errors.ArgumentError, match=message):
        latents_of(pipe, callback_on_step_end=lambda *_: returned)


def test_the_name_of_one_tensor_for_the_callback_stands_for_that_tensor_alone(pipe):
    seen = []
    latents_of(
        pipe,
        callback_on_step_end=lambda pipe, step, timestep, tensors: seen.append(list(tensors)),
        callback_on_step_end_tensor_inputs="negative_prompt_embeds",
    )
    assert seen == [["negative_prompt_embeds"]] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0.0]],), "latents list: must be a tensor"),
        ((torch.zeros(1, 6, 2, 8, 8),), "channels last"),
        ((torch.zeros(LATENTS).long(),), "latents of torch.int64"),
        ((torch.zeros(LATENTS), "np", 3), "tile 3: must be a row of"),
        ((torch.zeros(LATENTS), "latent"), "output_type 'latent': must be one of pil, np, pt"),
    ],
    ids=["list", "channels first", "whole", "tile", "output type"],
)
def test_what_cannot_be_decoded_is_refused(pipe, arguments, message):
    with refusing_to_run(pipe.vae.decoder), pytest.raises(errors.ArgumentError, match=message):
        pipe.decode(*arguments)


def test_a_pipeline_that_only_decodes_says_so(pipe):
    decoder = Kandinsky5NablaPipeline(None, pipe.vae, preset="demo")
    assert len(decoder.decode(torch.zeros(LATENTS), "np")[0]) == 5
    for call in (lambda: latents_of(decoder), lambda: decoder.encode_prompt("a circle")):
        with pytest.raises(errors.ArgumentError, match=r"can only decode latents \(pipe\.decode\)"):
            call()


def test_prompts_are_not_encoded_without_their_encoders(pipe):
    bare = Kandinsky5NablaPipeline(**{**pipe.components, "text_encoder_2": None}, preset="demo")
    with pytest.raises(errors.ArgumentError, match="no text encoder, or lacks a part of one"):
        bare.encode_prompt("a circle")


# Parts and loading


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("transformer", 3, "transformer: must be a Kandinsky5Transformer or None, not int"),
        ("transformer", "theirs", "transformer: must be a Kandinsky5Transformer or None, not Kandinsky5Transformer3D"),
        ("vae", None, "vae: must be a AutoencoderKLHunyuanVideo, not NoneType"),
        ("vae", "images", "vae: must be a AutoencoderKLHunyuanVideo, not AutoencoderKL"),
        ("text_encoder", "Qwen", "text_encoder: must be a PreTrainedModel or None, not str"),
        ("tokenizer_2", 3, "tokenizer_2: must be a PreTrainedTokenizerBase or None, not int"),
        ("scheduler", 3, "scheduler: must be a SchedulerMixin or None, not int"),
    ],
)
def test_a_part_of_another_class_is_refused_where_a_pipeline_is_built_and_loaded(pipe, part, value, message):
    if value in ("theirs", "images"):
        with torch.device("meta"):
            value = Kandinsky5Transformer3DModel(num_visual_blocks=1) if value == "theirs" else AutoencoderKL()
    with pytest.raises(errors.ArgumentError, match=message):
        Kandinsky5NablaPipeline(**{**pipe.components, part: value}, preset="demo")
    with pytest.raises(errors.ArgumentError, match=message):
        Kandinsky5NablaPipeline.from_pretrained(DEMO, **{part: value})


def test_a_compiled_transformer_is_a_transformer(pipe):
    parts = {**pipe.components, "transformer": torch.compile(pipe.transformer)}
    again = Kandinsky5NablaPipeline(**parts, preset="demo")
    assert again.transformer is parts["transformer"]


@pytest.mark.parametrize("cls", [Kandinsky5NablaPipeline, Kandinsky5Transformer])
@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("/nix", errors.NotFoundError, "'/nix': there is no such folder, and it is no Hub id"),
        ("Kandinsky-5.0-T2V-Pro-sft-10s-Diffusers", errors.NotFoundError, "nearest published is 'kandinskylab/Kandin"),
        (3, errors.ArgumentError, "checkpoint 3: must be a text or a pathlib.Path, not int"),
        (None, errors.ArgumentError, "checkpoint None: must be a text"),
        (__file__, errors.CheckpointError, r"is a file; from_single_file loads"),
    ],
)
def test_what_is_no_folder_and_no_repository_is_not_looked_for_on_the_hub(cls, source, kind, message):
    with pytest.raises(kind, match=message):
        cls.from_pretrained(source)


BAD_LOADING = {
    "typo": ({"torch_dtpye": torch.float32}, errors.ArgumentError, "'torch_dtpye' is no argument of it; did you mean "),
    "unknown": ({"xyzzy": 1}, errors.ArgumentError, "'xyzzy' is no argument of it; there are torch_dtype, dtype"),
    "dtype's name": ({"torch_dtype": "float8"}, errors.DtypeError, "'float8': torch.float32, torch.bfloat16, torch.f"),
    "whole dtype": ({"dtype": torch.int8}, errors.DtypeError, "torch.int8: torch.float32"),
    "a part's dtype": ({"dtype": {"vae": torch.int8}}, errors.DtypeError, "torch.int8: torch.float32"),
    "no part": ({"dtype": {"transfomer": torch.float16}}, errors.ArgumentError, "did you mean transformer"),
    "two dtypes": ({"dtype": torch.float32, "torch_dtype": torch.float16}, errors.ArgumentError, "give one of them"),
    "preset": ({"preset": "demmo"}, errors.PresetError, "did you mean 'demo'"),
    "cache": ({"cache_dir": 3}, errors.ArgumentError, "cache_dir 3: must be a text or a pathlib.Path"),
    "revision": ({"revision": "main"}, errors.ArgumentError, "revision 'main': of a repository of the Hub"),
    "revision's type": ({"revision": 3}, errors.ArgumentError, "revision 3: must be the name of"),
    "device map": ({"device_map": "balanced"}, errors.ArgumentError, "device_map='balanced': only None is supported"),
    "code": ({"trust_remote_code": True}, errors.ArgumentError, "only trust_remote_code=False is supported"),
    "download": ({"force_download": True}, errors.ArgumentError, "only force_download=False is supported"),
    "quantization": ({"quantization_config": 3}, errors.ArgumentError, "PipelineQuantizationConfig, not int"),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_LOADING.values(), ids=BAD_LOADING)
def test_an_argument_of_from_pretrained_is_refused_before_any_weights_are_read(arguments, kind, message, monkeypatch):
    monkeypatch.setattr(module, "require_loadable", lambda *_, **__: pytest.fail("the checkpoint was read"))
    with pytest.raises(kind, match=message):
        Kandinsky5NablaPipeline.from_pretrained(DEMO, **arguments)


def test_what_diffusers_users_pass_with_its_usual_value_goes_on_working():
    usual = {"use_safetensors": True, "low_cpu_mem_usage": True, "local_files_only": True, "trust_remote_code": False}
    none = dict.fromkeys(("device_map", "variant", "revision", "token", "cache_dir", "custom_pipeline", "max_memory"))
    pipe = Kandinsky5NablaPipeline.from_pretrained(DEMO, **usual, **none, torch_dtype={"transformer": torch.bfloat16})
    assert (pipe.transformer.dtype, pipe.text_encoder.dtype) == (torch.bfloat16, torch.float32)


FILE = DEMO / "transformer" / "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize(
    ("file", "arguments", "kind", "message"),
    [
        (3, {}, errors.ArgumentError, "file 3: must be a text or a pathlib.Path"),
        (FILE, {"torch_dtpye": torch.float16}, errors.ArgumentError, "did you mean torch_dtype"),
        (FILE, {"torch_dtype": "float8"}, errors.DtypeError, "'float8': torch.float32"),
        (FILE, {"text_encoder_dtype": torch.int8}, errors.DtypeError, "torch.int8: torch.float32"),
        (FILE, {"vae": 3}, errors.ArgumentError, "vae 3: must be a text or a pathlib.Path"),
        (FILE, {"cache_dir": 3}, errors.ArgumentError, "cache_dir 3: must be"),
        (FILE, {"without": "text_encoder_2"}, errors.ArgumentError, r"must be a list of \['text_encoder', "),
        (FILE, {"without": ["text_encodr"]}, errors.ArgumentError, "only text encoders can be left out"),
        (FILE, {"without": 3}, errors.ArgumentError, "without 3: only text encoders"),
    ],
)
def test_an_argument_of_from_single_file_is_refused(file, arguments, kind, message):
    with pytest.raises(kind, match=message):
        Kandinsky5NablaPipeline.from_single_file(file, **{"preset": "demo", "offline": True, **arguments})


@pytest.mark.parametrize("device", ["tpu", "cuda:999", torch.device("cuda:999"), 999, [1]])
def test_a_device_that_is_not_there_is_refused_and_the_parts_stay_where_they_are(fresh_pipe, device):
    for move in (lambda: fresh_pipe.to(device), lambda: fresh_pipe.to(device=device)):
        with pytest.raises(errors.DeviceError, match=r"device .*: cannot be used here \(.*\); 'cpu' works"):
            move()
    with pytest.raises(errors.DtypeError, match=r"torch\.int8: torch\.float32"):
        fresh_pipe.to(torch.int8)
    assert (fresh_pipe.transformer.device.type, fresh_pipe.transformer.dtype) == ("cpu", torch.float32)
    assert fresh_pipe.to("cpu", torch.bfloat16).transformer.dtype == torch.bfloat16
    assert fresh_pipe.to(torch.float32).transformer.dtype == torch.float32


def test_a_pipeline_is_saved_in_a_folder(pipe, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(errors.TakenError, match="taken: is a file; name a folder"):
        pipe.save_pretrained(tmp_path / "taken")
    with pytest.raises(errors.ArgumentError, match="save_directory 3: must be a text"):
        pipe.save_pretrained(3)


@pytest.mark.parametrize("source", [3, None, ["a.safetensors"]])
def test_a_lora_is_loaded_by_its_path_under_a_text_as_name(pipe, source):
    with pytest.raises(errors.ArgumentError, match=r"LoRA .*: must be a text or a pathlib\.Path"):
        pipe.load_lora_weights(source)
    with pytest.raises(errors.LoraError, match="adapter_name 3: letters"):
        pipe.load_lora_weights("cat.safetensors", adapter_name=3)
    with pytest.raises(errors.LoraError, match=r"set_adapters: .*: loaded are none"):
        pipe.set_adapters(source)
