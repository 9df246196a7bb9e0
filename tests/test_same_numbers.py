"""The same seed gives the same latents: in another process, with another number of threads, resumed or not."""

import json
import os
import subprocess
import sys

import pytest
import torch

from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline.state import load_state
from kandinsky5_nabla.scripts import generate

SPARSE = ["--config", "demo", "--height", "128", "--width", "256", "--num-frames", "5", "--steps", "2"]
SPARSE += ["--attention", "NABLA_REFERENCE", "--device", "cpu", "--dtype", "float32"]
CAT = [*SPARSE, "--prompt", "a cat", "--seed", "5", "--output", "cat.mp4", "--keep-state"]
CALLS = 2  # of the transformer in a step, with guidance
BETWEEN_THREADS = 1e-5  # of the largest value: sums in another order


def run_program(folder, threads, *argv):
    """Run the program in a process of its own; return its latents."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, generate.__file__, *argv]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return latents(folder)


def latents(folder):
    state = load_state(folder / "cat.k5" / "denoising.safetensors")
    assert state["completed"] == 2
    return state["latents"]


def difference(one, other):
    """The largest difference, as a share of the largest value."""
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The latents of a process with one thread, whose attention left out blocks."""
    folder = tmp_path_factory.mktemp("whole")
    of_it = run_program(folder, 1, *CAT, "--report", "report.json")
    [video] = json.loads((folder / "report.json").read_text())
    assert video["report"]["totals"]["density"] < 0.95
    return of_it


@pytest.fixture
def stopped(as_a_program, monkeypatch, tmp_path):
    """The folder of a run that failed in its second and last step, made in this process."""
    calls, real = [], Kandinsky5Transformer.forward

    def forward(self, *args, **kwargs):
        calls.append(None)
        if len(calls) > CALLS:
            raise RuntimeError("broken")
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Kandinsky5Transformer, "forward", forward)
        assert generate.main([*CAT, "--checkpoint-every", "1"]) == 1
    return tmp_path


def test_two_processes_make_the_same_latents_to_the_bit(as_a_program, tmp_path, whole):
    assert generate.main(CAT) == 0
    assert torch.equal(latents(tmp_path), whole)


def test_two_threads_make_nearly_the_same_latents(tmp_path, whole):
    assert difference(run_program(tmp_path, 2, *CAT), whole) <= BETWEEN_THREADS


def test_a_resumed_run_makes_the_same_latents_to_the_bit(stopped, whole):
    assert generate.main(["--resume", "cat.k5", "--keep-state"]) == 0
    assert torch.equal(latents(stopped), whole)


def test_a_run_that_is_resumed_with_two_threads_makes_nearly_the_same_latents(stopped, whole):
    torch.set_num_threads(2)  # the fixture sets it back
    assert generate.main(["--resume", "cat.k5", "--keep-state"]) == 0
    assert difference(latents(stopped), whole) <= BETWEEN_THREADS


def test_another_seed_makes_other_latents(as_a_program, tmp_path, whole):
    assert generate.main([*CAT, "--seed", "6"]) == 0
    assert difference(latents(tmp_path), whole) > 0.1
