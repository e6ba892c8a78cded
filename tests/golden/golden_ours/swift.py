"""Our losses and advantages of papers against ms-swift's own code."""

import jax
import jax.numpy as jnp
from golden_data import Ours

from golden_ours import graded, loss
from jaxrl_llm import advantages, aggregate, surrogates


def dft(a):
    targets, ones = a["targets"], jnp.ones(a["targets"].shape)

    def total(logits):
        logp = jax.nn.log_softmax(logits.astype(jnp.float32))
        logp = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
        return surrogates.dft(logp, None, ones, ones > 0).mean()

    return graded(total, a["logits"])


def rlsd(**options):
    def run(a):
        found = advantages.rlsd(
            a["advantages"],
            a["mask"],
            old_logp=a["old_logp"],
            teacher_token_logp=a["logp"],
            has_teacher=None,
            **options,
        )
        return {"advantages": found}

    return Ours(run)


def total(mask):
    """The script sums the losses of tokens."""
    return mask.astype(jnp.float32)


FIPO = {"safe_ratio": 4.0, "max_clipped": None}
TABLE = {
    "dft": Ours(dft),
    "rlsd": rlsd(),
    "rlsd_negative": rlsd(lam=1.0, eps=0.4, negative_only=True),
    "fipo": Ours(loss(surrogates.fipo, total, token_loss=False, **FIPO)),
    "real": Ours(loss(surrogates.real, aggregate.group_mean, token_loss=False)),
}
TABLES = {"swift_losses": TABLE}
