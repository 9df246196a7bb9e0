"""Command lines that cannot be honoured: exit code 2, a line that names the value and what would do, and no file.

Those of numbers and names alone are in test_plan.py; here is what files hold, what options have in common, and what
contradicts each other.
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save_file

from kandinsky5_nabla.configs import errors, load_preset
from kandinsky5_nabla.pipeline.state import load_state
from kandinsky5_nabla.scripts import generate
from kandinsky5_nabla.scripts._state import StateFolder

DEMO = load_preset("demo").local_folder
LAYER = "visual_transformer_blocks.0.feed_forward.in_layer"
QUICK = ["--config", "demo", "--height", "64", "--width", "64", "--num-frames", "1", "--steps", "2", "--device", "cpu"]
CAT = [*QUICK, "--prompt", "a cat"]
NO_PRESET = ["--device", "cpu", "--prompt", "a cat"]
LONG, HUGE = "x" * 300, "1" + "0" * 400
OPTIONS = [action for action in generate.build_parser()._actions if action.option_strings and action.nargs != 0]


def program(*argv):
    return [sys.executable, generate.__file__, *argv]


def environment():
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


# The files that are named: a run with its state, and what is not what its name says

YAMLS = {
    "deep": b"a: " + b"[" * 5000,
    "date": b"name: 2020-13-45\n",
    "digits": b"name: " + b"9" * 5000 + b"\n",
    "bytes": b"\xff\xfe",
    "list": b"- a\n",
}
LORAS = {
    "bytes": b"\xff",
    "list": b"[1]",
    "deep": b"[" * 100_000,
    "patterns": b'{"rank_pattern": [4]}',
    "regex": b'{"alpha_pattern": {"(": 4}}',
    "alpha": b'{"lora_alpha": "x"}',
    "rank": b'{"r": 7}',
    "loha": b'{"peft_type": "LOHA"}',
    "sound": b"{}",
}
SETTINGS = {
    "no-seed": {"seed": None},
    "two-prompts": {"prompt": ["a", "b"]},
    "flag": {"overwrite": True},
    "no-height": {"height": None},
    "true-height": {"height": True},
    "lora-number": {"loras": [5]},
    "true-scale": {"scale_factor": [1, True, 1]},
    "other-prompt": {"prompt": "a dog"},
    "blue": {"negative_prompt": "blue"},
    "no-output": {"output": None},
    "no-preset": {"preset": "nope"},
    "no-tile": {"vae_tile": "7x7"},
    "future": {"format": 99},
    "scale": {"scale_factor": [1, 2, 2]},
    "outside": {"output": "../cat.mp4"},
    "long-output": {"output": f"{LONG}.mp4"},
    "nul-output": {"output": "a\0b.mp4"},
    "text-output": {"output": "cat.txt"},
}
LATENTS = {
    "small": {"latents": torch.zeros(1, 1, 4, 4, 6)},
    "pair": {"latents": torch.zeros(2, 1, 8, 8, 6)},
    "channels": {"latents": torch.zeros(1, 1, 8, 8, 4)},
    "nan": {"latents": torch.full((1, 1, 8, 8, 6), torch.nan)},
    "many-steps": {"completed": 7},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder that all command lines run in; none of them changes it."""
    folder = tmp_path_factory.mktemp("made")
    argv = [*CAT, "--seed=5", "--output=cat.mp4", "--keep-state", "--save-embeds=texts.safetensors", "--attention"]
    done = subprocess.run(program(*argv, "NABLA_REFERENCE"), cwd=folder, env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    for name in ("folder", "folder.k5", "folder.yaml", "folder.json", "folder.safetensors", "two"):
        (folder / name).mkdir()
    for name, content in YAMLS.items():
        (folder / f"{name}.yaml").write_bytes(content)
    for name, content in LORAS.items():
        (folder / f"lora-{name}").mkdir()
        (folder / f"lora-{name}" / "adapter_config.json").write_bytes(content)
        save_file(
            {f"{LAYER}.lora_{part}.weight": torch.zeros(shape) for part, shape in (("A", (2, 128)), ("B", (256, 2)))},
            folder / f"lora-{name}" / "lora.safetensors",
        )
    sound = folder / "lora-sound" / "lora.safetensors"
    for name in ("two/a", "two/b", "sound"):
        shutil.copy(sound, folder / f"{name}.safetensors")
    (folder / "cut.safetensors").write_bytes(sound.read_bytes()[:-1])
    (folder / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    for name, content in {"bytes.json": b"\xff", "file": b"precious", "pickle.bin": b"\x80\x04."}.items():
        (folder / name).write_bytes(content)
    for name, changes in SETTINGS.items():
        state = _copy_of_state(folder, name)
        _change_settings(state, changes)
        _change_latents(state, {})
        record = json.loads((folder / "cat.json").read_text())
        (folder / f"{name}-record.json").write_text(json.dumps(record | changes))
    for name, changes in LATENTS.items():
        _change_latents(_copy_of_state(folder, name), changes)
    for name in ("no-text", "cut-text", "cut-state", "folder-state", "deep-state", "list-settings", "deep-settings"):
        _copy_of_state(folder, name)
    _copy_of_state(folder, "plain").rename(folder / "plain")
    for name, content in {"list-settings": "[]", "deep-settings": "[" * 100_000}.items():
        (folder / f"{name}.k5" / "settings.json").write_text(content)
    save_file({"latents": torch.zeros(1)}, folder / "deep-state.k5" / "denoising.safetensors", {"a": "[" * 100_000})
    (folder / "no-text.k5" / "text.safetensors").unlink()
    (folder / "folder-state.k5" / "denoising.safetensors").unlink()
    (folder / "folder-state.k5" / "denoising.safetensors").mkdir()
    for path in (folder / "cut-text.k5" / "text.safetensors", folder / "cut-state.k5" / "denoising.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    return folder


def _copy_of_state(folder, name):
    state = shutil.copytree(folder / "cat.k5", folder / f"{name}.k5")
    _change_settings(state, {"output": f"{name}.mp4"})
    return state


def _change_settings(state, changes):
    settings = json.loads((state / "settings.json").read_text())
    (state / "settings.json").write_text(json.dumps(settings | changes))


def _change_latents(state, changes):
    path = state / "denoising.safetensors"
    contents = load_state(path) | changes
    with suppress(ValueError):  # of settings that are damaged
        contents["run"] = StateFolder(state)._run()
    metadata = {"kind": "kandinsky5-nabla denoising state", "version": 1}
    metadata |= {name: value for name, value in contents.items() if name != "latents"}
    save_file({"latents": contents["latents"]}, path, {name: json.dumps(value) for name, value in metadata.items()})


# How they are refused


@pytest.fixture
def problems(as_a_program, made, monkeypatch, capsys):
    """Returns the problems of a command line, which is refused in text and in JSON, and changes no file."""
    monkeypatch.chdir(made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def contents():
        return {path: path.read_bytes() if path.is_file() else None for path in made.rglob("*")}

    def run(*argv):
        before = contents()
        code = generate.main([*argv])
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), err
        assert "Traceback" not in err
        found = [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]
        assert generate.main([*argv, "--json"]) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert all(2 in getattr(errors, kind).exit_codes for kind in error["kinds"]), error
        assert error == {"exit_code": 2, "problems": found, "kinds": error["kinds"]}
        assert contents() == before
        return found

    return run


def names_of(options):
    return pytest.mark.parametrize("option", options, ids=[option.option_strings[0] for option in options])


@names_of([option for option in OPTIONS if option.type is not str])  # a text may be empty, and hold anything
def test_an_option_with_nothing_or_a_nul_as_its_value_is_refused_by_name(problems, option):
    for value in ("", "a\0b"):
        [problem] = problems(*CAT, f"{option.option_strings[0]}={value}")
        assert problem.startswith(f"argument {option.option_strings[0]}: ")
        assert repr(value) in problem


@names_of([option for option in OPTIONS if option.type in (int, float)])
def test_a_number_that_is_none_is_refused_by_the_name_of_its_option(problems, option):
    for value in ("1,5", "0x10", "ten"):
        [problem] = problems(*CAT, f"{option.option_strings[0]}={value}")
        name, needed = option.option_strings[0], "a whole number" if option.type is int else "a number"
        assert problem.startswith(f"argument {name}: '{value}': {needed} is needed, such as ")


@names_of([option for option in OPTIONS if option.type in (int, float)])
def test_a_number_of_four_hundred_digits_is_refused_by_its_rule(problems, option):
    base = ["--config=demo", "--device=cpu", "--prompt=a cat"]
    problem, *_ = problems(*base, f"{option.option_strings[0]}={HUGE}")
    assert f" {HUGE}: must be " in problem if option.type is int else " inf: " in problem


DEMO_CASES = {
    "negative prompt of bytes": (["--negative-prompt=\udcff"], ["a negative prompt is no valid text", r"'\udcff'"]),
    "name of the cache too long": ([f"--cache-dir={LONG}"], [f"--cache-dir {LONG}: File name too long", "a folder"]),
    "cache below a file": (["--cache-dir=file/cache"], ["--cache-dir file/cache: Not a directory", "name a folder"]),
    "report too long": ([f"--report={LONG}.json"], [f"report {LONG}.json: File name too long"]),
    "report over the record": (
        ["--report=folder/../new.json", "--output=new.mp4"],
        ["report folder/../new.json: is the name of the video's own record", "choose another"],
    ),
    "embeds too long": ([f"--embeds={LONG}"], ["File name too long", LONG]),
    "embeds a folder": (["--embeds=folder"], ["--embeds: there is no file of embeddings folder"]),
    "embeds a text": (["--embeds=file"], ["--embeds: file is cut short or damaged, or holds no embeddings"]),
    "embeds cut": (["--embeds=cut.safetensors"], ["--embeds: cut.safetensors is cut short or damaged"]),
    "embeds a LoRA": (["--embeds=sound.safetensors"], ["sound.safetensors holds no embeddings", "--save-embeds"]),
    "embeds a state": (["--embeds=cat.k5/denoising.safetensors"], ["denoising.safetensors holds no embeddings"]),
    "embeds saved again": (
        ["--embeds=texts.safetensors", "--save-embeds=new.safetensors"],
        ["--save-embeds: the prompts come from --embeds already", "leave one out"],
    ),
    "embeds against another text": (
        ["--embeds=texts.safetensors", "--negative-prompt=blue"],
        ["--embeds texts.safetensors: their negative prompt is 'Static", "not 'blue'"],
    ),
    "save-embeds a folder": (["--save-embeds=folder"], ["save-embeds folder: is a folder", "prompts.safetensors"]),
    "save-embeds over a file": (["--save-embeds=cut.safetensors"], ["cut.safetensors: exists", "--overwrite"]),
    "LoRA too long": ([f"--lora={LONG}"], [f"LoRA {LONG}: there is no such file", "hf download"]),
    "LoRA a pickle": (["--lora=pickle.bin"], ["LoRA pickle.bin: only safetensors files are read"]),
    "LoRA an empty folder": (["--lora=folder"], ["LoRA folder: the folder holds no safetensors file"]),
    "LoRA one of two": (["--lora=two"], ["LoRA two: give one file of a.safetensors, b.safetensors"]),
    "LoRA cut": (["--lora=cut.safetensors"], ["cut.safetensors is cut short or damaged", "download it again"]),
    "LoRA a pointer": (["--lora=pointer.safetensors"], ["pointer.safetensors only points", "git lfs pull"]),
    "LoRA embeddings": (["--lora=texts.safetensors"], ["texts.safetensors is no LoRA of this transformer"]),
    "LoRA of nan": (["--lora=lora-sound:nan"], ["LoRA 'lora-sound:nan': give FILE[:SCALE]", "a finite number"]),
    "LoRA of infinity": (["--lora=lora-sound:1e999"], ["LoRA 'lora-sound:1e999': give FILE[:SCALE]"]),
    "LoRA without its scale": (["--lora=lora-sound:"], ["LoRA 'lora-sound:': the scale ''", "such as 0.8"]),
    "LoRA with bytes beside it": (["--lora=lora-bytes"], ["lora-bytes/lora.safetensors: adapter_config.json cannot"]),
    "LoRA with a list beside it": (["--lora=lora-list"], ["lora-list/lora.safetensors", "no", "plain LoRA"]),
    "LoRA with too deep a config": (["--lora=lora-deep"], ["lora-deep/lora.safetensors: adapter_config.json cannot"]),
    "LoRA with a list of patterns": (["--lora=lora-patterns"], ["lora-patterns", "the rank_pattern [4]", "must map"]),
    "LoRA with a broken pattern": (["--lora=lora-regex"], ["lora-regex", "the alpha_pattern {'(': 4}", "must map"]),
    "LoRA with no number as alpha": (["--lora=lora-alpha"], ["the alpha 'x'", "must be a finite number"]),
    "LoRA with another rank": (["--lora=lora-rank"], ["has rank 2 in the tensors and 7 in the config"]),
    "LoRA of another kind": (["--lora=lora-loha"], ["lora-loha/lora.safetensors: adapter_config.json does not"]),
    "file of the transformer cut": (["--model=cut.safetensors"], ["model cut.safetensors is cut short or damaged"]),
    "file of the transformer a LoRA": (["--model=sound.safetensors"], ["sound.safetensors"]),
    "file of the transformer a folder": (["--model=folder.safetensors"], ["model folder.safetensors is a folder"]),
    "file of the transformer a pointer": (["--model=pointer.safetensors"], ["only points", "git lfs pull"]),
    "model a pickle": (["--model=pickle.bin"], ["model 'pickle.bin': there is no such folder", "Hub id", "demo"]),
    "part of a folder": (["--vae=folder"], ["--vae: for a transformer in a file of its own", "leave it out"]),
    "last seed out of range": (
        [f"--seed={2**63 - 3}", "--num-videos=5"],
        [f"seed {2**63 - 3}: must be from 0 to 2**63 - 1", f"the last of 5 videos would be {2**63 + 1}"],
    ),
    "device with a number": (["--device=cpu:0"], ["device 'cpu:0': must be cpu, cuda or cuda:N"]),
    "device in capitals": (["--device=CUDA"], ["device 'CUDA': must be cpu, cuda or cuda:N"]),
    "attention in small letters": (["--attention=nabla_atn"], ["backend 'nabla_atn'", "did you mean NABLA_ATTN?"]),
    "dtype of 8 bits": (["--dtype=fp8"], ["argument --dtype: invalid choice: 'fp8'", "float16"]),
    "fp8 for the text": (["--text-encoder-dtype=fp8"], ["text encoder dtype 'fp8'", "int8, nf4"]),
    "offload in capitals": (["--offload=Model"], ["argument --offload: invalid choice: 'Model'", "'model'"]),
    "a word too many": (["cat"], ["unrecognized arguments: cat", "--help"]),
    "an option cut short": (["--num-vid=2"], ["unrecognized arguments: --num-vid=2", "--help"]),
    "an option misspelt": (["--seeed=5"], ["unrecognized arguments: --seeed=5", "--help"]),
    "a switch with a value": (["--overwrite=yes"], ["argument --overwrite: ignored explicit argument 'yes'"]),
    "two sources": (["--decode-only=cat.k5", "--from=cat.mp4"], ["--decode-only and --from exclude each other"]),
    "three sources": (["--resume=a", "--decode-only=b", "--from=c"], ["--resume and --decode-only and --from"]),
}
MODEL_CASES = {
    "preset too deep": (["--config=deep.yaml"], ["the preset deep.yaml cannot be read", "recursion"]),
    "preset with no date": (["--config=date.yaml"], ["the preset date.yaml cannot be read", "month"]),
    "preset with too long a number": (["--config=digits.yaml"], ["the preset digits.yaml cannot be read"]),
    "preset of bytes": (["--config=bytes.yaml"], ["the preset bytes.yaml cannot be read"]),
    "preset a list": (["--config=list.yaml"], ["the preset list.yaml is not valid: it must map keys", "got list"]),
    "preset a folder": (["--config=folder.yaml"], ["the preset folder.yaml cannot be read", "Is a directory"]),
    "model too long": ([f"--model={LONG}"], [f"model '{LONG}': there is no such folder", "owner/name"]),
    "Hub id too long": ([f"--model=owner/{LONG}"], [f"'owner/{LONG}'", "the maximum length is 96"]),
    "Hub id with two dashes": (["--model=owner/na--me"], ["Cannot have -- or ..", "'owner/na--me'"]),
    "Hub id of a checkout": (["--model=owner/name.git"], ["cannot end by '.git'", "'owner/name.git'"]),
    "Hub id that is none, offline": (["--model=owner/na--me", "--offline"], ["'owner/na--me'"]),
    "a file that no preset knows": (["--model=sound.safetensors"], ["model sound.safetensors: no preset", "--config"]),
}
STATE_CASES = {
    "a folder's own name": (["."], [" .: names no state", "NAME.k5"]),
    "too long": ([f"{LONG}.k5"], [f" {LONG}.k5: there is no state of a run in"]),
    "an empty folder": (["folder.k5"], [" folder.k5: there is no state of a run in folder.k5"]),
    "a file": (["file"], [" file: there is no state of a run in file.k5"]),
    "without its text": (["no-text.k5"], ["no-text.k5 is damaged: there is no no-text.k5/text.safetensors"]),
    "with its text cut": (["cut-text.k5"], ["cut-text.k5/text.safetensors is cut short or damaged"]),
    "with another prompt": (["other-prompt.k5"], ["other-prompt.k5/text.safetensors is not the text of the run"]),
    "with another negative prompt": (["blue.k5"], ["blue.k5/text.safetensors is not the text of the run in blue.k5"]),
    "with a list of settings": (["list-settings.k5"], ["settings.json is damaged: it is no JSON object"]),
    "with too deep settings": (["deep-settings.k5"], ["settings.json is damaged: maximum recursion depth"]),
    "with too deep latents": (["deep-state.k5"], ["deep-state.k5/denoising.safetensors is damaged"]),
    "without an output": (["no-output.k5"], ["no-output.k5/settings.json is damaged: output is None, no name"]),
    "without its suffix": (["plain"], [" plain: is a state whose name does not end in .k5", "rename", "plain.k5"]),
    "a file of it": (["cat.k5/settings.json"], ["settings.json: is a part of a state; name the folder, cat.k5"]),
    "with its latents cut": (["cut-state.k5"], ["cut-state.k5/denoising.safetensors is damaged"]),
    "with a folder for its latents": (["folder-state.k5"], ["folder-state.k5/denoising.safetensors is damaged"]),
    "with latents of another size": (["small.k5"], ["small.k5: its latents are (1, 1, 4, 4, 6)", "(1, 1, 8, 8, 6)"]),
    "with latents of two videos": (["pair.k5"], ["pair.k5: its latents are (2, 1, 8, 8, 6)", "(1, 1, 8, 8, 6)"]),
    "with latents of another VAE": (["channels.k5"], ["its latents are (1, 1, 8, 8, 4)", "(1, 1, 8, 8, 6)"]),
    "with latents that are no numbers": (["nan.k5"], ["nan.k5/denoising.safetensors is damaged", "not finite"]),
    "with more steps than it has": (["many-steps.k5"], ["many-steps.k5 is damaged: 7 of 2 steps are done"]),
    "without a seed": (["no-seed.k5"], ["no-seed.k5/settings.json is damaged", "seed is None"]),
    "without a height": (["no-height.k5"], ["no-height.k5/settings.json is damaged", "height is None"]),
    "with two prompts": (["two-prompts.k5"], ["two-prompts.k5/settings.json is damaged", "prompt is ['a', 'b']"]),
    "with a setting too many": (["flag.k5"], ["flag.k5/settings.json is damaged", "overwrite missing or unknown"]),
    "with an unknown preset": (["no-preset.k5"], ["unknown preset 'nope': did you mean 'demo'?"]),
    "with an unknown tile": (["no-tile.k5"], ["VAE tile '7x7': must be one of 256x16"]),
    "of a later version": (["future.k5"], ["a record of the format 99", "this version reads 1"]),
    "with another scale": (["scale.k5"], ["scale_factor (1, 2, 2)", "the preset demo has (1.0, 1.0, 1.0) now"]),
    "with an output elsewhere": (["outside.k5"], ["outside.k5/settings.json is damaged", "../cat.mp4"]),
}
RESUME_CASES = {
    "with too long an output": (["--resume=long-output.k5"], [f"output {LONG}.mp4: File name too long"]),
    "with a NUL in its output": (["--resume=nul-output.k5"], [r"output 'a\x00b.mp4': embedded null byte"]),
    "with another kind of output": (["--resume=text-output.k5"], ["output cat.txt: the video's name must end in .mp4"]),
    "decoded over its own video": (["--decode-only=cat.k5"], ["output cat.mp4: exists", "--overwrite"]),
    "decoded to a text": (["--decode-only=cat.k5", "--output=cat.txt"], ["output cat.txt", "must end in .mp4"]),
    "decoded with another prompt": (["--decode-only=cat.k5", "--prompt=x"], ["--prompt=x: the run in cat.k5"]),
    "decoded with a report": (["--decode-only=cat.k5", "--report=new.json"], ["--report=new.json: the run in cat.k5"]),
    "repeated from a folder": (["--from=folder"], ["--from folder: folder is not a complete video"]),
    "repeated from a folder of a record's name": (["--from=folder.json"], ["--from folder.json: ", "Is a directory"]),
    "repeated from bytes": (["--from=bytes.json"], ["--from bytes.json: ", "0xff"]),
    "repeated from a text": (["--from=file"], ["--from file: file is not a complete video"]),
    "repeated from too long a name": ([f"--from={LONG}"], [f"--from {LONG}: there is no such file"]),
    "repeated without a seed": (["--from=no-seed-record.json"], ["--from no-seed-record.json: ", "seed is None"]),
    "repeated without a height": (["--from=no-height-record.json"], ["no-height-record.json: ", "height is None"]),
    "repeated with a true height": (["--from=true-height-record.json"], ["a damaged record: height is True"]),
    "repeated with a true scale": (["--from=true-scale-record.json"], ["damaged record: scale_factor is [1, True"]),
    "repeated with a number for a LoRA": (["--from=lora-number-record.json"], ["a damaged record: loras is [5]"]),
    "repeated with two prompts": (["--from=two-prompts-record.json"], ["two-prompts-record.json: ", "['a', 'b']"]),
    "repeated with another prompt of bytes": (["--from=cat.json", "--prompt=\udcff"], [r"'\udcff'", "UTF-8"]),
}
CASES = [
    *((name, CAT, words, says) for name, (words, says) in DEMO_CASES.items()),
    *((name, NO_PRESET, words, says) for name, (words, says) in MODEL_CASES.items()),
    *((f"resume {name}", ["--resume"], words, says) for name, (words, says) in STATE_CASES.items()),
    *((f"run {name}", [], words, says) for name, (words, says) in RESUME_CASES.items()),
]


@pytest.mark.parametrize(("base", "words", "says"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_cannot_be_honoured_is_refused_by_its_value(problems, base, words, says):
    found = problems(*base, *words)
    assert any(all(text in problem for text in says) for problem in found), found


@pytest.mark.parametrize("name", STATE_CASES)
def test_a_state_that_cannot_be_resumed_cannot_be_decoded(problems, name):
    words, says = STATE_CASES[name]
    found = problems("--decode-only", *words, "--output=new.mp4")
    assert any(all(text in problem for text in says) for problem in found), found


def test_every_problem_of_many_is_reported(problems):
    numbers = "--height=100 --width=0 --steps=0 --num-frames=7 --shift=0 --guidance-scale=nan --seed=-1 --num-videos=0"
    names = "--model=nope --attention=x --device=x --vae-tile=x --lora=x --embeds=x --cache-dir=file"
    files = "--report=x.txt --output=no/x.mp4 --save-embeds=x.txt --checkpoint-every=0 --negative-prompt=\udcff"
    found = problems(*CAT, *numbers.split(), *names.split(), *files.split())
    for text in (
        *("height 100:", "width 0:", "number of steps 0:", "number of frames 7:", "shift 0.0:", "guidance scale nan:"),
        *("seed -1:", "number of videos 0:", "model 'nope':", "backend 'x'", "device 'x':", "VAE tile 'x':", "LoRA x:"),
        *("embeddings x", "--cache-dir file:", "report x.txt:", "output folder no:", "save-embeds x.txt:"),
        *("--checkpoint-every 0:", "negative prompt"),
    ):
        assert len([problem for problem in found if text in problem]) == 1, text


# As a program


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([*CAT, b"--prompt=\xff"], r"a prompt is no valid text (it holds bytes that are not UTF-8): '\udcff'"),
        ([*CAT, "--output="], "argument --output: '' is empty"),
        (["--resume=small.k5", "--json"], "small.k5: its latents are (1, 1, 4, 4, 6)"),
    ],
    ids=["bytes", "an empty name", "a damaged state"],
)
def test_the_program_ends_with_2_and_says_why_on_stderr(made, argv, says):
    before = sorted(made.rglob("*"))
    done = subprocess.run(program(*argv), cwd=made, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert [line.startswith(f"error: {says}") for line in done.stderr.splitlines()] == [True]
    assert done.stdout == "" or json.loads(done.stdout)["error"]["exit_code"] == 2
    assert sorted(made.rglob("*")) == before
