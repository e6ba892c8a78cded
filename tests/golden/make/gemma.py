"""Writes estimators/gemma.*: the losses of preferences of google-deepmind/gemma.

python tests/golden/make/gemma.py CHECKOUT COMMIT      # with jax besides torch

They take logits: here those of two tokens, of which the target has the log-probability of the
inputs.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from paper_code import peer, take
from preference_cases import pair_cases, response_cases

FOLDER = "gemma/gm/losses"


def released(root, file, name):
    """The class, without the framework that it is configured by."""
    stand_ins = {
        "kd": SimpleNamespace(losses=SimpleNamespace(Loss=object)),
        "kontext": SimpleNamespace(REQUIRED=None),
        "typechecked": lambda function: function,
    }
    path = root / FOLDER / file
    return take(path, name, "_get_logprobs_for_target", jax=jax, jnp=jnp, **stand_ins)[0]


def logits(logp):
    return jnp.stack([logp, jnp.log(-jnp.expm1(logp))], axis=-1)


def compute(loss, arrange, last=()):
    """The loss of each pair or response, and the gradient of their sum in the log-probabilities.

    `arrange` puts the axes of an array of the inputs in the order of the loss; tokens and masks
    have the axes `last` as well.
    """

    def run(case, a):
        mask = arrange(jnp.asarray(a["mask"]))
        mask = mask.reshape(*mask.shape, *last)

        def total(tokens):
            value = loss.get_values(
                tokens=jnp.zeros(mask.shape, jnp.int32),
                sequence_mask=mask,
                policy_logits=logits(arrange(tokens)),
                anchor_logits=logits(arrange(jnp.asarray(a["ref_logp"]))),
            )[..., 0]
            return value.sum(), value

        (_, value), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(a["logp"]))
        return {"loss": np.asarray(value), "gradient": np.asarray(gradient)}

    return run


@peer("gemma", "gemma", "google-deepmind/gemma")
def main(root, writer):
    writer.inputs("pairs", pair_cases())
    writer.inputs("responses", response_cases())
    for name, options in (("dpo", {}), ("dpo_smoothed", {"tau": 0.3, "label_smoothing": 0.1})):
        loss = released(root, "_dpo.py", "DpoLoss")()
        vars(loss).update(options)
        writer.add(name, compute(loss, lambda x: x.swapaxes(0, 1)))
    for name, options in (("npo", {}), ("npo_weaker", {"tau": 0.3})):
        loss = released(root, "_npo.py", "NpoLoss")()
        vars(loss).update(options)
        writer.add(name, compute(loss, lambda x: x, last=(1,)))
