"""Presets: data that is read strictly, without loading anything heavy."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kandinsky5_nabla.configs import Preset, find_preset, load_preset, preset_names

CONFIGS = Path(__file__).parent.parent / "configs"
LITE = "Kandinsky-5.0-T2V-Lite-sft-10s-Diffusers"


def write_preset(folder, changes):
    """Write the Lite preset with some values changed; a value of ... removes its key."""
    data = yaml.safe_load((CONFIGS / "lite-t2v-10s-sft.yaml").read_text(encoding="utf-8")) | changes
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not ...}))
    return path


def test_every_file_is_a_preset_of_its_own_name():
    assert preset_names() == sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    assert {"demo", "lite-t2v-10s-sft"} <= set(preset_names())
    for name in preset_names():
        assert load_preset(name).name == name


def test_the_lite_preset_has_the_published_values():
    preset = load_preset("lite-t2v-10s-sft")
    assert preset == Preset(
        name="lite-t2v-10s-sft",
        description=preset.description,
        model=f"kandinskylab/{LITE}",
        revision=None,
        attention="nabla",
        nabla_P=0.9,
        num_inference_steps=50,
        guidance_scale=5.0,
        shift=10.0,
        num_frames=241,
        height=512,
        width=768,
        sizes=((512, 512), (512, 768), (768, 512)),
        scale_factor=(1.0, 2.0, 2.0),
        fps=24.0,
        prompt_prefix_tokens=129,
        max_sequence_length=256,
    )
    assert preset.local_folder is None


def test_the_demo_preset_names_the_folder_beside_it():
    preset = load_preset("demo")
    assert preset.local_folder == CONFIGS / "demo"
    assert preset.model == str(CONFIGS / "demo")
    assert (preset.height, preset.width, preset.num_frames) == (256, 256, 17)
    assert preset.scale_factor == (1.0, 1.0, 1.0)
    assert preset.prompt_prefix_tokens is None


def test_a_users_own_file_works_like_a_preset(tmp_path, monkeypatch):
    path = write_preset(tmp_path, {"name": "mine", "model": "./weights", "num_inference_steps": 4, "fps": 8})
    for spelling in (path, str(path)):
        preset = load_preset(spelling)
        assert (preset.name, preset.num_inference_steps, preset.fps) == ("mine", 4, 8.0)
        assert preset.local_folder == tmp_path / "weights"
    monkeypatch.chdir(tmp_path)
    assert load_preset("own.yaml").local_folder == tmp_path / "weights"


def test_dense_attention_needs_no_share_and_allows_sizes_of_16(tmp_path):
    path = write_preset(
        tmp_path, {"attention": "dense", "nabla_P": None, "height": 528, "width": 16, "sizes": [[528, 16]]}
    )
    assert load_preset(path).nabla_P is None


def test_an_unknown_name_is_refused_with_the_nearest_and_all_names():
    with pytest.raises(
        ValueError, match=r"'lite-t2v-10s-stf': did you mean 'lite-t2v-10s-sft'\?.*demo, lite-t2v-10s-sft"
    ):
        load_preset("lite-t2v-10s-stf")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "cannot be read"),
        ("a: [", "cannot be read"),
        ("- a\n- b\n", "must map keys to values, got list"),
        ("", "must map keys to values, got NoneType"),
        ("!!python/object/apply:os.getcwd []", "cannot be read"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path, content, match):
    path = tmp_path / "own.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=rf"the preset .*own\.yaml .*{match}"):
        load_preset(path)


BAD = [
    ({"num_steps": 50}, r"unknown key 'num_steps' \(the nearest is 'num_inference_steps'\)"),
    ({"guidance": 5.0}, r"unknown key 'guidance' \(the nearest is 'guidance_scale'\)"),
    ({7: 5.0}, "unknown key 7"),
    ({"shift": ...}, "missing key 'shift'"),
    ({"revision": ...}, "missing key 'revision'"),
    ({"name": 7}, "name must be text, got 7"),
    ({"model": ""}, "model must be text"),
    ({"model": "no-owner"}, "model must be owner/name on the Hub, an absolute path or ./folder, got 'no-owner'"),
    ({"revision": 1}, "revision must be text or null, got 1"),
    ({"attention": "flash"}, "attention must be 'nabla' or 'dense', got 'flash'"),
    ({"attention": "dense"}, "nabla_P must be null with dense attention, got 0.9"),
    ({"nabla_P": None}, r"nabla_P must be in \(0, 1\] with nabla attention, got None"),
    ({"nabla_P": 0}, r"nabla_P must be in \(0, 1\]"),
    ({"nabla_P": 1.1}, r"nabla_P must be in \(0, 1\]"),
    ({"nabla_P": "0.9"}, "nabla_P must be a number or null, got '0.9'"),
    ({"nabla_P": float("nan")}, "nabla_P must be a number"),
    ({"num_inference_steps": 50.0}, "num_inference_steps must be an integer, got 50.0"),
    ({"num_inference_steps": True}, "num_inference_steps must be an integer"),
    ({"num_inference_steps": 0}, "num_inference_steps must be positive"),
    ({"guidance_scale": 0.5}, "guidance_scale must be at least 1"),
    ({"guidance_scale": True}, "guidance_scale must be a number"),
    ({"shift": 0}, "shift must be positive"),
    ({"fps": -24}, "fps must be positive"),
    ({"num_frames": 240}, r"num_frames must be 4k \+ 1.*got 240 \(nearest: \[237, 241\]\)"),
    ({"num_frames": 0}, r"num_frames must be .*\(nearest: \[1\]\)"),
    ({"num_frames": 513}, r"num_frames must be .*\(nearest: \[509\]\)"),
    ({"height": 500}, "height and width must be multiples of 16, .*, got 500x768"),
    ({"height": 2064}, "height and width must be multiples of 16, at most 2048"),
    ({"height": 256}, "height and width must be one of sizes"),
    ({"sizes": [[512, 768], [512, 500]]}, "got 512x500"),
    ({"sizes": [[512, 768], [2176, 512]]}, "at most 2048"),
    ({"sizes": []}, r"sizes must be a list of \[height, width\]"),
    ({"sizes": [[512, 768, 3]]}, "sizes must be a list"),
    ({"sizes": [512, 768]}, "sizes must be a list"),
    ({"sizes": [[512, 768.0]]}, "sizes must be a list"),
    ({"scale_factor": [1, 2]}, r"scale_factor must be a list of three numbers"),
    ({"scale_factor": 2}, "scale_factor must be a list of three numbers"),
    ({"scale_factor": [1, 2, "2"]}, "scale_factor must be a list of three numbers"),
    ({"scale_factor": [1, 0, 2]}, "scale_factor must be positive"),
    ({"prompt_prefix_tokens": 0}, "prompt_prefix_tokens must be positive"),
    ({"max_sequence_length": None}, "max_sequence_length must be an integer, got None"),
]


@pytest.mark.parametrize(("changes", "match"), BAD, ids=[str(changes) for changes, _ in BAD])
def test_a_bad_entry_is_refused_with_file_key_and_rule(tmp_path, changes, match):
    with pytest.raises(ValueError, match=rf"the preset .*own\.yaml is not valid: .*{match}"):
        load_preset(write_preset(tmp_path, changes))


def test_all_problems_are_listed_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"attention must be .*num_frames must be .*height and width"):
        load_preset(write_preset(tmp_path, {"attention": "flash", "num_frames": 7, "height": 500}))
    with pytest.raises(ValueError, match=r"unknown key 'heigth' .*'height'\); missing key 'height'"):
        load_preset(write_preset(tmp_path, {"heigth": 512, "height": ...}))


def test_a_changed_preset_is_checked_too():
    preset = load_preset("lite-t2v-10s-sft")
    assert replace(preset, num_frames=121).num_frames == 121
    with pytest.raises(ValueError, match="num_frames must be"):
        replace(preset, num_frames=120)


def test_a_preset_is_found_by_repository_old_repository_and_folder(tmp_path, monkeypatch):
    lite, demo = load_preset("lite-t2v-10s-sft"), load_preset("demo")
    assert find_preset(f"kandinskylab/{LITE}") == lite
    assert find_preset(f"ai-forever/{LITE}") == lite
    for folder in (LITE, "demo", "other"):
        (tmp_path / folder).mkdir()
    assert find_preset(str(tmp_path / LITE)) == lite
    assert find_preset(f"{tmp_path / LITE}/") == lite
    assert find_preset(demo.model) == demo
    assert find_preset(str(tmp_path / "demo")) is None  # a name alone says nothing
    monkeypatch.chdir(tmp_path / LITE)
    assert find_preset(".") == lite
    for unknown in (f"someone/{LITE}", LITE, "kandinskylab/demo", "kandinskylab/other", str(tmp_path / "other"), ""):
        assert find_preset(unknown) is None, unknown


def test_importing_configs_loads_neither_torch_nor_yaml():
    code = (
        "import sys, kandinsky5_nabla.configs as configs; configs.preset_names();"
        "print([name for name in ('torch', 'yaml', 'numpy', 'diffusers', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
