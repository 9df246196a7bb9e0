"""`--preview` shows what a run is heading for and ends with a contact sheet, and changes nothing of the video."""

import json
import resource
import shlex
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline import denoise
from kandinsky5_nabla.pipeline.export import read_video
from kandinsky5_nabla.pipeline.preview import (
    SHIPPED,
    clean_estimate,
    preview_frames,
    shipped_maps,
)
from kandinsky5_nabla.pipeline.schedule import make_sigmas
from kandinsky5_nabla.pipeline.state import load_state
from kandinsky5_nabla.scripts import fit_preview

DEMO = load_preset("demo").local_folder
QUICK = ["--config", "demo", "--height", "128", "--width", "128", "--num-frames", "5", "--steps", "4"]
QUICK += ["--attention", "NABLA_REFERENCE", "--device", "cpu"]
CAT = [*QUICK, "--prompt", "a red square", "--seed", "5", "--output", "cat.mp4"]
CALLS = 2  # of the transformer in a step, with guidance
GAP, CAPTION = 8, 16  # pixels between the frames of a sheet, and below them


@pytest.fixture
def make(here):
    def run(*argv):
        code, out, err = here(*argv)
        assert code == 0, err
        return out, err

    return run


@pytest.fixture
def problem(here, tmp_path):
    """Returns the one reason why a command line is refused, which changes no file."""

    def run(*argv):
        before = contents(tmp_path)
        code, out, err = here(*argv)
        assert (code, out) == (2, ""), err
        assert contents(tmp_path) == before
        [line] = err.splitlines()
        return line.removeprefix("error: ")

    return run


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def cells(path, count, side=128):
    """The frames of a sheet, all in its first row."""
    with Image.open(path, formats=["PNG"]) as image:
        pixels = np.asarray(image)
    assert pixels.shape == (side + CAPTION + 2 * GAP, count * (side + GAP) + GAP, 3)
    return [pixels[GAP:][:side, GAP + cell * (side + GAP) :][:, :side] for cell in range(count)]


def correlation(one, other):
    return np.corrcoef(np.ravel(one), np.ravel(other))[0, 1]


def at_call(monkeypatch, number, act):
    """Lets something happen before a call of the real transformer, numbered from 1."""
    calls, real = [], Kandinsky5Transformer.forward

    def forward(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == number:
            act()
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Kandinsky5Transformer, "forward", forward)


def test_the_clean_estimate_is_what_each_step_of_the_real_loop_was_heading_for(pipe, monkeypatch):
    real, velocities, after = denoise.guided_velocity, [], []

    def see(*args):
        velocities.append((args[1], real(*args)))
        return velocities[-1][1]

    def keep(pipe, step, timestep, tensors):
        after.append(tensors["latents"])

    monkeypatch.setattr(denoise, "guided_velocity", see)
    size = {"height": 128, "width": 128, "num_frames": 1, "num_inference_steps": 4, "output_type": "latent"}
    pipe("a red square", **size, seed=3, callback_on_step_end=keep)
    sigmas = make_sigmas(4, pipe.resolve_settings().shift)
    for step, (before, velocity) in enumerate(velocities):
        estimate = clean_estimate(before, after[step], sigmas[step], sigmas[step + 1])
        torch.testing.assert_close(estimate, before - sigmas[step] * velocity, atol=1e-4, rtol=0)
    assert torch.equal(estimate, after[-1])  # at the end there is no noise left


def test_a_run_with_a_preview_makes_the_same_bytes_and_a_contact_sheet_of_its_frames(make, tmp_path):
    make(*CAT, "--output", "plain.mp4")
    out, err = make(*CAT, "--preview")
    assert names(tmp_path) == ["cat.json", "cat.mp4", "cat.png", "plain.json", "plain.mp4"]
    assert (tmp_path / "cat.mp4").read_bytes() == (tmp_path / "plain.mp4").read_bytes()
    assert (tmp_path / "cat.json").read_bytes() == (tmp_path / "plain.json").read_bytes()
    assert "denoising in 4 steps, seed 5, preview in cat.k5/preview.png ..." in err.splitlines()
    assert out.endswith("; sheet cat.png\n")
    video, _ = read_video(tmp_path / "cat.mp4")
    with Image.open(tmp_path / "cat.png") as sheet:
        assert sheet.size == (4 * (128 + GAP) + GAP, 2 * (128 + GAP + CAPTION) + GAP)
        pixels = np.asarray(sheet)[GAP:, GAP:].astype(float)
    step = 128 + GAP
    for number, frame in enumerate(video):
        row, column = divmod(number, 4)
        assert np.abs(pixels[row * (step + CAPTION) :, column * step :][:128, :128] - frame).mean() < 3


def test_the_last_preview_is_the_video_in_small_and_lies_in_its_state(make, tmp_path):
    out, _ = make(*CAT, "--preview", "--keep-state", "--json")
    result = json.loads(out)
    assert (result["videos"][0]["sheet"], result["outputs"][0]["sheet"]) == ("cat.png", "cat.png")
    assert "preview.png" in names(tmp_path / "cat.k5")
    previews = cells(tmp_path / "cat.k5" / "preview.png", 2)
    latents = load_state(tmp_path / "cat.k5" / "denoising.safetensors")["latents"]
    for shown, frame in zip(previews, preview_frames(latents[0], *shipped_maps()), strict=True):
        assert (shown == np.asarray(Image.fromarray(frame).resize((128, 128), Image.Resampling.BICUBIC))).all()
    frames = torch.from_numpy(read_video(tmp_path / "cat.mp4")[0] / 255)
    assert correlation(np.stack(previews)[:, 4::8, 4::8], fit_preview.pool(frames, 4, 8)) > 0.9


def test_a_resumed_run_draws_what_the_whole_run_draws_and_its_first_step_too(here, make, monkeypatch, tmp_path):
    def interrupted_in(step, *argv):
        with monkeypatch.context() as patch:
            at_call(patch, CALLS * step, lambda: signal.raise_signal(signal.SIGINT))
            code, _, err = here(*argv)
        assert code == 130, err
        return err

    state = tmp_path / "cat.k5"
    interrupted_in(2, *CAT, "--preview")
    second = (state / "preview.png").read_bytes()
    err = interrupted_in(1, *CAT, "--preview", "--overwrite")
    assert not (state / "preview.png").exists()  # before the first step there are no latents that it could know
    command = shlex.split(err.splitlines()[-1].removeprefix("go on with: "))
    assert command[2:] == ["--resume", "cat.k5", "--preview", "--overwrite"]
    interrupted_in(1, *command[2:])
    assert (state / "preview.png").read_bytes() == second
    make("--resume", "cat.k5", "--preview")
    assert names(tmp_path) == ["cat.json", "cat.mp4", "cat.png"]


def test_a_run_of_many_steps_draws_about_eight_times_and_its_last_step_always(make, monkeypatch, tmp_path):
    drawn, real = [], Image.Image.save

    def save(self, file, *args, **kwargs):
        if Path(file).parent.name == "cat.k5":
            drawn.append(len(steps))
        real(self, file, *args, **kwargs)

    steps, velocity = [], denoise.guided_velocity
    monkeypatch.setattr(denoise, "guided_velocity", lambda *args: steps.append(None) or velocity(*args))
    monkeypatch.setattr(Image.Image, "save", save)
    make(*CAT, "--num-frames", "1", "--steps", "19", "--preview")
    assert drawn == [3, 6, 9, 12, 15, 18, 19]


def test_a_preview_that_the_disk_has_no_room_for_is_one_warning_and_costs_nothing_else(make, monkeypatch, tmp_path):
    make(*CAT, "--output", "plain.mp4")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:  # full while steps 2 and 3 are drawn; the state is saved after step 4
        at_call(patch, CALLS * 2, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard)))
        at_call(patch, CALLS * 4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))
        _, err = make(*CAT, "--preview", "--keep-state")
    [warning] = [line for line in err.splitlines() if "warning: the preview" in line]
    assert warning.startswith("warning: the preview cat.k5/preview.png cannot be written (")
    assert warning.endswith("; the run goes on without it")
    assert names(tmp_path / "cat.k5") == ["denoising.safetensors", "settings.json", "text.safetensors"]
    assert (tmp_path / "cat.mp4").read_bytes() == (tmp_path / "plain.mp4").read_bytes()


def test_decoding_alone_draws_a_sheet_and_leaves_the_state_as_it_is(make, tmp_path):
    make(*CAT, "--preview", "--keep-state")
    before = contents(tmp_path / "cat.k5")
    make("--decode-only", "cat.k5", "--output", "again.mp4", "--preview")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "cat.png").read_bytes()
    assert contents(tmp_path / "cat.k5") == before


# A file of prompts

SMALL = [*QUICK, "--height", "64", "--width", "64", "--num-frames", "1", "--steps", "3"]
ROWS = [{"prompt": "a red square"}, {"prompt": "a blue circle", "seed": 6, "width": 128}]
RED, BLUE = "0001-a-red-square-5", "0002-a-blue-circle-6"


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return [*SMALL, "--prompts", "rows.jsonl", "--seed", "5"]


@pytest.fixture
def previews(monkeypatch, tmp_path):
    """Before each call of the real transformer: the previews that lie there, each with its size in pixels."""
    seen, real = [], Kandinsky5Transformer.forward

    def forward(self, *args, **kwargs):
        pictures = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("preview.png")}
        seen.append({name: Image.open(path).size for name, path in pictures.items()})
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Kandinsky5Transformer, "forward", forward)
    return seen


def test_each_row_has_its_preview_while_it_runs_and_in_the_end_its_sheet_under_its_own_name(
    make, rows, previews, tmp_path
):
    make(*rows, "--output", "plain")
    previews.clear()
    out, _ = make(*rows, "--preview")
    red, blue = ({f"rows/{name}.k5/preview.png": size} for name, size in ((RED, (80, 96)), (BLUE, (144, 96))))
    assert previews == [{}] * 2 * CALLS + [red] * CALLS + [{}] * 2 * CALLS + [blue] * CALLS
    assert [line.partition("; sheet ")[2] for line in out.splitlines()] == [f"rows/{RED}.png", f"rows/{BLUE}.png"]
    assert names(tmp_path / "rows") == sorted([*names(tmp_path / "plain"), f"{RED}.png", f"{BLUE}.png"])
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "rows" / path.name).read_bytes() == path.read_bytes(), path
    made = contents(tmp_path / "rows")
    make(*SMALL, "--prompt", "a blue circle", "--seed", "6", "--width", "128", "--output", "blue.mp4", "--preview")
    assert (tmp_path / "blue.png").read_bytes() == made[tmp_path / "rows" / f"{BLUE}.png"]
    assert made[tmp_path / "rows" / f"{RED}.png"] != made[tmp_path / "rows" / f"{BLUE}.png"]
    previews.clear()
    out, err = make(*rows, "--preview")
    assert (out, previews, err.splitlines()[-1]) == ("", [], "rows/manifest.json: 2 done")
    assert contents(tmp_path / "rows") == made


def test_a_stopped_run_over_a_file_of_prompts_goes_on_to_the_same_pictures(here, make, rows, monkeypatch, tmp_path):
    make(*rows, "--preview", "--output", "whole")
    with monkeypatch.context() as patch:  # in the second step of the second row
        at_call(patch, 5 * CALLS, lambda: signal.raise_signal(signal.SIGINT))
        code, _, err = here(*rows, "--preview")
    assert code == 130
    assert err.splitlines()[-1].endswith("--prompts rows.jsonl --seed 5 --preview")
    assert "preview.png" in names(tmp_path / "rows" / f"{BLUE}.k5")
    (tmp_path / "rows" / f"{BLUE}.png").write_text("half")  # of a run that was killed while it put its state away
    make(*rows, "--preview")
    assert {path.name: content for path, content in contents(tmp_path / "rows").items()} == {
        path.name: content for path, content in contents(tmp_path / "whole").items()
    }


def test_a_picture_in_the_way_of_a_rows_sheet_stops_no_other_row(here, make, rows, tmp_path):
    (tmp_path / "rows").mkdir()
    taken = tmp_path / "rows" / f"{RED}.png"
    taken.write_text("precious")
    make(*rows, "--dry-run")  # without a sheet it is in nobody's way
    code, out, err = here(*rows, "--preview")
    assert code == 1
    assert f"error: rows.jsonl line 1: output rows/{RED}.png: exists; choose another name or add --overwrite" in err
    assert [line.partition(":")[0] for line in out.splitlines()] == [f"rows/{BLUE}.mp4"]
    made = [f"{BLUE}.{kind}" for kind in ("json", "mp4", "png")]
    assert names(tmp_path / "rows") == [f"{RED}.png", *made, "manifest.json"]
    assert taken.read_text() == "precious"
    make(*rows, "--preview", "--overwrite")
    assert taken.read_bytes().startswith(b"\x89PNG")


# Refused


def test_a_picture_in_the_way_of_the_sheet_is_replaced_only_if_asked(make, problem, tmp_path):
    (tmp_path / "cat.png").write_text("precious")
    assert problem(*CAT, "--preview") == "output cat.png: exists; choose another name or add --overwrite"
    make(*CAT, "--dry-run")  # without a sheet it is in nobody's way
    make(*CAT, "--preview", "--overwrite")
    assert (tmp_path / "cat.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "a-cat-5.png").write_text("precious")
    out, _ = make(*QUICK, "--prompt", "a cat", "--seed", "5", "--preview", "--dry-run", "--json")
    assert json.loads(out)["outputs"][0]["sheet"] == "a-cat-5-2.png"


def test_a_vae_without_a_map_is_refused_before_anything_is_loaded_with_the_command_that_fits_one(problem, checkpoint):
    vae = checkpoint / "vae"
    fit = f"`python scripts/fit_preview.py --model {vae} --output preview.json` fits one, and --preview preview.json"
    mine = [*CAT, "--model", checkpoint]
    assert problem(*mine, "--preview") == (
        f"--preview: no map from latents to colours is shipped for the VAE in {vae}; {fit} takes it"
    )
    other = SHIPPED / "demo.json"
    assert problem(*mine, "--preview", other) == (
        f"--preview {other}: was fitted for another VAE than the one in {vae}; {fit} takes it"
    )
    for name, why in (("missing.json", "there is no such file"), (vae, "cannot be read (Is a directory)")):
        assert problem(*mine, "--preview", name) == f"--preview {name}: {why}; {fit} takes it"
    table = DEMO / "model_index.json"
    assert problem(*mine, "--preview", table) == f"--preview {table}: holds no map of a preview; {fit} takes it"


def test_a_vae_that_is_not_here_is_refused_with_what_fetches_it(problem):
    text = problem(*CAT, "--model", "owner/name", "--preview")
    assert text.startswith("--preview: its colours are those of one VAE, which has to be here before the run: ")
    assert "`python scripts/download.py owner/name`" in text
    assert "`python scripts/fit_preview.py --model FOLDER --output preview.json`" in text
