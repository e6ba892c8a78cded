"""Our overlong penalty, one-token loss and moving reference against TRL's."""

import jax.numpy as jnp
from golden_data import Ours

from golden_ours import graded
from jaxrl_llm import regularizers, rewards, surrogates


def overlong(a):
    lengths = a["mask"].sum(-1)
    return {"penalty": rewards.overlong_penalty(lengths, max_length=5, buffer=3)}


def one_token(a):
    def total(logits):
        return surrogates.otr_exact(logits, a["targets"], beta=0.0, tau=1.0).mean()

    return graded(total, a["logits"])


def moving(a):
    reference = {"w": a["ref_logp"]}
    for name in ("logp", "old_logp", "behavior_logp"):
        reference = regularizers.ema_reference(reference, {"w": a[name]}, rate=0.6)
    return {"reference": jnp.where(a["mask"], reference["w"], 0.0)}


TABLE = {
    "overlong": Ours(overlong),
    "dft": Ours(one_token),
    "moving_reference": Ours(moving),
}
TABLES = {"trl_pieces": TABLE}
