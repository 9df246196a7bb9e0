"""The command line's request: bad input is refused as a whole, before a weight is read or a file is written."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.scripts.generate import main

DEMO = load_preset("demo").local_folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a few things in the way, on a machine without CUDA."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("folder", "folder.mp4", "left.k5", "bare.k5"):
        (tmp_path / name).mkdir()
    for name in ("taken.mp4", "kept.json", "left.k5/settings.json", "full.k5", "many-2.mp4"):
        (tmp_path / name).write_text("precious")
    (tmp_path / "odd.yaml").write_text("name: [")
    return tmp_path


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def problems_of(folder, checkpoint, capsys):
    """Returns the problems that the command line reports, after checking how it reports them."""

    def run(*argv, base=("--config", "demo", "--model", str(checkpoint), "--prompt", "a cat")):
        before = contents(folder)
        assert main([*base, *argv]) == 2
        out, err = capsys.readouterr()
        assert main([*base, *argv, "--json"]) == 2
        as_json = json.loads(capsys.readouterr().out)
        assert contents(folder) == before
        assert out == ""
        lines = err.splitlines()
        assert all(line.startswith("error: ") for line in lines), err
        problems = [line.removeprefix("error: ") for line in lines]
        kinds = as_json["error"].pop("kinds")
        assert as_json == {"error": {"exit_code": 2, "problems": problems}}
        assert len(kinds) == len(problems)
        return problems

    return run


@pytest.fixture
def plan_of(folder, checkpoint, capsys):
    """Returns what a dry run would do."""

    def run(*argv, base=("--config", "demo", "--model", str(checkpoint))):
        before = contents(folder)
        assert main([*base, *argv, "--dry-run", "--json"]) == 0
        assert contents(folder) == before
        return json.loads(capsys.readouterr().out)

    return run


def test_the_weights_of_these_tests_hold_no_number(checkpoint):
    # A run that came as far as to use them would end in an error and with the exit code 1.
    weights = list(checkpoint.rglob("*.safetensors"))
    assert len(weights) == 4
    for path in weights:
        assert all(tensor.isnan().all() for tensor in load_file(path).values())


ONE_PROBLEM = {
    "--config dmeo": "unknown preset 'dmeo': did you mean 'demo'?",
    "--config missing.yaml": "the preset missing.yaml cannot be read",
    "--config odd.yaml": "the preset odd.yaml cannot be read",
    "--model missing": "model 'missing': there is no such folder, and it is no Hub id (owner/name)",
    "--model ./missing": "model './missing': there is no such folder",
    "--model ../missing": "model '../missing': there is no such folder",
    "--model /missing/too": "model '/missing/too': there is no such folder",
    "--model a/b/c": "model 'a/b/c': there is no such folder",
    "--model folder": "folder/model_index.json is missing",
    "--model taken.mp4": "model 'taken.mp4': there is no such folder",
    "--model lite.safetensors": "model lite.safetensors is missing",
    "--height 500": "height 500: must be a multiple of 16 from 16 to 2048; nearest: 496 or 512",
    "--height 0": "height 0: must be a multiple of 16",
    "--height -128": "height -128: must be a multiple of 16",
    "--height 2176": "height 2176: must be a multiple of 16 from 16 to 2048",
    "--width 100": "width 100: must be a multiple of 16",
    "--height 500 --attention SDPA": "height 500: must be a multiple of 16 from 16 to 2048; nearest: 496 or 512",
    "--num-frames 7": "number of frames 7: must be 4k + 1, from 1 to 509; nearest: 5 or 9",
    "--num-frames 0": "number of frames 0: must be 4k + 1",
    "--num-frames -3": "number of frames -3: must be 4k + 1",
    "--num-frames 513": "number of frames 513: must be 4k + 1, from 1 to 509",
    "--duration 0.3": "duration 0.3 s: makes 3.4 frames at 8 fps; the nearest are 0 s (1 frames) and 0.5 s (5 frames)",
    "--duration 100": "duration 100 s: makes 801 frames at 8 fps; the nearest are 63.5 s (509 frames)",
    "--duration -1": "duration -1.0: must be 0 or more",
    "--duration nan": "duration nan: must be 0 or more",
    "--duration inf": "duration inf: must be 0 or more",
    "--duration 2 --num-frames 17": "--num-frames and --duration say the same thing",
    "--steps 0": "number of steps 0: must be a whole number from 1 to 10000",
    "--steps -5": "number of steps -5: must be",
    "--num-videos 0": "number of videos 0: must be a whole number from 1 to 10000",
    "--num-videos -1": "number of videos -1: must be",
    "--num-videos 1000000": "number of videos 1000000: must be a whole number from 1 to 10000",
    "--prompt \udcff": "a prompt is no valid text (it holds bytes that are not UTF-8)",
    "--seed -1": "seed -1: must be from 0 to 2**63 - 1",
    f"--seed {2**63}": f"seed {2**63}: must be from 0 to 2**63 - 1",
    "--guidance-scale -1": "guidance scale -1.0: must be a number, 0 or more",
    "--guidance-scale nan": "guidance scale nan: must be",
    "--guidance-scale inf": "guidance scale inf: must be",
    "--shift 0": "shift 0.0: must be a number above 0",
    "--shift -1": "shift -1.0: must be",
    "--shift nan": "shift nan: must be",
    "--nabla-p 0": "NABLA P 0.0: the kept mass must be a number above 0 and at most 1",
    "--nabla-p -0.1": "NABLA P -0.1: the kept mass",
    "--nabla-p 1.5": "NABLA P 1.5: the kept mass",
    "--nabla-p nan": "NABLA P nan: the kept mass",
    "--nabla-p 0.5 --attention SDPA": "NABLA P 0.5: attention is dense here and keeps everything; leave P out",
    "--attention flash": "unknown attention backend 'flash'; known are NABLA_ATTN, NABLA_REFERENCE, SDPA",
    "--attention flex": "unknown attention backend 'flex'",  # a name that diffusers has and would not honour
    "--device cuda": "device cuda: there is no CUDA device here; --device cpu works",
    "--device cuda:1": "device cuda:1: there is no CUDA device here",
    "--device mps": "device 'mps': must be cpu, cuda or cuda:N",
    "--device cuda:x": "device 'cuda:x': must be",
    "--offload model": "--offload model: moves parts to the CPU, and this run is on it",
    "--offload sequential --device cpu": "--offload sequential: moves parts to the CPU",
    "--output folder": "output folder: is a folder; name a file in it, such as folder/video.mp4",
    "--output folder.mp4": "output folder.mp4: is a folder",
    "--output folder.mp4 --overwrite": "output folder.mp4: is a folder",
    "--output .": "output .: is a folder",
    "--output ..": "output ..: is a folder",
    "--output=": "argument --output: '' is empty; give a value, or leave the argument out",
    "--output cat.mov": "output cat.mov: the video's name must end in .mp4, got 'cat.mov': cat.mp4 works",
    "--output cat": "output cat: the video's name must end in .mp4, got 'cat': cat.mp4 works for codec 'h264'",
    "--output .mp4": "output .mp4: the video's name has nothing before its suffix '.mp4': video.mp4 works",
    "--output missing/cat.mp4": "output folder missing: does not exist; create it first",
    "--output taken.mp4/cat.mp4": "output folder taken.mp4: does not exist",
    "--output taken.mp4": "output taken.mp4: exists; choose another name or add --overwrite",
    "--output kept.mp4": "output kept.json: exists; choose another name or add --overwrite",
    "--output left.mp4": "output left.k5: holds the state of a run; --resume left.k5 goes on with it, --overwrite",
    "--output full.mp4 --overwrite": "output full.k5: is where the state of the run lies, and a file has that name",
    "--output many.mp4 --num-videos 2": "output many-2.mp4: exists",
    f"--output {'x' * 251}.mp4": f"output {'x' * 251}.json: File name too long",
    "--report kept.json": "report kept.json: exists; choose another name or add --overwrite",
    "--report folder --overwrite": "report folder: is a folder; name a file in it, such as folder/report.json",
    "--report .json": "report .json: has nothing before .json; report.json works",
    "--report cat.txt": "report cat.txt: must be a name that ends in .json",
    "--report missing/cat.json": "report folder missing: does not exist; create it first",
    "--report cat.json --output cat.mp4": "report cat.json: is the name of the video's own record; choose another",
    "--report cat.json --attention SDPA": "--report: attention is dense here and keeps every block",
    "--checkpoint-every 0": "--checkpoint-every 0: must be from 1 to 10000 steps",
    "--revision main": "--revision main: for a repository of the Hub; leave it out for",
    "--resume missing.k5": "--resume missing.k5: there is no state of a run in missing.k5",
    "--resume missing.mp4": "--resume missing.mp4: there is no state of a run in missing.k5",
    "--resume bare.k5": "--resume bare.k5: there is no state of a run in bare.k5",
    "--resume left.k5": "--resume left.k5: left.k5/settings.json is damaged",
    "--decode-only missing.k5": "--decode-only missing.k5: there is no state of a run in missing.k5",
    "--from missing.mp4": "--from missing.mp4: there is no such file",
    "--from taken.mp4": "--from taken.mp4: ",
    "--from kept.json": "--from kept.json: holds no record of a run",
    "--from left.k5": "--from left.k5: ",
    "--resume left.k5 --from taken.mp4": "--resume and --from exclude each other: give one",
    "--dtype int8": "argument --dtype: invalid choice: 'int8'",
    "--offload disk": "argument --offload: invalid choice: 'disk'",
    "--height tall": "argument --height: 'tall': a whole number is needed, such as 5",
    "--height 1e3": "argument --height: '1e3': a whole number is needed; 1000 works",
    "--height inf": "argument --height: 'inf': a whole number is needed, such as 5",
    "--num-frames 4.5": "argument --num-frames: '4.5': a whole number is needed; 4 works",
    "--shift 1,5": "argument --shift: '1,5': a number is needed, such as 1.5",
    "--output -cat.mp4": "argument --output: expected one argument; --output=-cat.mp4 gives it a value that begins",
    "--output --overwrite": "argument --output: expected one argument (--help lists the arguments)",
    "--guidance 3": "unrecognized arguments: --guidance 3",  # no abbreviation is guessed
    "--prompt": "argument --prompt: expected one argument",
    "--dry-run --height 500": "height 500: must be",
}


@pytest.mark.parametrize("argv", ONE_PROBLEM)
def test_bad_input_is_refused_with_the_value_and_the_rule(problems_of, argv):
    problems = problems_of(*argv.split())
    assert len(problems) == 1
    assert problems[0].startswith(ONE_PROBLEM[argv])


def test_without_a_prompt_the_report_asks_for_one(problems_of):
    assert problems_of(base=("--config", "demo")) == [
        "no prompt was given: add --prompt TEXT (an empty text is allowed)"
    ]


def test_every_problem_of_a_request_is_in_the_report(problems_of, checkpoint):
    numbers = "--height 500 --width 0 --num-frames 7 --duration 0.3 --steps 0 --num-videos 0 --seed -1 --nabla-p 2"
    others = "--guidance-scale nan --shift 0 --output missing/cat.mov --device cuda --dit-dtype fp9 --model missing"
    problems = problems_of(*numbers.split(), *others.split(), base=("--config", "demo"))
    found = sorted(problem.split(":")[0] for problem in problems)
    assert found == [
        "--num-frames and --duration say the same thing",
        "NABLA P 2.0",
        "device cuda",
        "duration 0.3 s",
        "guidance scale nan",
        "height 500",
        "model 'missing'",
        "no prompt was given",
        "number of steps 0",
        "number of videos 0",
        "output folder missing",
        "output missing/cat.mov",
        "seed -1",
        "shift 0.0",
        "transformer dtype 'fp9'",
        "width 0",
    ]


def test_a_taken_name_is_reported_beside_other_problems(problems_of):
    problems = problems_of("--output", "taken.mp4", "--height", "500", "--attention", "flash")
    assert len(problems) == 3
    assert "output taken.mp4: exists; choose another name or add --overwrite" in problems


def test_lite_without_cuda_names_the_demo_and_the_cpu(problems_of):
    problems = problems_of(base=("--prompt", "a cat"))
    assert len(problems) == 1
    for words in ("lite-t2v-10s-sft needs a CUDA device", "--config demo", "--device cpu"):
        assert words in problems[0]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe{}", b""])
@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json", "vae/config.json"])
@pytest.mark.parametrize("config", [("--config", "demo"), ("--device", "cpu")])
def test_a_broken_json_file_of_a_checkpoint_is_named(problems_of, checkpoint, tmp_path, name, content, config):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / name).write_bytes(content)
    problems = problems_of(base=("--model", str(broken), "--prompt", "a cat", *config))
    assert len(problems) == 1
    assert problems[0].startswith(f"{broken / name} ")


def test_the_checkpoint_of_another_pipeline_is_refused(problems_of, checkpoint, tmp_path):
    other = shutil.copytree(checkpoint, tmp_path / "other")
    index = json.loads((other / "model_index.json").read_text())
    (other / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionPipeline"}))
    problems = problems_of("--model", str(other))
    assert problems == [f"{other}: model_index.json is of a StableDiffusionPipeline; a Kandinsky5T2VPipeline is needed"]


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        ("--height 256 --width 128", "height", 256),
        ("--height 144 --attention SDPA", "nabla_P", None),
        ("--num-frames 1", "num_frames", 1),
        ("--duration 0.5", "num_frames", 5),
        ("--duration 0", "num_frames", 1),
        ("--guidance-scale 0", "guidance_scale", 0),
        ("--nabla-p 1", "nabla_P", 1),
        ("--device cpu --dtype bfloat16", "dtype", "bfloat16"),
        ("--device cpu --dtype fp16", "dtype", "float16"),
        ("--model some-owner/some.name", "model", "some-owner/some.name"),
    ],
)
def test_what_can_be_honoured_is_planned_as_asked(plan_of, argv, key, value):
    assert plan_of("--prompt", "a cat", *argv.split())[key] == value


@pytest.mark.parametrize("name", ["cat.mp4", "cat.MP4", "folder/cat.mp4", "taken.mp4", "left.mp4", f"{'x' * 250}.mp4"])
def test_a_good_output_name_is_used_as_it_is(plan_of, name):
    plan = plan_of("--prompt", "a cat", "--output", name, "--overwrite")
    assert [output["file"] for output in plan["outputs"]] == [name]


@pytest.mark.parametrize("name", ["cat.json", "cat.JSON", "folder/cat.json", "kept.json"])
def test_a_good_name_of_a_report_is_planned_and_nothing_is_written(plan_of, name):
    assert plan_of("--prompt", "a cat", "--report", name, "--overwrite")["report"] == name
    assert "report" not in plan_of("--prompt", "a cat")


def test_a_dry_run_prints_the_same_plan_as_text(folder, plan_of, checkpoint, capsys):
    argv = ("--prompt", "a cat", "--seed", "5", "--steps", "3")
    plan = plan_of(*argv)
    assert main(["--config", "demo", "--model", str(checkpoint), *argv, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert [line.split(":")[0] for line in text.splitlines() if line[0] != " "] == list(plan)
    assert "num_inference_steps: 3\n" in text
    assert "a-cat-5.mp4" in text


def test_without_cuda_the_demo_runs_on_the_cpu_in_fp32(plan_of):
    plan = plan_of("--prompt", "a cat")
    assert (plan["device"], plan["dtype"]) == ("cpu", "float32")


NAMES = {
    'a/b:c*?"<>|' + "ж" * 300: "a-b-c-жж",
    "": "video-",
    " \n\t": "video-",
    "../..": "video-",
    "-rf *": "rf-",
    ".hidden": "hidden-",
    "A cat, in a RED hat!": "a-cat-in-a-red-hat-",
    "é" * 300: "éé",
    "日本" * 100: "日本",
    "🐈" * 40: "video-",
    "\x00\x1b[31m": "31m-",
    "x" * 500: "xx",
}


@pytest.mark.parametrize("prompt", NAMES)
def test_any_prompt_makes_a_valid_file_name_of_at_most_100_bytes(plan_of, folder, prompt):
    seed = 2**63 - 1  # the longest
    for number in range(3):
        name = plan_of("--prompt", prompt, "--seed", str(seed))["outputs"][0]["file"]
        assert name.startswith(NAMES[prompt])
        assert name.endswith(f"-{seed}.mp4" if number == 0 else f"-{seed}-{number + 1}.mp4")
        assert len(os.fsencode(name)) <= 100
        assert not set(name) & set('/\\:*?"<>| \0\n\t')
        (folder / name).write_text("a name of the file system, from now on taken")


@pytest.mark.parametrize("suffix", ["mp4", "json", "k5"])
def test_a_name_that_is_taken_gets_a_number_unless_overwriting_is_asked_for(plan_of, folder, suffix):
    taken = folder / f"a-cat-5.{suffix}"
    taken.mkdir() if suffix == "k5" else taken.touch()
    argv = ("--prompt", "a cat", "--prompt", "A CAT!", "--seed", "5")
    assert [output["file"] for output in plan_of(*argv)["outputs"]] == ["a-cat-5-2.mp4", "a-cat-5-3.mp4"]
    overwriting = plan_of(*argv, "--overwrite")["outputs"]
    assert [output["file"] for output in overwriting] == ["a-cat-5.mp4", "a-cat-5-2.mp4"]


def test_prompts_times_videos_are_planned_in_order_with_their_seeds(plan_of):
    argv = ("--prompt", "a cat", "--prompt", "a dog", "--num-videos", "2", "--seed", "5")
    expected = [("a cat", 5), ("a cat", 6), ("a dog", 5), ("a dog", 6)]
    plan = plan_of(*argv)
    assert [(output["prompt"], output["seed"]) for output in plan["outputs"]] == expected
    names = ["a-cat-5.mp4", "a-cat-6.mp4", "a-dog-5.mp4", "a-dog-6.mp4"]
    assert [output["file"] for output in plan["outputs"]] == names
    numbered = plan_of(*argv, "--output", "folder/pet.mp4")["outputs"]
    assert [output["file"] for output in numbered] == [f"folder/pet-{i}.mp4" for i in (1, 2, 3, 4)]


def test_a_seed_that_is_not_given_is_drawn_anew(plan_of):
    seeds = {plan_of("--prompt", "a cat")["outputs"][0]["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_the_plain_checks_know_the_models_constants():
    from kandinsky5_nabla.models.rope import MAX_POSITIONS
    from kandinsky5_nabla.pipeline import checks

    assert checks.MAX_POSITIONS == MAX_POSITIONS
