"""Our loss of dynamic fine-tuning against ms-swift's own code."""

import golden_data
import jax
import jax.numpy as jnp
import pytest
from golden_data import Ours

from jaxrl_llm import surrogates

SWIFT = golden_data.load("swift_losses")


def dft(a):
    targets, ones = a["targets"], jnp.ones(a["targets"].shape)

    def total(logits):
        logp = jax.nn.log_softmax(logits.astype(jnp.float32))
        logp = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
        return surrogates.dft(logp, None, ones, ones > 0).mean()

    value, gradient = jax.value_and_grad(total)(a["logits"])
    return {"loss": value, "gradient": gradient}


TABLE = {"dft": Ours(dft)}


@pytest.mark.parametrize(("name", "case"), SWIFT.cases())
def test_numbers_of_swift(name, case):
    golden_data.check(SWIFT, TABLE, name, case)


def test_every_entry_is_compared():
    golden_data.check_complete(SWIFT, TABLE)
