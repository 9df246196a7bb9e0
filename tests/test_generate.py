"""The command line's runs: what was asked for is on disk and described. What fails is in test_resume.py."""

import json
import os
import re
import shutil
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
from kandinsky5_nabla.pipeline.attention_report import recorded_attention, report_of
from kandinsky5_nabla.pipeline.export import VideoInfo, read_comment, read_video
from kandinsky5_nabla.scripts import generate

DEMO = load_preset("demo").local_folder
KERNEL = "block-sparse attention over 256 tokens"
SMALL = ["--config", "demo", "--height", "128", "--width", "256", "--num-frames", "5", "--steps", "2"]
RED_CAT = ["--prompt", "a red cat", "--seed", "7", "--output", "cat.mp4"]
# Half a second a run: the kernel, which is compiled, has its tests above and elsewhere.
QUICK = [*SMALL, "--width", "128", "--num-frames", "1", "--attention", "NABLA_REFERENCE", "--device", "cpu"]
CAT = ["--prompt", "a cat", "--seed", "5", "--output", "cat.mp4"]
VARYING = re.compile(r"\d+\.\d+( s\b)|\d+\.\d(?: of \d+\.\d)?( GB)|\b\d+\.\d(?=[,)])|\d\d:\d\d(?= left)|\d+\.\d(?= %)")
STAGES = ["load", "text", "denoise", "decode", "export"]


def as_everywhere(lines):
    """Return printed lines without the numbers that depend on the machine: seconds, gigabytes, densities."""
    return VARYING.sub(lambda match: f"X{match[1] or match[2] or ''}", lines)


def program(*argv):
    return [sys.executable, generate.__file__, *argv]


def environment(**changes):
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", **changes}


def run_program(folder, *argv, **changes):
    """Run the real program in a folder."""
    return subprocess.run(
        program(*argv), cwd=folder, env=environment(**changes), capture_output=True, text=True, check=False
    )


@pytest.fixture
def here(as_a_program, capsys):
    """Runs the command line in this process, on one thread, in an empty folder; returns exit code, stdout, stderr."""

    def run(*argv):
        code = generate.main([*QUICK, *argv])
        return code, *capsys.readouterr()

    return run


def pixels(path):
    return read_video(path)[0].tobytes()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """A run with everything at its default but the size: the block-sparse kernel, text on the terminal."""
    folder = tmp_path_factory.mktemp("first")
    return folder, run_program(folder, *SMALL, *RED_CAT)


def test_a_prompt_becomes_an_mp4_of_exactly_what_was_asked_for(first_run):
    folder, done = first_run
    assert done.returncode == 0, done.stderr
    assert names(folder) == ["cat.json", "cat.mp4"]  # and no state
    frames, info = read_video(folder / "cat.mp4")
    assert info == VideoInfo(width=256, height=128, fps=Fraction(8), num_frames=5)
    assert frames.std() > 1


def test_the_last_line_names_file_size_seed_and_seconds_per_stage(first_run):
    _, done = first_run
    seconds = ", ".join(rf"{stage} \d+\.\d s" for stage in STAGES)
    assert re.fullmatch(rf"cat\.mp4: 256x128, 5 frames at 8 fps, seed 7; {seconds}\n", done.stdout)


def test_the_stages_are_announced_and_the_libraries_are_silent(first_run):
    _, done = first_run
    caution, *lines = as_everywhere(done.stderr).splitlines()
    assert caution.startswith("warning: 128x256 (height x width) is no size that demo was trained for")
    assert lines == [
        f"loading {DEMO} ...",
        "memory: offload none, VAE tile 256x16, at most X GB (text X, denoise X, decode X)",
        "encoding the text ...",
        "keeping the state of the run in cat.k5 ...",
        "denoising in 2 steps, seed 7 ...",
        f"compiling {KERNEL} for cpu (later runs find it in the compiler's cache) ...",
        f"{KERNEL} is compiled (X s)",
        "step 1 of 2: X s a step, X left, density X %, X GB",
        "step 2 of 2: X s a step, density X %, X GB",
        "decoding ...",
        "writing cat.mp4 ...",
    ]


def test_a_second_process_makes_the_same_bytes_and_describes_them_in_json(first_run, tmp_path):
    folder, first = first_run
    done = run_program(tmp_path, *SMALL, *RED_CAT, "--json")
    assert done.returncode == 0, done.stderr
    content = (tmp_path / "cat.mp4").read_bytes()
    assert content == (folder / "cat.mp4").read_bytes()
    record = json.loads((tmp_path / "cat.json").read_text())
    assert json.loads(read_comment(tmp_path / "cat.mp4")) == record  # in the video and beside it
    assert (record["prompt"], record["seed"], record["num_inference_steps"]) == ("a red cat", 7, 2)
    assert as_everywhere(done.stderr) == as_everywhere(first.stderr)
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    [video], memory = result.pop("videos"), result.pop("memory")
    assert memory[0].startswith("memory: offload none")
    assert list(video["seconds"]) == STAGES
    assert all(seconds >= 0 for seconds in video.pop("seconds").values())
    size = {"height": 128, "width": 256, "num_frames": 5, "fps": 8}
    assert video == {"file": "cat.mp4", "prompt": "a red cat", "seed": 7, "vae_tile": "256x16", **size}
    assert result == {
        "preset": "demo",
        "model": str(DEMO),
        **size,
        "num_inference_steps": 2,
        "guidance_scale": 1.5,
        "shift": 5,
        "scale_factor": [1, 1, 1],
        "nabla_P": 0.73,
        "attention": "NABLA_ATTN",
        "device": "cpu",
        "dtype": "float32",
        "offload": "none",
        "outputs": [{"file": "cat.mp4", "seed": 7, "prompt": "a red cat"}],
    }


def test_a_seed_that_was_drawn_is_named_everywhere_and_makes_the_same_video_again(here, tmp_path):
    code, out, err = here("--prompt", "a cat")
    assert code == 0
    seed = re.search(r"seed (\d+);", out).group(1)
    assert f"seed {seed} ...\n" in err
    assert names(tmp_path) == [f"a-cat-{seed}.json", f"a-cat-{seed}.mp4"]
    _, out, _ = here("--prompt", "a cat", "--seed", seed, "--output", "again.mp4", "--json")
    assert json.loads(out)["videos"][0]["seed"] == int(seed)
    assert (tmp_path / "again.mp4").read_bytes() == (tmp_path / f"a-cat-{seed}.mp4").read_bytes()


def test_each_of_several_videos_equals_its_own_single_run(here, tmp_path):
    prompts = ["a red cat", "a dog that is described at greater length, so that its text has more tokens"]
    each = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    code, out, _ = here(*each, "--num-videos", "2", "--seed", "3", "--json")
    assert code == 0
    videos = json.loads(out)["videos"]
    assert [(video["prompt"], video["seed"]) for video in videos] == [(p, seed) for p in prompts for seed in (3, 4)]
    assert names(tmp_path) == sorted(f"{video['file'][:-4]}.{kind}" for video in videos for kind in ("json", "mp4"))
    contents = {pixels(tmp_path / video["file"]) for video in videos}
    assert len(contents) == 4
    for video in videos:
        here("--prompt", video["prompt"], "--seed", str(video["seed"]), "--output", "single.mp4", "--overwrite")
        assert (tmp_path / "single.mp4").read_bytes() == (tmp_path / video["file"]).read_bytes()


def without_seconds(report):
    """The report without what differs from run to run."""
    entries = [report["totals"], *report["layers"], *report["steps_of_layers"]]
    return [{name: value for name, value in entry.items() if not name.startswith("seconds")} for entry in entries]


def test_a_report_says_what_the_attention_did_in_each_video_and_changes_no_byte_of_it(here, tmp_path):
    request = ["--prompt", "a cat", "--num-videos", "2", "--seed", "3", "--width", "256", "--nabla-p", "0.01"]
    code, out, err = here(*request, "--report", "report.json", "--json")
    assert (code, json.loads(out)["report"]) == (0, "report.json"), err
    videos = json.loads((tmp_path / "report.json").read_text())
    reports = [video.pop("report") for video in videos]
    assert videos == [{"file": f"a-cat-{seed}.mp4", "seed": seed, "prompt": "a cat"} for seed in (3, 4)]
    pipe = Kandinsky5NablaPipeline.from_pretrained(DEMO)
    pipe.transformer.set_attention_backend("NABLA_REFERENCE")
    for seed, report in zip((3, 4), reports, strict=True):
        size = {"height": 128, "width": 256, "num_frames": 1, "num_inference_steps": 2, "nabla_P": 0.01}
        with recorded_attention(pipe.transformer) as records:
            pipe("a cat", **size, seed=seed, output_type="latent")
        assert without_seconds(report) == without_seconds(report_of(records))
        assert report["totals"]["density"] < 1
    with_report = [(tmp_path / video["file"]).read_bytes() for video in videos]
    assert here(*request, "--overwrite")[0] == 0
    assert [(tmp_path / video["file"]).read_bytes() for video in videos] == with_report


def test_every_number_of_the_request_reaches_the_video(here, tmp_path):
    changes = ["--negative-prompt=blue", "--steps=3", "--guidance-scale=1", "--shift=2", "--seed=2", "--num-frames=5"]
    wide = [["--width=256", "--nabla-p=0.01"], ["--width=256", "--attention=SDPA"]]  # two blocks: NABLA has a choice
    variants = [[], *([change] for change in [*changes, "--dtype=bfloat16"]), *wide]
    for index, change in enumerate(variants):
        code, _, err = here("--prompt=a cat", "--seed=1", f"--output={index}.mp4", *change)
        assert code == 0, err
    assert len({pixels(path) for path in tmp_path.glob("*.mp4")}) == len(variants)


def test_an_existing_file_is_replaced_when_that_is_asked_for(here, tmp_path):
    (tmp_path / "cat.k5").mkdir()
    for name in ("cat.mp4", "cat.json", "cat.k5/settings.json", "cat.k5/.tmpa1B2c3"):  # the last one is of a kill
        (tmp_path / name).write_text("old")
    code, _, err = here("--prompt", "a cat", "--output", "cat.mp4", "--overwrite")
    assert code == 0, err
    assert names(tmp_path) == ["cat.json", "cat.mp4"]
    assert read_video(tmp_path / "cat.mp4")[1].num_frames == 1


def test_an_empty_prompt_makes_a_video(here, tmp_path):
    code, _, err = here("--prompt", "", "--seed", "1")
    assert code == 0, err
    assert names(tmp_path) == ["video-1.json", "video-1.mp4"]


def test_text_that_is_cut_from_a_prompt_is_named_in_one_warning(here):
    code, _, err = here("--prompt", "word " * 90 + "and\nthe end", "--seed", "1")
    assert code == 0
    [warning] = [line for line in err.splitlines() if "warning" in line and "no size" not in line]
    assert warning.startswith("warning: CLIP reads 77 tokens of a prompt. This text was cut: ")
    assert warning.endswith('and the end"')


def with_nan(tmp_path, part, name):
    """Return a copy of the demo checkpoint in which one weight is NaN."""
    folder = shutil.copytree(DEMO, tmp_path / "damaged")
    [path] = (folder / part).glob("*.safetensors")
    weights = load_file(path)
    weights[name].view(-1)[0] = np.nan
    save_file(weights, path, {"format": "pt"})
    return str(folder)


def test_nan_in_the_transformer_is_an_error_that_names_step_and_layer(here, tmp_path):
    damaged = with_nan(tmp_path, "transformer", "out_layer.out_layer.weight")
    code, _, err = here(*CAT, "--model", damaged)
    assert code == 1
    told = "the latents after step 1 of 2 (first in out_layer.out_layer) are not finite"
    assert f"error: denoise failed with NotFiniteError: {told}" in err
    assert "Likely cause: damaged weights" in err
    assert "float16" not in err  # it was computed in float32
    assert names(tmp_path) == ["cat.k5", "damaged"]


def test_nan_from_the_decoder_is_an_error_and_no_black_video(here, tmp_path):
    damaged = with_nan(tmp_path, "vae", "decoder.conv_out.conv.bias")
    code, _, err = here(*CAT, "--model", damaged)
    assert code == 1
    assert "not finite" in err.splitlines()[-2]
    assert names(tmp_path) == ["cat.k5", "damaged"]


def test_without_a_compiler_the_masked_reference_runs_and_that_is_said_once(here, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    hidden = {"PATH": str(tmp_path / "nothing"), "CXX": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = run_program(folder, *SMALL, *RED_CAT, OMP_NUM_THREADS="1", **hidden)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.endswith("...")]
    _, _, warning, _, _ = lines  # after that about the size, and the memory plan; two steps follow
    assert warning.startswith("warning: block-sparse FlexAttention cannot run on cpu")
    for words in ("C++ compiler", "masked reference runs instead", "dense cost"):
        assert words in warning
    assert names(folder) == ["cat.json", "cat.mp4"]
    assert here(*SMALL, *RED_CAT, "--attention", "NABLA_REFERENCE")[0] == 0
    assert pixels(tmp_path / "cat.mp4") == pixels(folder / "cat.mp4")


def test_the_version_is_printed(capsys):
    assert generate.main(["--version"]) == 0
    assert re.match(r"kandinsky5-nabla \d+\.\d+\S*, torch \d", capsys.readouterr().out)
