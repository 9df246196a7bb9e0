"""The rules of the house that a linter does not know: who may import whom, and how long things may be."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = "kandinsky5_nabla"
LAYERS = ("configs", "attention", "models", "pipeline", "scripts")  # each may import those before it
MODULE_OF_DISTRIBUTION = {"pillow": "PIL", "pyyaml": "yaml"}  # where the names differ
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 80

SHIPPED = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
TESTS = sorted(Path(__file__).parent.glob("*.py"))
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".in"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


each_shipped_file = pytest.mark.parametrize("path", SHIPPED, ids=relative)
each_file = pytest.mark.parametrize("path", SHIPPED + TESTS, ids=relative)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yields (dotted absolute name, written relatively) for all imports in a file, lazy ones too."""
    package = [PACKAGE, *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = [*base, *filter(None, [node.module])]
            yield from ((".".join([*module, alias.name]), node.level > 0) for alias in node.names)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts a function's lines without its docstring, which may be as long as its arguments need."""
    first = function.body[0]
    docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) is not None else 0
    return function.end_lineno - function.lineno + 1 - docstring


def declared_modules() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["lora"], *extras["quantization"]]
    names = (re.match(r"[\w-]+", requirement)[0] for requirement in requirements)
    return {MODULE_OF_DISTRIBUTION.get(name, name.replace("-", "_")) for name in names}


@each_shipped_file
def test_dependencies_run_one_way(path):
    layer = LAYERS.index(path.relative_to(ROOT).parts[0])
    own = [name.split(".")[1] for name, _ in imports(path) if name.startswith(f"{PACKAGE}.")]
    assert [name for name in own if name not in LAYERS[: layer + 1]] == []


@each_file
def test_the_library_imports_itself_relatively_and_everyone_else_imports_it_absolutely(path):
    in_library = path.relative_to(ROOT).parts[0] in LAYERS[:4]
    own = [(name, relatively) for name, relatively in imports(path) if name.split(".")[0] == PACKAGE]
    assert [name for name, relatively in own if relatively != in_library] == []


@each_shipped_file
def test_only_declared_dependencies_are_imported(path):
    allowed = sys.stdlib_module_names | declared_modules() | {PACKAGE}
    if path == ROOT / "attention" / "triton_selection.py":
        allowed |= {"triton"}  # comes with the CUDA builds of torch, and is imported on CUDA alone
    assert [name for name, _ in imports(path) if name.split(".")[0] not in allowed] == []


@each_shipped_file
def test_the_model_is_ours_and_not_the_one_in_diffusers(path):
    tree = ast.parse(path.read_text("utf-8"))
    names = [name for name, _ in imports(path)]
    names += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    theirs = {n for n in names if n.startswith("diffusers.") and "kandinsky" in n.lower()}
    theirs.discard("diffusers.loaders.KandinskyLoraLoaderMixin")  # the one thing of theirs that is used
    measured = path == ROOT / "scripts" / "benchmark_attention.py"
    assert not theirs or measured


@each_file
def test_files_and_functions_stay_short(path):
    source = path.read_text("utf-8")
    assert len(source.splitlines()) <= MAX_FILE_LINES
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert {f.name: code_lines(f) for f in functions if code_lines(f) > MAX_FUNCTION_LINES} == {}


def test_no_text_names_a_path_of_one_machine():
    texts = [p for p in ROOT.iterdir() if p.suffix in TEXT_SUFFIXES or p.name == "Makefile"]
    texts += [p for layer in LAYERS for p in (ROOT / layer).rglob("*") if p.suffix in TEXT_SUFFIXES]
    path_of_a_machine = re.compile(r"(?<![\w.~}])/(?:home|root|Users|work|opt|mnt)/")
    assert [relative(p) for p in texts if path_of_a_machine.search(p.read_text("utf-8"))] == []
