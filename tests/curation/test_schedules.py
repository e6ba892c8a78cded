"""Numbers that depend on the step, and the controller around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.curation import (
    icpo_bonus,
    linear_schedule,
    scheduled,
    sqrt_lr,
    training_progress,
)


def test_linear_schedule_and_its_ends():
    p = jnp.array([-1.0, 0.0, 0.25, 1.0, 2.0])
    np.testing.assert_allclose(linear_schedule(p, start=4.0, end=8.0), [4, 4, 5, 8, 8])


def test_progress():
    np.testing.assert_allclose(
        training_progress(jnp.array([0, 5, 10, 99]), steps=10), [0, 0.5, 1, 1]
    )


def test_icpo_bonus_fades():
    steps = jnp.array([0, 200, 400, 1000])
    np.testing.assert_array_equal(icpo_bonus(steps), [2, 1.5, 1, 1])
    np.testing.assert_array_equal(icpo_bonus(steps, beta=0.0), [1, 1, 1, 1])
    np.testing.assert_allclose(icpo_bonus(50, beta=0.5, anneal=100), 1.25)


def test_a_schedule_as_a_controller_counts_its_steps():
    clock = scheduled(icpo_bonus, anneal=2)
    state, values = clock.init(), []
    update = jax.jit(clock.update)
    for _ in range(4):
        value, state = update(jnp.zeros((2, 3)), state)
        assert value.shape == () and value.dtype == jnp.float32
        values.append(float(value))
    assert values == [2.0, 1.5, 1.0, 1.0]
    assert clock == scheduled(icpo_bonus, anneal=2) != scheduled(icpo_bonus, anneal=3)


def test_learning_rate_of_another_batch():
    assert sqrt_lr(1e-6, old_size=16, new_size=64) == pytest.approx(2e-6)
    assert sqrt_lr(1e-6, old_size=16, new_size=16) == 1e-6
