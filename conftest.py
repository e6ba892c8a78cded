"""Settings of tests and doctests: eight fake devices, fast and cached compilation, no network."""

import atexit
import contextlib
import dataclasses
import functools
import gc
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import zlib
from importlib.metadata import version
from pathlib import Path

# Set before anything imports jax; setdefault, so that a developer can choose otherwise.
_USER = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
_CACHE = Path(tempfile.gettempdir()) / f"jaxrl_llm-jax-cache-{_USER}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("XDG_STATE_HOME", str(_CACHE.with_name(f"jaxrl_llm-test-state-{_USER}")))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # quicker to lower
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "PIP_NO_INDEX"):
    os.environ.setdefault(_name, "1")
# Most programs of a test run once, so what counts is how fast they compile: that halves the time.
# Each in one piece: of several, which threads compile at once, every one has costs of its own.
# JAX_DISABLE_MOST_OPTIMIZATIONS=0 compiles as users do.
if os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
    _QUICK = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
    # A flag that jaxlib does not know ends the process, so only for versions that were tried.
    if version("jaxlib").startswith("0.10."):
        _FLAGS = os.environ.get("XLA_FLAGS", "").split()
        os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, *(x for x in _QUICK if x not in _FLAGS)])


def _tracked_results(root: Path) -> Path | None:
    """A folder with the benchmarks' results as git tracks them, if those of the checkout differ.

    Tests compare the pages with results, and who only measured something has not changed a page.
    """
    git = ["git", "-C", str(root)]
    changed = [*git, "status", "--porcelain", "--untracked-files=all", "benchmarks/results"]
    try:
        run = subprocess.run(changed, capture_output=True, text=True, check=True)
        # The second letter is of the checkout beside the index.
        if all(line[1] == " " for line in run.stdout.splitlines()):
            return None
        folder = Path(tempfile.mkdtemp(prefix="jaxrl_llm-results-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        names = subprocess.check_output([*git, "ls-files", "-z", "benchmarks/results"])
        subprocess.run(
            [*git, "checkout-index", "-z", "--stdin", f"--prefix={folder}/"],
            input=names,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return None
    return folder / "benchmarks" / "results"


# The processes of xdist have the variable from their parent; an empty one stands for the checkout.
if "JAXRL_LLM_RESULTS" not in os.environ:
    os.environ["JAXRL_LLM_RESULTS"] = str(_tracked_results(Path(__file__).parent) or "")

import pytest  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

_make_context = getattr(mlir, "make_ir_context", None)
_contexts = threading.local()


def _context_of_this_thread():
    """One MLIR context for a hundred programs: of its own, each would cost 3 ms and 1 MB more."""
    _contexts.uses = getattr(_contexts, "uses", 0) + 1
    if _contexts.uses % 100 == 1:  # what a program named stays in its context
        _contexts.context = _make_context()
    return _contexts.context


if _make_context is not None and version("jax").startswith("0.10."):
    mlir.make_ir_context = _context_of_this_thread

# A shell starts what runs in the background deaf to Ctrl-C, which tests send to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_LOCAL = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}
_connect = socket.socket.connect


def _connect_locally(self, address):
    """Refuse every address but this machine's, so that no test depends on a network."""
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in _LOCAL:
        raise OSError(f"tests have no network, but something connects to {address[0]!r}")
    return _connect(self, address)


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Every test runs without other machines."""
    socket.socket.connect = _connect_locally
    yield
    socket.socket.connect = _connect


@pytest.fixture
def optimized():
    """Programs as users get them, for tests whose programs run longer than they compile."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    # JAX would go on with the programs that it has compiled under the other setting.
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


class _Trained:
    """A recipe that equals all with the same step, which reads neither name nor collector."""

    def __init__(self, recipe):
        self.recipe, unread = recipe, ("name", "collector", "paper", "status")
        names = (x.name for x in dataclasses.fields(recipe) if x.name not in unread)
        self.slots = tuple(getattr(recipe, name) for name in names)

    def __eq__(self, other):
        return isinstance(other, _Trained) and self.slots == other.slots

    def __hash__(self):
        return hash(self.slots)


def _shared(function):
    """The function, whose results for equal options are the same object where there is no mesh."""
    from jaxrl_llm.recipes import Recipe

    @functools.lru_cache(maxsize=64, typed=True)
    def cached(*args, **options):
        plain = (x.recipe if isinstance(x, _Trained) else x for x in args)
        return function(*plain, **options)

    @functools.wraps(function)
    def call(*args, **options):
        if options.get("mesh") is not None:  # a step has the shardings of its first state
            return function(*args, **options)
        keys = [_Trained(x) if isinstance(x, Recipe) else x for x in args]
        try:
            hash((*keys, *options.values()))
        except TypeError:
            return function(*args, **options)
        return cached(*keys, **options)

    return call


def _traced_once(make_model):
    """``make_model``, whose models are traced once for all programs with the same shapes."""
    import jax

    def make(config):
        model = make_model(config)
        # Inlined, so that a program is the same to the letter.
        return model._replace(apply=jax.jit(model.apply, static_argnames="remat", inline=True))

    return make


@functools.cache
def _shared_parts():
    from jaxrl_llm.testing import model
    from jaxrl_llm.train import algorithms, evolution, policy_gradient
    from jaxrl_llm.train.experiment import samplers, setup

    programs = ["make_sampler", "make_flow_sampler", "make_denoising_sampler", "make_population"]
    names = {
        model: ["make_model", "make_flow_model", "make_text_flow_model"],
        samplers: [*programs, "make_engine"],
        algorithms: ["make_schedule", "make_optimizer"],
        setup: ["make_optimizer", "moving_only"],
        policy_gradient: ["make_step"],
        evolution: ["make_evolution_step"],
    }
    parts = ((module, name) for module, each in names.items() for name in each)
    made = {(module, name): getattr(module, name) for module, name in parts}
    made[model, "make_model"] = _traced_once(model.make_model)
    return [(*part, _shared(function)) for part, function in made.items()]


@pytest.fixture(scope="module")
def shared_programs():
    """Runs of one process share the sampler, engine and train step of equal models and options.

    They are functions of their arrays alone; a second run need not trace and load them again.
    """
    with pytest.MonkeyPatch.context() as patch:
        for part in _shared_parts():
            patch.setattr(*part)
        yield


@pytest.fixture(autouse=True, scope="session")
def plots():
    """Runs leave no reward.png, which takes longer than their few steps, but inside ``plots()``."""
    from jaxrl_llm.train.logging import run_folder

    draw = run_folder.plot_reward

    @contextlib.contextmanager
    def drawn():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_folder, "plot_reward", draw)
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "plot_reward", lambda *args, **options: None)
        yield drawn


_PARTS = 8  # of the tests that are one of many alike, in the whole suite's run


def pytest_addoption(parser):
    """Adds ``--share``."""
    parser.addoption(
        "--share",
        metavar="N or K/N",
        help="of the tests that are one of many alike (marker of_many), the part of N that the "
        f"commit chooses, or the K-th; 1 runs all. The default is {_PARTS} for the whole suite, "
        "and 1 for files that are named",
    )


def pytest_configure(config):
    """Reads ``--share`` once: the part, and how many parts there are."""
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    text = config.getoption("share") or (str(_PARTS) if whole else "1")
    try:
        numbers = [int(x) for x in text.split("/")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] > 0:
        numbers = [_number_of_commit(config.rootpath) % numbers[0], *numbers]
    if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
        raise pytest.UsageError(
            f"--share must be N or K/N with 0 <= K < N, such as 4 or 0/4; got {text!r}."
        )
    config.stash[_SHARE] = tuple(numbers)


_SHARE = pytest.StashKey[tuple[int, int]]()


def _number_of_commit(root: Path) -> int:
    """A number of the commit that is checked out; 0 where there is none."""
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(run.stdout[:7], 16)


def pytest_report_header(config):
    """Says which share runs."""
    part, count = config.stash[_SHARE]
    if count > 1:
        return f"share: part {part} of {count} of the tests that are one of many alike"
    return None


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    """Leaves out tests that are not in the share.

    Each function keeps its share, and at least one test, so that N runs see all and each run sees
    every function.
    """
    part, count = config.stash[_SHARE]
    if count == 1:
        return
    alike = {}
    for item in items:
        if item.get_closest_marker("of_many") is not None:
            alike.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped = set()
    for tests in alike.values():
        tests.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        parts = min(count, len(tests))
        dropped |= {item for n, item in enumerate(tests) if n % parts != part % parts}
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


def pytest_collection_finish():
    """The garbage collector looks at less and more rarely: tracing makes very many objects."""
    gc.collect()
    gc.freeze()  # what collection made stays
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each worker takes neighbors, so that few of a file's fixtures and programs are made twice."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


# Linux gives a process 65,530 mappings, of which every compiled program takes some three. Without
# one more, XLA ends the process.
_MANY_MAPPINGS, _TOO_MANY = 25_000, 40_000
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
