"""A file of prompts in the folder of another run: its videos are not taken for done, and not overwritten unasked."""

import json
import shlex
import shutil
import signal

import pytest
import torch
from safetensors.torch import save_file

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer

DEMO = load_preset("demo").local_folder
QUICK = ["--config", "demo", "--height", "64", "--width", "64", "--num-frames", "1", "--steps", "2"]
QUICK += ["--attention", "NABLA_REFERENCE", "--device", "cpu", "--prompts", "a.txt", "--seed", "1"]
REMEDY = "; --overwrite makes it anew, another --output leaves it"


def test_files_of_another_run_are_neither_taken_for_done_nor_overwritten(here, tmp_path):
    (tmp_path / "a.txt").write_text("a cat\n")
    assert here(*QUICK)[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    code, _, err = here(*QUICK, "--steps", "1")
    assert code == 2
    assert "line 1: a/0001-a-cat-1.json: was made with num_inference_steps 2, not 1; --overwrite makes it anew" in err
    (tmp_path / "a/0001-a-cat-1.json").write_text("{}")
    code, _, err = here(*QUICK)
    assert code == 2
    assert "a/0001-a-cat-1.json: is in the way (holds no record of a run)" in err
    assert (tmp_path / "a/0001-a-cat-1.mp4").read_bytes() == before["0001-a-cat-1.mp4"]
    assert here(*QUICK, "--overwrite")[0] == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_state_of_another_run_is_not_gone_on_with(here, tmp_path):
    (tmp_path / "a.txt").write_text("a cat\n")
    assert here(*QUICK, "--steps", "1", "--output", "other")[0] == 0
    assert here(*QUICK, "--keep-state")[0] == 0
    code, _, err = here(*QUICK, "--steps", "1")
    assert code == 2
    assert f"line 1: a/0001-a-cat-1.k5: was made with num_inference_steps 2, not 1{REMEDY}" in err
    shutil.copytree(tmp_path / "a", tmp_path / "before")
    assert here(*QUICK, "--steps", "1", "--overwrite", "--keep-state")[0] == 0
    shutil.copy(tmp_path / "before/0001-a-cat-1.json", tmp_path / "a")  # as if killed before it had written its own
    assert here(*QUICK, "--steps", "1")[0] == 0
    for path in (tmp_path / "other").iterdir():
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes(), path
    (tmp_path / "a/0001-a-cat-1.k5").mkdir()
    (tmp_path / "a/0001-a-cat-1.k5/settings.json").write_text("{}")
    code, _, err = here(*QUICK)
    assert code == 2
    assert "line 1: a/0001-a-cat-1.k5: is in the way (a/0001-a-cat-1.k5/settings.json is damaged: " in err


OWN = (DEMO.parent / "demo.yaml").read_text().replace("model: ./demo", f"model: {DEMO}")
FIRST = {"--config": "own.yaml", "--model": "mine.safetensors", "--lora": "zero.safetensors:0.5", "--device": "cpu"}
FIRST |= dict.fromkeys(("--vae", "--text-encoder", "--text-encoder-2"), DEMO)
FIRST |= {"--height": 64, "--width": 64, "--num-frames": 1, "--steps": 1, "--guidance-scale": 1, "--shift": 3}
FIRST |= {"--attention": "NABLA_REFERENCE", "--nabla-p": 0.5, "--prompts": "a.txt", "--seed": 1}
# What is other in the second run, where None stands for an option that is left out, and what that is a difference in.
CHANGES = [
    ({"--config": "demo"}, "preset 'own.yaml', not 'demo'"),
    ({"--model": "other.safetensors"}, "model 'mine.safetensors', not 'other.safetensors'"),
    ({"--vae": "demo"}, f"vae {str(DEMO)!r}, not 'demo'"),
    ({"--text-encoder": "demo"}, f"text_encoder {str(DEMO)!r}, not 'demo'"),
    ({"--text-encoder-2": "demo"}, f"text_encoder_2 {str(DEMO)!r}, not 'demo'"),
    ({"--lora": "zero.safetensors:1"}, "loras ('zero.safetensors:0.5',), not ('zero.safetensors:1.0',)"),
    ({"--height": None}, "height 64, not 256"),
    ({"--width": 128}, "width 64, not 128"),
    ({"--num-frames": None, "--duration": 2}, "num_frames 1, not 17"),
    ({"--steps": None}, "num_inference_steps 1, not 16"),
    ({"--guidance-scale": None}, "guidance_scale 1.0, not 1.5"),
    ({"--shift": 4}, "shift 3.0, not 4.0"),
    ({"--nabla-p": None}, "nabla_P 0.5, not 0.73"),
    ({"--nabla-p": None, "--attention": "SDPA"}, "attention 'NABLA_REFERENCE', not 'SDPA', nabla_P 0.5, not None"),
    ({"--dit-dtype": "fp8"}, "dit_dtype 'float32', not 'fp8'"),
    ({"--codec": "h265"}, "codec 'h264', not 'h265', crf 18, not 20"),
    ({"--crf": 30}, "crf 18, not 30"),
    ({"--vae-tile": "192x16"}, "vae_tile '256x16', not '192x16'"),
    ({"--negative-prompt": "x"}, "negative_prompt None, not 'x'"),
]
DTYPES = ", ".join(f"{kind}dtype 'float32', not 'bfloat16'" for kind in ("", "text_encoder_", "dit_"))


def test_what_differs_from_the_run_that_was_first_is_named(here, tmp_path):
    def second(changes, name="0001-a-cat-1"):
        options = {**FIRST, **changes}
        code, _, err = here(*(word for pair in options.items() if pair[1] is not None for word in pair))
        assert code == 2
        [line] = [line for line in err.splitlines() if line.startswith("error: ")]
        return line.removeprefix(f"error: a.txt line 1: a/{name}.json: was made with ").removesuffix(REMEDY)

    for name in ("mine", "other"):
        shutil.copy(DEMO / "transformer" / "diffusion_pytorch_model.safetensors", tmp_path / f"{name}.safetensors")
    layer, A, B = (
        "transformer.visual_transformer_blocks.0.feed_forward.in_layer",
        torch.zeros(1, 128),
        torch.zeros(256, 1),
    )
    save_file({f"{layer}.lora_A.weight": A, f"{layer}.lora_B.weight": B}, tmp_path / "zero.safetensors")
    (tmp_path / "demo").symlink_to(DEMO)
    (tmp_path / "own.yaml").write_text(OWN)
    (tmp_path / "a.txt").write_text("a cat")
    code, _, err = here(*(word for pair in FIRST.items() for word in pair))
    assert code == 0, err
    assert [second(changes) for changes, _ in CHANGES] == [difference for _, difference in CHANGES]
    assert second({"--dtype": "bfloat16"}) == DTYPES
    (tmp_path / "own.yaml").write_text(OWN.replace("fps: 8.0", "fps: 12.0"))
    assert second({}) == "fps 8.0, not 12.0"
    (tmp_path / "own.yaml").write_text(OWN.replace("scale_factor: [1.0, 1.0", "scale_factor: [1.0, 2.0"))
    assert second({}) == "scale_factor (1.0, 1.0, 1.0), not (1.0, 2.0, 1.0)"
    (tmp_path / "own.yaml").write_text(OWN)
    (tmp_path / "a.txt").write_text("A cat!")
    assert second({}) == "prompt 'a cat', not 'A cat!'"
    (tmp_path / "a.txt").write_text("a cat")
    for suffix in (".json", ".mp4"):
        (tmp_path / f"a/0001-a-cat-1{suffix}").rename(tmp_path / f"a/0001-a-cat-2{suffix}")
    assert second({"--seed": 2}, "0001-a-cat-2") == "seed 1, not 2"


# Going on with the same command


def test_overwrite_makes_anew_what_is_other_and_leaves_what_is_the_same(here, tmp_path):
    (tmp_path / "a.txt").write_text("a cat\na dog\n")
    assert here(*QUICK)[0] == 0
    cat, dog = sorted((tmp_path / "a").glob("*.mp4"))
    expected, inode = cat.read_bytes(), dog.stat().st_ino
    code, _, err = here(*QUICK, "--steps", "1", "--overwrite", "--seed", "1", "--output", "a")
    assert code == 0, err
    assert cat.read_bytes() != expected
    assert here(*QUICK, "--overwrite")[0] == 0
    inode = dog.stat().st_ino
    cat.with_suffix(".json").write_text("{}")
    code, out, _ = here(*QUICK, "--overwrite")
    assert [line.partition(":")[0] for line in out.splitlines()] == ["a/0001-a-cat-1.mp4"]
    assert (cat.read_bytes(), dog.stat().st_ino) == (expected, inode)
    record = json.loads(dog.with_suffix(".json").read_text())
    dog.with_suffix(".json").write_text(json.dumps(record | {"versions": {"torch": "1"}}))
    assert here(*QUICK)[1] == ""  # what is done stays
    assert here(*QUICK, "--overwrite")[1].startswith("a/0002-a-dog-1.mp4")


@pytest.mark.parametrize("damage", [b"", b"half"])
def test_a_video_that_is_not_as_it_was_written_is_not_taken_for_done(here, tmp_path, damage):
    (tmp_path / "a.txt").write_text("a cat\na dog\n")
    assert here(*QUICK)[0] == 0
    video = tmp_path / "a/0001-a-cat-1.mp4"
    content = video.read_bytes()
    video.write_bytes(damage)
    for _ in range(2):
        code, _, err = here(*QUICK)
        assert code == 1
        sizes = f"has {len(damage)} bytes and was written with {len(content)}"
        assert f"line 1: a/0001-a-cat-1.mp4: {sizes}{REMEDY}" in err
    assert here(*QUICK, "--overwrite")[0] == 0
    assert video.read_bytes() == content


def test_a_folder_of_frames_that_lacks_one_is_not_taken_for_done(here, tmp_path):
    (tmp_path / "a.txt").write_text("a cat\n")
    frames = [*QUICK, "--codec", "frames"]
    assert here(*frames)[0] == 0
    assert here(*frames)[1] == ""
    (tmp_path / "a/0001-a-cat-1/frame-0000.png").unlink()
    code, _, err = here(*frames)
    assert (code, "line 1: a/0001-a-cat-1: has " in err) == (2, True)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"seed": 1}', '{"seed": "1", "bytes": {}}', "[" * 100_000])
def test_a_manifest_that_is_damaged_or_somebodys_is_neither_passed_over_nor_replaced(here, tmp_path, content):
    (tmp_path / "a.txt").write_text("a cat\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/manifest.json").write_text(content)
    code, _, err = here(*QUICK)
    assert code == 2
    assert "a/manifest.json: is damaged, or no manifest of a run over prompts (" in err
    assert "--overwrite replaces it, another --output leaves it" in err
    assert (tmp_path / "a/manifest.json").read_text() == content
    assert here(*QUICK, "--overwrite", "--dry-run")[0] == 0


def test_reports_and_saved_texts_are_no_hindrance_to_going_on(here, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a cat\na dog\n")
    files = ["--report", "report.json", "--save-embeds=texts.safetensors"]
    real, calls = Kandinsky5Transformer.forward, []

    def forward(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 5:  # the first of the second row
            signal.raise_signal(signal.SIGINT)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Kandinsky5Transformer, "forward", forward)
    code, _, err = here(*QUICK, *files)
    assert code == 130
    command = shlex.split(err.splitlines()[-1].removeprefix("go on with: "))
    assert command[2:] == [*QUICK, *files[:2]]
    first = json.loads((tmp_path / "report.json").read_text())
    code, _, err = here(*command[2:])
    assert code == 0, err
    whole = json.loads((tmp_path / "report.json").read_text())
    assert [each["file"] for each in whole] == ["a/0001-a-cat-1.mp4", "a/0002-a-dog-1.mp4"]
    assert whole[:1] == first
    code, _, err = here(*QUICK, "--report", "a/manifest.json", "--overwrite")
    assert code == 2
    assert "report a/manifest.json: is the name of the manifest of the videos; choose another" in err
