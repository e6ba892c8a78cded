"""Numbers that depend on the step, and the controller around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal
from compiled_curation import icpo_bonus, linear_schedule, scheduled, sqrt_lr, warmup_cosine

from jaxrl_llm.curation import training_progress


def test_schedules():
    # Linear schedule and its ends.
    p = jnp.array([-1.0, 0.0, 0.25, 1.0, 2.0])
    close(linear_schedule(p, start=4.0, end=8.0), [4, 4, 5, 8, 8])

    # Progress.
    close(training_progress(jnp.array([0, 5, 10, 99]), steps=10), [0, 0.5, 1, 1])

    # Icpo bonus fades.
    steps = jnp.array([0, 200, 400, 1000])
    equal(icpo_bonus(steps), [2, 1.5, 1, 1])
    equal(icpo_bonus(steps, beta=0.0), [1, 1, 1, 1])
    close(icpo_bonus(50, beta=0.5, anneal=100), 1.25)

    # A share that rises and falls.
    steps = jnp.array([0, 5, 10, 14, 18, 26, 99])
    found = warmup_cosine(steps, peak=0.8, valley=0.2, warmup=10, decay=16)
    middle = 0.2 + 0.6 * (1 + np.cos(np.pi / 4)) / 2
    close(found, [0, 0.4, 0.8, middle, 0.5, 0.2, 0.2], rtol=1e-6)
    down = warmup_cosine(jnp.arange(4), peak=0.9, valley=0.1, warmup=0, decay=2)
    close(down, [0.9, 0.5, 0.1, 0.1], rtol=1e-6)
    up = warmup_cosine(jnp.arange(4), peak=0.5, valley=0.25, warmup=2, decay=0)
    close(up, [0, 0.25, 0.25, 0.25], rtol=1e-6)
    level = warmup_cosine(jnp.arange(3), peak=0.1, valley=0.1, warmup=0, decay=0)
    close(level, [0.1] * 3, rtol=1e-6)

    # A schedule as a controller counts its steps.
    clock = scheduled(icpo_bonus, anneal=2)
    state, values = clock.init(), []
    update = jax.jit(clock.update)
    for _ in range(4):
        value, state = update(jnp.zeros((2, 3)), state)
        assert value.shape == () and value.dtype == jnp.float32
        values.append(float(value))
    assert values == [2.0, 1.5, 1.0, 1.0]
    assert clock == scheduled(icpo_bonus, anneal=2) != scheduled(icpo_bonus, anneal=3)

    # Learning rate of another batch.
    assert sqrt_lr(1e-6, old_size=16, new_size=64) == pytest.approx(2e-6)
    assert sqrt_lr(1e-6, old_size=16, new_size=16) == 1e-6
