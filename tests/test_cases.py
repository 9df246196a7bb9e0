"""What went wrong for users of such programs, each as one run of the whole: names, sizes, memory, NaN."""

import json
import os
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.pipeline.export import VideoInfo, read_video
from kandinsky5_nabla.scripts import generate

DEMO = load_preset("demo").local_folder
TINY = ["--attention", "NABLA_REFERENCE", "--device", "cpu", "--seed", "5"]
SMALL = ["--height", "64", "--width", "64", "--num-frames", "1"]


@pytest.fixture
def here(as_a_program, capsys):
    """Runs the command line in this process, in an empty folder; returns exit code and stderr."""

    def run(*argv):
        code = generate.main([*argv])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("height", "width", "frames", "fps"), [(48, 80, 5, "12.5"), (112, 16, 1, "23.976"), (16, 208, 9, "8.0")]
)
def test_the_mp4_has_exactly_the_size_the_frames_and_the_rate_that_were_asked_for(
    here, tmp_path, height, width, frames, fps
):
    preset = (DEMO.parent / "demo.yaml").read_text().replace("model: ./demo", f"model: {DEMO}")
    (tmp_path / "own.yaml").write_text(preset.replace("fps: 8.0", f"fps: {fps}"))
    size = ["--height", str(height), "--width", str(width), "--num-frames", str(frames), "--steps", "1"]
    code, err = here("--config", "own.yaml", *size, *TINY, "--prompt", "a cat", "--output", "cat.mp4")
    assert code == 0, err
    pixels, info = read_video(tmp_path / "cat.mp4")
    rate = Fraction(float(fps)).limit_denominator(1001)
    assert info == VideoInfo(width=width, height=height, fps=rate, num_frames=frames)
    assert pixels.shape == (frames, height, width, 3)


def test_a_prompt_of_signs_and_300_letters_names_files_that_are_valid_and_never_replaced(here, tmp_path):
    prompt = 'a/b:c*?"<>|' + "ж" * 300
    for steps in ("1", "2"):
        code, err = here("--config", "demo", *SMALL, "--steps", steps, *TINY, "--prompt", prompt)
        assert code == 0, err
    stem = f"a-b-c-{'ж' * 32}-5"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{stem}-2.json",
        f"{stem}-2.mp4",
        f"{stem}.json",
        f"{stem}.mp4",
    ]
    for path in tmp_path.iterdir():
        assert len(os.fsencode(path.name)) <= 100
        assert not set(path.name) & set('/\\:*?"<>| ')
    records = {name: json.loads(Path(f"{name}.json").read_text()) for name in (stem, f"{stem}-2")}
    assert [(record["num_inference_steps"], record["prompt"]) for record in records.values()] == [
        (1, prompt),
        (2, prompt),
    ]


def test_when_memory_ends_in_decoding_after_50_steps_the_latents_are_kept_and_are_decoded_alone(
    here, monkeypatch, tmp_path
):
    argv = ["--config", "demo", *SMALL, "--steps", "50", "--guidance-scale", "1", *TINY, "--prompt", "a cat"]
    with monkeypatch.context() as patch:
        # The real allocator is asked for more than any machine has.
        patch.setattr(AutoencoderKLHunyuanVideo, "decode", lambda *args, **kwargs: torch.empty(2**60))
        code, err = here(*argv, "--output", "cat.mp4")
    assert code == 1
    assert "the state after step 50 of 50 is kept in cat.k5" in err
    assert [path.name for path in tmp_path.iterdir()] == ["cat.k5"]
    code, err = here("--decode-only", "cat.k5")
    assert (code, "denoising" in err) == (0, False), err
    assert here(*argv, "--output", "whole.mp4")[0] == 0
    assert (tmp_path / "cat.mp4").read_bytes() == (tmp_path / "whole.mp4").read_bytes()
