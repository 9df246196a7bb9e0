"""A checkpoint's folder is judged before anything of it is loaded: classes, code, pickles, files, sizes."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.models.text_encoder import QwenTextEncoder
from kandinsky5_nabla.pipeline.precision import text_encoder_quantization
from kandinsky5_nabla.pipeline.safety import WEIGHTS, check_folder, check_weights, require_loadable

DEMO = load_preset("demo").model
PARTS = sorted(WEIGHTS)
each_part = pytest.mark.parametrize("part", PARTS)


@pytest.fixture
def folder(tmp_path):
    """A copy of the demo checkpoint, to change."""
    return shutil.copytree(DEMO, tmp_path / "checkpoint")


def edit_json(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_tensors(folder, part, edit):
    tensors = load_file(folder / part / WEIGHTS[part])
    edit(tensors)
    save_file(tensors, folder / part / WEIGHTS[part], metadata={"format": "pt"})


def only(problems):
    assert len(problems) == 1, problems
    return problems[0]


def test_a_good_folder_has_no_problem_and_neither_has_one_made_of_links(folder, tmp_path):
    links = tmp_path / "snapshot"  # as the Hub's cache: every file is a link to somewhere else
    for file in (path for path in folder.rglob("*") if path.is_file()):
        link = links / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(file, link.parent))
    for good in (folder, links):
        assert check_folder(good) == []
        assert check_weights(good) == []
        require_loadable(good)


def test_the_quick_checks_load_no_torch(folder):
    script = f"""
        import sys
        from pathlib import Path
        from kandinsky5_nabla.pipeline.safety import check_folder
        assert check_folder(Path({str(folder)!r})) == []
        print({{"torch", "diffusers", "transformers"}} & set(sys.modules))
        """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_all_problems_are_found_at_once_and_raised_together(folder):
    edit_json(folder / "vae" / "config.json", lambda config: config.update(auto_map={"AutoModel": "evil.Model"}))
    (folder / "transformer" / "config.json").unlink()
    shutil.rmtree(folder / "tokenizer_2")
    assert len(check_folder(folder)) == 3
    with pytest.raises(ValueError, match=r"(?s)transformer.config\.json is missing.*auto_map.*tokenizer_2"):
        require_loadable(folder)


def test_a_part_that_the_caller_brings_may_be_broken_or_missing(folder):
    shutil.rmtree(folder / "text_encoder")
    (folder / "vae" / "config.json").write_text("{")
    assert len(check_folder(folder)) == 2
    brought = ("text_encoder", "vae")
    assert check_folder(folder, without=brought) == []
    assert check_weights(folder, without=brought) == []


NAMED = {
    "class": ({"vae": ["os", "system"]}, "vae is a os.system, only diffusers.AutoencoderKLHunyuanVideo is loaded"),
    "our own module": ({"vae": ["pipeline_evil", "Vae"]}, "vae is a pipeline_evil.Vae"),
    "nested": ({"vae": ["diffusers", ["AutoencoderKLHunyuanVideo"]]}, "vae is a diffusers"),
    "pipeline": ({"_class_name": "EvilPipeline"}, "of a EvilPipeline"),
    "pipeline in a file": ({"_class_name": ["pipeline", "EvilPipeline"]}, "of a ['pipeline', 'EvilPipeline']"),
    "another part": ({"safety_checker": ["pickle", "loads"]}, "'safety_checker' is a pickle.loads"),
    "absolute part": ({"/etc": ["diffusers", "UNet2DModel"]}, "'/etc' is a diffusers.UNet2DModel"),
    "part outside": ({"../vae": ["diffusers", "UNet2DModel"]}, "'../vae' is a diffusers.UNet2DModel"),
    "no part": ({"transformer": "diffusers"}, "transformer is missing"),
}


@pytest.mark.parametrize(("changes", "problem"), NAMED.values(), ids=NAMED)
def test_an_index_that_names_anything_but_the_listed_classes_is_refused(changes, problem, folder):
    edit_json(folder / "model_index.json", lambda index: index.update(changes))
    assert problem in only(check_folder(folder))


SETTINGS = {
    "auto_map": {"AutoModel": "modeling.Evil"},
    "custom_code": True,
    "trust_remote_code": True,
    "custom_pipeline": "owner/name",
    "quantization_config": {"quant_method": "gptq"},
    "attn_implementation": "owner/kernel",
    "_attn_implementation": "owner/kernel",
    "module": "modeling.py",
    "files": ["modeling.py"],
}
FILES_OF_SETTINGS = [
    "model_index.json",
    "transformer/config.json",
    "vae/config.json",
    "text_encoder/generation_config.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/preprocessor_config.json",
    "scheduler/scheduler_config.json",
]


@pytest.mark.parametrize("file", FILES_OF_SETTINGS)
@pytest.mark.parametrize("key", SETTINGS)
def test_code_that_a_settings_file_names_is_refused_however_deep_it_stands(key, file, folder):
    edit_json(folder / file, lambda config: config.update(deep=[{"deeper": {key: SETTINGS[key]}}]))
    problem = only(check_folder(folder))
    assert f"{folder / file}: {key}" in problem
    assert "remove it" in problem or "take weights that are not" in problem


def test_a_word_of_a_vocabulary_or_an_empty_setting_is_no_code(folder):
    edit_json(folder / "tokenizer" / "tokenizer.json", lambda content: content.update(auto_map=7))
    harmless = {"auto_map": {}, "trust_remote_code": False, "attn_implementation": "sdpa"}
    edit_json(folder / "text_encoder" / "config.json", lambda config: config.update(harmless))
    assert check_folder(folder) == []


def test_an_adapter_that_would_send_the_loader_elsewhere_is_refused(folder):
    (folder / "text_encoder" / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/name"}')
    assert "wherever it says" in only(check_folder(folder))


PICKLES = ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"]


@pytest.mark.parametrize("name", PICKLES)
@each_part
def test_weights_in_pickle_files_alone_are_refused_with_the_reason(part, name, folder):
    (folder / part / WEIGHTS[part]).rename(folder / part / name)
    problem = only(check_folder(folder))
    assert f"{folder / part} has its weights as {name} alone" in problem
    assert "run code" in problem


@each_part
def test_a_pickle_file_beside_the_safetensors_is_never_read_and_no_problem(part, folder):
    (folder / part / "pytorch_model.bin").write_bytes(b"a pickle")
    assert check_folder(folder) == []


@pytest.fixture
def shards(folder):
    """Divides a part's weights among two files with an index; returns a function of the part."""

    def divide(part):
        weights = folder / part / WEIGHTS[part]
        tensors = load_file(weights)
        weight_map = {}
        for number in range(2):
            shard = f"shard-{number + 1}-of-2.safetensors"
            names = sorted(tensors)[number::2]
            save_file({name: tensors[name] for name in names}, folder / part / shard, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names, shard)
        weights.unlink()
        (folder / part / f"{WEIGHTS[part]}.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return sorted((folder / part).glob("shard-*"))

    return divide


@each_part
def test_shards_are_read_as_one_file(part, folder, shards):
    assert len(shards(part)) == 2
    assert check_folder(folder) == []
    assert check_weights(folder) == []


@each_part
def test_a_shard_that_is_missing_is_named(part, folder, shards):
    shards(part)[1].unlink()
    problem = only(check_folder(folder))
    assert f"{folder / part}" in problem
    assert "missing: shard-2-of-2.safetensors" in problem


@each_part
def test_every_shard_that_is_cut_short_is_named(part, folder, shards):
    for shard, remaining in zip(shards(part), (-1, 20), strict=True):
        shard.write_bytes(shard.read_bytes()[:remaining])
    problems = check_folder(folder)
    assert [problem.split(" is cut short")[0] for problem in problems] == [
        str(shard) for shard in shards_of(folder, part)
    ]


def shards_of(folder, part):
    return sorted((folder / part).glob("shard-*"))


@pytest.mark.parametrize("remaining", [-1, 20, 4, 0])
@each_part
def test_a_file_that_is_cut_short_is_named(part, remaining, folder):
    file = folder / part / WEIGHTS[part]
    file.write_bytes(file.read_bytes()[:remaining])
    assert f"{file} is cut short or damaged" in only(check_folder(folder))


@pytest.mark.parametrize("outside", ["../shard.safetensors", "/shard.safetensors", "deeper/shard.safetensors"])
@each_part
def test_a_shard_that_lies_outside_its_folder_is_refused(part, outside, folder, shards):
    shards(part)
    index = folder / part / f"{WEIGHTS[part]}.index.json"
    edit_json(index, lambda content: content["weight_map"].update(extra=outside))
    assert f"names {outside}; shards lie beside their index" in only(check_folder(folder))


@pytest.mark.parametrize("text", ["{", "[]", "\ufeff{}", '{"a": ' * 100_000 + "1" + "}" * 100_000])
def test_a_file_of_settings_that_is_none_is_named(text, folder):
    (folder / "model_index.json").write_text(text)
    assert str(folder / "model_index.json") in only(check_folder(folder))


@pytest.mark.parametrize("name", ["vae", "tokenizer", "scheduler"])
def test_a_folder_that_the_index_names_and_that_is_missing_is_named(name, folder):
    shutil.rmtree(folder / name)
    assert f"{folder / name} is missing" in only(check_folder(folder))


WIDTHS = {
    "text_encoder": (
        lambda config: config["text_config"].update(hidden_size=3584),
        "hidden_size 3584",
        "in_text_dim 64",
    ),
    "text_encoder_2": (lambda config: config.update(hidden_size=768), "hidden_size 768", "in_text_dim2 64"),
    "vae": (lambda config: config.update(latent_channels=16), "latent_channels 16", "out_visual_dim 6"),
}


@pytest.mark.parametrize("part", WIDTHS)
def test_parts_of_different_widths_are_named_with_both(part, folder):
    edit, theirs, ours = WIDTHS[part]
    edit_json(folder / part / "config.json", edit)
    assert only(check_folder(folder)) == f"{part} has {theirs}, and the transformer has {ours}"


# part -> a change of its config that keeps its width, and what the tensors of the file and of the config look like
SIZES = {
    "transformer": ({"ff_dim": 10**6}, "[256, 128], the config asks for [1000000, 128]"),
    "vae": ({"block_out_channels": [16, 16, 32, 10**6]}, ", the config asks for [1000000"),
    "text_encoder": ({"intermediate_size": 10**9}, "[64, 128], the config asks for [64, 1000000000]"),
    "text_encoder_2": ({"intermediate_size": 10**9}, "[128], the config asks for [1000000000]"),
}


def update_config(folder, part, **changes):
    def edit(config):
        config.get("text_config", config).update(changes)

    edit_json(folder / part / "config.json", edit)


@each_part
def test_sizes_that_would_fill_any_memory_are_compared_with_the_tensors_first(part, folder):
    changes, problem = SIZES[part]
    update_config(folder, part, **changes)
    assert check_folder(folder) == []
    found = only(check_weights(folder))
    assert found.startswith(f"the weights in {folder / part} do not fit their config")
    assert problem in found


COUNTS = [
    ("transformer", "num_text_blocks"),
    ("transformer", "num_visual_blocks"),
    ("vae", "layers_per_block"),
    ("text_encoder", "num_hidden_layers"),
    ("text_encoder_2", "num_hidden_layers"),
]


@pytest.mark.parametrize(("part", "key"), COUNTS)
def test_a_number_of_layers_that_would_never_end_is_refused_before_one_is_built(part, key, folder):
    update_config(folder, part, **{key: 10**9})
    assert f"{folder / part / 'config.json'}: {key} is 1000000000, and the files hold" in only(check_weights(folder))


BROKEN = [
    ("transformer", {"model_dim": 10**30}),
    ("transformer", {"attention_sinks": 4}),
    ("transformer", {"axes_dims": [1, 2, 3]}),
    ("vae", {"block_out_channels": "many"}),
    ("text_encoder", {"hidden_act": "no such function"}),
    ("text_encoder_2", {"intermediate_size": "wide"}),
]


@pytest.mark.parametrize(("part", "changes"), BROKEN)
def test_a_config_that_cannot_be_built_is_named(part, changes, folder):
    update_config(folder, part, **changes)
    assert f"{folder / part / 'config.json'} cannot be built" in only(check_weights(folder))


def test_a_text_encoder_of_another_family_is_refused_by_its_name(folder):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config))
    assert "of type 'llama'; qwen2_5_vl is needed" in only(check_weights(folder))


NORMS = {
    "transformer": "text_embeddings.norm.weight",
    "vae": "decoder.conv_norm_out.weight",
    "text_encoder": "model.norm.weight",
    "text_encoder_2": "final_layer_norm.weight",
}


@pytest.mark.parametrize("damage", ["missing", "unexpected", "not floating point"])
@each_part
def test_tensors_that_are_missing_unexpected_or_integers_are_named_in_every_part(part, damage, folder):
    def edit(tensors):
        weight = tensors.pop(NORMS[part])
        if damage == "unexpected":
            tensors |= {NORMS[part]: weight, "extra.weight": weight.clone()}
        elif damage == "not floating point":
            tensors[NORMS[part]] = weight.to(torch.int8)

    edit_tensors(folder, part, edit)
    problem = only(check_weights(folder))
    assert "in 1 tensors" in problem
    assert damage in problem


def test_the_whole_clip_and_both_layouts_of_qwen_are_read_as_their_text_sides(folder):
    config = json.loads((folder / "text_encoder_2" / "config.json").read_text())
    eyes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    clip = CLIPModel(
        CLIPConfig(text_config=config, vision_config={**eyes, "num_attention_heads": 2}, projection_dim=16)
    )
    shutil.rmtree(folder / "text_encoder_2")
    clip.save_pretrained(folder / "text_encoder_2")
    edit_tensors(
        folder,
        "text_encoder_2",  # older versions of transformers saved this buffer
        lambda tensors: tensors.update({"text_model.embeddings.position_ids": torch.arange(77)[None]}),
    )
    assert check_folder(folder) + check_weights(folder) == []

    def to_newer_layout(tensors):
        for name in list(tensors):
            prefix = "model.language_model." if name.startswith("model.") else "model."
            if not name.startswith("lm_head"):
                tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(folder, "text_encoder", to_newer_layout)
    assert check_weights(folder) == []


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder_2"])
def test_no_part_but_the_text_encoder_may_be_quantised(part, folder):
    update_config(folder, part, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert "only text_encoder may be quantised" in only(check_folder(folder))


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_a_text_encoder_that_was_saved_quantised_is_compared_by_what_is_not_packed(name, folder):
    quantization = text_encoder_quantization(name, "cpu")
    encoder = QwenTextEncoder.from_pretrained(
        folder / "text_encoder", dtype=torch.float32, quantization_config=quantization
    )
    shutil.rmtree(folder / "text_encoder")
    encoder.save_pretrained(folder / "text_encoder")
    assert check_folder(folder) + check_weights(folder) == []
    edit_tensors(folder, "text_encoder", lambda tensors: tensors.pop("norm.weight"))
    assert "in 1 tensors: norm.weight is missing" in only(check_weights(folder))
