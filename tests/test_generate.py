"""The command line's runs: what was asked for is on disk and described, and what fails loses nothing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo
from safetensors.torch import load_file, save_file

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
from kandinsky5_nabla.pipeline.attention_report import recorded_attention, report_of
from kandinsky5_nabla.pipeline.export import VideoInfo, export_video, read_video
from kandinsky5_nabla.pipeline.latents import load_latents
from kandinsky5_nabla.scripts import generate

DEMO = load_preset("demo").local_folder
KERNEL = "block-sparse attention over 256 tokens"
SMALL = ["--config", "demo", "--height", "128", "--width", "256", "--num-frames", "5", "--steps", "2"]
RED_CAT = ["--prompt", "a red cat", "--seed", "7", "--output", "cat.mp4"]
# Half a second a run: the kernel, which is compiled, has its tests above and elsewhere.
QUICK = [*SMALL, "--width", "128", "--num-frames", "1", "--attention", "NABLA_REFERENCE", "--device", "cpu"]
CAT = ["--prompt", "a cat", "--seed", "5", "--output", "cat.mp4"]
LATENTS = "cat.latents.safetensors"
VARYING = re.compile(r"\d+\.\d( s\b)|\d+\.\d(?: of \d+\.\d)?( GB)|\b\d+\.\d(?=[,)])")
STAGES = ["load", "text", "denoise", "decode", "export"]


def as_everywhere(lines):
    """Return printed lines without the numbers that depend on the machine: seconds and gigabytes."""
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
    assert names(folder) == ["cat.mp4"]  # and no latents
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
        "denoising in 2 steps, seed 7 ...",
        f"compiling {KERNEL} for cpu (later runs find it in the compiler's cache) ...",
        f"{KERNEL} is compiled (X s)",
        "decoding ...",
        "writing cat.mp4 ...",
    ]


def test_a_second_process_makes_the_same_bytes_and_describes_them_in_json(first_run, tmp_path):
    folder, first = first_run
    done = run_program(tmp_path, *SMALL, *RED_CAT, "--json")
    assert done.returncode == 0, done.stderr
    content = (tmp_path / "cat.mp4").read_bytes()
    assert content == (folder / "cat.mp4").read_bytes()
    assert b'"seed": 7' in content  # what made a video is recorded in it
    assert as_everywhere(done.stderr) == as_everywhere(first.stderr)
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    [video], memory = result.pop("videos"), result.pop("memory")
    assert memory[0].startswith("memory: offload none")
    assert list(video["seconds"]) == STAGES
    assert all(seconds >= 0 for seconds in video.pop("seconds").values())
    size = {"height": 128, "width": 256, "num_frames": 5, "fps": 8}
    assert video == {"file": "cat.mp4", "prompt": "a red cat", "seed": 7, **size}
    assert result == {
        "preset": "demo",
        "model": str(DEMO),
        **size,
        "num_inference_steps": 2,
        "guidance_scale": 1.5,
        "shift": 5,
        "scale_factor": [1, 1, 1],
        "nabla_P": 0.7,
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
    assert names(tmp_path) == [f"a-cat-{seed}.mp4"]
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
    assert names(tmp_path) == sorted(video["file"] for video in videos)
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
    assert len({pixels(path) for path in tmp_path.iterdir()}) == len(variants)


def test_an_existing_file_is_replaced_when_that_is_asked_for(here, tmp_path):
    for name in ("cat.mp4", LATENTS):
        (tmp_path / name).write_text("old")
    code, _, err = here("--prompt", "a cat", "--output", "cat.mp4", "--overwrite")
    assert code == 0, err
    assert names(tmp_path) == ["cat.mp4"]
    assert read_video(tmp_path / "cat.mp4")[1].num_frames == 1


def test_an_empty_prompt_makes_a_video(here, tmp_path):
    code, _, err = here("--prompt", "", "--seed", "1")
    assert code == 0, err
    assert names(tmp_path) == ["video-1.mp4"]


def test_text_that_is_cut_from_a_prompt_is_named_in_one_warning(here):
    code, _, err = here("--prompt", "word " * 90 + "and\nthe end", "--seed", "1")
    assert code == 0
    [warning] = [line for line in err.splitlines() if "warning" in line and "no size" not in line]
    assert warning.startswith("warning: CLIP reads 77 tokens of a prompt. This text was cut: ")
    assert warning.endswith('and the end"')


def fail_in_decoding(monkeypatch, error):
    """Let the VAE fail as it does where memory runs out."""

    def decode(self, *args, **kwargs):
        raise error

    monkeypatch.setattr(AutoencoderKLHunyuanVideo, "decode", decode)


def assert_latents_make_the_video(here, tmp_path):
    """The kept latents hold what is needed, and decoding them alone gives the video of an undisturbed run."""
    latents, values = load_latents(tmp_path / LATENTS)
    assert values == {"prompt": "a cat", "seed": "5", "fps": "8.0"}
    frames = Kandinsky5NablaPipeline.from_pretrained(DEMO).decode(latents, "np")[0]
    decoded = export_video(frames, tmp_path / "decoded.mp4", float(values["fps"]))
    assert here("--prompt", "a cat", "--seed", "5", "--output", "whole.mp4")[0] == 0
    assert pixels(decoded) == pixels(tmp_path / "whole.mp4")


def test_when_decoding_fails_the_latents_are_kept_and_make_the_same_video(here, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        fail_in_decoding(patch, torch.OutOfMemoryError("out of memory:\n  tried to allocate 20 GiB"))
        code, out, err = here(*CAT)
    assert code == 1
    assert out == ""
    assert err.splitlines()[-3:] == [
        "decoding ...",
        "out of memory: decoding again in smaller tiles (--vae-tile 192x16) ...",
        "error: decode failed with OutOfMemoryError: out of memory: tried to allocate 20 GiB; "
        f"the latents are kept in {LATENTS} (--debug shows the traceback)",
    ]
    assert names(tmp_path) == [LATENTS]
    assert_latents_make_the_video(here, tmp_path)


def test_an_error_while_running_is_one_json_object_too(here, monkeypatch):
    fail_in_decoding(monkeypatch, RuntimeError("no memory"))
    code, out, err = here(*CAT, "--json")
    assert code == 1
    [problem] = err.splitlines()[-1:]
    assert json.loads(out) == {"error": {"exit_code": 1, "problems": [problem.removeprefix("error: ")]}}


def test_the_traceback_is_shown_with_debug_alone(here, monkeypatch):
    fail_in_decoding(monkeypatch, RuntimeError("no memory"))
    assert "Traceback" not in here(*CAT)[2]
    code, out, err = here(*CAT, "--debug", "--overwrite", "--json")
    assert code == 1
    assert "Traceback" in err
    assert "raise error\nRuntimeError: no memory\n" in err
    last = err.splitlines()[-1]
    assert last == f"error: decode failed with RuntimeError: no memory; the latents are kept in {LATENTS}"
    assert json.loads(out)["error"]["exit_code"] == 1


def test_a_name_that_is_taken_while_the_video_is_made_is_not_overwritten(here, tmp_path, monkeypatch):
    real = AutoencoderKLHunyuanVideo.decode

    def decode(self, *args, **kwargs):
        (tmp_path / "cat.mp4").write_text("precious")
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoencoderKLHunyuanVideo, "decode", decode)
        code, _, err = here(*CAT)
    assert code == 1
    assert err.splitlines()[-1].startswith("error: export failed with FileExistsError: cat.mp4 exists")
    assert f"the latents are kept in {LATENTS}" in err
    assert names(tmp_path) == [LATENTS, "cat.mp4"]
    assert (tmp_path / "cat.mp4").read_text() == "precious"
    assert_latents_make_the_video(here, tmp_path)


def with_nan(tmp_path, part, name):
    """Return a copy of the demo checkpoint in which one weight is NaN."""
    folder = shutil.copytree(DEMO, tmp_path / "damaged")
    [path] = (folder / part).glob("*.safetensors")
    weights = load_file(path)
    weights[name].view(-1)[0] = np.nan
    save_file(weights, path, {"format": "pt"})
    return str(folder)


def test_nan_in_the_transformer_is_an_error_that_names_the_step(here, tmp_path):
    damaged = with_nan(tmp_path, "transformer", "out_layer.out_layer.weight")
    code, _, err = here(*CAT, "--model", damaged)
    assert code == 1
    assert "error: denoise failed with ValueError: the latents after step 1 of 2 are not finite" in err
    assert names(tmp_path) == ["damaged"]


def test_nan_from_the_decoder_is_an_error_and_no_black_video(here, tmp_path):
    damaged = with_nan(tmp_path, "vae", "decoder.conv_out.conv.bias")
    code, _, err = here(*CAT, "--model", damaged)
    assert code == 1
    assert "not finite" in err.splitlines()[-1]
    assert names(tmp_path) == [LATENTS, "damaged"]


def test_an_interrupt_while_decoding_keeps_the_latents_and_says_so(here, tmp_path, monkeypatch):
    fail_in_decoding(monkeypatch, KeyboardInterrupt())
    code, out, err = here(*CAT)
    assert code == 130
    assert out == ""
    assert err.splitlines()[-3:] == ["decoding ...", f"the latents are kept in {LATENTS}", "error: interrupted"]
    assert names(tmp_path) == [LATENTS]


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT to another process")
def test_ctrl_c_while_denoising_exits_with_130_and_leaves_nothing(tmp_path):
    process = subprocess.Popen(
        program(*QUICK, "--prompt", "a cat", "--steps", "10000", "--json"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell ignores SIGINT for what it starts in the background, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        lines = []
        while not (lines and lines[-1].startswith("denoising")) and process.poll() is None:
            lines.append(process.stderr.readline())
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert err == "error: interrupted\n"
    assert json.loads(out) == {"error": {"exit_code": 130, "problems": ["interrupted"]}}
    assert names(tmp_path) == []


def test_without_a_compiler_the_masked_reference_runs_and_that_is_said_once(here, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    hidden = {"PATH": str(tmp_path / "nothing"), "CXX": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = run_program(folder, *SMALL, *RED_CAT, OMP_NUM_THREADS="1", **hidden)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.endswith("...")]
    _, _, warning = lines  # after that about the size, and the memory plan
    assert warning.startswith("warning: block-sparse FlexAttention cannot run on cpu")
    for words in ("C++ compiler", "masked reference runs instead", "dense cost"):
        assert words in warning
    assert names(folder) == ["cat.mp4"]
    assert here(*SMALL, *RED_CAT, "--attention", "NABLA_REFERENCE")[0] == 0
    assert pixels(tmp_path / "cat.mp4") == pixels(folder / "cat.mp4")


def test_the_version_is_printed(capsys):
    assert generate.main(["--version"]) == 0
    assert re.match(r"kandinsky5-nabla \d+\.\d+\S*, torch \d", capsys.readouterr().out)
