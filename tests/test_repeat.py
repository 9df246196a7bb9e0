"""A run is repeated from its record or decoded again from its state; what contradicts them is refused."""

import json
import shutil
import time

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo
from safetensors.torch import load_file, save_file

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline.export import read_video
from kandinsky5_nabla.scripts import generate
from kandinsky5_nabla.scripts._record import FORMAT, Record
from kandinsky5_nabla.scripts._state import StateFolder

DEMO = load_preset("demo").local_folder
QUICK = ["--config", "demo", "--height", "128", "--width", "128", "--num-frames", "1", "--steps", "2"]
QUICK += ["--attention", "NABLA_REFERENCE", "--device", "cpu"]
CAT = [*QUICK, "--prompt=-- a 'cat'\n=", "--seed", "5", "--output", "cat.mp4"]


@pytest.fixture
def make(here):
    def run(*argv):
        code, _, err = here(*argv)
        assert code == 0, err
        return err

    return run


@pytest.fixture
def problems(here, tmp_path):
    """Returns why a command line is refused, which changes no file."""

    def run(*argv):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        code, out, err = here(*argv)
        assert (code, out) == (2, ""), err
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        return [line.removeprefix("error: ") for line in err.splitlines()]

    return run


def same(folder, one, other):
    return all((folder / f"{one}.{kind}").read_bytes() == (folder / f"{other}.{kind}").read_bytes() for kind in KINDS)


KINDS = ("mp4", "json")


# From a record


def test_a_run_repeated_from_its_video_or_its_record_makes_the_same_bytes(make, problems, tmp_path):
    # Numbers that are not the preset's, some of them without a short form in decimals.
    other = ["--guidance-scale", str(1 / 3 + 1), "--shift", "2", "--nabla-p", "0.1", "--negative-prompt=- blue"]
    make(*CAT, *other, "--vae-tile", "96x16")
    make("--from", "cat.mp4", "--output", "video.mp4")
    make("--from", "cat.json", "--output", "record.mp4")
    assert same(tmp_path, "video", "cat")
    assert same(tmp_path, "record", "cat")
    assert problems("--from", "cat.mp4", "--output", "video.mp4")[0].startswith("output video.mp4: exists; choose")
    make("--from", "cat.mp4", "--seed", "6")  # an argument beside it wins
    [other] = tmp_path.glob("a-cat-6.json")
    expected = json.loads((tmp_path / "cat.json").read_text())
    assert json.loads(other.read_text()) == expected | {"seed": 6}


def test_everything_that_decides_on_a_video_is_repeated(here, make, tmp_path):
    lora = tmp_path / "lora.safetensors"
    weights = load_file(DEMO / "transformer" / "diffusion_pytorch_model.safetensors")
    layer = "visual_transformer_blocks.0.feed_forward.in_layer"
    out_features, in_features = weights[f"{layer}.weight"].shape
    pair = {"A": torch.ones(2, in_features), "B": torch.ones(out_features, 2)}
    save_file({f"transformer.{layer}.lora_{name}.weight": weight for name, weight in pair.items()}, lora)
    file = shutil.copy(DEMO / "transformer" / "diffusion_pytorch_model.safetensors", tmp_path / "mine.safetensors")
    parts = [word for part in ("vae", "text-encoder", "text-encoder-2") for word in (f"--{part}", DEMO)]
    texts = tmp_path / "texts.safetensors"
    make(*CAT, "--model", file, *parts, "--lora", f"{lora}:0.001", "--dit-dtype", "fp8", "--save-embeds", texts)
    make("--from", "cat.mp4", "--output", "again.mp4")
    assert same(tmp_path, "again", "cat")
    make(*CAT, "--output", "embeds.mp4", "--embeds", texts)
    make("--from", "embeds.mp4", "--output", "again.mp4", "--overwrite")
    assert same(tmp_path, "again", "embeds")
    record = json.loads((tmp_path / "embeds.json").read_text())
    assert (record["embeds"], record["model"]) == (str(texts), None)  # of the demo its name is enough, wherever it lies


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--duration", "0.5"], {"num_frames": 5}),
        (["--attention", "SDPA"], {"attention": "SDPA", "nabla_P": None}),
        (["--model", str(DEMO)], {"model": str(DEMO)}),
        (["--prompt", "a dog"], {"outputs": [{"file": "a-dog-5.mp4", "seed": 5, "prompt": "a dog"}]}),
    ],
)
def test_an_argument_beside_a_record_puts_out_of_force_what_it_stands_for(here, make, argv, expected):
    make(*CAT)
    code, out, err = here("--from", "cat.json", *argv, "--dry-run", "--json")
    assert code == 0, err
    assert expected.items() <= json.loads(out).items()


def test_a_record_of_other_versions_is_repeated_with_a_warning(here, make, tmp_path):
    make(*CAT)
    record = json.loads((tmp_path / "cat.json").read_text())
    record["versions"]["torch"] = "1.0"
    (tmp_path / "cat.json").write_text(json.dumps(record))
    code, _, err = here("--from", "cat.json", "--dry-run", "--json")
    assert code == 0
    assert f"warning: cat.json was made with torch 1.0, here {torch.__version__}: numbers may differ" in err


def test_a_preset_that_has_changed_since_is_no_repetition(make, problems, tmp_path):
    own = (DEMO.parent / "demo.yaml").read_text().replace("model: ./demo", f"model: {DEMO}")
    own = own.replace("guidance_scale: 1.5", "guidance_scale: 2")  # a whole number is recorded as any other
    (tmp_path / "own.yaml").write_text(own)
    make(*CAT, "--config", "own.yaml")
    make("--from", "cat.mp4", "--output", "same.mp4")
    assert same(tmp_path, "same", "cat")
    (tmp_path / "own.yaml").write_text(own.replace("fps: 8.0", "fps: 12.0"))
    assert problems("--from", "cat.mp4", "--output", "again.mp4") == [
        "cat.mp4 was made with fps 8.0, and the preset own.yaml has 12.0 now: use the preset as it was"
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": FORMAT + 1}, f"holds a record of the format {FORMAT + 1}; this version reads {FORMAT}"),
        ({"more": 1}, "holds a damaged record: more missing or unknown"),
        ({"loras": "x"}, "holds a damaged record: loras is 'x'"),
        ({"prompt": ["a cat"]}, "holds a damaged record: prompt is ['a cat']"),
        ({"short_prompt": 5}, "holds a damaged record: short_prompt is 5"),
        ({"height": "tall"}, "holds a damaged record: height is 'tall'"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(make, problems, tmp_path, changed, message):
    make(*CAT)
    record = json.loads((tmp_path / "cat.json").read_text())
    (tmp_path / "cat.json").write_text(json.dumps(record | changed))
    [problem] = problems("--from", "cat.json", "--output", "again.mp4")
    assert problem.startswith(f"--from cat.json: {message}")


def test_a_record_comes_back_from_its_json_and_from_its_arguments(make, tmp_path):
    make(*CAT)
    text = (tmp_path / "cat.json").read_text()
    record = Record.from_json(text)
    assert record.as_dict() == json.loads(record.as_json()) | {"loras": (), "scale_factor": (1.0, 1.0, 1.0)}
    args = generate.build_parser().parse_args(record.arguments())
    assert (args.prompt, args.seed, args.steps, args.config) == (["-- a 'cat'\n="], 5, 2, "demo")
    assert args.guidance_scale == record.guidance_scale


# From a state


def test_decoding_alone_repeats_the_bytes_without_the_other_models_and_keeps_the_state(make, tmp_path):
    model = shutil.copytree(DEMO, tmp_path / "model")
    make(*CAT, "--model", "model", "--keep-state")
    for part in ("transformer", "text_encoder", "text_encoder_2"):
        shutil.rmtree(model / part)
    make("--decode-only", "cat.k5", "--output", "again.mp4")
    assert same(tmp_path, "again", "cat")
    assert StateFolder(tmp_path / "cat.k5").load()["completed"] == 2


def test_decoding_alone_with_another_tile_is_a_run_with_that_tile(make, problems, tmp_path):
    large = [*CAT, "--height", "256", "--width", "256"]
    make(*large, "--keep-state")
    assert problems("--decode-only", "cat.k5", "--vae-tile", "96x16") == [
        f"output {name}: exists; choose another name or add --overwrite" for name in ("cat.mp4", "cat.json")
    ]
    make("--decode-only", "cat.k5", "--vae-tile", "96x16", "--output", "small.mp4")
    assert (read_video(tmp_path / "small.mp4")[0] != read_video(tmp_path / "cat.mp4")[0]).any()
    make(*large, "--vae-tile", "96x16", "--overwrite")
    assert same(tmp_path, "small", "cat")


def unfinished(here):
    """Leaves a state after step 1 of 2 in cat.k5."""
    calls, real = [], Kandinsky5Transformer.forward

    def forward(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("broken")
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kandinsky5Transformer, "forward", forward)
        code, _, err = here(*CAT, "--checkpoint-every", "1")
    assert (code, "after step 1 of 2 is kept" in err) == (1, True)


def test_arguments_that_contradict_a_state_are_refused_by_name(here, problems):
    unfinished(here)
    changes = {
        "--prompt=a dog": "-- a 'cat' =",
        "--lora=mine.safetensors": "nothing of the kind",
        "--seed=6": 5,
        "--height=256": 128,
        "--steps=3": 2,
        "--guidance-scale=2.0": 1.5,
        "--attention=SDPA": "NABLA_REFERENCE",
        "--dtype=bfloat16": "float32",
        "--vae-tile=96x16": "256x16",
        "--output=dog.mp4": "cat.mp4",
        "--num-videos=2": 1,
        "--negative-prompt=blue": "nothing of the kind",
        "--embeds=texts.safetensors": "nothing of the kind",
        "--save-embeds=texts.safetensors": "nothing of the kind",
        "--device=cuda": "cpu",
    }
    expected = {
        f"{words}: the run in cat.k5 has {known}; leave it out to go on with that run, or start another"
        for words, known in changes.items()
    }
    assert {*problems("--resume", "cat.k5", *changes)} == expected


def test_what_repeats_a_state_or_changes_no_number_may_stand_beside_it(here, make, tmp_path):
    unfinished(here)
    free = ["--offload", "none", "--checkpoint-every", "2", "--keep-state", "--report", "report.json", "--debug"]
    free += ["--quiet", "--log", "run.jsonl"]
    err = make("--resume", "cat.mp4", "--seed", "5", "--steps", "2", "--output", "cat.mp4", "--device", "cpu", *free)
    assert "warning: report.json: the first 1 of 2 steps are done, and a report is made in the steps" in err
    assert json.loads((tmp_path / "report.json").read_text())[0]["report"]["totals"]["steps"] == 1
    make(*CAT, "--output", "whole.mp4")
    assert same(tmp_path, "cat", "whole")
    assert StateFolder(tmp_path / "cat.k5").load()["completed"] == 2


def test_an_unfinished_run_is_neither_overwritten_nor_decoded(here, make, problems, tmp_path):
    unfinished(here)
    assert problems(*CAT) == [
        "output cat.k5: holds the state of a run; --resume cat.k5 goes on with it, --overwrite begins anew"
    ]
    assert problems("--decode-only", "cat.k5") == [
        "--decode-only cat.k5: 1 of 2 steps are done; go on with --resume cat.k5"
    ]
    code, out, _ = here("--resume", "cat.k5", "--dry-run", "--json")
    plan = json.loads(out)
    assert (code, plan["state"], plan["completed_steps"]) == (0, "cat.k5", 1)
    (tmp_path / "cat.k5" / "mine.txt").write_text("precious")
    make(*CAT, "--overwrite")
    assert [path.name for path in (tmp_path / "cat.k5").iterdir()] == ["mine.txt"]  # what is not ours stays


def test_a_damaged_state_is_refused(here, problems, tmp_path):
    unfinished(here)
    state = tmp_path / "cat.k5" / "denoising.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    [problem] = problems("--resume", "cat.k5")
    assert problem.startswith("--resume cat.k5: cat.k5/denoising.safetensors is damaged")


def test_by_default_at_most_a_minute_of_work_is_at_risk(here, monkeypatch, tmp_path):
    real, clock, ahead = Kandinsky5Transformer.forward, time.perf_counter, 0.0

    def forward(self, *args, **kwargs):
        nonlocal ahead
        ahead += 12.5  # seconds; two calls a step
        if ahead > 11 * 12.5:
            raise RuntimeError("broken in step 6")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Kandinsky5Transformer, "forward", forward)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + ahead)
    code, _, err = here(*CAT, "--steps", "8")
    assert code == 1
    assert "the state after step 4 of 8 is kept" in err  # at 50 s a third step would have ended after 75 s


# Out of memory


def too_large_for(sides, error):
    """Lets the VAE run out of memory with tiles of these sides."""
    real = AutoencoderKLHunyuanVideo.decode

    def decode(self, *args, **kwargs):
        if self.tile_sample_min_height in sides:
            error()
        return real(self, *args, **kwargs)

    return decode


def cuda_error():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


def cpu_error():
    torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize("error", [cuda_error, cpu_error])
def test_out_of_memory_in_decoding_is_tried_once_more_with_the_next_tile_which_is_recorded(
    make, monkeypatch, tmp_path, error
):
    with monkeypatch.context() as patch:
        patch.setattr(AutoencoderKLHunyuanVideo, "decode", too_large_for({256}, error))
        err = make(*CAT)
    [warning] = [line for line in err.splitlines() if "memory ran out" in line]
    assert warning.endswith("decoding again with 192x16")
    assert json.loads((tmp_path / "cat.json").read_text())["vae_tile"] == "192x16"
    make(*CAT, "--output", "again.mp4", "--vae-tile", "192x16")
    assert same(tmp_path, "again", "cat")


def test_out_of_memory_twice_is_an_error_that_names_the_command_for_less(here, make, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(AutoencoderKLHunyuanVideo, "decode", too_large_for({256, 192}, cuda_error))
        code, _, err = here(*CAT)
        assert code == 1
        assert "--decode-only cat.k5 --vae-tile 128x16 takes less; the state after step 2 of 2 is kept in cat.k5" in err
        make("--decode-only", "cat.k5", "--vae-tile", "128x16")
    assert json.loads((tmp_path / "cat.json").read_text())["vae_tile"] == "128x16"


def test_out_of_memory_in_denoising_says_what_would_fit(here, monkeypatch):
    monkeypatch.setattr(Kandinsky5Transformer, "forward", lambda *args, **kwargs: cuda_error())
    code, _, err = here(*CAT)
    assert code == 1
    assert (
        "denoise failed with OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB. What would fit: --dtype"
        in err
    )
    assert "the encoded text is kept in cat.k5" in err
