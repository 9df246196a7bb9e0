"""A file of many prompts: every good row becomes a video, a bad one is told with its line and stops nothing."""

import json
import resource
import shlex
import signal
import sys

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo

from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline.export import probe_video, read_comment
from kandinsky5_nabla.scripts import generate
from kandinsky5_nabla.scripts._prompts import Row, read_prompts

QUICK = ["--config", "demo", "--height", "64", "--width", "64", "--num-frames", "1", "--steps", "2"]
QUICK += ["--attention", "NABLA_REFERENCE", "--device", "cpu"]
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


# The file

RED, DOG = "a red cat", "a dog, running"


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.txt", f"{RED}\n\n  {DOG} \r\n", [Row(1, RED), Row(3, DOG)]),
        ("a.TXT", f"\ufeff{RED}", [Row(1, RED)]),
        ("a.csv", f'prompt\n{RED}\n\n"{DOG}"\n', [Row(2, RED), Row(4, DOG)]),
        (
            "a.csv",
            f'\ufeffSeed, Prompt ,height\r\n7,{RED},64\r\n,"{DOG}",\r\n',
            [Row(2, RED, {"seed": 7, "height": 64}), Row(3, DOG)],
        ),
        ("a.csv", 'prompt,seed\n"two\nlines",1\nb,2\n', [Row(2, "two\nlines", {"seed": 1}), Row(4, "b", {"seed": 2})]),
        (
            "a.jsonl",
            f'{{"prompt": "{RED}", "seed": 7, "width": null}}\n\n{{"prompt": "", "num_frames": "5"}}',
            [Row(1, RED, {"seed": 7}), Row(3, "", {"num_frames": 5})],
        ),
        ("a.jsonl", '{"prompt": "a", "negative_prompt": ""}', [Row(1, "a", {"negative_prompt": ""})]),
    ],
)
def test_each_format_gives_its_rows_with_their_lines(tmp_path, name, text, rows):
    (tmp_path / name).write_bytes(text.encode())
    assert read_prompts(tmp_path / name) == rows


@pytest.mark.parametrize(
    ("name", "text", "line", "problem"),
    [
        ("a.csv", "prompt,seed\na,1\nb,x\n", 3, "seed 'x': must be a whole number"),
        ("a.csv", "prompt,seed\na,1.5\n", 2, "seed '1.5': must be a whole number"),
        ("a.csv", "prompt,seed\n,1\n", 2, "has no prompt"),
        ("a.csv", "prompt,seed\na, b,1\n", 2, "has 3 values for 2 columns; quote values with commas"),
        ("a.csv", 'prompt\n"a" b\n', 2, "is not CSV"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n', 2, "is not JSON"),
        ("a.jsonl", '["a"]', 1, 'is no object such as {"prompt": "a cat"}: ["a"]'),
        ("a.jsonl", '{"text": "a"}', 1, "there is no column 'text'"),
        ("a.jsonl", '{"prompt": "a", "sede": 1}', 1, "there is no column 'sede': seed is meant?"),
        ("a.jsonl", '{"prompt": ["a"]}', 1, "prompt ['a']: must be text"),
        ("a.jsonl", '{"prompt": "a", "seed": true}', 1, "seed True: must be a whole number"),
        ("a.jsonl", '{"prompt": "a", "seed": 1.0}', 1, "seed 1.0: must be a whole number"),
    ],
)
def test_a_bad_row_says_what_is_wrong_and_the_rows_around_it_are_read(tmp_path, name, text, line, problem):
    (tmp_path / name).write_text(
        text + ('\n{"prompt": "last"}' if name.endswith("jsonl") else "last" + ",7" * ("," in text))
    )
    rows = read_prompts(tmp_path / name)
    [bad] = [row for row in rows if row.problems]
    assert bad.line == line
    assert any(sentence.startswith(problem) for sentence in bad.problems), bad.problems
    assert rows[-1].prompt == "last"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.yaml", b"prompt: a", "must be a name that ends in .txt, .csv, .jsonl"),
        ("a", b"a", "must be a name that ends in .txt, .csv, .jsonl"),
        ("a.txt", b"\n \n", "has no prompt"),
        ("a.csv", b"prompt,seed\n", "has no prompt"),
        ("a.csv", b"", "the first row must name the columns, prompt among them"),
        ("a.csv", b"a cat\na dog\n", "the first row must name the columns, prompt among them; it is 'a cat'"),
        ("a.csv", b"prompt,sead\na,1\n", "there is no column 'sead': seed is meant?"),
        ("a.csv", b"prompt,seed,seed\na,1,2\n", "there are two columns 'seed'"),
        ("a.txt", b"a\xffb", "byte 1 is not UTF-8; save the file in UTF-8"),
        ("missing.txt", None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_used_as_a_whole_is_refused_before_anything(here, tmp_path, name, content, problem):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = here("--prompts", name, "--output", "videos")
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert problem in line
    assert name in line
    assert sorted(tmp_path.rglob("*")) == before


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
    {"prompt": "a fox", "width": 128},
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
        "error: rows.jsonl line 3: seed 'many': must be a whole number",
        "error: rows.jsonl line 5: height 65: must be a multiple of 16 from 16 to 2048; nearest: 64 or 80",
    ]
    assert err.splitlines()[-1] == "rows/manifest.json: 3 done, 2 failed"
    assert statuses(folder) == ["done", "done", "failed", "done", "failed"]
    assert manifest_of(folder)["rows"][1] == {
        "line": 2, "status": "done", "prompt": "a dog", "seed": 3, "file": "0002-a-dog-3.mp4",
    }  # fmt: skip
    records = [json.loads((folder / f"{name}.json").read_text()) for name in names]
    assert [record["negative_prompt"] for record in records] == [None, "cats", None]
    assert [record["width"] for record in records] == [64, 64, 128]
    assert [probe_video(folder / f"{name}.mp4").width for name in names] == [64, 64, 128]
    assert json.loads(read_comment(folder / "0002-a-dog-3.mp4")) == records[1]


def test_a_row_has_the_bytes_of_the_same_video_made_alone(here, rows_file, tmp_path):
    here("--prompts", "rows.jsonl", "--seed", "7")
    code, _, err = here("--prompt", "a dog", "--seed", "3", "--negative-prompt", "cats", "--output", "dog.mp4")
    assert code == 0, err
    assert (tmp_path / "dog.mp4").read_bytes() == (tmp_path / "rows/0002-a-dog-3.mp4").read_bytes()


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
    rows = [row for row in manifest_of(tmp_path / "other")["rows"] if row["status"] == "failed"]
    assert rows == [{**failure, "status": "failed"} for failure in failed]
    assert len(videos_in(tmp_path / "other")) == 3


def test_a_file_of_bad_rows_alone_is_bad_input(here, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "height": 1}\n[]')
    code, _, err = here("--prompts", "a.jsonl")
    assert code == 2
    assert [line.split(": ")[1] for line in err.splitlines()] == ["a.jsonl line 1", "a.jsonl line 2"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_names_are_safe_and_unique(here, tmp_path):
    wild = 'a/b:c*?"<>|' + "ы" * 300
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"prompt": wild, "seed": 2**63 - 3})] * 2))
    code, _, err = here("--prompts", "a.jsonl", "--num-videos", "2", "--guidance-scale", "1", "--steps", "1")
    assert code == 0, err
    made = [path.name for path in videos_in(tmp_path / "a")]
    assert len(made) == 4
    assert all(len(name.encode()) <= 100 and not set(name) & set('/:*?"<>|') for name in made)


# Going on


def test_the_same_command_goes_on_where_a_stopped_run_was_and_ends_with_the_same_bytes(here, calls, tmp_path):
    made, acts = calls
    (tmp_path / "a.txt").write_text("a cat\na dog\na cow\n")
    assert here("--prompts", "a.txt", "--output", "whole", "--seed", "4")[0] == 0
    made.clear()
    acts[CALLS + 1] = lambda: signal.raise_signal(signal.SIGINT)  # in the first step of the second video
    code, _, err = here("--prompts", "a.txt", "--seed", "4")
    assert code == 130
    assert statuses(tmp_path / "a") == ["done", "waiting", "waiting"]
    command = shlex.split(err.splitlines()[-1].removeprefix("go on with: "))
    assert command == [sys.executable, generate.__file__, *QUICK, "--prompts", "a.txt", "--seed", "4"]
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
    assert err.splitlines()[-1] == "a/manifest.json: 2 done"
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    code, out, _ = here("--prompts", "a.txt", "--json")
    assert (code, json.loads(out)["videos"], json.loads(out)["failed"]) == (0, [], [])
    (tmp_path / "a.txt").write_text("a cat\na dog\na cow\n")
    assert here("--prompts", "a.txt")[0] == 0
    assert len(made) == CALLS
    assert len({row["seed"] for row in manifest_of(tmp_path / "a")["rows"]}) == 1


def test_files_of_another_run_are_neither_taken_for_done_nor_overwritten(here, tmp_path):
    (tmp_path / "a.txt").write_text("a cat\n")
    assert here("--prompts", "a.txt", "--seed", "1")[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    code, _, err = here("--prompts", "a.txt", "--seed", "1", "--steps", "1")
    assert code == 2
    assert "line 1: a/0001-a-cat-1.json: was made with num_inference_steps 2, not 1; --overwrite makes it anew" in err
    (tmp_path / "a/0001-a-cat-1.json").write_text("{}")
    code, _, err = here("--prompts", "a.txt", "--seed", "1")
    assert code == 2
    assert "a/0001-a-cat-1.json: is in the way (holds no record of a run)" in err
    assert (tmp_path / "a/0001-a-cat-1.mp4").read_bytes() == before["0001-a-cat-1.mp4"]
    assert here("--prompts", "a.txt", "--seed", "1", "--overwrite")[0] == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_row_that_fails_while_it_runs_stops_no_other_and_goes_on_later(here, calls, tmp_path, monkeypatch):
    made, _ = calls
    (tmp_path / "a.txt").write_text("a cat\na dog\na cow\n")
    real, decoded = AutoencoderKLHunyuanVideo.decode, []

    def decode(self, *args, **kwargs):
        decoded.append(None)
        if len(decoded) == 2:
            raise ValueError("the second one")
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoencoderKLHunyuanVideo, "decode", decode)
        code, _, err = here("--prompts", "a.txt", "--seed", "4")
    assert code == 1
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert error.startswith(
        "error: a.txt line 2: decode failed with ValueError: the second one; the state after step 2"
    )
    assert statuses(tmp_path / "a") == ["done", "failed", "done"]
    made.clear()
    assert here("--prompts", "a.txt", "--seed", "4")[0] == 0
    assert made == []  # every step was saved
    assert statuses(tmp_path / "a") == ["done"] * 3


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
