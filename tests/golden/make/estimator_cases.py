"""Inputs of the golden data of estimators, and the writer of its manifests.

The inputs are the same for every peer, and every case of a set has the same shapes, so that a test
compiles a function once. What is masked holds mild junk. The files: `estimators/README.md`.
"""

import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "estimators"
PROMPTS, ROLLOUTS, TOKENS, VOCABULARY = 3, 4, 6, 5
SHAPE = (PROMPTS, ROLLOUTS, TOKENS)
GROUPS = (PROMPTS, ROLLOUTS)


def _mask(lengths):
    return np.arange(TOKENS) < np.asarray(lengths).reshape(GROUPS)[..., None]


RAGGED = _mask([6, 3, 5, 1, 4, 6, 2, 5, 6, 6, 3, 4])


def token_cases():
    """Log-probabilities and advantages: what a surrogate or a KL term reads."""

    def case(rng, mask=RAGGED, spread=0.35):
        old = -rng.gamma(2.0, 0.5, SHAPE) - 0.02
        return {
            "logp": np.minimum(old + spread * rng.normal(size=SHAPE), -0.01),
            "old_logp": old,
            "ref_logp": np.minimum(old + 0.5 * rng.normal(size=SHAPE), -0.01),
            "behavior_logp": np.minimum(old + 0.2 * rng.normal(size=SHAPE), -0.01),
            "advantages": rng.normal(size=GROUPS),
            "token_advantages": rng.normal(size=SHAPE),
            "weight": rng.uniform(0.3, 2.0, SHAPE),
            "entropy": rng.uniform(0.1, 2.0, SHAPE),
            "mask": mask,
        }

    holes = RAGGED.copy()
    holes[:, :, 2] = False
    holes[0, 0] = [True, False, False, True, True, False]
    masked_row = RAGGED.copy()
    masked_row[0, 1] = masked_row[2, 3] = False
    one_sequence = np.zeros(SHAPE, bool)
    one_sequence[1, 2, :4] = True
    # Case by case from a seed of its own: adding a case leaves the others as they are.
    rngs = iter(np.random.default_rng((1, i)) for i in range(100))
    cases = {
        "ragged": case(next(rngs)),
        "on_policy": case(next(rngs), spread=0.0),
        "holes": case(next(rngs), holes),
        "masked_row": case(next(rngs), masked_row),
        "one_sequence": case(next(rngs), one_sequence),
        "length_one": case(next(rngs), _mask([1] * 12)),
        "log_ratio_30": case(next(rngs)),
        "zero_advantage": case(next(rngs)),
        "bfloat16": case(next(rngs)),
    }
    for name in ("advantages", "token_advantages"):
        cases["zero_advantage"][name][1] = 0.0
    far = cases["log_ratio_30"]
    for (prompt, rollout), difference in {(0, 0): 30, (0, 2): 30, (1, 1): -30, (2, 0): -30}.items():
        near, distant = (-0.5, -30.5) if difference > 0 else (-30.5, -0.5)
        far["logp"][prompt, rollout, 1] = near
        for other in ("old_logp", "ref_logp", "behavior_logp"):
            far[other][prompt, rollout, 1] = distant
    # Both signs of both differences.
    far["advantages"][[0, 0, 1, 2], [0, 2, 1, 0]] = [0.8, -0.6, 0.7, -0.9]
    far["token_advantages"][[0, 0, 1, 2], [0, 2, 1, 0], 1] = [0.8, -0.6, 0.7, -0.9]
    return cases


def reward_cases():
    """Rewards of groups: what an advantage function reads."""

    def case(rng, rewards=None, where=None, mask=RAGGED):
        rewards = rng.normal(size=GROUPS) if rewards is None else np.asarray(rewards, np.float64)
        old = -rng.gamma(2.0, 0.5, SHAPE) - 0.02
        probability = np.exp(old)
        columns = np.stack([rewards, rng.integers(0, 3, GROUPS), rng.normal(size=GROUPS)])
        return {
            "rewards": rewards,
            "where": np.ones(GROUPS, bool) if where is None else np.asarray(where, bool),
            "mask": mask,
            "columns": columns,
            "greedy_rewards": rng.normal(size=PROMPTS),
            "old_logp": old,
            "ref_logp": np.minimum(old + 0.3 * rng.normal(size=SHAPE), -0.01),
            # At least the square of the sampled token's own probability.
            "sum_pi_sq": probability**2 + (1 - probability) ** 2 * rng.uniform(0.2, 1.0, SHAPE),
            "weight": rng.uniform(0.3, 2.0, SHAPE),
            "values": rng.normal(size=SHAPE),
        }

    masked_row = RAGGED.copy()
    masked_row[0, 1] = masked_row[2, 3] = False
    holes = RAGGED.copy()
    holes[:, :, 2] = False
    holes[1, 2] = [True, True, False, False, True, False]
    rngs = iter(np.random.default_rng((2, i)) for i in range(100))
    equal = [[0.1] * 4, [1.0] * 4, [0.0] * 4]
    cases = {
        "full": case(next(rngs)),
        "binary": case(next(rngs), [[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0]]),
        "ragged": case(next(rngs), where=[[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 0, 1]]),
        "singleton": case(next(rngs), where=[[0, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]),
        # A group of three: the mean of three float32 numbers of 0.1 is not 0.1.
        "all_equal": case(next(rngs), equal, where=[[1, 1, 1, 0], [1] * 4, [1] * 4]),
        "masked_row": case(next(rngs), mask=masked_row),
        "holes": case(next(rngs), mask=holes),
        "length_one": case(next(rngs), mask=_mask([1] * 12)),
        "bfloat16": case(next(rngs)),
    }
    # All the columns of a group equal, not the first one alone.
    cases["all_equal"]["columns"] = np.broadcast_to(np.asarray(equal), (3, *GROUPS)).copy()
    return cases


def vocabulary_cases():
    """Logits: what entropy and distillation read."""

    def case(rng, scale=1.5):
        shape = (*SHAPE[1:], VOCABULARY)
        logits = scale * rng.normal(size=shape)
        return {
            "logits": logits,
            "teacher_logits": logits + rng.normal(size=shape),
            "targets": rng.integers(0, VOCABULARY, shape[:-1]).astype(np.int32),
            "old_logp": -rng.gamma(2.0, 0.5, shape[:-1]) - 0.02,
            "advantages": rng.normal(size=shape[:-1]),
        }

    rngs = iter(np.random.default_rng((3, i)) for i in range(100))
    cases = {
        "normal": case(next(rngs)),
        "peaked": case(next(rngs), scale=4.0),
        "equal": case(next(rngs)),
        "bfloat16": case(next(rngs)),
    }
    cases["equal"]["teacher_logits"] = cases["equal"]["logits"].copy()
    return cases


SETS = {"tokens": token_cases, "rewards": reward_cases, "vocabulary": vocabulary_cases}


def _bfloat16(x):
    """The nearest bfloat16 numbers, as float32 (round to nearest, ties to even)."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & 0xFFFF0000).astype(np.uint32).view(np.float32)


def load_inputs(name):
    """The cases of a set by name, float32, bool or int32."""
    cases = {}
    for case, arrays in SETS[name]().items():
        cases[case] = {}
        for key, x in arrays.items():
            if x.dtype == np.float64 or key == "columns":
                x = np.asarray(x, np.float32)
                x = _bfloat16(x) if case == "bfloat16" else x
            cases[case][key] = x
    return cases


def stack(cases):
    """A dict of cases as a dict of arrays with the cases along the first axis."""
    names = next(iter(cases.values())).keys()
    return {name: np.stack([case[name] for case in cases.values()]) for name in names}


def digest(arrays):
    """A fingerprint of the values, so that outputs of other inputs are noticed."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        sha.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return sha.hexdigest()[:16]


class Writer:
    """Computes the entries of `NAME.json` with a peer and writes it and `NAME.npz`.

    The manifest is the table of what is called: keys, function, arguments, inputs, cases, tolerance
    and note of each entry. A new entry is a row of it, written by hand; its script computes it.
    """

    def __init__(self, name, package, versions, script, **facts):
        self.name, self.arrays, self.outputs, self.sets = name, {}, {}, {}
        stored = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        self.rows = {row["name"]: row for row in stored["entries"]}
        self.head = {
            "package": package,
            "version": metadata.version(package) if "version" not in facts else facts["version"],
            "script": f"tests/golden/make/{script}",
            "versions": {"python": platform.python_version()}
            | {name: metadata.version(name) for name in versions},
        } | facts

    def inputs(self, name, cases=None):
        """The cases of a shared set, or those given, which become a set of this peer alone."""
        if name not in self.sets:
            self.sets[name] = cases or load_inputs(name)
            for arrays in self.sets[name].values():
                # jax has no integers of 64 bits.
                arrays |= {k: x.astype(np.int32) for k, x in arrays.items() if x.dtype == np.int64}
            if cases is not None:
                for key, x in stack(cases).items():
                    self.arrays[f"inputs/{name}/{key}"] = x
        return self.sets[name]

    def add(self, name, compute):
        """Runs `compute(case, arrays) -> {output: array}` on every case of an entry."""
        row = self.rows[name]
        cases = self.inputs(row["inputs"])
        outputs = stack({case: compute(case, cases[case]) for case in row["cases"]})
        for output, x in outputs.items():
            x = np.asarray(x)
            self.arrays[f"{name}/{output}"] = x if x.dtype == bool else x.astype(np.float32)
        self.outputs[name] = sorted(outputs)

    def each(self, function, make):
        """Adds the entries of a peer's function that are not yet there, by `make(**arguments)`."""
        rest = {name: row for name, row in self.rows.items() if name not in self.outputs}
        found = [name for name, row in rest.items() if row["function"].endswith(function)]
        if not found:
            raise LookupError(f"{self.name} has no entry of {function}")
        for name in found:
            self.add(name, make(**self.rows[name]["arguments"]))

    def save(self):
        missing = self.rows.keys() - self.outputs.keys()
        if missing:
            raise LookupError(f"{self.name}: nothing computes {sorted(missing)}")
        sets = {name: list(cases) for name, cases in self.sets.items()}
        fingerprints = {name: digest(stack(cases)) for name, cases in self.sets.items()}
        head = self.head | {"sets": sets, "fingerprints": fingerprints}
        entries = [row | {"outputs": self.outputs[name]} for name, row in self.rows.items()]
        lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
        text = json.dumps(head, indent=1)[:-2] + ',\n "entries": [\n' + lines + "\n ]\n}\n"
        (FOLDER / f"{self.name}.json").write_text(text, encoding="utf-8")
        np.savez_compressed(FOLDER / f"{self.name}.npz", **self.arrays)


def written(name, package, versions, **facts):
    """Marks the function of a script that adds the entries of `name`; a script that runs calls it.

    It stands last in its file.
    """

    def run(add):
        if add.__module__ == "__main__":
            writer = Writer(name, package, versions, f"{name}.py", **facts)
            add(writer)
            writer.save()
        return add

    return run


def main():
    arrays = {}
    for name in SETS:
        for key, x in stack(load_inputs(name)).items():
            arrays[f"inputs/{name}/{key}"] = x
    np.savez_compressed(FOLDER / "inputs.npz", **arrays)


if __name__ == "__main__":
    main()
