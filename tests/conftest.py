"""The suite is offline and hermetic, and runs GPU tests only where there is a GPU."""

import importlib.util
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

# Set before any Hugging Face library reads them; the subprocesses of tests inherit them. A cache of
# its own keeps what the user has downloaded from deciding a test.
_hf_home = tempfile.TemporaryDirectory(prefix="hf-home-")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HOME=_hf_home.name)

import pytest  # noqa: E402
import torch  # noqa: E402

from kandinsky5_nabla.configs import load_preset  # noqa: E402
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline  # noqa: E402
from kandinsky5_nabla.scripts import generate  # noqa: E402

LOOPBACK = {"127.0.0.1", "::1", "localhost"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--soak` lets the tests that take the fixture `soak` go on for longer (`make soak`)."""
    parser.addoption("--soak", action="store_true", help="run the long versions of the tests that have one")


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> int:
    """How many times a test that can go on is to repeat itself."""
    return 15 if request.config.getoption("--soak") else 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects GPU tests without a GPU: a skip would hide among the skips that mean a defect."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not torch.cuda.is_available():
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if item not in gpu_items]


@pytest.fixture(scope="session", autouse=True)
def _signals() -> None:
    """Takes Ctrl-C, which a shell lets its background jobs ignore, in this process and in those of the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Lets sockets of this process reach nothing but this machine."""
    real_connect, real_getaddrinfo = socket.socket.connect, socket.getaddrinfo

    def connect(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX and address[0] not in LOOPBACK:
            raise RuntimeError(f"a test tried to reach {address}")
        real_connect(self, address)

    def getaddrinfo(host: str | None, *args: object, **kwargs: object) -> list:
        if host is not None and host not in LOOPBACK:
            raise RuntimeError(f"a test tried to look up {host}")
        return real_getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        patch.setattr(socket, "getaddrinfo", getaddrinfo)
        yield


def _demo_pipeline() -> Kandinsky5NablaPipeline:
    pipe = Kandinsky5NablaPipeline.from_pretrained(load_preset("demo").model)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def _shared_pipe() -> Kandinsky5NablaPipeline:
    return _demo_pipeline()


@pytest.fixture
def pipe(_shared_pipe: Kandinsky5NablaPipeline) -> Kandinsky5NablaPipeline:
    """The checkpoint inside the package on the masked reference: exact, and nothing to compile at each new size."""
    _shared_pipe.transformer.set_attention_backend("NABLA_REFERENCE")
    return _shared_pipe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint with sound headers and no number in its weights: who uses them fails with exit code 1."""
    folder = shutil.copytree(load_preset("demo").model, tmp_path_factory.mktemp("checkpoint") / "copy")
    for weights in folder.rglob("*.safetensors"):
        content = weights.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        weights.write_bytes(content[:header] + b"\xff" * (len(content) - header))  # NaN in every dtype
    return folder


@pytest.fixture
def fresh_pipe() -> Kandinsky5NablaPipeline:
    """A pipeline of its own, for tests that change weights or dtype."""
    pipe = _demo_pipeline()
    pipe.transformer.set_attention_backend("NABLA_REFERENCE")
    return pipe


@pytest.fixture
def as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working folder and one thread, and afterwards no trace of a run that took this process for its own.

    A run sets how libraries show warnings and logs; here this is undone.
    """
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    monkeypatch.chdir(tmp_path)
    for name in ("kandinsky5_nabla", "diffusers", "transformers"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    monkeypatch.setattr(logging.getLogger("bitsandbytes.autograd._functions"), "level", logging.NOTSET)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is not faster on more, and much slower where others use them
    levels = [(library, library.get_verbosity()) for library in (diffusers_logging, transformers_logging)]
    yield
    torch.set_num_threads(threads)
    for library, level in levels:
        library.set_verbosity(level)
        library.enable_progress_bar()


@pytest.fixture
def here(
    as_a_program: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process, in an empty folder; returns exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", [generate.__file__])

    def run(*argv: object) -> tuple[int, str, str]:
        code = generate.main([str(word) for word in argv])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def server() -> ModuleType:
    """The module `hub_server`, which is no package's: a small Hub on this machine for the real client."""
    spec = importlib.util.spec_from_file_location("hub_server", Path(__file__).with_name("hub_server.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
