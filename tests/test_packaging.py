"""What is installed: the packages and their data under one name, imports without effects, a wheel that works."""

import configparser
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import tomllib

from kandinsky5_nabla.scripts import generate

ROOT = Path(__file__).parents[1]
FOLDERS = ("attention", "configs", "models", "pipeline", "scripts")
SHIPPED = {
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}

# Prints what an import did to the world outside the interpreter. The hook records and does not raise,
# because a library may swallow an exception. In HOME only what stays counts: libraries probe the folder
# for temporary files with a file that they remove.
EFFECTS_OF_IMPORT = """
import os, sys
seen = []
def watch(event, args):
    if event.startswith(("socket.connect", "socket.getaddrinfo", "subprocess.", "os.system")):
        seen.append((event, args))
    elif event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        if not str(args[0]).startswith(os.environ["HOME"]):
            seen.append((event, args[0]))
sys.addaudithook(watch)
import kandinsky5_nabla.pipeline
for entry in seen:
    print(*entry)
"""

# Prints which global settings an import changed. What it builds on is imported before: the question is ours.
CHANGES_OF_IMPORT = """
import logging, os, warnings
import diffusers, torch, transformers
from diffusers import AutoencoderKLHunyuanVideo, DiffusionPipeline
from transformers import CLIPTextModel, Qwen2_5_VLModel
import torch._dynamo.config, torch._inductor.config
def state():
    return {
        "environment": dict(os.environ),
        "dynamo": torch._dynamo.config.get_config_copy(),
        "inductor": torch._inductor.config.get_config_copy(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "matmul": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        "warnings": list(warnings.filters),
        "logging": (list(logging.root.handlers), logging.root.level, diffusers.logging.get_verbosity()),
    }
before = state()
import kandinsky5_nabla.pipeline
after = state()
print(*[name for name in before if before[name] != after[name]])
"""

MODULES_OF_ATTENTION = """
import sys
import torch
before = set(sys.modules)
import kandinsky5_nabla.attention
new = set(sys.modules) - before
print(*[m for m in new if m.split(".")[0] not in sys.stdlib_module_names | {"torch", "kandinsky5_nabla"}])
print(*[m for m in new if m.startswith(("torch._dynamo", "torch._inductor"))])
"""

HELP = """
import runpy, sys
path = sys.argv[1]
sys.argv = [path, "--help"]
try:
    runpy.run_path(path, run_name="__main__")
except SystemExit as exit:
    assert exit.code in (0, None), exit.code
print({"torch", "diffusers", "transformers", "numpy"} & set(sys.modules), file=sys.stderr)
"""


def run_python(code, cwd, *arguments, flags=("-I",), **environment):
    """Runs code in a fresh interpreter away from the repository; returns (stdout, stderr)."""
    command = [sys.executable, *flags, "-c", code, *map(str, arguments)]
    result = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def dists(tmp_path_factory):
    """Wheel and sdist, built without network from a copy that has nothing but what a clone has."""
    source, out = tmp_path_factory.mktemp("source") / "clone", tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "outputs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    result = subprocess.run(command, cwd=out, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


@pytest.fixture(scope="module")
def installed(dists, tmp_path_factory):
    """A fresh folder with the wheel, and nothing else, installed in it."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, *map(str, dists.glob("*.whl"))], check=True, timeout=300)
    return target


def test_every_package_folder_is_declared():
    found = {
        ".".join(["kandinsky5_nabla", *init.parent.relative_to(ROOT).parts])
        for folder in ROOT.iterdir()
        if (folder / "__init__.py").is_file()
        for init in folder.rglob("__init__.py")
    }
    assert found == set(project()["tool"]["setuptools"]["packages"])
    assert not (ROOT / "__init__.py").exists()


def test_no_generic_name_is_importable_after_an_install(tmp_path):
    code = "import sys, importlib.util as u; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    names = [*FOLDERS, "tests", "kandinsky5_nabla", "kandinsky5_nabla.pipeline"]
    stdout, _ = run_python(code, tmp_path, *names)
    assert stdout.strip() == "['kandinsky5_nabla', 'kandinsky5_nabla.pipeline']"


def test_the_wheel_holds_exactly_the_packages_their_data_and_the_licence(dists):
    (wheel,) = dists.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read(f"{info}/entry_points.txt").decode())
    assert {n for n in names if not n.startswith(info)} == {f"kandinsky5_nabla/{path}" for path in SHIPPED}
    assert f"{info}/licenses/LICENSE" in names
    assert dict(entry_points["console_scripts"]) == project()["project"]["scripts"]


def test_the_wheel_carries_the_presets_and_a_whole_checkpoint():
    assert {"configs/demo.yaml", "configs/lite-t2v-10s-sft.yaml", "configs/demo/model_index.json"} <= SHIPPED
    parts = {path.split("/")[2] for path in SHIPPED if path.startswith("configs/demo/")}
    assert {"transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"} <= parts


def test_the_sdist_holds_the_sources_and_no_tests(dists):
    (sdist,) = dists.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert SHIPPED | {"LICENSE", "README.md", "pyproject.toml"} <= names
    allowed = SHIPPED | {"LICENSE", "README.md", "pyproject.toml", "MANIFEST.in", "PKG-INFO", "setup.cfg"}
    assert [n for n in names if n not in allowed and not n.startswith("kandinsky5_nabla.egg-info/")] == []


def test_an_installed_wheel_imports_without_a_warning(installed, tmp_path):
    code = "import kandinsky5_nabla.pipeline as p; print(p.__file__)"
    stdout, stderr = run_python(code, tmp_path, flags=("-W", "error"), PYTHONPATH=str(installed))
    assert Path(stdout.strip()).is_relative_to(installed)
    assert stderr == ""


def test_an_installed_wheel_finds_its_presets_from_its_command(installed, tmp_path):
    command = [installed / "bin" / "kandinsky5-nabla", "--config", "demo", "--prompt", "a cat", "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_importing_prints_nothing_writes_nothing_and_opens_no_socket(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    caches = {"HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "cache"), "TMPDIR": str(home)}
    out = run_python(EFFECTS_OF_IMPORT, tmp_path, flags=("-I", "-B", "-W", "error"), HOME=str(home), **caches)
    assert out == ("", "")
    assert [path for path in home.rglob("*") if path.is_file()] == []  # torch leaves an empty cache folder


def test_importing_changes_no_global_setting(tmp_path):
    stdout, _ = run_python(CHANGES_OF_IMPORT, tmp_path)
    assert stdout.strip() == ""


def test_attention_imports_torch_alone_and_no_compiler(tmp_path):
    stdout, _ = run_python(MODULES_OF_ATTENTION, tmp_path)
    assert stdout.split() == []


def test_help_answers_without_the_heavy_libraries(tmp_path):
    stdout, stderr = run_python(HELP, tmp_path, ROOT / "scripts" / "generate.py")
    assert "--prompt" in stdout
    assert stderr.strip() == "set()"


def test_no_test_reaches_the_network():
    with pytest.raises(RuntimeError, match="tried to reach"), socket.socket() as sock:
        sock.connect(("192.0.2.1", 80))  # an address reserved for documentation
    with pytest.raises(RuntimeError, match="tried to look up"):
        socket.create_connection(("example.invalid", 80))


def test_the_command_is_installed_as_kandinsky5_nabla():
    [command] = importlib.metadata.entry_points(group="console_scripts", name="kandinsky5-nabla")
    assert command.load() is generate.main
    assert Path(sys.executable).with_name("kandinsky5-nabla").exists()
