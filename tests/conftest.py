"""The suite is offline and hermetic, and runs GPU tests only where there is a GPU."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline

# Set before any Hugging Face library reads them; the subprocesses of tests inherit them. A cache of
# its own keeps what the user has downloaded from deciding a test.
_hf_home = tempfile.TemporaryDirectory(prefix="hf-home-")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HOME=_hf_home.name)

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
    """The demo checkpoint with weights that nothing can read: who comes as far fails with exit code 1."""
    folder = shutil.copytree(load_preset("demo").model, tmp_path_factory.mktemp("checkpoint") / "copy")
    for weights in folder.rglob("*.safetensors"):
        weights.write_bytes(b"no weights")
    return folder


@pytest.fixture
def fresh_pipe() -> Kandinsky5NablaPipeline:
    """A pipeline of its own, for tests that change weights or dtype."""
    pipe = _demo_pipeline()
    pipe.transformer.set_attention_backend("NABLA_REFERENCE")
    return pipe
