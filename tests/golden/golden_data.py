"""The golden data of estimators: reading the manifests, and comparing them with our functions.

What they confirm of the catalog is written by `python tests/golden/confirmed.py`.
The files are described in `estimators/README.md`, our side is in `golden_ours`.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "estimators"
BFLOAT16 = "bfloat16"
# As the catalog spells them.
NAMES = {"trl": "TRL", "google-tunix": "tunix"}

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where we and a peer give different numbers on purpose.

    Attributes:
      reason: Who does what, in a sentence.
      expected: From the inputs and the peer's outputs, what ours are; only the outputs that differ.
    """

    reason: str
    expected: Callable[[Arrays, Arrays], Arrays]


@dataclasses.dataclass(frozen=True)
class Ours:
    """Our side of an entry.

    Attributes:
      run: From the inputs of a case (jax arrays) to outputs of the entry's names; is jitted.
      differences: By case.
      host: The function is not jitted and gets NumPy arrays.
    """

    run: Callable[[Mapping], Mapping]
    differences: Mapping[str, Difference] = dataclasses.field(default_factory=dict)
    host: bool = False


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The numbers of one peer."""

    head: dict
    entries: dict[str, dict]
    arrays: Arrays
    inputs: dict[str, dict[str, Arrays]]

    @property
    def label(self) -> str:
        """Name and version, as the catalog says it."""
        package = self.head["package"]
        return f"{NAMES.get(package, package)} {self.head['version']}"

    def cases(self) -> list[tuple[str, str]]:
        return [(name, case) for name, entry in self.entries.items() for case in entry["cases"]]

    def outputs(self, name: str, case: str) -> Arrays:
        entry = self.entries[name]
        row = entry["cases"].index(case)
        return {output: self.arrays[f"{name}/{output}"][row] for output in entry["outputs"]}


def _stored(path: Path) -> Arrays:
    with np.load(path) as file:
        return dict(file)


@functools.cache
def load(name: str) -> Manifest:
    """A manifest with its arrays and the inputs that it names."""
    head = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    entries = {entry["name"]: entry for entry in head.pop("entries")}
    arrays = _stored(FOLDER / f"{name}.npz")
    shared = _stored(FOLDER / "inputs.npz")
    inputs = {}
    for group, cases in head["sets"].items():
        prefix = f"inputs/{group}/"
        found = {k: x for k, x in (shared | arrays).items() if k.startswith(prefix)}
        stacked = {key.removeprefix(prefix): x for key, x in found.items()}
        inputs[group] = {
            case: {key: x[row] for key, x in stacked.items()} for row, case in enumerate(cases)
        }
    return Manifest(head, entries, arrays, inputs)


def manifests() -> list[str]:
    """Names of all the manifests there are."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def fingerprint(cases: dict[str, Arrays]) -> str:
    """As `estimator_cases.digest`: of the values of a set, stacked."""
    sha = hashlib.sha256()
    for name in sorted(next(iter(cases.values()))):
        x = np.stack([case[name] for case in cases.values()])
        sha.update(name.encode() + np.ascontiguousarray(x).tobytes())
    return sha.hexdigest()[:16]


def covered_keys() -> dict[str, list[str]]:
    """Keys of the catalog, each with the peers (and versions) whose own code it was compared to."""
    found: dict[str, list[str]] = {}
    for name in manifests():
        manifest = load(name)
        for entry in manifest.entries.values():
            for key in entry["keys"]:
                labels = found.setdefault(key, [])
                if manifest.label not in labels:
                    labels.append(manifest.label)
    return dict(sorted(found.items()))


def _poisoned(inputs: Arrays) -> Arrays:
    """The inputs with NaN where the mask, or `where`, says that nothing is read."""
    changed = dict(inputs)
    for name in ("mask", "where"):
        for key, x in inputs.items():
            if name in inputs and x.dtype == np.float32 and x.shape == inputs[name].shape:
                changed[key] = np.where(inputs[name], x, np.nan)
    return changed


_programs: dict[tuple, Callable] = {}
_outputs: dict[tuple, dict[str, Arrays]] = {}


def run(manifest: Manifest, table: Mapping[str, Ours], name: str, case: str) -> Arrays:
    """Our outputs of an entry for a case; in a case of bfloat16 every float array is one.

    The entries of a set of inputs are one program: of their own, each would cost several times as
    much to compile. It runs on each case of the set, whatever cases an entry has.
    """
    import jax
    import jax.numpy as jnp

    group = manifest.entries[name]["inputs"]
    inputs = manifest.inputs[group][case]
    if table[name].host:
        return {output: np.asarray(x) for output, x in table[name].run(inputs).items()}
    coarse = case == BFLOAT16
    key = id(manifest), id(table), group, coarse
    if key not in _programs:
        runs = {
            entry: table[entry].run
            for entry, row in manifest.entries.items()
            if row["inputs"] == group
            and not table[entry].host
            and any((x == BFLOAT16) == coarse for x in row["cases"])
        }
        _programs[key] = jax.jit(lambda a: {entry: compute(a) for entry, compute in runs.items()})
    if (*key, case) not in _outputs:
        kind = jnp.bfloat16 if coarse else jnp.float32
        arrays = {
            x: jnp.asarray(value, kind if value.dtype == np.float32 else value.dtype)
            for x, value in _poisoned(inputs).items()
        }
        _outputs[*key, case] = jax.device_get(_programs[key](arrays))
    return _outputs[*key, case][name]


def usual_size(x: np.ndarray, *, largest: bool = False) -> float:
    """The median of what is not 0, within 0.01 and 1: one e^20 must not hide the others."""
    sizes = np.abs(x[np.isfinite(x) & (x != 0)])
    if not sizes.size:
        return 1e-2
    return float(np.clip(sizes.max() if largest else np.median(sizes), 1e-2, 1.0))


def close(actual, expected, tolerance: float, *, coarse: bool = False) -> bool:
    """Equal up to a share of each value, or of the usual size of the values where they are small.

    With `coarse`, for a peer that computes in bfloat16, it is a share of the largest value: what
    cancels leaves the rounding of the terms.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    if expected.dtype == bool:
        return actual.dtype == bool and np.array_equal(actual, expected)
    atol = tolerance * usual_size(expected, largest=coarse)
    return actual.shape == expected.shape and np.allclose(
        np.asarray(actual, np.float32), expected, rtol=tolerance, atol=atol, equal_nan=True
    )


def _worst(actual, expected) -> str:
    """Where two arrays differ most, for a message."""
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, expected {expected.shape}"
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - expected) / (np.abs(expected) + usual_size(expected))
    error = np.where(np.isnan(actual) & np.isnan(expected), 0.0, np.nan_to_num(error, nan=np.inf))
    places = np.argsort(error, axis=None)[::-1][:6]
    lines = [
        f"  {tuple(map(int, np.unravel_index(i, error.shape)))}: ours {actual.flat[i]:.7g}, "
        f"expected {expected.flat[i]:.7g}"
        for i in places
        if error.flat[i] > 0
    ]
    return f"{np.count_nonzero(error > 1e-5)} of {error.size} differ, most:\n" + "\n".join(lines)


def check(manifest: Manifest, table: Mapping[str, Ours], name: str, case: str) -> None:
    """Fails unless our numbers are the peer's, or differ from them exactly as documented."""
    entry, ours = manifest.entries[name], table[name]
    inputs = manifest.inputs[entry["inputs"]][case]
    theirs = manifest.outputs(name, case)
    results = run(manifest, table, name, case)
    assert set(results) == set(theirs), f"outputs {sorted(results)}, stored {sorted(theirs)}"
    coarse = case == BFLOAT16
    tolerance = entry["tolerance"][BFLOAT16 if coarse else "float32"]
    difference = ours.differences.get(case)
    changed = {} if difference is None else difference.expected(inputs, theirs)
    for output, value in theirs.items():
        expected = changed.get(output, value)
        assert close(results[output], expected, tolerance, coarse=coarse), (
            f"{manifest.label} {name}, {case}, {output}: {_worst(results[output], expected)}"
        )
    if difference is not None:
        assert any(
            not close(value, theirs[output], tolerance, coarse=coarse)
            for output, value in changed.items()
        ), f"{manifest.label} {name}, {case}: no difference any more: {difference.reason}"


def check_complete(manifest: Manifest, table: Mapping[str, Ours]) -> None:
    """Fails unless data and table have the same entries, and all that they name is there."""
    missing = set(manifest.entries) - set(table)
    gone = set(table) - set(manifest.entries)
    assert not missing, f"entries of {manifest.label} without our side: {sorted(missing)}"
    assert not gone, f"compared with {manifest.label}, but not in its data: {sorted(gone)}"
    for name, fingerprints in manifest.head["fingerprints"].items():
        assert fingerprint(manifest.inputs[name]) == fingerprints, (
            f"the inputs {name!r} are not those that {manifest.label} was run on"
        )
    for name, entry in manifest.entries.items():
        assert entry["keys"], f"{name} covers no key"
        assert set(entry["cases"]) <= set(manifest.inputs[entry["inputs"]]), name
        assert set(table[name].differences) <= set(entry["cases"]), name
        for output in entry["outputs"]:
            rows = len(manifest.arrays[f"{name}/{output}"])
            assert rows == len(entry["cases"]), f"{name}/{output} has {rows} cases"
