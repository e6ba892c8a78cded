"""Our loss of FIPO against the authors' own code."""

import jax.numpy as jnp
import numpy as np
from golden_data import Difference, Ours

from golden_ours import loss
from jaxrl_llm import surrogates


def total(mask):
    """The script sums the losses of tokens."""
    return mask.astype(jnp.float32)


def weights(a, half_life, w_min, dual_clip, safe_ratio, skip_masked):
    """In float64, with distances over all tokens or over the unmasked ones."""
    mask, d = a["mask"], np.clip(np.float64(a["logp"]) - a["old_logp"], -20, 20)
    counted = np.where(mask & (d <= np.log(dual_clip)), d, 0.0)
    future, last = np.zeros(mask.shape), np.zeros(mask.shape[:-1])
    for t in reversed(range(mask.shape[-1])):
        decay = np.where(mask[..., t] | (not skip_masked), 2 ** (-1 / half_life), 1.0)
        future[..., t] = last = decay * last + counted[..., t]
    f = np.clip(np.exp(future), w_min, 1.2)
    held_back = (a["advantages"][..., None] < 0) & (np.exp(d) > safe_ratio)
    return np.where(held_back, np.clip(f, 0.8, 1.0), f)


TIGHT = {"half_life": 2.0, "w_min": 0.8, "dual_clip": 1.2, "safe_ratio": 1.1}


def without_holes(a, theirs):
    change = weights(a, **TIGHT, skip_masked=True) / weights(a, **TIGHT, skip_masked=False)
    tokens, gradient = theirs["token_loss"] * change, theirs["gradient"] * change
    return {"token_loss": tokens, "gradient": gradient, "loss": tokens.sum()}


# With the settings of the script the difference is too small to see.
HOLES = Difference(
    "In the distances of the authors' code masked tokens count, in ours they do not", without_holes
)
TABLE = {
    "script": Ours(loss(surrogates.fipo, total)),
    "tight": Ours(loss(surrogates.fipo, total, **TIGHT), {"holes": HOLES}),
}
TABLES = {"fipo": TABLE}
