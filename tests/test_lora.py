"""LoRAs: what a file says, what it does to the video, and that what fits no layer changes nothing."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.models.headers import read_headers, weight_files
from kandinsky5_nabla.pipeline.lora import LoraRequest, load_loras, lora_problems, parse_lora, with_triggers
from kandinsky5_nabla.pipeline.lora_files import linear_layers

DEMO = Path(load_preset("demo").model)
QUERY = "visual_transformer_blocks.0.self_attention.to_query"
CROSS = "visual_transformer_blocks.2.cross_attention.out_layer"
FEED = "visual_transformer_blocks.1.feed_forward.in_layer"
TEXT = "text_transformer_blocks.0.feed_forward.out_layer"
TIME = "time_embeddings.in_layer"  # stays fp32
TRIGGER = "M1CR0W4V3 r0t4tION, 360-degree rotation."

# The merged weights sum in another order than W x + B (A x); one step carries 1e-6 to about 1e-5.
TOLERANCE = {"rtol": 0, "atol": 1e-4}


def latents_of(pipe, prompt="a circle", **kwargs):
    size = {"height": 128, "width": 128, "num_frames": 1, "num_inference_steps": 1, "guidance_scale": 1.0}
    return pipe(prompt, **{**size, "seed": 7, "output_type": "latent", **kwargs}).frames


@pytest.fixture
def clean(pipe):
    """The shared pipeline, without LoRAs again after the test."""
    yield pipe
    pipe.unload_lora_weights()


@pytest.fixture
def toy(pipe):
    """A LoRA of some layers, as B, A by layer."""
    linears = linear_layers(pipe.transformer)

    def make(ranks, seed=0):
        generator = torch.Generator().manual_seed(seed)
        pairs = {}
        for name, rank in ranks.items():
            out_features, in_features = linears[name]
            B = torch.randn(out_features, rank, generator=generator)
            pairs[name] = B, torch.randn(rank, in_features, generator=generator) / math.sqrt(in_features)
        return pairs

    return make


def named(pairs, form="transformer.{}.lora_{}.weight", parts="AB", alpha=None):
    tensors = {}
    for name, (B, A) in pairs.items():
        module = name.replace(".", "_") if form.startswith("lora_unet") else name
        tensors |= {form.format(module, part): x for part, x in zip(parts, (A, B), strict=True)}
        if alpha is not None:
            tensors[form.split(".lora")[0].format(module) + ".alpha"] = torch.tensor(alpha)
    return tensors


def written(folder, tensors, name="lora.safetensors", config=None, **metadata):
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / config[0]).write_text(json.dumps(config[1]))
    save_file({key: x.clone() for key, x in tensors.items()}, folder / name, metadata=metadata or None)
    return folder / name


def latents_of_merged(pipe, *changes, **kwargs):
    """The oracle: the latents of W + factor * B A, computed without peft; the weights are put back."""
    originals = {}
    with torch.no_grad():
        for pairs, factor in changes:
            for name, (B, A) in pairs.items():
                weight = pipe.transformer.get_parameter(f"{name}.weight")
                originals.setdefault(name, weight.clone())
                weight += (factor * B.double() @ A.double()).to(weight.dtype)
        latents = latents_of(pipe, **kwargs)
        for name, original in originals.items():
            pipe.transformer.get_parameter(f"{name}.weight").copy_(original)
    return latents


OLD = {"parts": ("down", "up"), "alpha": 3.0}
FORMATS = {
    "diffusers": {},
    "peft": {"form": "base_model.model.{}.lora_{}.weight"},
    "peft of a pipeline": {"form": "base_model.model.transformer.{}.lora_{}.weight"},
    "published": {"form": "base_model.model.{}.lora_{}.default.weight"},
    "comfy": {"form": "diffusion_model.{}.lora_{}.weight"},
    "bare": {"form": "{}.lora_{}.weight"},
    "down and up": OLD,
    "kohya": {"form": "lora_unet_{}.lora_{}.weight", **OLD},
}

# What it does to the video


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_does_what_the_merged_weights_do_with_ranks_that_differ(clean, toy, tmp_path, form):
    pairs = toy({QUERY: 3, CROSS: 3, FEED: 6, TEXT: 4})
    alpha = FORMATS[form].get("alpha")
    factors = [({name: pair}, alpha / len(pair[1]) if alpha else 1.0) for name, pair in pairs.items()]
    expected, before = latents_of_merged(clean, *factors), latents_of(clean)
    assert (expected - before).abs().max() > 0.1
    clean.load_lora_weights(written(tmp_path, named(pairs, **FORMATS[form])))
    torch.testing.assert_close(latents_of(clean), expected, **TOLERANCE)


def test_a_lora_that_was_removed_leaves_everything_as_it_was(clean, toy):
    before, tensors = latents_of(clean), dict(clean.transformer.state_dict())
    trained = [name for name, p in clean.transformer.named_parameters() if p.requires_grad]
    random = torch.get_rng_state()
    given = named(toy({QUERY: 2, FEED: 2, TIME: 2}))
    copies = {key: x.clone() for key, x in given.items()}
    clean.load_lora_weights(given)
    assert not torch.equal(latents_of(clean), before)
    clean.transformer.get_submodule(QUERY).lora_B["default_0"].weight.data.zero_()
    assert all(torch.equal(given[key], x) for key, x in copies.items())
    clean.unload_lora_weights()
    assert torch.equal(latents_of(clean), before)
    after = clean.transformer.state_dict()
    assert after.keys() == tensors.keys()
    assert all(after[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())
    assert [name for name, p in clean.transformer.named_parameters() if p.requires_grad] == trained
    assert torch.equal(torch.get_rng_state(), random)


def test_two_loras_add_up_whatever_layers_they_share(clean, toy):
    first, second = toy({QUERY: 2, FEED: 2}), toy({FEED: 4, TEXT: 2}, seed=1)
    before, alone = latents_of(clean), latents_of_merged(clean, (second, 1.0))
    expected = latents_of_merged(clean, (first, 1.0), (second, 1.0))
    scaled = latents_of_merged(clean, (first, -0.5), (second, 2.0))
    clean.load_lora_weights(named(first), adapter_name="first")
    clean.load_lora_weights(named(second), adapter_name="second")
    torch.testing.assert_close(latents_of(clean), expected, **TOLERANCE)
    clean.set_adapters(["first", "second"], [-0.5, 2.0])
    torch.testing.assert_close(latents_of(clean), scaled, **TOLERANCE)
    clean.set_adapters(["first", "second"], [0.0, 0.0])
    torch.testing.assert_close(latents_of(clean), before, **TOLERANCE)
    clean.set_adapters("second")
    torch.testing.assert_close(latents_of(clean), alone, **TOLERANCE)
    clean.disable_lora()
    assert torch.equal(latents_of(clean), before)
    clean.enable_lora()
    clean.delete_adapters("second")
    clean.set_adapters("first", 0.0)
    torch.testing.assert_close(latents_of(clean), before, **TOLERANCE)


def test_sparse_attention_stays_sparse_and_sees_the_lora(clean, toy):
    size = {"height": 256, "width": 256, "nabla_P": 0.3}
    pairs = toy({QUERY: 2, FEED: 2})
    before, expected = latents_of(clean, **size), latents_of_merged(clean, (pairs, 1.0), **size)
    clean.load_lora_weights(named(pairs))
    torch.testing.assert_close(latents_of(clean, **size), expected, **TOLERANCE)
    assert (expected - before).abs().max() > 0.1
    clean.transformer.set_attention_backend("SDPA")
    assert (latents_of(clean, height=256, width=256) - expected).abs().max() > 1e-3


def test_in_bf16_adapters_take_the_dtype_of_their_layer_and_what_is_fp32_stays_so(fresh_pipe, toy):
    fresh_pipe.transformer.to(torch.bfloat16)
    dtypes = {name: x.dtype for name, x in fresh_pipe.transformer.state_dict().items()}
    pairs = toy({QUERY: 2, FEED: 2, TIME: 2})
    before, expected = latents_of(fresh_pipe), latents_of_merged(fresh_pipe, (pairs, 1.0))
    fresh_pipe.load_lora_weights(named(pairs))
    assert (latents_of(fresh_pipe) - expected).norm() < 0.1 * (expected - before).norm()
    assert fresh_pipe.transformer.get_submodule(TIME).lora_A["default_0"].weight.dtype == torch.float32
    assert fresh_pipe.transformer.get_submodule(QUERY).lora_B["default_0"].weight.dtype == torch.bfloat16
    dtypes_now = {name.replace(".base_layer", ""): x.dtype for name, x in fresh_pipe.transformer.state_dict().items()}
    assert dtypes_now.items() >= dtypes.items()


def test_a_fused_lora_stays_when_it_is_unloaded_and_is_saved(fresh_pipe, toy, tmp_path):
    pairs = toy({QUERY: 2, FEED: 2})
    expected = latents_of_merged(fresh_pipe, (pairs, 0.5), prompt=f"{TRIGGER} a circle")
    fresh_pipe.load_lora_weights(written(tmp_path, named(pairs), trigger=TRIGGER))
    with pytest.raises(ValueError, match=r"unload_lora_weights\(\) before saving"):
        fresh_pipe.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    fresh_pipe.fuse_lora(lora_scale=0.5)
    with pytest.raises(ValueError, match="LoRAs are fused"):
        fresh_pipe.load_lora_weights(named(pairs))
    fresh_pipe.unload_lora_weights()
    torch.testing.assert_close(latents_of(fresh_pipe), expected, **TOLERANCE)
    fresh_pipe.save_pretrained(tmp_path / "saved")
    saved, original = (read_headers(weight_files(folder / "transformer")) for folder in (tmp_path / "saved", DEMO))
    assert saved.keys() == original.keys()


ALPHAS = [
    ({"r": 4, "lora_alpha": 8}, 2.0, 2.0),
    ({"r": 4, "lora_alpha": 8, "alpha_pattern": {"feed_forward.in_layer": 2}}, 2.0, 0.5),
    ({"r": 4, "lora_alpha": 8, "use_rslora": True}, 4.0, 4.0),
    ({}, 1.0, 1.0),
]


@pytest.mark.parametrize(("config", "query", "feed"), ALPHAS)
@pytest.mark.parametrize("place", ["config_lora.json", "adapter_config.json", "metadata"])
def test_alpha_is_read_where_it_is_written(clean, toy, tmp_path, caplog, place, config, query, feed):
    tensors = named(toy({QUERY: 4, FEED: 4}), "base_model.model.{}.lora_{}.weight")
    if place == "metadata":
        text = json.dumps({f"transformer.{key}": value for key, value in config.items()})
        clean.load_lora_weights(written(tmp_path, tensors, lora_adapter_metadata=text))
    else:
        clean.load_lora_weights(written(tmp_path, tensors, config=(place, config)))
    scales = [clean.transformer.get_submodule(name).scaling["default_0"] for name in (QUERY, FEED)]
    assert scales == pytest.approx([query, feed])
    assert ("does not say its alpha" in caplog.text) == (config == {})


def test_what_diffusers_saves_of_an_adapter_is_read_again(clean, toy, tmp_path):
    pairs = toy({QUERY: 3, FEED: 2, TEXT: 2})
    clean.load_lora_weights(named(pairs, alpha=5.0))
    expected = latents_of(clean)
    clean.transformer.save_lora_adapter(tmp_path, "default_0")
    clean.unload_lora_weights()
    clean.load_lora_weights(tmp_path)
    torch.testing.assert_close(latents_of(clean), expected, **TOLERANCE)


# Refusals

A, B = torch.ones(2, 128), torch.ones(128, 2)
PAIR = named({QUERY: (B, A)})
Q = f"transformer.{QUERY}"
NOT_OURS = {
    "another width": (named({QUERY: (B, torch.ones(2, 1792))}), r"\[2, 1792\] and lora_B \[128, 2\] .* \[128, 128\]"),
    "two ranks": (named({QUERY: (B, torch.ones(3, 128))}), r"to_query: lora_A \[3, 128\] and lora_B \[128, 2\]"),
    "a deeper model": (PAIR | named({QUERY.replace("0", "59"): (B, A)}), r"blocks\.59\.self_.*query is no linear"),
    "another model": (named({"blocks.0.attn1.to_q": (B, A)}), r"blocks\.0\.attn1\.to_q is no linear layer"),
    "a norm": (named({"pooled_text_embeddings.norm": (B, A)}), r"embeddings\.norm is no linear layer"),
    "a text encoder": (named({"q_proj": (B, A)}, "text_encoder.{}.lora_{}.weight"), "text_encoder.q_proj is no"),
    "half a pair": ({f"{Q}.lora_A.weight": A}, "lora_A.weight alone"),
    "an alpha alone": (PAIR | {f"transformer.{FEED}.alpha": torch.tensor(1.0)}, r"in_layer\.alpha alone"),
    "DoRA": (PAIR | {f"{Q}.lora_magnitude_vector": torch.ones(128)}, "lora_magnitude_vector is neither"),
    "a bias": (PAIR | {f"{Q}.lora_B.bias": torch.ones(128)}, "lora_B.bias is neither"),
    "whole weights": ({f"{Q}.weight": torch.ones(128, 128)}, "to_query.weight is neither"),
    "the same twice": (PAIR | named({QUERY: (B, A)}, "{}.lora_{}.weight"), "stands for the same as"),
    "integers": ({key: x.int() for key, x in PAIR.items()}, "is not floating point"),
    "an infinite alpha": (named({QUERY: (B, A)}, alpha=math.inf), "alpha inf"),
    "nothing": ({}, "nothing in it matches"),
}


@pytest.mark.parametrize("kind", NOT_OURS)
@pytest.mark.parametrize("in_a_file", [True, False])
def test_what_is_no_lora_of_this_transformer_is_refused_before_anything_changes(pipe, tmp_path, kind, in_a_file):
    tensors, message = NOT_OURS[kind]
    names = list(pipe.transformer.state_dict())
    with pytest.raises(ValueError, match=message):
        pipe.load_lora_weights(written(tmp_path, tensors) if in_a_file else tensors)
    assert list(pipe.transformer.state_dict()) == names
    assert pipe.get_list_adapters() == {}


NO_CONFIG = {
    "rank 2 in the tensors and 8 in the config": {"r": 8, "lora_alpha": 8},
    "alpha None": {"r": 2, "lora_alpha": None},
    "does not describe a plain LoRA": {"r": 2, "use_dora": True},
    "json does not describe": {"peft_type": "LOKR"},
    "not describe a plain": [],
}


@pytest.mark.parametrize("message", NO_CONFIG)
def test_a_config_of_something_else_is_refused(pipe, tmp_path, message):
    with pytest.raises(ValueError, match=message):
        pipe.load_lora_weights(written(tmp_path, PAIR, config=("adapter_config.json", NO_CONFIG[message])))
    assert pipe.get_list_adapters() == {}


@pytest.mark.parametrize("name", ["lora.bin", "lora.pt", "lora.ckpt"])
@pytest.mark.parametrize("method", ["load_lora_weights", "lora_state_dict"])
def test_pickle_files_are_refused(pipe, tmp_path, name, method):
    torch.save(PAIR, tmp_path / name)
    for source, arguments in ((tmp_path / name, {}), (tmp_path, {"weight_name": name})):
        with pytest.raises(ValueError, match="only safetensors files are read"):
            getattr(pipe, method)(source, **arguments)
    with pytest.raises(ValueError, match="use_safetensors=False"):
        getattr(pipe, method)(tmp_path, use_safetensors=False)


def test_the_file_is_found_in_a_folder_or_named(pipe, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no safetensors"):
        pipe.load_lora_weights(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        pipe.load_lora_weights("loras/none.bin")
    written(tmp_path, PAIR, "left.safetensors")
    written(tmp_path, PAIR, "right.safetensors")
    with pytest.raises(ValueError, match=r"one file of left\.safetensors, right\.safetensors"):
        pipe.load_lora_weights(tmp_path)
    assert pipe.lora_state_dict(tmp_path, weight_name="left.safetensors").keys() == PAIR.keys()


@pytest.mark.parametrize("name", ["taken", "a.b", "", "train"])
def test_a_name_that_cannot_be_an_adapters_is_refused(clean, name):
    clean.load_lora_weights(PAIR, adapter_name="taken")
    with pytest.raises(ValueError, match=f"adapter_name '{name}'"):
        clean.load_lora_weights(PAIR, adapter_name=name)
    assert clean.get_list_adapters() == {"transformer": ["taken"]}


def test_a_transformer_that_diffusers_would_pass_over_or_that_is_in_fp8_is_refused(fresh_pipe):
    fresh_pipe.transformer.visual_transformer_blocks.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="in fp8"):
        fresh_pipe.load_lora_weights(PAIR)
    fresh_pipe.transformer = torch.compile(fresh_pipe.transformer)
    with pytest.raises(ValueError, match=r"transformer\.compile\(\)"):
        fresh_pipe.unload_lora_weights()


@pytest.mark.parametrize("key", ["trigger", "trigger_word", "instance_prompt"])
def test_trigger_words_stand_before_the_prompt_while_their_lora_acts(clean, tmp_path, key):
    file = written(tmp_path, PAIR, config=("config_lora.json", {"r": 2, "lora_alpha": 2}), **{key: f"{TRIGGER} "})
    clean.load_lora_weights(PAIR)
    expected = latents_of(clean, f"{TRIGGER} a circle", guidance_scale=5.0)
    clean.unload_lora_weights()
    clean.load_lora_weights(file, adapter_name="turn")
    assert clean.lora_trigger_words == {"turn": TRIGGER}
    assert torch.equal(latents_of(clean, guidance_scale=5.0), expected)
    assert torch.equal(latents_of(clean, f"{TRIGGER} a circle", guidance_scale=5.0), expected)
    clean.load_lora_weights(PAIR, adapter_name="silent")
    assert clean.acting_trigger_words == [TRIGGER]
    clean.set_adapters(["turn", "silent"], [0.0, 1.0])
    assert clean.acting_trigger_words == []
    clean.unload_lora_weights()
    assert clean.lora_trigger_words == {}


def test_triggers_precede_each_prompt_that_lacks_them():
    prompts = with_triggers(["a cat", "", "one, cones"], ["one", "cone"])
    assert prompts == ["one cone a cat", "one cone ", "cone one, cones"]


REQUESTS = {
    "arc.safetensors": ("arc.safetensors", 1.0),
    "loras/arc:-1": ("loras/arc", -1.0),
    r"C:\loras\arc.safetensors": (r"C:\loras\arc.safetensors", 1.0),
    r"C:\loras\arc.safetensors:0": (r"C:\loras\arc.safetensors", 0.0),
    "a:b:c.safetensors:.5": ("a:b:c.safetensors", 0.5),
}


@pytest.mark.parametrize("text", REQUESTS)
def test_a_request_is_a_file_that_may_hold_colons_and_a_scale(text):
    assert parse_lora(text) == LoraRequest(*REQUESTS[text])


@pytest.mark.parametrize("text", ["", " ", ":0.5", "a:nan", "a:inf", "a:1e999", "a:", "a.safetensors:0,8"])
def test_a_request_without_a_file_or_a_finite_scale_is_refused(text):
    with pytest.raises(ValueError, match=r"LoRA .*(finite number|FILE)"):
        parse_lora(text)


def test_several_loras_are_loaded_with_their_scales(clean, toy, tmp_path):
    first, second = toy({QUERY: 2}), toy({QUERY: 3}, seed=1)
    paths = [str(written(tmp_path / "1", named(first))), str(written(tmp_path / "2", named(second)).parent)]
    expected = latents_of_merged(clean, (first, 0.5), (second, -2.0))
    assert load_loras(clean, [LoraRequest(paths[0], 0.5), LoraRequest(paths[1], -2.0)]) == ["default_0", "default_1"]
    torch.testing.assert_close(latents_of(clean), expected, **TOLERANCE)


def test_problems_of_all_loras_are_told_at_once_and_without_the_model(pipe, tmp_path):
    files = [written(tmp_path, PAIR), written(tmp_path, NOT_OURS["another model"][0], "other.safetensors")]
    requests = [LoraRequest(str(path)) for path in (*files, "missing.safetensors")]
    with pytest.raises(ValueError, match=r"other\.safetensors is no LoRA.*missing\.safetensors: there is no such"):
        load_loras(pipe, requests)
    assert pipe.get_list_adapters() == {}
    headers = read_headers(weight_files(DEMO / "transformer"))
    shapes = {name.removesuffix(".weight"): h.shape for name, h in headers.items() if len(h.shape) == 2}
    assert shapes == linear_layers(pipe.transformer)
    assert len(lora_problems(requests, shapes)) == 2


def test_without_peft_everything_imports_and_loras_say_what_to_install():
    script = """if True:
        import sys
        from kandinsky5_nabla.pipeline.lora import parse_lora
        assert not {"torch", "diffusers", "numpy"} & set(sys.modules)
        sys.modules["peft"] = None
        from kandinsky5_nabla.pipeline.pipeline import Kandinsky5NablaPipeline
        pipe = Kandinsky5NablaPipeline.__new__(Kandinsky5NablaPipeline)
        pipe.transformer = None
        pipe.load_lora_weights({})
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.endswith('DependencyError: LoRAs need peft: pip install "kandinsky5-nabla[lora]"\n')
