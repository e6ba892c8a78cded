"""Options and arrays that cannot be meant raise one sentence that names function and argument."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, aggregate, curation, regularizers

REWARDS, MASK = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
LOGP = -REWARDS
CALLS = {
    "grpo: eps": lambda x: advantages.grpo(REWARDS, eps=x),
    "whiten: eps": lambda x: advantages.whiten(REWARDS, MASK, eps=x),
    "clip: bound": lambda x: advantages.clip(REWARDS, bound=x),
    "kl_to_reference: coef": lambda x: regularizers.kl_to_reference(LOGP, LOGP, MASK, coef=x),
    "entropy_bonus: coef": lambda x: regularizers.entropy_bonus(REWARDS, MASK, coef=x),
    "fixed_length: length": lambda x: aggregate.fixed_length(MASK, length=x),
    "sequence_sum_norm: length": lambda x: aggregate.sequence_sum_norm(MASK, length=x),
}
ARRAYS = {
    "grpo: rewards": lambda x: advantages.grpo(x),
    "whiten: x": lambda x: advantages.whiten(x, MASK),
    "gae: token_rewards": lambda x: advantages.gae(x, REWARDS, MASK),
    "kl_token: logp": lambda x: regularizers.kl_token(x, LOGP, MASK),
    "token_mean: mask": aggregate.token_mean,
    "informative_groups: rewards": curation.informative_groups,
}


@pytest.mark.parametrize(
    ("value", "error"),
    [(True, TypeError), (1e30, ValueError), (float("inf"), ValueError), ("1", TypeError)],
)
@pytest.mark.parametrize("name", CALLS)
def test_options(name, value, error):
    with pytest.raises(error, match=f"^{name} must "):
        CALLS[name](value)


@pytest.mark.parametrize("dtype", [object, str])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_without_numbers(name, dtype):
    with pytest.raises(TypeError, match=f"^{name} must hold numbers; got an array of"):
        ARRAYS[name](np.ones((2, 3)).astype(dtype))
