"""Presets: read strictly, found by what a user calls a checkpoint, held against what is asked and what is published."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kandinsky5_nabla.configs import find_preset, load_preset, preset_names
from kandinsky5_nabla.pipeline.checks import Geometry, Settings
from kandinsky5_nabla.scripts.list_presets import main, table

CONFIGS = Path(__file__).parent.parent / "configs"
LITE = "Kandinsky-5.0-T2V-Lite-sft-10s-Diffusers"
PRO = "Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers"
SD = [(512, 512), (512, 768), (768, 512)]
HD = [(640, 1408), (768, 1280), (896, 1152), (1024, 1024), (1152, 896), (1280, 768), (1408, 640)]
CLASSES = {"SD": ((512, 768), SD, (1.0, 2.0, 2.0)), "HD": ((768, 1280), HD, (1.0, 3.16, 3.16))}
PUBLISHED = """
lite-t2v-10s-sft         Lite-sft-10s              kandinsky5lite_t2v_sft_10s              0.9    50 5 241 10 SD
lite-t2v-10s-nocfg       Lite-nocfg-10s            kandinsky5lite_t2v_nocfg_10s            0.9    50 1 241 10 SD
lite-t2v-10s-distilled16 Lite-distilled16steps-10s kandinsky5lite_t2v_distilled16steps_10s 0.9    16 1 241 10 SD
lite-t2v-10s-pretrain    Lite-pretrain-10s         kandinsky5lite_t2v_pretrain_10s         0.9    50 5 241 10 SD
lite-t2v-5s-sft          Lite-sft-5s               kandinsky5lite_t2v_sft_5s               dense  50 5 121  5 SD
lite-t2v-5s-nocfg        Lite-nocfg-5s             kandinsky5lite_t2v_nocfg_5s             dense  50 1 121  5 SD
lite-t2v-5s-distilled16  Lite-distilled16steps-5s  kandinsky5lite_t2v_distilled16steps_5s  dense  16 1 121  5 SD
lite-t2v-5s-pretrain     Lite-pretrain-5s          kandinsky5lite_t2v_pretrain_5s          dense  50 5 121  5 SD
pro-t2v-5s-sft-sd        Pro-sft-5s                kandinsky5pro_t2v_sft_5s                dense  50 5 121  5 SD
pro-t2v-5s-sft-hd        Pro-sft-5s                kandinsky5pro_t2v_sft_5s                0.8    50 5 121  5 HD
pro-t2v-10s-sft-sd       Pro-sft-10s               kandinsky5pro_t2v_sft_10s               0.9    50 5 241 10 SD
pro-t2v-10s-sft-hd       Pro-sft-10s               kandinsky5pro_t2v_sft_10s               0.7    50 5 241 10 HD
"""
PUBLISHED = {line.split()[0]: line.split()[1:] for line in PUBLISHED.strip().splitlines()}
SD_PRESETS = [name for name, row in PUBLISHED.items() if row[-1] == "SD"]  # one for each checkpoint


def write_preset(folder, changes):
    """Write the Lite preset with some values changed; a value of ... removes its key."""
    data = yaml.safe_load((CONFIGS / "lite-t2v-10s-sft.yaml").read_text(encoding="utf-8")) | changes
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not ...}))
    return path


def test_every_published_checkpoint_and_the_demo_have_a_preset_and_nothing_else_does():
    assert preset_names() == sorted(["demo", *PUBLISHED])
    assert preset_names() == sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_values(name):
    preset = load_preset(name)
    repository, file, P, steps, guidance, frames, shift, resolution = PUBLISHED[name]
    attention = ("dense", None, None) if P == "dense" else ("nabla", float(P), (11, 3, 3))
    size, sizes, scale_factor = CLASSES[resolution]
    assert (preset.model, preset.revision) == (f"kandinskylab/Kandinsky-5.0-T2V-{repository}-Diffusers", None)
    assert preset.original_file == f"{file}.safetensors"
    assert (preset.attention, preset.nabla_P, preset.nabla_window) == attention
    assert preset.attention_decided_by == ("preset" if name.startswith("pro") else "checkpoint")
    assert (preset.num_inference_steps, preset.guidance_scale) == (int(steps), float(guidance))
    assert (preset.num_frames, preset.fps, preset.shift) == (int(frames), 24.0, float(shift))
    assert preset.seconds == {"121": 5, "241": 10}[frames]
    assert ((preset.height, preset.width), sorted(preset.sizes), preset.scale_factor) == (size, sizes, scale_factor)
    assert (preset.prompt_prefix_tokens, preset.max_sequence_length) == (129, 256)
    assert (preset.name, preset.local_folder) == (name, None)


def test_a_value_that_is_a_guess_says_so_beside_it():
    for name in PUBLISHED:
        lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        guesses = {line.partition(":")[0] for line in lines if "# guess" in line}
        expected = {"shift"} if name.startswith("pro") else set()
        assert guesses - {"width"} == expected | ({"model"} if name.startswith("pro-t2v-10s") else set()), name


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
    dense = {"attention": "dense", "nabla_P": None, "nabla_window": None}
    path = write_preset(tmp_path, dense | {"height": 528, "width": 16, "sizes": [[528, 16]]})
    assert load_preset(path).nabla_P is None


def test_an_unknown_name_is_refused_with_the_nearest_and_all_names():
    match = r"'lite-t2v-10s-stf': did you mean 'lite-t2v-10s-sft'\?.*demo, lite-t2v-10s-.*pro-t2v-5s-sft-sd"
    with pytest.raises(ValueError, match=match):
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
    ({"original_file": ...}, "missing key 'original_file'"),
    ({"attention_decided_by": ...}, "missing key 'attention_decided_by'"),
    ({"nabla_window": ...}, "missing key 'nabla_window'"),
    ({"name": 7}, "name must be text, got 7"),
    ({"model": ""}, "model must be text"),
    ({"model": "no-owner"}, "model must be owner/name on the Hub, an absolute path or ./folder, got 'no-owner'"),
    ({"revision": 1}, "revision must be text or null, got 1"),
    ({"original_file": 1}, "original_file must be text or null, got 1"),
    ({"original_file": "a.ckpt"}, "original_file must be the name of a .safetensors file, .*got 'a.ckpt'"),
    ({"original_file": "model/a.safetensors"}, "original_file must be the name .*, without a folder"),
    ({"attention": "flash"}, "attention must be 'nabla' or 'dense', got 'flash'"),
    ({"attention": "dense"}, "nabla_P must be null with dense attention, got 0.9"),
    ({"attention": "dense"}, r"nabla_window must be null with dense attention, got \(11, 3, 3\)"),
    ({"attention_decided_by": "user"}, "attention_decided_by must be 'checkpoint' or 'preset', got 'user'"),
    ({"attention_decided_by": None}, "attention_decided_by must be text, got None"),
    ({"nabla_window": None}, "nabla_window must be at least 1 on each axis with nabla attention, got None"),
    ({"nabla_window": [11, 0, 3]}, r"nabla_window must be at least 1 on each axis .*\(11, 0, 3\)"),
    ({"nabla_window": [11, 3]}, "nabla_window must be a list of three integers"),
    ({"nabla_window": [11, 3, 3.0]}, "nabla_window must be a list of three integers"),
    ({"nabla_window": 3}, r"nabla_window must be a list of three integers \[time, height, width\] or null, got 3"),
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


def test_a_key_that_is_given_twice_is_refused(tmp_path):
    path = write_preset(tmp_path, {})
    path.write_text(path.read_text() + "shift: 5.0\n")
    with pytest.raises(ValueError, match=r"the preset .*own\.yaml is not valid: key 'shift' is given 2 times"):
        load_preset(path)


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


@pytest.mark.parametrize("name", SD_PRESETS)
def test_each_published_checkpoint_is_found_by_all_its_names(tmp_path, name):
    repository, file = f"Kandinsky-5.0-T2V-{PUBLISHED[name][0]}", f"{PUBLISHED[name][1]}.safetensors"
    snapshot = tmp_path / f"models--kandinskylab--{repository}-Diffusers" / "snapshots" / "0123abc"
    folders = [tmp_path / repository, tmp_path / f"{repository}-Diffusers", snapshot]
    for folder in folders:
        folder.mkdir(parents=True)
    ids = [f"{owner}/{repository}{suffix}" for owner in ("kandinskylab", "ai-forever") for suffix in ("-Diffusers", "")]
    files = [file, f"model/{file}", str(tmp_path / file)]
    for model in (*ids, *map(str, folders), *files):
        assert find_preset(model).name == name, model


@pytest.mark.parametrize("model", [f"kandinskylab/{PRO}", "kandinsky5pro_t2v_sft_5s.safetensors", "folder"])
def test_the_size_picks_the_preset_of_a_checkpoint_of_two_classes(tmp_path, model):
    if model == "folder":
        (tmp_path / PRO).mkdir()
        model = str(tmp_path / PRO)
    found = {size: find_preset(model, size).name for size in (*SD, *HD, (720, 1280))}
    assert found == {
        **dict.fromkeys((*SD, (720, 1280)), "pro-t2v-5s-sft-sd"),
        **dict.fromkeys(HD, "pro-t2v-5s-sft-hd"),
    }
    assert find_preset(model).name == "pro-t2v-5s-sft-sd"
    assert find_preset(f"kandinskylab/{LITE}", (768, 1280)).name == "lite-t2v-10s-sft"
    assert find_preset("kandinskylab/other", (768, 1280)) is None


def test_what_is_no_published_checkpoint_is_not_found(tmp_path):
    folders = [f"models--someone--{LITE}/snapshots/0", f"models--kandinskylab--{LITE}/refs/main", f"{LITE}/transformer"]
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    for model in (
        *(str(tmp_path / folder) for folder in folders),
        str(tmp_path / "missing" / LITE),
        f"kandinskylab/{LITE}-Diffusers",
        "kandinsky5pro_t2v_pretrain_5s.safetensors",
        "my_kandinsky5lite_t2v_sft_10s.safetensors",
        "kandinsky5lite_t2v_sft_10s",
        "kandinsky5lite_t2v_sft_10s.safetensors/other",
        ".safetensors",
    ):
        assert find_preset(model) is None, model


def test_what_the_checkpoint_was_made_for_raises_no_caution():
    for name in preset_names():
        preset = load_preset(name)
        for size in preset.sizes:
            for frames in (1, 5, preset.num_frames):
                assert preset.cautions(frames, *size) == []
    assert len(preset.cautions(preset.num_frames + 4, 16, 2048)) == 2  # one each for length and size


CAUTIONS = [  # preset, frames, (height, width), words of the one caution
    ("lite-t2v-10s-sft", 361, (512, 768), ["15 s (361 frames)", "lite-t2v-10s-sft was made for 10 s (241 frames)"]),
    ("lite-t2v-5s-nocfg", 241, (512, 768), ["10 s (241 frames)", "5 s (121 frames)"]),
    ("lite-t2v-10s-sft", 245, (512, 512), ["10.17 s (245 frames)", "10 s (241 frames)"]),
    ("demo", 33, (256, 256), ["4 s (33 frames)", "2 s (17 frames)"]),
    ("lite-t2v-10s-sft", 5, (720, 1280), ["720x1280", "scale (1, 2, 2) of the SD class", "shape is 512x768"]),
    ("lite-t2v-10s-sft", 5, (1280, 720), ["shape is 768x512"]),
    ("lite-t2v-10s-sft", 5, (576, 560), ["shape is 512x512"]),
    ("pro-t2v-5s-sft-hd", 5, (720, 1280), ["scale (1, 3.16, 3.16) of the HD class", "shape is 768x1280"]),
    ("pro-t2v-5s-sft-sd", 5, (768, 1280), ["SD class", "pro-t2v-5s-sft-hd of the same checkpoint has 768x1280"]),
    ("pro-t2v-10s-sft-hd", 5, (512, 512), ["shape is 1024x1024", "pro-t2v-10s-sft-sd of the same checkpoint"]),
    ("demo", 5, (128, 256), ["RoPE scale (1, 1, 1); ", "shape is 256x256"]),
]


@pytest.mark.parametrize(("name", "frames", "size", "words"), CAUTIONS)
def test_what_the_checkpoint_was_not_made_for_raises_a_caution(name, frames, size, words):
    (caution,) = load_preset(name).cautions(frames, *size)
    for word in words:
        assert word in caution
    assert ("same checkpoint" in caution) == ("same checkpoint" in words[-1])


WINDOW = {"attention_wT": 11, "attention_wH": 3, "attention_wW": 3}
NABLA_CONFIG = {"attention_type": "nabla", "attention_P": 0.9, **WINDOW, "model_dim": 1792}


@pytest.mark.parametrize(
    ("name", "transformer", "scheduler"),
    [
        ("lite-t2v-10s-sft", {}, {}),
        ("pro-t2v-5s-sft-sd", {}, {}),
        ("lite-t2v-10s-sft", NABLA_CONFIG, {"shift": 10.0}),
        ("lite-t2v-5s-sft", {"attention_type": "regular", "attention_P": None}, {"shift": 5}),
        ("lite-t2v-5s-sft", {"attention_type": "regular", "attention_P": 0.9, "attention_wT": 7}, {"shift": 5}),
        ("lite-t2v-10s-sft", {"attention_type": None, "attention_P": None, "attention_wT": 11}, {"shift": None}),
    ],
)
def test_a_checkpoint_that_says_the_same_or_nothing_differs_in_nothing(name, transformer, scheduler):
    assert load_preset(name).differences(transformer, scheduler) == []


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("lite-t2v-10s-sft", {"attention_type": "regular"}, ["attention_type 'regular'", "'nabla'", "checkpoint's"]),
        ("lite-t2v-5s-sft", {}, ["attention_type 'nabla'", "'regular'", "checkpoint's"]),
        ("lite-t2v-10s-sft", {"attention_P": 0.8}, ["attention_P 0.8", "0.9", "checkpoint's"]),
        ("lite-t2v-10s-sft", {"attention_wH": 5}, ["attention_wT, wH, wW (11, 5, 3)", "(11, 3, 3)", "checkpoint's"]),
        ("pro-t2v-5s-sft-sd", {}, ["attention_type 'nabla'", "'regular'", "preset's"]),
        ("pro-t2v-5s-sft-hd", {"attention_type": "regular"}, ["attention_type 'regular'", "'nabla'", "preset's"]),
        ("pro-t2v-5s-sft-hd", {}, ["attention_P 0.9", "0.8", "preset's"]),
        ("pro-t2v-10s-sft-sd", {"attention_wT": 7}, ["attention_wT, wH, wW (7, 3, 3)", "(11, 3, 3)", "checkpoint's"]),
    ],
)
def test_a_difference_in_attention_names_both_values_and_the_one_that_is_used(name, changes, expected):
    (difference,) = load_preset(name).differences(NABLA_CONFIG | changes, {})
    theirs, ours, used = expected
    assert difference == f"transformer/config.json has {theirs}, the preset {name} has {ours}: the {used} is used"


def test_the_shift_of_the_scheduler_wins_for_every_preset_and_all_differences_are_reported():
    for name in preset_names():
        preset = load_preset(name)
        (difference,) = preset.differences({}, {"shift": 3.0})
        assert difference == (
            f"scheduler/scheduler_config.json has shift 3.0, the preset {name} has {preset.shift}: "
            "the checkpoint's is used"
        )
    everything = NABLA_CONFIG | {"attention_P": 0.5, "attention_wW": 1}
    assert len(load_preset("lite-t2v-10s-sft").differences(everything, {"shift": 5.0})) == 3


@pytest.mark.parametrize("name", preset_names())
def test_more_than_509_frames_and_2048_pixels_are_refused_and_that_many_are_not(name):
    preset, geometry = load_preset(name), Geometry(nabla=load_preset(name).attention == "nabla")
    most = {"num_frames": 509, "height": 2048, "width": 2048}
    assert Settings.from_preset(preset, geometry, **most).problems(geometry) == []
    for key, value in {"num_frames": 513, "height": 2064, "width": 2064}.items():
        (problem,) = Settings.from_preset(preset, geometry, **{key: value}).problems(geometry)
        assert f"nearest: {most[key]}" in problem


def test_the_list_has_a_line_for_each_preset_in_both_of_its_tables_and_fits_on_a_screen(capsys):
    presets = [load_preset(name) for name in preset_names()]
    assert main([]) == 0
    assert capsys.readouterr().out == table(presets) + "\n"
    runs, places = (block.splitlines() for block in table(presets).split("\n\n"))
    assert [line.split()[0] for line in runs] == [line.split()[0] for line in places] == ["preset", *preset_names()]
    assert max(len(line) for line in (*runs, *places)) <= 100
    rows = {line.split()[0]: line.split()[1:] for line in runs}
    assert rows["lite-t2v-5s-distilled16"] == ["dense", "16", "1", "5", "121", "5", "512x768"]
    assert rows["pro-t2v-10s-sft-hd"] == ["NABLA,", "P", "0.7", "50", "5", "10", "241", "10", "768x1280"]
    assert dict(line.split(maxsplit=1) for line in places)["pro-t2v-5s-sft-hd"] == f"kandinskylab/{PRO}"
    assert dict(line.split(maxsplit=1) for line in places)["demo"] == "inside the package"
    for column in ("attention", "height x width"):  # text begins below its header, numbers end below theirs
        start = runs[0].index(column)
        assert all(line[start - 1] == " " != line[start] for line in runs)
    assert all(line[runs[0].index("shift") + len("shift")] == " " != line[runs[0].index("shift") + 4] for line in runs)


def test_a_preset_of_the_users_own_is_listed_with_its_folder(tmp_path):
    mine = load_preset(write_preset(tmp_path, {"name": "mine", "model": "./weights", "num_frames": 5, "fps": 8}))
    runs, places = table([mine]).split("\n\n")
    assert "  0.5  " in runs
    assert places.endswith(f"mine    {tmp_path / 'weights'}")


def test_importing_configs_and_their_list_loads_neither_torch_nor_yaml():
    code = (
        "import sys, kandinsky5_nabla.scripts.list_presets as presets; presets.preset_names();"
        "print([name for name in ('torch', 'yaml', 'numpy', 'diffusers', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
