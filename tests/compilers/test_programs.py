"""Programs of accelerators compile without one, and take the memory that they should.

Continuous integration installs the compilers into an environment of their own; elsewhere these
tests are left out unless benchmarks/absent.py finds them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import absent

ROOT = Path(__file__).parents[2]
REQUIRED = "JAXRL_COMPILERS" in os.environ


@pytest.fixture(params=absent.KINDS)
def kind(request):
    """A kind of device whose compiler is here."""
    if name := absent.missing(request.param):
        if REQUIRED:
            pytest.fail(f"{name} is not installed")
        pytest.skip(f"{name} is not installed")
    return request.param


def run(*words):
    """What a benchmark prints, in a process of its own."""
    # As users compile, without what keeps the tests of the suite short.
    own = {"JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_step_of_a_mesh_compiles(kind):
    config = {"v5e": "configs/tpu_v5e_64.py", "h100": "configs/gpu_8.py"}[kind]
    words = ["--layers", "2", "--prompt-length", "16", "--response-length", "16"]
    found = run("-m", "benchmarks.pods", config, "--device", kind, *words)
    state = found["params_bytes"] + found["optimizer_bytes"]
    assert found["arguments_bytes"] == pytest.approx(state + found["batch_bytes"], rel=1e-2)
    assert found["aliased_bytes"] == pytest.approx(state, rel=1e-2)  # donated, so there once
    # The gradients of a device, its part of them in each microbatch, and little besides.
    assert found["temporary_bytes"] < 4 * state / 3


def test_the_update_is_written_in_place(kind):
    found = run("tests/compilers/update.py", kind)
    assert found["aliased"] == pytest.approx(3, rel=1e-2)
    assert found["temporary"] < 1.2  # the gradients


def test_devices_with_experts_exchange_tokens(kind):
    """And no experts, which are [16, 512, 256] or a quarter of that."""
    found = run("tests/compilers/experts.py", kind)
    assert [8, 2, 128, 512] in found
    assert {tuple(shape[1:3]) for shape in found} == {(2, 128)}


@pytest.mark.parametrize("kind", ["v5e"], indirect=True)
def test_data_spans_two_slices(kind):
    del kind
    found = run("tests/compilers/slices.py")
    assert found == {"two": [[0], [1]], "both": [[0, 1]], "v6e": [[0]]}
