"""SAFE's controller against a simulation with Python numbers and lists."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.regularizers import (
    asymmetric_init,
    asymmetric_kl,
    asymmetric_step,
    pid_init,
    pid_step,
    safe_controller,
    safe_init,
    safe_step,
    step_scale,
)
from jaxrl_llm.regularizers.safe import PHASES

safe = jax.jit(safe_step)


class Simulation:
    """The entry's formulas with plain numbers."""

    def __init__(self):
        self.short, self.average, self.integral, self.error = 0.0, None, 0.0, 0.0
        self.rewards = []

    def pid(self, reward):
        if self.average is None:
            self.average = reward
            return 0.0
        before, self.average = self.average, 0.95 * self.average + 0.05 * reward
        error = self.average - before - 0.001
        self.integral = max(-1.0, min(1.0, self.integral + error))
        out = 0.3 * error + 0.01 * self.integral + 0.05 * (error - self.error)
        self.error = error
        return out

    def phase(self):
        if len(self.rewards) < 50:
            return "warmup"
        recent = self.rewards[-50:]
        old = self.rewards[-100:-50] if len(self.rewards) >= 100 else recent
        if np.mean(recent) > np.mean(old) + 0.01:
            return "climbing"
        return "converged" if np.std(recent) < 0.02 and np.mean(recent) > 0.7 else "plateau"

    def step(self, kl, entropy, reward):
        self.short = 0.9 * self.short + 0.1 * kl
        self.rewards.append(reward)
        phase = self.phase()
        multiplier = {"warmup": 1.5, "climbing": 1.2, "plateau": 0.8, "converged": 1.0}[phase]
        threshold = max(0.1, min(0.6, (0.3 + self.pid(reward)) * multiplier))
        penalty = 0.1 * max(0, self.short - threshold) ** 2 * max(0.5, 2.0 / (entropy + 0.1))
        return penalty, threshold, phase


def test_worked_numbers():
    state, control = safe(safe_init(), 5.0, 0.4, 7.0)
    close(state.kl_short, 0.5, rtol=1e-6)
    close(control.threshold, 0.45, rtol=1e-6)
    close(control.penalty, 1e-3, rtol=1e-4)
    state, first = pid_step(pid_init(), 0.5)
    state, second = pid_step(state, 1.5)
    close([first, second], [0.0, 0.01764], atol=1e-7)


def rewards_of_a_training(steps=230):
    rng = np.random.default_rng(0)
    curve = np.concatenate([
        np.full(60, 0.2), np.linspace(0.2, 0.9, 60), np.full(110, 0.9)
    ])  # fmt: skip
    noise = np.where(np.arange(230) < 120, 0.05, 0.005)
    return (curve + noise * rng.normal(size=230))[:steps]


def test_a_whole_training_against_the_simulation():
    rng = np.random.default_rng(1)
    rewards = rewards_of_a_training()
    kls, entropies = rng.uniform(-0.2, 2.0, 230), rng.uniform(0.05, 8.0, 230)

    def one(state, x):
        state, control = safe_step(state, *x)
        return state, control

    xs = tuple(jnp.asarray(x, jnp.float32) for x in (kls, entropies, rewards))
    _, found = jax.jit(lambda: jax.lax.scan(one, safe_init(), xs))()
    simulation = Simulation()
    expected = [simulation.step(*x) for x in zip(kls, entropies, rewards, strict=True)]
    penalties, thresholds, phases = zip(*expected, strict=True)
    assert set(phases) == set(PHASES)
    assert [PHASES[i] for i in found.phase] == list(phases)
    close(found.threshold, thresholds, atol=1e-5)
    close(found.penalty, penalties, rtol=1e-3, atol=1e-6)


@for_each(("kl", "entropy"), [(5.0, 0.4), (9.0, 50.0), (1.0, 0.4), (-3.0, 0.4)])
def test_the_coefficient_is_the_slope_of_the_penalty(kl, entropy):
    penalty = lambda kl: safe_step(safe_init(), kl, entropy, 0.5)[1].penalty  # noqa: E731
    _, control = safe(safe_init(), kl, entropy, 0.5)
    close(control.coef, jax.grad(penalty)(kl), rtol=1e-5)
    assert (control.coef > 0) == (kl > 4.5)


def test_quiet_rewards_have_converged_only_if_they_are_high():
    step = jax.jit(lambda state, reward: safe_step(state, 0.1, 1.0, reward))
    for reward, phase in ((0.69, "plateau"), (0.71, "converged")):
        state = safe_init()
        for _ in range(50):
            state, control = step(state, reward)
        assert PHASES[control.phase] == phase


def test_the_gate_and_the_options():
    # The gate of entropy is at least a half.
    sure = safe(safe_init(), 5.0, 0.4, 0.0)[1].penalty
    unsure = safe(safe_init(), 5.0, 1e6, 0.0)[1].penalty
    close(unsure / sure, 0.5 / 4.0, rtol=1e-5)

    # Options reach the step.
    controller = safe_controller(base=0.2, low=0.0, high=0.2, scale=1.0, entropy_floor=1.0)
    rewards, context = batch(5.0)
    coef, _ = controller.update(rewards, controller.init(), **context)
    close(coef, 0.2 * (0.5 - 0.2) * 2.0, rtol=1e-5)

    # Step scale.
    close([step_scale(x) for x in (0.0, 0.5, 2.0, -1.0)], [1.0, 1.0, 0.25, 1.0])


def batch(kl, entropy=0.4, junk=0.0):
    mask = jnp.array([[[1, 1], [1, 0], [1, 1]]], bool)
    where = jnp.array([[True, True, False]])
    kept = mask & where[..., None]
    ref = jnp.full(mask.shape, -2.0)
    return jnp.array([[1.0, 0.0, junk]]), {
        "old_logp": jnp.where(kept, ref + kl, junk),
        "ref_logp": jnp.where(kept, ref, junk),
        "old_entropy": jnp.where(kept, entropy, junk),
        "mask": mask,
        "where": where,
    }


@for_each("junk", [0.0, np.nan, np.inf])
def test_the_transform_measures_the_batch(junk):
    controller = safe_controller()
    rewards, context = batch(5.0, junk=junk)
    coef, state = jax.jit(controller.update)(rewards, controller.init(), **context)
    expected, control = safe(safe_init(), 5.0, 0.4, 0.5)
    close(coef, control.coef, rtol=1e-5)
    jax.tree.map(lambda a, b: close(a, b, rtol=1e-5), state, expected)
    assert jax.tree.structure(state) == jax.tree.structure(controller.init())


def test_the_asymmetric_variant():
    # The asymmetric variant against plain numbers.
    window, rng = 4, np.random.default_rng(2)
    kls = rng.uniform(-0.5, 1.0, 12)
    state, step, seen = asymmetric_init(window=window), jax.jit(asymmetric_step), []
    for kl in kls:
        seen.append(kl)
        momentum = (kl - seen[-window]) / window if len(seen) >= window else 0.0
        penalty = 0.1 * max(0, kl - 0.3) ** 2 + 5 * max(0, momentum) ** 2
        slope = jax.grad(lambda x, s=state: asymmetric_step(s, x)[1].penalty)(jnp.float32(kl))
        state, control = step(state, kl)
        close(control.momentum, momentum, atol=1e-6)
        close(control.penalty, penalty, rtol=1e-4, atol=1e-7)
        close(control.coef, slope, rtol=1e-4, atol=1e-7)

    # A low or falling divergence costs nothing.
    state = asymmetric_init(window=2)
    for kl in (0.29, 0.2, -4.0):
        state, control = asymmetric_step(state, kl)
        assert control.penalty == 0 and control.coef == 0


@for_each("window", [1, 3])
def test_the_asymmetric_transform(window):
    controller = asymmetric_kl(window=window)
    rewards, context = batch(0.5)
    context.pop("old_entropy")
    coef, state = jax.jit(controller.update)(rewards, controller.init(), **context)
    close(coef, 2 * 0.1 * 0.2, rtol=1e-4)
    assert state.history.shape == (window,)


def of_nobody(rewards, context):
    """The same batch with no rollout, and with no token, that takes part."""
    for name in ("where", "mask"):
        yield rewards, context | {name: jnp.zeros_like(context[name])}


def test_a_batch_without_a_token_changes_nothing():
    # A batch without a token leaves safe as it was.
    controller = safe_controller()
    update = jax.jit(controller.update)
    first = controller.init()
    rewards, context = batch(5.0)
    _, second = update(rewards, first, **context)
    for before in (first, second):
        for nobody, empty in of_nobody(rewards, context):
            coef, state = update(nobody, before, **empty)
            jax.tree.map(equal, state, before)
            assert coef == 0

    # A batch without a token leaves the asymmetric variant as it was.
    controller = asymmetric_kl(window=2)
    state, coef = controller.init(), 0.0
    for kl in (None, 0.5, 0.9):
        if kl is not None:
            rewards, context = batch(kl)
            context.pop("old_entropy")
            coef, state = jax.jit(controller.update)(rewards, state, **context)
        rewards, context = batch(7.0)
        context.pop("old_entropy")
        for nobody, empty in of_nobody(rewards, context):
            again, same = jax.jit(controller.update)(nobody, state, **empty)
            jax.tree.map(equal, same, state)
            close(again, coef, rtol=1e-6)

    # Transforms compare by value.
    assert safe_controller() == safe_controller() != safe_controller(base=0.2)
    assert asymmetric_kl() == asymmetric_kl() != asymmetric_kl(window=3)
    assert hash(safe_controller()) == hash(safe_controller())
