"""The inspection of the attention shows what was recorded, and refuses before loading what it cannot show."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.pipeline.attention_report import MapChoice, recorded_attention, report_of
from kandinsky5_nabla.scripts._attention_picture import (
    COLOURS,
    KEPT,
    MAX_STEPS,
    MAX_WIDTH,
    SKIPPED,
    block_image,
    colour_of,
    heat_map,
    legend,
    scale_of,
)
from kandinsky5_nabla.scripts.inspect_attention import DEFAULT_PROMPT, inspection_problems, main, table

SCRIPT = Path(__file__).parent.parent / "scripts" / "inspect_attention.py"
DEMO = load_preset("demo").local_folder
SMALL = ["--height", "128", "--width", "128", "--num-frames", "5", "--steps", "2", "--attention", "NABLA_REFERENCE"]
SIZE = {"height": 128, "width": 128, "num_frames": 5, "num_inference_steps": 2}


def run_program(folder, *argv, script=SCRIPT):
    """Run the real program in a folder: it sets how its process shows warnings and logs."""
    command = [sys.executable, script, "--device", "cpu", *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def read_png(path):
    with Image.open(path, formats=["PNG"]) as image:
        return image.convert("RGB")


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """A run with everything at its default but the size, the kernel and a report."""
    folder = tmp_path_factory.mktemp("first")
    return folder, run_program(folder, *SMALL, "--report", "report.json")


@pytest.fixture
def recorded(pipe):
    """The records of what that run does."""
    with recorded_attention(pipe.transformer, MapChoice(1, 2, 0)) as records:
        pipe(DEFAULT_PROMPT, **SIZE, seed=0, output_type="latent")
    return records


def test_a_run_writes_the_picture_and_the_report_and_names_them(first_run):
    folder, done = first_run
    assert done.returncode == 0, done.stderr
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == [
        "outputs",
        "outputs/attention.png",
        "report.json",
    ]
    assert done.stdout.splitlines()[-2:] == ["outputs/attention.png", "report.json"]
    loading, memory, denoising, first, last = done.stderr.splitlines()
    assert (loading, denoising) == (f"loading {DEMO} ...", "denoising in 2 steps, seed 0 ...")
    assert memory.startswith("memory: offload none, ")
    assert first.startswith("step 1 of 2: ")
    assert last.startswith("step 2 of 2: ")


def without_seconds(lines):
    return [line for line in lines if not line.startswith("seconds")]


def test_the_table_and_the_report_are_those_of_the_pipeline_under_the_recorder(first_run, recorded):
    folder, done = first_run
    expected = report_of(recorded)
    lines = done.stdout.splitlines()[:-2]
    assert without_seconds(lines) == without_seconds(table(expected).splitlines())
    assert [line.split()[0] for line in lines[1:5]] == ["0", "1", "2", "3"]
    assert lines[1].endswith(" of 2")
    content = json.loads((folder / "report.json").read_text())
    report = content.pop("report")
    assert content["map"] == {"step": 1, "layer": 2, "head": 0}
    assert (content["prompt"], content["seed"], content["attention"]) == (DEFAULT_PROMPT, 0, "NABLA_REFERENCE")
    assert {name: content[name] for name in SIZE} == SIZE
    seconds = {"seconds_selecting": 0, "seconds_attending": 0}
    assert report["totals"] | seconds == expected["totals"] | seconds
    assert report["layers"] == expected["layers"]
    for row, expected_row in zip(report["steps_of_layers"], expected["steps_of_layers"], strict=True):
        assert row | seconds == expected_row | seconds


def test_the_picture_shows_the_densities_and_the_chosen_blocks(first_run, recorded):
    picture = np.asarray(read_png(first_run[0] / "outputs" / "attention.png"))
    rows = report_of(recorded)["steps_of_layers"]
    densities = [[row["density"] for row in rows if row["layer"] == layer] for layer in range(4)]
    [kept] = [record.block_map for record in recorded if record.block_map is not None]
    scale = scale_of(densities)
    panels = [heat_map(densities, scale), legend(scale), block_image(kept.numpy())]
    y = 12
    for lines_above, panel in zip((1, 0, 1), panels, strict=True):
        y += 16 * lines_above
        shown = picture[y : y + panel.height, 12 : 12 + panel.width]
        assert np.array_equal(shown, np.asarray(panel))
        y += panel.height + 12
    assert len(picture) == y
    assert max(panel.width for panel in panels) + 24 <= picture.shape[1] <= MAX_WIDTH
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 100


def test_an_existing_picture_is_replaced_only_when_that_is_asked_for(first_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "attention.png").write_text("precious")
    assert main([*SMALL, "--device", "cpu"]) == 2
    problem = "error: output outputs/attention.png: exists; choose another name or add --overwrite\n"
    assert capsys.readouterr().err == problem
    assert (tmp_path / "outputs" / "attention.png").read_text() == "precious"
    done = run_program(tmp_path, *SMALL, "--overwrite")
    assert done.returncode == 0, done.stderr
    expected = read_png(first_run[0] / "outputs" / "attention.png")
    assert read_png(tmp_path / "outputs" / "attention.png").tobytes() == expected.tobytes()


# Bad input


@pytest.fixture
def problems_of(checkpoint, tmp_path, monkeypatch, capsys):
    """Returns the problems that the command line reports, after checking that it wrote nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("taken.png", "taken.json"):
        (tmp_path / name).write_text("precious")

    def run(*argv):
        assert main(["--model", str(checkpoint), "--config", "demo", *SMALL, "--device", "cpu", *argv]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "taken.json", "taken.png"]
        assert all(line.startswith("error: ") for line in err.splitlines())
        return [line.removeprefix("error: ") for line in err.splitlines()]

    return run


ONE_PROBLEM = {
    "--attention SDPA": "attention is dense here and keeps every block, so there is nothing to report",
    "--map 1": "argument --map: must be three numbers as in 15,2,0, got '1'",
    "--map 1,2,x": "argument --map: must be three numbers",
    "--map 1,2,0,0": "argument --map: must be three numbers",
    "--map 2,0,0": "--map: step 2: must be from 0 to 1",
    "--map 1,4,0": "--map: layer 4: must be from 0 to 3",
    "--map 1,0,4": "--map: head 4: must be from 0 to 3",
    "--map=-1,0,0": "--map: step -1: must be from 0 to 1",
    "--output taken.png": "output taken.png: exists; choose another name or add --overwrite",
    "--output folder": "output folder: is a folder; name a file in it, such as folder/attention.png",
    "--output missing/a.png": "output folder missing: does not exist; create it first",
    "--output a.jpg": "output a.jpg: must be a name that ends in .png",
    "--report taken.json": "report taken.json: exists; choose another name or add --overwrite",
    "--report missing/a.json": "report folder missing: does not exist; create it first",
    "--report a.txt": "report a.txt: must be a name that ends in .json",
    "--steps 0 --map 0,0,0": "number of steps 0: must be a whole number from 1 to 10000",
    f"--steps {MAX_STEPS + 1}": f"number of steps {MAX_STEPS + 1}: the picture has room for {MAX_STEPS}",
    "--seed -1": "seed -1: must be from 0 to 2**63 - 1",
    "--height 100": "height 100: must be a multiple of",
    "--nabla-p 2": "NABLA P 2.0: the kept mass must be",
    "--config dmeo": "unknown preset 'dmeo': did you mean 'demo'?",
    "--model missing": "model 'missing': there is no such folder",
    "--device mps": "device 'mps': must be cpu, cuda or cuda:N",
    "--dtype int8": "argument --dtype: invalid choice: 'int8'",
    "--prompt": "argument --prompt: expected one argument",
    "--prompt \udcff": "a prompt is no valid text",
    "--num-videos 2": "unrecognized arguments: --num-videos 2",
}


@pytest.mark.parametrize("argv", ONE_PROBLEM)
def test_bad_input_is_refused_with_the_value_and_the_rule(problems_of, argv):
    problems = problems_of(*argv.split())
    assert problems[0].startswith(ONE_PROBLEM[argv])
    assert len(problems) == 1 or argv.startswith("--steps 0")  # of which there is no step 0 either


def test_every_problem_is_in_the_report(problems_of):
    argv = "--attention SDPA --map 9,9,9 --output a.gif --report taken.json --seed -1 --height 100"
    assert len(problems_of(*argv.split())) == 8


def test_what_a_checkpoint_that_is_not_here_decides_is_not_guessed():
    assert inspection_problems(True, (1, 31, 23), 2, {}) == []
    [problem] = inspection_problems(True, (1, 31, -1), 2, {})
    assert str(problem) == "--map: head -1: must be from 0"


def test_a_checkpoint_that_cannot_be_used_is_one_line_and_exit_code_1(checkpoint, tmp_path):
    done = run_program(tmp_path, "--model", checkpoint, *SMALL)
    assert (done.returncode, done.stdout) == (1, "")
    [problem] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert problem.startswith("error: denoise failed with NotFiniteError: the latents after step 1 ")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("script", "argv", "code"),
    [("inspect_attention.py", [], 2), ("generate.py", ["--prompt", "a cat", "--report", "report.json"], 1)],
)
def test_dense_attention_that_only_the_loaded_model_shows_is_refused_then(tmp_path, script, argv, code):
    folder = shutil.copytree(DEMO, tmp_path / "dense")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    del config["attention_type"]  # so that the plan goes by the preset, and the model is dense
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    argv = [*argv, "--config", "demo", "--model", "dense", *SMALL[:-2]]
    done = run_program(tmp_path, *argv, script=SCRIPT.with_name(script))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "attention is dense here and keeps every block" in done.stderr.splitlines()[-1]
    assert os.listdir(tmp_path) == ["dense"]


def test_the_help_loads_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", SCRIPT, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    modules = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "argparse" in modules
    assert modules.isdisjoint({"torch", "numpy", "PIL"})


# The picture


def test_a_cell_of_the_heat_map_has_the_colour_of_its_density():
    densities = [[0.2, 0.4, 0.6], [0.6, 0.2, 0.5]]
    scale = scale_of(densities)
    assert scale == pytest.approx((0.2, 0.6), abs=0.051)
    image = heat_map(densities, scale)
    for layer, row in enumerate(densities):
        for step, density in enumerate(row):
            assert image.getpixel((40 + 40 * step + 2, 20 * layer + 2)) == colour_of(density, scale)
    assert colour_of(0.1, (0.1, 0.5)) == COLOURS[0]
    assert colour_of(0.3, (0.1, 0.5)) == COLOURS[2]
    assert colour_of(0.5, (0.1, 0.5)) == COLOURS[-1]


@pytest.mark.parametrize("density", [0.0, 0.33, 1.0])
def test_equal_densities_have_a_scale_too(density):
    low, high = scale_of([[density, density]])
    assert low - 1e-9 <= density <= high + 1e-9
    assert high - low == pytest.approx(0.05)


def test_many_layers_and_steps_fit_on_a_screen_until_a_step_has_no_pixel():
    image = heat_map([[0.5] * 50] * 60, (0.0, 1.0))
    assert 1000 < image.width <= MAX_WIDTH
    assert heat_map([[0.5] * MAX_STEPS], (0.0, 1.0)).width <= MAX_WIDTH
    with pytest.raises(ValueError, match=f"at most {MAX_STEPS} fit on {MAX_WIDTH} pixels"):
        heat_map([[0.5] * (MAX_STEPS + 1)], (0.0, 1.0))


def test_the_legend_has_all_colours_in_order_and_numbers_below():
    pixels = np.asarray(legend((0.25, 0.75)))
    assert tuple(pixels[5, 40]) == COLOURS[0]
    assert tuple(pixels[5, 439]) == COLOURS[-1]
    assert [(pixels[20:, x - 20 : x + 20] < 128).any() for x in (40, 140, 240, 340, 439)] == [True] * 5


@pytest.mark.parametrize("N", [1, 5, 100, 300])
def test_a_block_is_dark_exactly_where_it_is_kept(N):
    kept = torch.rand(N, N, generator=torch.Generator().manual_seed(0)).numpy() < 0.4
    pixels = np.asarray(block_image(kept))
    side = pixels.shape[0] // N
    middle = side // 2
    shown = pixels[middle::side, middle::side][:N, :N]
    assert np.array_equal(shown[kept], np.broadcast_to(KEPT, (kept.sum(), 3)))
    assert np.array_equal(shown[~kept], np.broadcast_to(SKIPPED, ((~kept).sum(), 3)))


def test_a_map_of_more_blocks_than_pixels_shows_shares():
    kept = np.zeros((3152, 3152), dtype=bool)
    kept[:, ::2] = True
    image = block_image(kept)
    assert image.size == (1576, 1576)
    halfway = np.abs(np.subtract(image.getpixel((100, 100)), np.add(KEPT, SKIPPED) / 2))
    assert halfway.max() <= 1
