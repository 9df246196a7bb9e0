"""A file of many prompts: every good row becomes a video, a bad one is told with its line and stops nothing."""

import json
import os
import resource
import shlex
import shutil
import signal
import sys

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo

from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline.export import probe_video, read_comment, read_video
from kandinsky5_nabla.scripts import generate

QUICK = ["--config", "demo", "--height", "64", "--width", "64", "--num-frames", "1", "--steps", "2"]
QUICK += ["--attention", "NABLA_REFERENCE", "--device", "cpu"]
LINUX = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no folder that nobody can write to")
CALLS = 4  # of the transformer for a video: two steps, with guidance


@pytest.fixture
def here(as_a_program, capsys, monkeypatch):
    """Runs the command line in this process, in an empty folder; returns exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", [generate.__file__])

    def run(*argv):
        code = generate.main([*QUICK, *map(str, argv)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def calls(monkeypatch):
    """The list of the calls of the real transformer, and what is done before one of them, by its number from 1."""
    real, made, acts = Kandinsky5Transformer.forward, [], {}

    def forward(self, *args, **kwargs):
        made.append(None)
        acts.get(len(made), lambda: None)()
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Kandinsky5Transformer, "forward", forward)
    return made, acts


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def statuses(folder):
    return [row["status"] for row in manifest_of(folder)["rows"]]


def videos_in(folder):
    return sorted(folder.glob("*.mp4"))


# What does not go with it


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--prompt", "b"], "--prompts a.txt: has the prompts of the run; leave --prompt out"),
        (["--embeds", "e.safetensors"], "leave --embeds out"),
        (["--output", "a.txt"], "output a.txt: is a file, and with --prompts the output is a folder; name another"),
        (["--output", "no/folder"], "output folder no: does not exist; create it first"),
        (["--steps", "0"], "number of steps 0: must be"),
        (["--num-videos", "0"], "number of videos 0: must be"),
        (["--seed", "-1"], "seed -1: must be"),
        (["--device", "cuda:99"], "device cuda:99: there "),
        pytest.param(["--output", "/proc/self"], "output folder /proc/self: cannot be written to", marks=LINUX),
    ],
)
def test_what_does_not_go_with_a_file_of_prompts_is_refused(here, tmp_path, argv, problem):
    (tmp_path / "a.txt").write_text("a")
    code, _, err = here("--prompts", "a.txt", *argv)
    assert code == 2
    assert problem in err, err
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


# The run

ROWS = [
    {"prompt": "a cat"},
    {"prompt": "a dog", "seed": 3, "negative_prompt": "cats"},
    {"prompt": "a cow", "seed": "many"},
    {"prompt": "a fox", "width": 128, "num_frames": 5},
    {"prompt": "a yak", "height": 65},
]


@pytest.fixture
def rows_file(tmp_path, as_a_program):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path / "rows.jsonl"


def test_good_rows_become_videos_and_bad_ones_are_told_with_their_line(here, rows_file, tmp_path):
    code, out, err = here("--prompts", "rows.jsonl", "--seed", "7")
    assert code == 1
    names = ["0001-a-cat-7", "0002-a-dog-3", "0004-a-fox-7"]
    folder = tmp_path / "rows"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*(f"{name}.{kind}" for name in names for kind in ("mp4", "json")), "manifest.json"]
    )
    assert [line.partition(":")[0] for line in out.splitlines()] == [f"rows/{name}.mp4" for name in names]
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert errors == [
        'error: rows.jsonl line 3: seed "many": must be a whole number',
        "error: rows.jsonl line 5: height 65: must be a multiple of 16 from 16 to 2048; nearest: 64 or 80",
    ]
    assert err.splitlines()[-1] == "rows/manifest.json: 3 done, 2 failed"
    assert statuses(folder) == ["done", "done", "failed", "done", "failed"]
    manifest = manifest_of(folder)
    assert (manifest["prompts"], manifest["seed"]) == ("rows.jsonl", 7)
    assert manifest["bytes"] == {f"{name}.mp4": (folder / f"{name}.mp4").stat().st_size for name in names}
    done, failed = manifest["rows"][1:3]
    assert done == {"line": 2, "status": "done", "prompt": "a dog", "seed": 3, "file": "0002-a-dog-3.mp4"}
    problem = 'seed "many": must be a whole number'
    assert failed == {"line": 3, "status": "failed", "problems": [problem], "kinds": ["PromptsFileError"]}
    records = [json.loads((folder / f"{name}.json").read_text()) for name in names]
    assert [record["negative_prompt"] for record in records] == [None, "cats", None]
    assert [record["width"] for record in records] == [64, 64, 128]
    infos = [probe_video(folder / f"{name}.mp4") for name in names]
    assert [(info.width, info.num_frames) for info in infos] == [(64, 1), (64, 1), (128, 5)]
    assert json.loads(read_comment(folder / "0002-a-dog-3.mp4")) == records[1]
    code, out, err = here("--prompts", "rows.jsonl", "--seed", "7", "--log", "log.jsonl")
    assert (code, out) == (1, "")
    said = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert [entry["line"] for entry in said if entry["event"] == "error"] == [3, 5]
    assert [line for line in err.splitlines() if line.startswith("error: ")] == errors
    assert err.splitlines()[-1] == "rows/manifest.json: 3 done, 2 failed"


def test_a_row_has_the_bytes_of_the_same_video_made_alone(here, rows_file, tmp_path):
    here("--prompts", "rows.jsonl", "--seed", "7")
    code, _, err = here("--prompt", "a dog", "--seed", "3", "--negative-prompt", "cats", "--output", "dog.mp4")
    assert code == 0, err
    assert (tmp_path / "dog.mp4").read_bytes() == (tmp_path / "rows/0002-a-dog-3.mp4").read_bytes()
    code, _, err = here("--prompts", "rows.jsonl", "--from", "dog.mp4")
    assert code == 2
    assert err == "error: --prompts rows.jsonl: has the prompts of the run; leave --from out\n"


def test_the_result_as_json_and_the_dry_run_name_what_failed(here, rows_file, tmp_path):
    code, out, _ = here("--prompts", "rows.jsonl", "--dry-run", "--json")
    assert code == 1
    assert len(json.loads(out)["outputs"]) == 3
    assert [line.split(":")[0] for line in json.loads(out)["bad"]] == ["rows.jsonl line 3", "rows.jsonl line 5"]
    assert not (tmp_path / "rows").exists()
    code, out, _ = here("--prompts", "rows.jsonl", "--json", "--output", "other")
    assert code == 1
    assert len(json.loads(out)["videos"]) == 3
    failed = json.loads(out)["failed"]
    assert [(failure["line"], failure["kinds"]) for failure in failed] == [
        (3, ["PromptsFileError"]),
        (5, ["SettingsError"]),
    ]
    assert failed[0]["problems"] == ['seed "many": must be a whole number']
    rows = [row for row in manifest_of(tmp_path / "other")["rows"] if row["status"] == "failed"]
    assert rows == [{**failure, "status": "failed"} for failure in failed]
    assert len(videos_in(tmp_path / "other")) == 3


def test_a_file_of_bad_rows_alone_is_bad_input(here, tmp_path):
    rows = ['{"prompt": "a", "height": 1}', "[]", '{"prompt": "a", "seed": -1}']
    rows += ['{"prompt": "\\ud800"}', '{"prompt": "a", "negative_prompt": "\\ud800"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    code, _, err = here("--prompts", "a.jsonl")
    assert code == 2
    assert [line.split(": ")[1] for line in err.splitlines()] == [f"a.jsonl line {i}" for i in range(1, 6)]
    assert "line 3: seed -1: must be from 0 to 2**63 - 1" in err
    assert err.count(": a prompt is no valid text") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_memory_is_planned_for_the_largest_row_and_one_that_cannot_fit_is_a_bad_one(here, tmp_path):
    def planned(*argv):
        code, out, _ = here(*argv, "--dry-run", "--json")
        return code, json.loads(out)["memory"][1:], json.loads(out).get("bad")  # the first line has what is free now

    def rows(*sizes):
        (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"prompt": "a", **size}) for size in sizes))
        return "--prompts", "a.jsonl"

    large, huge = ({"height": side, "width": side, "num_frames": count} for side, count in ((256, 17), (2048, 509)))
    _, of_large, _ = planned("--prompt", "a", "--num-videos", "3", "--height", 256, "--width", 256, "--num-frames", 17)
    assert planned(*rows({}, large, {})) == (0, of_large, [])
    code, of_small, [bad] = planned(*rows({}, huge, {}))
    assert (code, of_small != of_large) == (1, True)
    assert bad.startswith("a.jsonl line 2: --offload auto needs"), bad


def test_names_are_safe_and_unique(here, tmp_path):
    wild = 'a/b:c*?"<>|' + "ы" * 300
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"prompt": wild, "seed": 2**63 - 3})] * 2))
    code, _, err = here("--prompts", "a.jsonl", "--num-videos", "2", "--guidance-scale", "1", "--steps", "1")
    assert code == 0, err
    made = [path.name for path in videos_in(tmp_path / "a")]
    assert len(made) == 4
    assert all(len(name.encode()) <= 100 and not set(name) & set('/:*?"<>|') for name in made)
    pixels = [read_video(path)[0] for path in videos_in(tmp_path / "a")]
    assert (pixels[0] == pixels[2]).all()  # one prompt and one seed, in two rows
    assert (pixels[0] != pixels[1]).any()  # the next seed


# Going on


def test_the_same_command_goes_on_where_a_stopped_run_was_and_ends_with_the_same_bytes(here, calls, tmp_path):
    made, acts = calls
    (tmp_path / "a.txt").write_text("a cat\na dog\na cow\n")
    before = []
    acts[1] = lambda: before.extend(statuses(tmp_path / "whole"))
    assert here("--prompts", "a.txt", "--output", "whole", "--seed", "4")[0] == 0
    assert before == ["waiting"] * 3
    made.clear()
    acts.clear()
    acts[CALLS + 1] = lambda: signal.raise_signal(signal.SIGINT)  # in the first step of the second video
    code, _, err = here("--prompts", "a.txt", "--seed", "4", "--overwrite")
    assert code == 130
    assert "not begun" not in err  # the manifest tells that of any number of rows
    assert statuses(tmp_path / "a") == ["done", "waiting", "waiting"]
    shutil.copy(tmp_path / "whole/0002-a-dog-4.mp4", tmp_path / "a")  # as if killed before its state was put away
    command = shlex.split(err.splitlines()[-1].removeprefix("go on with: "))
    assert command == [sys.executable, generate.__file__, *QUICK, "--prompts", "a.txt", "--seed", "4", "--overwrite"]
    acts.clear()
    made.clear()
    assert generate.main(command[2:]) == 0
    assert len(made) == 2 * CALLS - CALLS // 2  # one of the four steps that were left is done
    assert statuses(tmp_path / "a") == ["done"] * 3
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes(), path
    assert len(list((tmp_path / "a").iterdir())) == 7


def test_what_is_done_is_not_made_again_and_a_drawn_seed_is_kept(here, calls, tmp_path):
    made, _ = calls
    (tmp_path / "a.txt").write_text("a cat\na dog\n")
    assert here("--prompts", "a.txt")[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    made.clear()
    code, out, err = here("--prompts", "a.txt")
    assert (code, out, made) == (0, "", [])
    assert "loading" not in err
    assert err.splitlines()[-1] == "a/manifest.json: 2 done"
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    code, out, _ = here("--prompts", "a.txt", "--json")
    result = json.loads(out)
    assert (code, result["videos"], result["failed"], result["done_before"]) == (0, [], [], 2)
    (tmp_path / "a.txt").write_text("a cat\na dog\na cow\n")
    assert here("--prompts", "a.txt")[0] == 0
    assert len(made) == CALLS
    assert len({row["seed"] for row in manifest_of(tmp_path / "a")["rows"]}) == 1
    _, out, _ = here("--prompts", "a.txt", "--seed", "0", "--dry-run", "--json")
    assert [output["seed"] for output in json.loads(out)["outputs"]] == [0, 0, 0]  # one that is given goes first


def test_a_video_that_was_taken_away_is_made_again_and_one_without_its_record_is_not(here, calls, tmp_path):
    made, _ = calls
    (tmp_path / "a.txt").write_text("a cat\na dog\n")
    assert here("--prompts", "a.txt", "--seed", "1")[0] == 0
    cat, dog = videos_in(tmp_path / "a")
    before = cat.read_bytes()
    cat.unlink()
    dog.with_suffix(".json").unlink()
    made.clear()
    code, out, err = here("--prompts", "a.txt", "--seed", "1")
    assert code == 0, err
    assert out.startswith("a/0001-a-cat-1.mp4: ")
    assert len(made) == CALLS
    assert cat.read_bytes() == before


def test_a_row_whose_state_was_kept_on_purpose_is_done(here, calls, tmp_path):
    made, _ = calls
    (tmp_path / "a.txt").write_text("a cat\na dog\n")
    again = ["--prompts", "a.txt", "--seed", "1", "--keep-state"]
    assert here(*again)[0] == 0
    cat, dog = videos_in(tmp_path / "a")
    dog.with_suffix(".json").unlink()  # as if it had been killed just before its end
    before, done = dog.read_bytes(), cat.stat()
    made.clear()
    code, out, err = here(*again)
    assert (code, made, err.splitlines()[-1]) == (0, [], "a/manifest.json: 2 done")
    assert [line.partition(":")[0] for line in out.splitlines()] == ["a/0002-a-dog-1.mp4"]
    assert dog.read_bytes() == before
    assert (cat.stat().st_ino, cat.stat().st_mtime_ns) == (done.st_ino, done.st_mtime_ns)
    assert here(*again)[1] == ""


def test_a_row_that_fails_while_it_runs_stops_no_other_and_goes_on_later(here, calls, tmp_path, monkeypatch):
    made, _ = calls
    (tmp_path / "a.txt").write_text("a cat\na dog\na cow\n")
    real, decoded = AutoencoderKLHunyuanVideo.decode, []

    def decode(self, *args, **kwargs):
        decoded.append(None)
        if len(decoded) != 2:
            raise ValueError("no pixels")
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoencoderKLHunyuanVideo, "decode", decode)
        code, _, err = here("--prompts", "a.txt", "--seed", "4")
    assert code == 1
    failed = ": decode failed with ValueError: no pixels; the state after step 2 of 2 is kept in a/000"
    assert [line.partition(failed)[0] for line in err.splitlines() if line.startswith("error: ")] == [
        "error: a.txt line 1", "error: a.txt line 3",
    ]  # fmt: skip
    assert statuses(tmp_path / "a") == ["failed", "done", "failed"]
    made.clear()
    assert here("--prompts", "a.txt", "--seed", "4")[0] == 0
    assert made == []  # every step was saved
    assert statuses(tmp_path / "a") == ["done"] * 3


def test_a_name_that_is_taken_meanwhile_costs_its_own_row_alone(here, calls, tmp_path):
    _, acts = calls
    (tmp_path / "a.txt").write_text("a cat\na dog\n")
    taken = tmp_path / "a/0001-a-cat-4.mp4"
    acts[1] = lambda: taken.write_text("precious")
    code, _, err = here("--prompts", "a.txt", "--seed", "4")
    assert code == 1
    assert "error: a.txt line 1: export failed with TakenError: a/0001-a-cat-4.mp4 exists" in err
    assert statuses(tmp_path / "a") == ["failed", "done"]
    assert taken.read_text() == "precious"


def test_a_full_disk_ends_the_whole_run_and_costs_no_row(here, calls, tmp_path):
    _, acts = calls
    (tmp_path / "a.txt").write_text("a cat\na dog\na cow\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    acts[CALLS + 1] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        code, _, err = here("--prompts", "a.txt", "--seed", "4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    assert "go on with: " in err.splitlines()[-1]
    assert statuses(tmp_path / "a") == ["done", "waiting", "waiting"]
    acts.clear()
    assert here("--prompts", "a.txt", "--seed", "4")[0] == 0
    assert statuses(tmp_path / "a") == ["done"] * 3


def test_each_text_is_encoded_once_before_the_first_video(here, calls, tmp_path, monkeypatch):
    from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline

    made, _ = calls
    real, texts = Kandinsky5NablaPipeline.encode_prompt, []

    def encode(self, prompts, *args):
        assert made == []
        texts.append(prompts)
        return real(self, prompts, *args)

    monkeypatch.setattr(Kandinsky5NablaPipeline, "encode_prompt", encode)
    rows = [{"prompt": "a"}, {"prompt": "b", "negative_prompt": "c"}, {"prompt": "a", "seed": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert here("--prompts", "a.jsonl", "--negative-prompt", "d")[0] == 0
    assert sorted(texts) == ["a", "b", "c", "d"]
    made.clear()
    texts.clear()
    assert here("--prompts", "a.jsonl", "--guidance-scale", "1", "--steps", "1", "--output", "b")[0] == 0
    assert sorted(texts) == ["a", "b"]
    code, _, err = here("--prompts", "a.jsonl", "--save-embeds", "a.safetensors", "--output", "c")
    assert code == 2
    assert "--save-embeds: holds one negative prompt, and the rows have several; leave it out" in err


def test_many_rows_with_a_few_bad_ones_give_all_the_others(here, tmp_path, soak):
    count, bad = (1000, 30) if soak > 1 else (12, 3)
    rows = [
        {"prompt": f"video {i}", **({"height": 1} if i % (count // bad) == 1 and i < count // bad * bad else {})}
        for i in range(count)
    ]
    (tmp_path / "many.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out, err = here("--prompts", "many.jsonl", "--steps", "1", "--guidance-scale", "1", "--seed", "0")
    assert code == 1
    assert len(videos_in(tmp_path / "many")) == len(out.splitlines()) == count - bad
    assert err.splitlines()[-1] == f"many/manifest.json: {count - bad} done, {bad} failed"
    assert torch.get_num_threads() == 1
