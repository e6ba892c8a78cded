"""Minibatches of one batch: advantages of the whole, weights of the part, as verl trains them."""

import golden_data
import jax
import jax.numpy as jnp
import pytest
from golden_data import Ours

from jaxrl_llm import advantages, aggregate, surrogates

VERL = golden_data.load("verl_minibatch")


def minibatches(a):
    """Two minibatches of whole groups, in the order of the case."""
    values = advantages.grpo(a["rewards"], where=a["where"])
    losses, gradients = [], []
    for prompts in a["order"].reshape(2, -1):
        logp, old_logp, mask, rows = (
            x[prompts] for x in (a["logp"], a["old_logp"], a["mask"], values)
        )
        weights = aggregate.token_mean(mask)

        def loss(logp, old_logp=old_logp, rows=rows, mask=mask, weights=weights):
            each = surrogates.ppo_clip(logp, old_logp, rows, mask, eps_low=0.2, eps_high=0.2)
            return aggregate.weighted_sum(each, weights)

        value, gradient = jax.value_and_grad(loss)(logp)
        losses.append(value)
        gradients.append(gradient)
    return {
        "advantages": jnp.where(a["mask"], values[..., None], 0.0),
        "loss": jnp.stack(losses),
        "gradient": jnp.stack(gradients),
    }


MINIBATCHES = {"grpo_token_mean": Ours(minibatches)}


def test_every_entry_of_the_data_is_here():
    golden_data.check_complete(VERL, MINIBATCHES)


@pytest.mark.parametrize(("name", "case"), VERL.cases())
def test_minibatches(name, case):
    golden_data.check(VERL, MINIBATCHES, name, case)


@pytest.mark.parametrize("case", VERL.entries["grpo_token_mean"]["cases"])
def test_the_two_minibatches_differ_in_tokens(case):
    """Else a weighting by the tokens of the whole batch would give the same gradients."""
    a = VERL.inputs["minibatch"][case]
    first, second = a["mask"][a["order"]].reshape(2, -1).sum(-1)
    assert first != second
