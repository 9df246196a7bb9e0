"""The catalogue of errors: each kind has a real cause, which is told by its name, in one line, without a traceback."""

import ast
import builtins
import json
import re
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo

from kandinsky5_nabla.configs import errors
from kandinsky5_nabla.configs.errors import UserError, catalogue
from kandinsky5_nabla.pipeline.checks import Report
from kandinsky5_nabla.pipeline.export import export_video
from kandinsky5_nabla.scripts import generate

ROOT = Path(__file__).parents[1]
KINDS = list(catalogue())
RUN = ["--config", "demo", "--height", "64", "--width", "64", "--num-frames", "1", "--steps", "1", "--seed", "5"]
RUN += ["--attention", "NABLA_REFERENCE", "--device", "cpu", "--output", "cat.mp4"]
CAT = [*RUN, "--prompt", "a cat"]
HUGE = ["--height", "2048", "--width", "2048", "--num-frames", "509"]  # whole matrices of scores: petabytes


@dataclass(frozen=True)
class Cause:
    """What leads to an error: a command line, with files that are there and something that happens meanwhile.

    Attributes:
        names: what the message has to name.
        argv: the arguments.
        code: the exit code.
        files: by name, with their content.
        meanwhile: a context of the run.
    """

    names: str
    argv: list[str]
    code: int = 2
    files: tuple[tuple[str, str], ...] = ()
    meanwhile: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True)
class Download:
    """A run whose checkpoint cannot be fetched.

    Attributes:
        names: the repository.
        refused: what the Hub answers (`hub_server`); None for one that has it.
        in_the_way: a file of the cache, where one of its folders would be.
    """

    names: str
    refused: tuple[int | None, str | None] | None
    in_the_way: str = "something"


@dataclass(frozen=True)
class Call:
    """A call of the Python API, with the pipeline and a folder."""

    names: str
    function: Callable


def in_decoding(act):
    """Returns a context in which something happens before the real VAE decodes."""

    @contextmanager
    def context():
        real, limits = AutoencoderKLHunyuanVideo.decode, resource.getrlimit(resource.RLIMIT_FSIZE)

        def decode(self, *args, **kwargs):
            act()
            return real(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AutoencoderKLHunyuanVideo, "decode", decode)
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return context


@contextmanager
def without_bitsandbytes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "bitsandbytes", None)  # what import finds where it is not installed
        yield


def fill_the_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def break_the_kernel():
    raise RuntimeError("the kernel broke")


CAUSES = {
    errors.UsageError: Cause("'many'", [*CAT, "--steps", "many"]),
    errors.RequestError: Call("17", lambda pipe, folder: pipe(5, height=17)),
    errors.SettingsError: Cause("height 17", [*CAT, "--height", "17"]),
    errors.ArgumentError: Call("'gif'", lambda pipe, folder: pipe("a cat", output_type="gif")),
    errors.PromptError: Cause(r"\udcff", [*RUN, "--prompt", "a \udcff"]),
    errors.PromptsFileError: Cause("cats.xls", [*RUN, "--prompts", "cats.xls"]),
    errors.PresetError: Cause("'demmo'", [*CAT, "--config", "demmo"]),
    errors.NotFoundError: Cause("arc.safetensors", [*CAT, "--lora", "arc.safetensors"]),
    errors.CheckpointError: Cause(
        "model_index.json", [*CAT, "--model", "broken"], files=(("broken/model_index.json", "{"),)
    ),
    errors.DownloadError: Download("someone/here", None, "models--someone--here"),
    errors.RepositoryError: Cause(
        "someone/absent", [*CAT, "--model", "someone/absent", "--offline", "--cache-dir", "cache"]
    ),
    errors.AccessError: Download("someone/gated", (403, "GatedRepo")),
    errors.NetworkError: Download("someone/away", (None, None)),
    errors.LoraError: Cause("'loud'", [*CAT, "--lora", "arc.safetensors:loud"]),
    errors.EmbedsError: Cause(
        "cat.safetensors", [*RUN, "--embeds", "cat.safetensors"], files=(("cat.safetensors", "no tensors"),)
    ),
    errors.DeviceError: Cause("'tpu'", [*CAT, "--device", "tpu"]),
    errors.DtypeError: Cause("'fp9'", [*CAT, "--dit-dtype", "fp9"]),
    errors.DependencyError: Cause(
        "bitsandbytes", [*CAT, "--text-encoder-dtype", "nf4"], meanwhile=without_bitsandbytes
    ),
    errors.BackendError: Cause("'NABLA_ATN'", [*CAT, "--attention", "NABLA_ATN"]),
    errors.MemoryPlanError: Cause(
        "--offload none needs", [*CAT, "--config", "pro-t2v-10s-sft-hd", *HUGE, "--offload", "none"]
    ),
    errors.OutOfMemoryError: Cause("--vae-tile", CAT, 1, meanwhile=in_decoding(lambda: torch.empty(2**50))),
    errors.OutputError: Cause("cat.avi", [*CAT, "--output", "cat.avi"]),
    errors.TakenError: Cause("cat.mp4", CAT, files=(("cat.mp4", "precious"),)),
    errors.WriteError: Cause("export", CAT, 1, meanwhile=in_decoding(fill_the_disk)),
    errors.VideoError: Cause("99", [*CAT, "--crf", "99"]),
    errors.StateError: Cause("settings.json", ["--resume", "cat.k5"], files=(("cat.k5/settings.json", "{"),)),
    errors.RecordError: Cause("cat.json", ["--from", "cat.json"], files=(("cat.json", "{}"),)),
    errors.PreviewError: Cause("fits one", [*CAT, "--preview", "map.json"], files=(("map.json", "{}"),)),
    errors.NotFiniteError: Call(
        "frame 0", lambda pipe, folder: export_video([np.full((16, 16, 3), np.nan)], folder / "cat.mp4")
    ),
    errors.StageError: Cause("the kernel broke", CAT, 1, meanwhile=in_decoding(break_the_kernel)),
    errors.InterruptedRun: Cause("cat.k5", CAT, 130, meanwhile=in_decoding(lambda: signal.raise_signal(signal.SIGINT))),
}
"""One for each class."""


def causes_of(kind):
    """The parameters of a test: the causes of one sort, named after their classes."""
    return [pytest.param(each, cause, id=each.__name__) for each, cause in CAUSES.items() if isinstance(cause, kind)]


def test_every_kind_has_a_cause():
    assert list(CAUSES) == KINDS


def check(kind, code, names, answer):
    """Compares what a command line has said, its exit code, stdout and stderr, with what it was to say."""
    found, out, err = answer
    error = json.loads(out)["error"]
    assert error["kinds"] == [kind.__name__], err
    assert (found, error["exit_code"]) == (code, code)
    assert code in kind.exit_codes
    [problem] = error["problems"]
    assert names in problem
    assert f"error: {problem}" in err.splitlines()
    assert "Traceback" not in err


@pytest.mark.parametrize(("kind", "cause"), causes_of(Cause))
def test_a_command_line_tells_the_kind_of_what_is_wrong(as_a_program, tmp_path, capsys, kind, cause):
    for name, content in cause.files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with cause.meanwhile():
        code = generate.main([*cause.argv, "--json"])
    check(kind, cause.code, cause.names, (code, *capsys.readouterr()))


@pytest.fixture(scope="module")
def hub_and_client(server, tmp_path_factory):
    with server.hub_and_client(tmp_path_factory.mktemp("home")) as pair:
        pair[0].add("someone/here", {"model_index.json": b"{}"})
        yield pair


@pytest.mark.parametrize(("kind", "cause"), causes_of(Download))
def test_a_download_that_fails_tells_the_kind_of_what_is_wrong(hub_and_client, tmp_path, kind, cause):
    hub, client = hub_and_client
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / cause.in_the_way).touch()
    if cause.refused is not None:
        hub.refused[cause.names] = cause.refused
    where = ["--output", str(tmp_path / "cat.mp4"), "--cache-dir", str(tmp_path / "cache")]
    answer = client.call("generate", *CAT, "--model", cause.names, *where, "--json")
    check(kind, 1, cause.names, (answer["code"], answer["said"], answer["errors"]))


@pytest.mark.parametrize(("kind", "cause"), causes_of(Call))
def test_a_call_raises_the_kind_of_what_is_wrong(pipe, tmp_path, kind, cause):
    with pytest.raises(kind, match=re.escape(cause.names)) as raised:
        cause.function(pipe, tmp_path)
    assert type(raised.value) is kind


# The classes


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_what_happened_and_what_to_do(kind):
    for sentence in (kind.__doc__.partition("\n")[0], kind.remedy):
        assert re.fullmatch(r"\S.*\S\.", sentence)
        assert "|" not in sentence  # it stands in a table
    assert kind.exit_codes != ()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_caught_by_the_name_that_python_has_for_it(kind):
    above = [base for base in kind.__mro__ if base.__module__ == "builtins" and base is not object]
    known = set(above) - {Exception, BaseException}
    assert known or kind is errors.InterruptedRun  # Ctrl-C is no Exception, and a UserError is one
    assert str(kind("a sentence")) == "a sentence"


def test_a_report_keeps_the_class_of_each_problem_and_raises_what_they_have_in_common():
    report = Report()
    assert report.attempt(int, "no number") is None  # an error of the library's
    assert [type(problem) for problem in report.problems] == [errors.RequestError]
    report = Report()
    report.add(errors.SettingsError, ["one", "two"])
    with pytest.raises(errors.SettingsError, match=r"^one; two$"):
        report.raise_if_any()
    report.extend([errors.PromptError("three")])
    with pytest.raises(errors.RequestError, match=r"^one; two; three$"):
        report.raise_if_any()


# The code


EXEMPT = re.compile(
    r"_demo_\w+|train_demo|evaluate_demo|readme_tables|_?benchmark\w*|measure_memory|make_demo_checkpoint"
)
"""What trains, measures and writes tables is for those who work on this."""
SHIPPED = [
    path
    for layer in ("configs", "attention", "models", "pipeline", "scripts")
    for path in sorted((ROOT / layer).rglob("*.py"))
    if not EXEMPT.fullmatch(path.stem)
]
PLAIN = {
    name
    for name, each in vars(builtins).items()
    if isinstance(each, type)
    and issubclass(each, (ValueError, OSError, RuntimeError, MemoryError, ImportError))
    and not issubclass(each, NotImplementedError)
}
"""Names of the built-in classes that a user's error must not be of alone."""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_plain_error_is_made_where_a_user_can_cause_one(path):
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    made = [node.func for node in nodes if isinstance(node, ast.Call)]
    made += [node.exc for node in nodes if isinstance(node, ast.Raise)]
    assert [f"line {n.lineno}: {n.id}" for n in made if isinstance(n, ast.Name) and n.id in PLAIN] == []


def test_only_classes_of_the_catalogue_are_user_errors_and_all_are_in_one_file():
    assert {kind.__module__ for kind in KINDS} == {UserError.__module__}
    assert len({kind.__name__ for kind in KINDS}) == len(KINDS)
