"""Trainings of `_bandit` by several collectors over the same seeds, and measures of them."""

from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.claims import _bandit, _chosen, harness

STEPS = 100
# Learning rates. The loss of `_bandit` is a mean over rollouts, with or without a signal: dropping
# groups without one multiplies the gradient, as a greater rate does. So each way has its best one.
RATES = tuple(2.0**n for n in range(11))


def runs(
    ways: Mapping[str, Callable[[int], _bandit.Curve]], *, seed: int, quick: bool
) -> dict[str, list[_bandit.Curve]]:
    """Of each way, ``way(seed)`` for several seeds."""
    seeds = [1000 * seed + i for i in range(2 if quick else 6)]
    return {name: [way(each) for each in seeds] for name, way in ways.items()}


def at_best_rates(
    ways: Mapping[str, Callable[[int, float], _bandit.Curve]], *, seed: int, quick: bool
) -> tuple[dict[str, list[_bandit.Curve]], dict[str, float]]:
    """:func:`runs` of each ``way(seed, rate)`` at its best rate, and the rates as facts.

    The best has the greatest `last` accuracy, on three seeds that no measure uses.
    """
    rates = RATES[6:8] if quick else RATES
    trials = [1000 * seed + 500 + i for i in range(1 if quick else 3)]
    chosen = {}
    for name, way in ways.items():
        means = [np.mean([last(way(each, rate)) for each in trials]) for rate in rates]
        chosen[name] = rates[_chosen.highest(f"rate of {name}", rates, means, quick=quick)]
    found = runs(
        {name: lambda s, way=way, rate=chosen[name]: way(s, rate) for name, way in ways.items()},
        seed=seed,
        quick=quick,
    )
    return found, {f"learning rate, {name}": rate for name, rate in chosen.items()}


def less(found, name: str, other: str, what: Callable[[_bandit.Curve], float]) -> harness.Estimate:
    """Paired by seed."""
    pair = (np.array([what(curve) for curve in found[each]]) for each in (name, other))
    return harness.mean(np.subtract(*pair), "seeds")


def cost_over(found, name: str, other: str, what: str) -> harness.Estimate:
    """Rollouts or updates to the accuracy of ``other`` after three quarters of its updates.

    A seed that never gets there counts with all of its own or of ``other``, whichever is more: to
    have sampled little is no saving.
    """
    costs = []
    for curve, plain in zip(found[name], found[other], strict=True):
        value, reached = _bandit.cost(curve, _aim(plain), what)
        if not reached:
            value = max(value, _bandit.cost(plain, np.inf, what)[0])
        costs.append((value, _bandit.cost(plain, _aim(plain), what)[0]))
    return harness.ratio(*np.array(costs).T, what="seeds")


def reaching(found, name: str, other: str) -> dict[str, float]:
    """How many seeds get to the accuracy of `cost_over`, as a fact."""
    pairs = zip(found[name], found[other], strict=True)
    count = sum(_bandit.cost(curve, _aim(plain))[1] for curve, plain in pairs)
    return {f"seeds that reach that accuracy, of {len(found[name])}, {name}": count}


def _aim(curve: _bandit.Curve) -> float:
    return curve.accuracy[3 * STEPS // 4]


def last(curve: _bandit.Curve) -> float:
    return float(curve.accuracy[STEPS - 1])


def informative(curve: _bandit.Curve) -> float:
    return float(curve.informative[:STEPS].mean())


def facts(found) -> dict[str, float]:
    words = {}
    for name, curves in found.items():
        words[f"accuracy after {STEPS} updates, {name}"] = np.mean([last(x) for x in curves])
        words[f"share of informative groups, {name}"] = np.mean([informative(x) for x in curves])
        words[f"rollouts, {name}"] = np.mean([x.sampled[STEPS - 1] for x in curves])
    return words


def plot(found) -> harness.Plot:
    """Accuracy by rollouts."""
    series = []
    for name, curves in found.items():
        places = np.arange(4, min(len(x.accuracy) for x in curves), 5)
        centers = [harness.mean([x.accuracy[i] for x in curves], "seeds") for i in places]
        value, low, high, _ = zip(*centers, strict=True)
        sampled = np.mean([x.sampled[places] for x in curves], axis=0)
        series.append(harness.Series(name, sampled, value, low, high))
    return harness.Plot("rollouts sampled", "accuracy", series)
