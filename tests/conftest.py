"""Settings of every test: eight fake CPU devices, fast and cached compilation, no network."""

import gc
import os
import socket
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

# Set before anything imports jax; setdefault, so that a developer can choose otherwise.
_USER = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
_CACHE = Path(tempfile.gettempdir()) / f"jaxrl_llm-jax-cache-{_USER}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "PIP_NO_INDEX"):
    os.environ.setdefault(_name, "1")
# Most programs of a test run once, so what counts is how fast they compile: that halves the time.
# JAX_DISABLE_MOST_OPTIMIZATIONS=0 compiles as users do.
if os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
    _FLAGS, _QUICK = os.environ.get("XLA_FLAGS", ""), "--xla_cpu_use_fusion_emitters=false"
    # A flag that jaxlib does not know ends the process, so only for versions that were tried.
    if version("jaxlib").startswith("0.10.") and _QUICK not in _FLAGS:
        os.environ["XLA_FLAGS"] = f"{_FLAGS} {_QUICK}".strip()

import pytest  # noqa: E402

_LOCAL = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}
_connect = socket.socket.connect


def _connect_locally(self, address):
    """Refuse every address but this machine's, so that no test depends on a network."""
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in _LOCAL:
        raise OSError(f"tests have no network, but something connects to {address[0]!r}")
    return _connect(self, address)


@pytest.fixture(autouse=True, scope="session")
def no_network():
    socket.socket.connect = _connect_locally
    yield
    socket.socket.connect = _connect


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each worker takes neighbors, so that few of a file's fixtures and programs are made twice."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


# Linux gives a process 65,530 mappings, of which every compiled program takes some three. Without
# one more, XLA ends the process.
_MANY_MAPPINGS, _TOO_MANY = 8_000, 35_000
_MAPPINGS = Path("/proc/self/maps")
_looked = 0.0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Between two files, and now and then in one, drops compiled programs if there are many."""
    global _looked
    same_file = nextitem is not None and nextitem.path == item.path
    if not _MAPPINGS.exists() or (same_file and time.monotonic() < _looked + 10):
        return
    _looked = time.monotonic()
    with _MAPPINGS.open() as lines:
        count = sum(1 for _ in lines)
    if count > (_TOO_MANY if same_file else _MANY_MAPPINGS):
        import jax

        jax.clear_caches()
        gc.collect()
