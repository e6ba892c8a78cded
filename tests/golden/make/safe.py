"""Writes estimators/safe.*: ryyzn9/SAFE's controllers and its pessimistic critic."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import array, peer, take

PID, ENTROPY, ASYMMETRIC = (
    f"safe/controllers/{name}.py" for name in ("pid", "entropy_aware", "asymmetric")
)
CRITIC = "safe/models/critic.py"
PHASES = ("WARMUP", "CLIMBING", "PLATEAU", "CONVERGED")


def steps():
    """Runs of 160 steps: one that climbs, one on a plateau, one that has converged."""
    rng = np.random.default_rng(24)

    def run(rewards, kl):
        x = {"reward": rewards, "kl": kl, "entropy": rng.uniform(0.05, 5.0, 160)}
        return {name: values.astype(np.float32) for name, values in x.items()}

    time = np.arange(160)
    return {
        "climbing": run(time / 100 + 0.1 * rng.normal(size=160), rng.gamma(2.0, 0.4, 160)),
        "plateau": run(0.3 + 0.2 * rng.normal(size=160), rng.normal(size=160)),
        "converged": run(0.9 + 0.005 * rng.normal(size=160), time / 80),
    }


def entropy_aware(controller):
    def compute(case, a):
        made, found = controller(), []
        for kl, entropy, reward in zip(a["kl"], a["entropy"], a["reward"], strict=True):
            given = {"entropy": float(entropy), "reward": float(reward)}
            info = made.compute_penalty(float(kl), **given)
            numbers = [info[n] for n in ("penalty", "threshold", "kl_short", "kl_long")]
            found.append([*numbers, PHASES.index(info["phase"])])
        names = ("penalty", "threshold", "kl_short", "kl_long", "phase")
        return dict(zip(names, np.array(found).T, strict=True))

    return compute


def asymmetric(controller):
    def compute(case, a):
        made = controller()
        found = [made.compute_penalty(float(kl)) for kl in a["kl"]]
        return {name: np.array([x[name] for x in found]) for name in ("penalty", "momentum")}

    return compute


def velocity(controller):
    def compute(case, a):
        made = controller()
        return {"adjustment": np.array([made.update(float(x)) for x in a["reward"]])}

    return compute


def scale(controller):
    return lambda case, a: {
        "scale": np.array([controller().get_scale_factor(float(kl)) for kl in a["kl"]])
    }


def soft_min(function, alpha):
    def compute(case, a):
        values = [torch.from_numpy(a[name]).requires_grad_() for name in ("first", "second")]
        found = function(SimpleNamespace(alpha=alpha), *values)
        gradients = torch.autograd.grad(found.sum(), values)
        return {"values": array(found)} | {
            f"gradient_{i}": array(x) for i, x in enumerate(gradients)
        }

    return compute


@peer("safe", "SAFE", "ryyzn9/SAFE")
def main(root, writer):
    pid, detector = take(root / PID, "PIDController", "PhaseDetector")
    given = {"PIDController": pid, "PhaseDetector": detector, "BaseKLController": object}
    (aware,) = take(root / ENTROPY, "EntropyAwarePredictiveController", **given)
    (one_sided,) = take(root / ASYMMETRIC, "AsymmetricKLController", **given)
    writer.inputs("steps", steps())
    writer.add("pid", velocity(pid))
    writer.add("controller", entropy_aware(aware))
    writer.add("step_scale", scale(aware))
    writer.add("asymmetric", asymmetric(one_sided))
    rng = np.random.default_rng(25)
    values = {name: rng.normal(size=20).astype(np.float32) for name in ("first", "second")}
    writer.inputs("values", {"random": values})
    (function,) = take(root / CRITIC, "soft_min")
    for alpha in (0.3, 0.01, 100.0):
        writer.add(f"soft_min_{alpha:g}", soft_min(function, alpha))
