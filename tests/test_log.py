"""What a run says: by default, quietly, at length and in its log, which a kill, a crash or a full disk cannot spoil."""

import json
import logging
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import datetime, timedelta
from statistics import fmean

import pytest
from diffusers import AutoencoderKLHunyuanVideo

from kandinsky5_nabla.configs.errors import SettingsError
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.scripts import generate, inspect_attention
from kandinsky5_nabla.scripts._log import log_problems, say, speaking

STEPS = 3
# Two frames of 4x16 tokens: four blocks, all of them part padding, so that NABLA has a choice and edges.
QUICK = ["--config", "demo", "--height", "64", "--width", "256", "--num-frames", "5", "--steps", str(STEPS)]
QUICK += ["--attention", "NABLA_REFERENCE", "--nabla-p", "0.01", "--device", "cpu", "--prompt", "a cat", "--seed", "5"]
CAT = [*QUICK, "--output", "cat.mp4"]
LOG = ["--log", "run.jsonl"]
NOTICE = "a library's remark"


@pytest.fixture
def go_on(here):
    """Goes on by the command that a run has printed last."""

    def run(err):
        command = shlex.split(err.splitlines()[-1].removeprefix("go on with: "))
        code, _, err = here(*command[2:])
        assert code == 0, err

    return run


def log_of(folder, name="run.jsonl"):
    """The lines of a log, each of which has to be whole."""
    text = (folder / name).read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def events(lines, event):
    return [line for line in lines if line["event"] == event]


@contextmanager
def before(owner, name, act, number=1):
    """Lets something happen before a call of a real method, numbered from 1."""
    calls, real = [], getattr(owner, name)

    def method(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == number:
            act()
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, method)
        yield


def remark():
    logging.getLogger("diffusers.models").warning("%s", NOTICE)


def broken():
    raise RuntimeError("broken")


# On stderr


def test_quietly_a_run_shows_its_warnings_and_its_result(here):
    code, out, err = here(*CAT, "--quiet")
    assert (code, out.startswith("cat.mp4: 256x64, 5 frames")) == (0, True)
    [line] = err.splitlines()
    assert line.startswith("warning: 64x256 (height x width) is no size that demo was trained for")


def test_at_length_a_run_shows_steps_seconds_versions_and_what_libraries_warn_of(here):
    said = {}
    for choice in ("--debug", "--verbose"):  # the first shows no more than the default
        with before(AutoencoderKLHunyuanVideo, "decode", remark):
            code, _, said[choice] = here(*CAT, choice, "--overwrite")
        assert code == 0
    extra = said["--verbose"].splitlines()
    for line in said["--debug"].splitlines():
        if not line.startswith(("step ", "memory: ")):  # whose numbers differ
            extra.remove(line)
    [versions] = [line for line in extra if line.startswith("kandinsky5-nabla ")]
    installed = ", ".join(rf"{name} \S+" for name in ("kandinsky5-nabla", "torch", "diffusers", "transformers"))
    assert re.fullmatch(rf"{installed}; cpu: .+, 1 threads", versions)
    assert f"warning: {NOTICE}" in extra
    assert [line.partition(":")[0] for line in extra if line.startswith("step")] == [
        f"step {step} of {STEPS}" for step in (1, 2, 3)
    ]
    took = [line.split()[0] for line in extra if " took " in line]
    assert took == ["load", "text", "state", "denoise", "decode", "export"]


def test_quiet_and_verbose_exclude_each_other(here):
    code, _, err = here(*CAT, "--quiet", "--verbose")
    assert (code, err.splitlines()) == (
        2,
        ["error: argument --verbose: not allowed with argument --quiet (--help lists the arguments)"],
    )


def test_quietly_a_failed_run_still_says_what_failed_and_how_to_go_on_as_quietly(here, go_on):
    with before(AutoencoderKLHunyuanVideo, "decode", broken):
        code, out, err = here(*CAT, "--quiet")
    assert (code, out) == (1, "")
    caution, problem, command = err.splitlines()
    assert caution.startswith("warning: ")
    assert problem.startswith("error: decode failed with RuntimeError: broken; the state after step 3 of 3 is kept")
    assert command.endswith("--resume cat.k5 --quiet")
    go_on(err)


def test_a_terminal_that_is_gone_does_not_end_a_run(here, monkeypatch, tmp_path):
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        assert generate.main([*CAT, *LOG]) == 0
        with pytest.raises(OSError, match="No space left"):
            full.close()  # what could not be written
    assert events(log_of(tmp_path), "done")


# In the log


def test_the_log_holds_everything_with_its_numbers_whatever_is_shown(here, tmp_path):
    with before(AutoencoderKLHunyuanVideo, "decode", remark):
        _, out, err = here(*CAT, *LOG, "--json")
    log = log_of(tmp_path)
    assert list(log[0])[:4] == ["time", "level", "event", "message"]
    times = [datetime.fromisoformat(line["time"]) for line in log]
    assert times == sorted(times)
    assert {each.utcoffset() for each in times} == {timedelta(0)}
    shown = [line.removeprefix("warning: ") for line in err.splitlines()]
    assert [line["message"] for line in log if line["message"] in shown] == shown
    assert [line["stage"] for line in events(log, "stage")] == ["load", "text", "state", "denoise", "decode", "export"]
    ends = {line["stage"]: line["seconds"] for line in events(log, "stage_done")}
    [video] = json.loads(out)["videos"]
    assert {name: ends[name] for name in video["seconds"]} == pytest.approx(video["seconds"], abs=0.01)
    assert NOTICE in [line["message"] for line in events(log, "warning") if line.get("logger") == "diffusers.models"]
    [begin] = events(log, "run")
    assert (begin["plan"]["num_inference_steps"], begin["device"]) == (STEPS, "cpu")
    [complete] = events(log, "video")
    assert complete["video"] == video
    assert (log[-1]["event"], log[-1]["exit_code"]) == ("done", 0)
    here(*CAT, "--log", "quiet.jsonl", "--quiet", "--overwrite")
    quiet = log_of(tmp_path, "quiet.jsonl")
    without_remark = [line["event"] for line in log if line["message"] != NOTICE]
    assert [line["event"] for line in quiet] == without_remark


def test_each_step_is_in_the_log_with_the_density_that_a_report_has(here, tmp_path):
    assert here(*CAT, *LOG, "--report", "report.json")[0] == 0
    [video] = json.loads((tmp_path / "report.json").read_text())
    rows = video["report"]["steps_of_layers"]
    steps = events(log_of(tmp_path), "step")
    expected = [fmean(row["density"] for row in rows if row["step"] == step) for step in range(STEPS)]
    assert [step["density"] for step in steps] == pytest.approx(expected, abs=1e-12)
    assert len({*expected, 1}) == STEPS + 1
    assert [(step["step"], step["steps"], step["file"]) for step in steps] == [(n, 3, "cat.mp4") for n in (1, 2, 3)]
    [denoise] = [line for line in events(log_of(tmp_path), "stage_done") if line["stage"] == "denoise"]
    assert sum(step["seconds"] for step in steps) <= denoise["seconds"] + 0.01
    dense = [word for word in CAT if word not in ("--nabla-p", "0.01")]
    assert here(*dense, "--attention", "SDPA", "--log", "dense.jsonl", "--overwrite")[0] == 0
    assert [step["density"] for step in events(log_of(tmp_path, "dense.jsonl"), "step")] == [None] * STEPS


def test_nothing_that_is_shown_or_logged_changes_a_byte_of_the_video(here, tmp_path):
    assert here(*CAT)[0] == 0
    expected = (tmp_path / "cat.mp4").read_bytes(), (tmp_path / "cat.json").read_bytes()
    for choice in ([*LOG, "--quiet"], [*LOG, "--verbose"]):
        assert here(*CAT, *choice, "--overwrite")[0] == 0
        assert ((tmp_path / "cat.mp4").read_bytes(), (tmp_path / "cat.json").read_bytes()) == expected
    assert here("--from", "cat.json", *LOG, "--quiet", "--overwrite", "--output", "cat.mp4")[0] == 0
    assert (tmp_path / "cat.mp4").read_bytes() == expected[0]
    assert len(events(log_of(tmp_path), "done")) == 3


def test_a_failure_is_in_the_log_with_its_code_and_the_run_that_goes_on_continues_it(here, go_on, tmp_path):
    with before(Kandinsky5Transformer, "forward", broken, number=5):  # two calls a step, with guidance
        code, _, err = here(*CAT, *LOG, "--checkpoint-every", "1", "--report", "report.json")
    assert code == 1
    *_, trace, error, command = log_of(tmp_path)
    assert (trace["event"], "RuntimeError: broken" in trace["message"], "Traceback" in err) == (
        "traceback",
        True,
        False,
    )
    assert (error["level"], error["event"], error["exit_code"]) == ("error", "error", 1)
    assert error["message"] == err.splitlines()[-2].removeprefix("error: ")
    assert (command["event"], f"go on with: {command['command']}") == ("go_on", err.splitlines()[-1])
    assert command["command"].endswith("--resume cat.k5 --checkpoint-every=1 --log=run.jsonl --report=report.json")
    go_on(err)
    assert json.loads((tmp_path / "report.json").read_text())[0]["report"]["totals"]["steps"] == 1
    log = log_of(tmp_path)
    assert [step["step"] for step in events(log, "step")] == [1, 2, 3]
    assert len(events(log, "run")) == 2
    assert log[-1]["event"] == "done"


def test_an_interrupt_is_in_the_log(here, go_on, tmp_path):
    with before(Kandinsky5Transformer, "forward", lambda: signal.raise_signal(signal.SIGINT), number=3):
        code, _, err = here(*CAT, *LOG, "--quiet")
    assert code == 130
    assert "stopping after this step (once more: at once) ..." in err.splitlines()  # or one might press it again
    log = log_of(tmp_path)
    said = [line["event"] for line in log if line["event"] in ("interrupt", "step", "error", "go_on")]
    assert said == ["step", "interrupt", "step", "error", "go_on"]
    assert events(log, "error")[0]["exit_code"] == 130
    go_on(err)
    assert [step["step"] for step in events(log_of(tmp_path), "step")] == [1, 2, 3]


def test_bad_input_is_in_the_log_too_but_a_dry_run_writes_none(here, tmp_path):
    assert here(*CAT, *LOG, "--dry-run")[0] == 0
    assert list(tmp_path.iterdir()) == []
    assert here(*CAT, *LOG, "--steps", "0")[0] == 2
    *_, error = log_of(tmp_path)
    assert (error["exit_code"], "steps" in error["message"]) == (2, True)
    assert (error["kind"], error["remedy"]) == ("SettingsError", SettingsError.remedy)


def test_a_bad_row_is_in_the_log_with_its_line_and_kind(here, tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,height\na cat,64\na dog,65\n")
    without_prompt = [word for word in QUICK if word not in ("--prompt", "a cat")]
    assert here(*without_prompt, "--prompts", "rows.csv", *LOG)[0] == 1
    [error] = events(log_of(tmp_path), "error")
    assert error["message"].startswith("rows.csv line 3: height 65: must be a multiple of 16")
    assert (error["line"], error["kind"]) == (3, "SettingsError")


def test_a_killed_run_leaves_whole_lines_of_all_that_it_said(tmp_path):
    command = [sys.executable, generate.__file__, *CAT, *LOG, "--steps", "200"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    log = tmp_path / "run.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and (not log.exists() or log.read_bytes().count(b'"step":') < 3):
            time.sleep(0.01)
        process.kill()
        shown = process.stderr.read().splitlines()
    assert process.returncode == -signal.SIGKILL
    lines = log_of(tmp_path)
    assert "denoise" not in [line["stage"] for line in events(lines, "stage_done")]  # it was killed within it
    said = {line["message"] for line in lines}
    assert {line.removeprefix("warning: ") for line in shown[:-1]} <= said  # the last may have been between the two
    assert [step["step"] for step in events(lines, "step")][:3] == [1, 2, 3]


def test_the_inspection_of_the_attention_speaks_the_same_way(as_a_program, capsys, tmp_path):
    size = ["--height", "64", "--width", "128", "--num-frames", "1", "--steps", "2", "--attention", "NABLA_REFERENCE"]
    assert inspect_attention.main([*size, "--device", "cpu", "--output", "a.png", *LOG, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    log = log_of(tmp_path)
    assert [step["step"] for step in events(log, "step")] == [1, 2]
    assert (len(events(log, "run")), log[-1]["event"]) == (1, "done")
    assert inspect_attention.main([*size, "--device", "cpu", "--output", "b.png", "--log", "a.png"]) == 2
    assert "log a.png: must be a name that ends in .jsonl" in capsys.readouterr().err


# What a log may be


BAD_LOGS = {
    "run.txt": "log run.txt: must be a name that ends in .jsonl",
    "folder.jsonl": "log folder.jsonl: is a folder; name a file in it, such as folder.jsonl/run.jsonl",
    "missing/run.jsonl": "log folder missing: does not exist; create it first",
    "video.jsonl": "log video.jsonl: holds something else than a log; name another file",
    "record.jsonl": "log record.jsonl: holds something else than a log; name another file",
    "list.jsonl": "log list.jsonl: holds something else than a log; name another file",
    "x" * 250 + ".jsonl": f"log {'x' * 250}.jsonl: File name too long",
}


@pytest.mark.parametrize("name", BAD_LOGS)
def test_a_log_that_cannot_be_one_is_refused_with_all_else_that_is_wrong_and_left_alone(here, tmp_path, name):
    contents = {"video.jsonl": b"\0\0\0\x20ftypisom", "record.jsonl": b'{"format": 1}\n', "list.jsonl": b"[1]\n"}
    for file, content in contents.items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / "folder.jsonl").mkdir()
    code, _, err = here(*CAT, "--steps", "0", "--log", name)
    assert code == 2
    assert f"error: {BAD_LOGS[name]}" in err.splitlines()
    assert "steps" in err
    assert {path.name for path in tmp_path.iterdir()} == {*contents, "folder.jsonl"}
    assert {file: (tmp_path / file).read_bytes() for file in contents} == contents


def test_a_log_that_cannot_be_written_costs_one_warning_and_no_run(here, tmp_path):
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    code, _, err = here(*CAT, *LOG)
    assert code == 0
    warnings = [line for line in err.splitlines() if "the log" in line]
    assert warnings == [
        "warning: the log run.jsonl cannot be written (No space left on device): the run goes on, and lines are "
        "missing there"
    ]
    assert (tmp_path / "cat.mp4").exists()


def test_a_disk_that_fills_up_leaves_whole_lines_and_the_log_goes_on_when_it_can(capsys, tmp_path):
    log = tmp_path / "run.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with speaking(True, False, log):
        say("first", "before")
        full = log.stat().st_size + 20  # the next line does not fit, its beginning does
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (full, limits[1]))
            say("second", "x" * 100)
            say("third", "x" * 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        say("fourth", "after")
    assert [line["event"] for line in log_of(tmp_path)] == ["first", "fourth"]
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_a_log_that_ends_in_half_a_line_is_continued_on_a_line_of_its_own(tmp_path):
    log = tmp_path / "run.jsonl"
    log.write_text('{"time": "t", "event": "e"}\n{"time": "t')
    assert log_problems(log) == []
    with speaking(True, False, log):
        say("next", "whole")
    *_, half, whole = log.read_text().splitlines()
    assert (half, json.loads(whole)["event"]) == ('{"time": "t', "next")


def test_what_is_no_text_in_a_librarys_remark_does_not_end_a_run(capsys, monkeypatch, tmp_path):
    for name, value in {"propagate": False, "handlers": []}.items():  # without pytest's own handler, which would raise
        monkeypatch.setattr(logging.getLogger("diffusers"), name, value)
    with speaking(False, True, tmp_path / "run.jsonl"):
        logging.getLogger("diffusers.models").warning("%d of %d", 1)
    assert capsys.readouterr().err == "warning: %d of %d\n"
    assert log_of(tmp_path)[0]["message"] == "%d of %d"


def test_after_a_run_no_handler_and_no_level_of_it_is_left(tmp_path):
    names = ("kandinsky5_nabla", "diffusers", "transformers")

    def state():
        return [(list(logging.getLogger(name).handlers), logging.getLogger(name).level) for name in names]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("kandinsky5_nabla"), "handlers", [])
        expected = state()
        with speaking(True, True, tmp_path / "run.jsonl"):
            assert state() != expected
        assert state() == expected
