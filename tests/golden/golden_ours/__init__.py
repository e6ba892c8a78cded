"""Our side of the entries of the golden data: functions of the inputs of a case.

Each module of this folder has a table ``TABLES``: by manifest, and then by entry.
"""

import importlib
import pkgutil
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from golden_data import Difference, Ours

from jaxrl_llm import advantages, aggregate, regularizers


def tables() -> dict[str, Mapping[str, Ours]]:
    """Our side of the entries of each manifest."""
    found = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        found |= importlib.import_module(module.name).TABLES
    return found


def graded(loss, x):
    """A loss of `x` with its gradient."""
    value, gradient = jax.value_and_grad(loss)(x)
    return {"loss": value, "gradient": gradient}


def spread(values, a):
    """Advantages as the peers give them: one a token, 0 where masked."""
    tokens = a["mask"] & a["where"][..., None]
    values = values if values.ndim == tokens.ndim else values[..., None]
    return jnp.where(tokens, values, 0.0)


def advantage(function, *names, **options):
    """A function of rewards over tokens; `names` are more inputs, in its order."""

    def run(a):
        values = function(a["rewards"], *(a[n] for n in names), where=a["where"], **options)
        return {"advantages": spread(values, a)}

    return run


def loss(surrogate, weights, *, by="advantages", weighted=False, token_loss=True, **options):
    """A surrogate under a weighting: its value, its gradient, the token losses with weights."""
    given = {"weight": "weight"} if weighted else {}

    def run(a):
        more = options | {name: a[entry] for name, entry in given.items()}
        weight = weights(a["mask"])

        def total(logp):
            each = surrogate(logp, a["old_logp"], a[by], a["mask"], **more)
            return aggregate.weighted_sum(each, weight), each * weight

        (value, each), gradient = jax.value_and_grad(total, has_aux=True)(a["logp"])
        outputs = {"loss": value, "gradient": gradient}
        return outputs | ({"token_loss": each} if token_loss and not weighted else {})

    return run


def aggregation(weights, **options):
    """A weighting applied to token advantages in the place of losses."""

    def run(a):
        weight = weights(a["mask"], **options)
        return {"loss": aggregate.weighted_sum(a["token_advantages"], weight), "gradient": weight}

    return run


def kl(estimator, **options):
    """An estimate of the divergence to the reference with its gradient, token by token."""

    def run(a):
        def total(logp):
            value = regularizers.kl_token(
                logp, a["ref_logp"], a["mask"], estimator=estimator, **options
            )
            return value.sum(), value

        (_, value), gradient = jax.value_and_grad(total, has_aux=True)(a["logp"])
        return {"kl": value, "gradient": gradient}

    return run


def entropy(a):
    value, back = jax.vjp(regularizers.entropy_from_logits, a["logits"])
    return {"entropy": value, "gradient": back(jnp.ones_like(value))[0]}


def replaced(reason, **cells):
    """A difference in a few cells: for each output a dict from index to our number.

    A number is a constant or a function of the peer's.
    """

    def expected(inputs, theirs):
        changed = {}
        for output, values in cells.items():
            changed[output] = np.array(theirs[output])
            for index, value in values.items():
                cell = changed[output][index]
                changed[output][index] = value(cell) if callable(value) else value
        return changed

    return Difference(reason, expected)


def empty_rows_count(reason):
    """Differences of a mean over sequences that counts the empty ones, which ours leaves out."""

    def expected(inputs, theirs):
        filled = inputs["mask"].any(-1)
        return {output: x * (filled.size / filled.sum()) for output, x in theirs.items()}

    return {case: Difference(reason, expected) for case in ("masked_row", "one_sequence")}


def where(reason, chosen, **outputs):
    """A difference in all the cells that `chosen(inputs)` selects: our number by output.

    A number is a constant or a function of the inputs and of the peer's outputs.
    """

    def expected(inputs, theirs):
        cells = chosen(inputs)
        return {
            output: np.where(
                cells, value(inputs, theirs) if callable(value) else value, theirs[output]
            )
            for output, value in outputs.items()
        }

    return Difference(reason, expected)


def far_from_reference(reason, **values):
    """The case of log ratios of 30, in which our estimators clamp the difference to 20."""
    return {
        "log_ratio_30": where(
            reason, lambda a: a["mask"] & (np.abs(a["logp"] - a["ref_logp"]) > 20), **values
        )
    }


def twenty(inputs, theirs):
    """The difference to the reference, clamped."""
    return np.clip(inputs["logp"] - inputs["ref_logp"], -20, 20)


def k3_of_twenty(inputs, theirs):
    d = np.float64(twenty(inputs, theirs))
    return np.expm1(-d) + d


def clamped_ratio(inputs, theirs):
    """Our numbers where a peer does not clamp a log ratio of 30: a ratio of e^20, no gradient."""
    d = np.where(inputs["mask"], inputs["logp"] - inputs["old_logp"], 0.0)
    gradient = np.where(np.abs(d) > 20, 0.0, theirs["gradient"])
    if "token_loss" not in theirs:
        # One ratio outweighs all the rest of a sum.
        return {"loss": theirs["loss"] * np.exp(-10.0), "gradient": gradient}
    token_loss = theirs["token_loss"]
    # Where the clip holds, the loss of a far ratio is that of the bound.
    free = (d > 20) & (np.abs(token_loss) > 1)
    token_loss = np.where(free, token_loss * np.exp(20 - np.where(free, d, 20)), token_loss)
    return {"loss": token_loss.sum(), "token_loss": token_loss, "gradient": gradient}


def gae(a, token_rewards=None, *, whiten=True):
    """Advantages and returns, without others the rewards at the ends of responses."""
    mask, options = a["mask"], {"gamma": 0.97, "lam": 0.9}
    if token_rewards is None:
        token_rewards = advantages.terminal_rewards(a["rewards"], mask)
    plain = advantages.gae(token_rewards, a["values"], mask, **options)
    return {
        "advantages": advantages.whiten(plain, mask) if whiten else plain,
        "returns": advantages.gae_returns(token_rewards, a["values"], mask, **options),
    }


def plain_gae(a):
    """Of slime and rlax, which leave the advantages as they are."""
    return gae(a, whiten=False)


def far_from_old(peer):
    reason = f"{peer} does not clamp the log ratio here, we clamp it to +-20"
    return {"log_ratio_30": Difference(reason, clamped_ratio)}
