"""The sequence ratio under-weights the tokens of long answers; times the length, it does not.

First a group of answers of 1 to 64 tokens with advantages of 1 and -1, by the gradient that the
loss has in the log-probability of each token: on policy, and after a move that changes each token's
log-ratio by a normal error of 0.005. The number is the mean gradient of a token of the shortest
answers over that of the longest, with `luspo`, and it must stay below 1.05; with `gspo` it is above
10 if there is anything to repair.

Then by enumeration: a policy over two words and an end, at most six tokens, policies and rewards
drawn at random, advantages of the exact value. The number is the angle between the expected
gradient of the loss and the policy gradient; `luspo` must be within 0.1 degrees, and `gspo` is
farther off than 5 if the length matters to the direction of the step.

Off policy the mean log-ratio of a short answer varies more, so the clip takes more of its gradient:
there `luspo` is no longer without a length bias, in favor of long answers.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _sequences, harness

PAPER = "2602.05261"
LENGTHS = (1, 2, 4, 8, 16, 32, 64)
ERROR = 0.005
WORDS, LONGEST = 3, 6
METHODS = {"luspo": jr.surrogates.luspo, "gspo": jr.surrogates.gspo}


def token_gradients(log_ratio, name: str):
    """Mean size of the gradient in a token's log-probability, ``[answers, lengths]``."""
    mask = jnp.arange(LENGTHS[-1]) < jnp.array(LENGTHS)[:, None]
    mask = jnp.broadcast_to(mask, log_ratio.shape)
    sign = jnp.where(jnp.arange(len(log_ratio)) % 2, 1.0, -1.0)[:, None]
    sign = jnp.broadcast_to(sign, mask.shape[:-1])

    def loss(log_ratio):
        tokens = METHODS[name](log_ratio, jnp.zeros_like(log_ratio), sign, mask)
        return jr.aggregate.weighted_sum(tokens, jr.aggregate.sequence_mean(mask))

    size = jnp.sum(jnp.abs(jax.grad(loss)(log_ratio)), axis=-1)
    return size / jnp.array(LENGTHS) * mask[..., 0].size


def angles(key):
    """Degrees from the policy gradient to the expected gradient of each loss, for one draw."""
    first, second = jax.random.split(key)
    tokens, mask = _sequences.ending(WORDS, LONGEST)
    logits = jax.random.normal(first, (WORDS + 1, WORDS))
    rewards = jax.random.uniform(second, (len(tokens),))

    def logp(logits):
        return _sequences.logp(logits, tokens, mask)

    chance = jnp.exp(logp(logits).sum(-1))
    advantages = rewards - jnp.sum(chance * rewards)

    def loss(logits, method):
        # The weighting by sequence_mean, with the chance of an answer in place of one over their
        # number.
        each = method(logp(logits), None, advantages, mask)
        return jnp.sum(chance * jr.core.masking.masked_mean(each, mask, axis=-1))

    def value(logits):
        return jnp.sum(jnp.exp(logp(logits).sum(-1)) * rewards)

    true = jax.grad(value)(logits)
    return {
        name: _sequences.degrees(-jax.grad(loss)(logits, method), true)
        for name, method in METHODS.items()
    }


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Tokens by length, then directions."""
    first, second = jax.random.split(jax.random.key(seed))
    answers, draws = (1000, 20) if quick else (10000, 500)
    error = ERROR * jax.random.normal(first, (answers, len(LENGTHS), LENGTHS[-1]))
    sizes = jax.jit(token_gradients, static_argnames="name")
    on = {name: np.asarray(sizes(jnp.zeros_like(error[:2]), name=name)) for name in METHODS}
    off = {name: np.asarray(sizes(error, name=name), np.float64) for name in METHODS}
    angle = jax.jit(jax.vmap(angles))(jax.random.split(second, draws))
    what = "gradient of a token of 1 over that of a token of 64"
    ratio = {
        name: harness.exact(found.mean(0)[0] / found.mean(0)[-1], "exact")
        for name, found in on.items()
    }
    turned = {
        name: harness.mean(values, "draws, each exact by enumeration")
        for name, values in angle.items()
    }
    off_by = "angle of {} to the policy gradient, degrees, mean of draws"
    measures = [
        harness.Measure(f"{what}, luspo, on policy", ratio["luspo"], "below", 1.05),
        harness.Measure(f"{what}, gspo, on policy", ratio["gspo"], "above", 10.0),
        harness.Measure(off_by.format("luspo"), turned["luspo"], "below", 0.1),
        harness.Measure(off_by.format("gspo"), turned["gspo"], "above", 5.0),
    ]
    estimate = harness.ratio(off["luspo"][:, 0], off["luspo"][:, -1], what="answers")
    measures.append(harness.Measure(f"{what}, luspo, off policy", estimate, "above", 0.95))
    facts = {f"{what}, gspo, off policy": off["gspo"][:, 0].mean() / off["gspo"][:, -1].mean()}
    for name in METHODS:
        facts[f"largest angle of {name}, degrees"] = np.max(angle[name])
        for column, length in ((0, 1), (-1, 64)):
            kept = off[name][:, column].mean() / on[name][:, column].mean()
            facts[f"share of the gradient left by the clip, {name}, {length} tokens"] = kept
    series = []
    for label, found in (("on policy", on), ("off policy", off)):
        for name, value in found.items():
            shown = value.mean(0) / on[name].mean(0)[0]
            series.append(harness.Series(f"{name}, {label}", LENGTHS, shown))
    label = "gradient of a token over that of one token on policy"
    return harness.Claim(
        measures, harness.Plot("tokens of the answer", label, series, log="xy"), facts
    )
