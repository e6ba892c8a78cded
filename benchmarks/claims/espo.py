"""One ratio of bounds a response trains better than a ratio a token where a batch trains often

Tabular denoisers of four tokens out of three, with rewards of responses from 0 to 1 of which few
are near 1, learn from groups of 16 for 60 steps, each batch in four updates with the masks of the
first, one sample of masks with complements: two forwards. The ratio is that of the lower bounds of
a response, to the power of one over its length (`espo`), or that of each token's part of the bound;
both are clipped at 0.2. Each learns at the rate of a grid that is best for it on other seeds, and
that is not at its end. With responses that are right or wrong, as this claim was measured first,
the best rates were the greatest of the grid, and the claim held there. The first number is the
exact mean reward at the end, less that with a ratio a token, paired by seed; 0 or below refutes the
claim. The second is the error of the logarithm of a ratio, root mean square, against the exact one:
of the response over of the product of a token's ratios of one update, the same bound once as a sum
and once as L times a token's part, below 1 where the sum is steadier.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.claims import _denoisers, harness
from jaxrl_llm import diffusion, surrogates

PAPER = "2512.03759"
RATES = tuple(4.0**power for power in range(1, 9))
STEP = 0.3  # of the logits between two policies whose ratio is compared


def bounds(table, tokens, key):
    """Of each token ``[B, L]``."""
    valid = jnp.ones(tokens.shape, bool)
    masked, _ = _denoisers.exact_masks(key, valid, 1, least=0)
    masked = diffusion.complementary(masked, valid)
    t = diffusion.count_levels(masked, valid, least=0)
    return diffusion.elbo(_denoisers.log_probs(table, tokens, masked), masked, t)


def loss_with(surrogate):
    def loss(table, old, tokens, A, key):
        now, before = (bounds(x, tokens, key) for x in (table, old))
        valid = jnp.ones(tokens.shape, bool)
        return surrogate(now, before, A, valid, eps_low=0.2, eps_high=0.2).mean()

    return loss


@jax.jit
def errors(table, moved, key):
    """Root mean square error of the log ratio of a response: by its bound, and by one token's."""
    one, two = jax.random.split(key)
    tokens = jnp.repeat(_denoisers.draw(table, one, 8), 500, axis=0)
    now, old = (bounds(x, tokens, two) for x in (moved, table))
    exact = _denoisers.log_likelihood(moved, tokens) - _denoisers.log_likelihood(table, tokens)
    of_response, of_token = (now - old).sum(-1), _denoisers.L * (now - old)[..., 0]
    return jnp.sqrt(jnp.stack([jnp.mean((x - exact) ** 2) for x in (of_response, of_token)]))


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Training, then the ratio's error."""
    losses = {
        "ratio of a response": loss_with(surrogates.gspo),
        "ratio of a token": loss_with(surrogates.ppo_clip),
    }
    rates = RATES[3:4] if quick else RATES
    curves, chosen = _denoisers.best(losses, rates, seed=seed, quick=quick, updates=4)
    ours, tokens = curves.values()
    what = "mean reward less that with a ratio a token"
    measures = [
        harness.Measure(
            f"{what}, at the end", harness.mean(ours[:, -1] - tokens[:, -1], "seeds"), "above", 0.0
        ),
        harness.Measure(
            f"{what}, mean of all steps",
            harness.mean((ours - tokens).mean(-1), "seeds"),
            "above",
            0.0,
        ),
    ]
    count = 8 if quick else 40
    base = _denoisers.tables("random", seed=seed, count=count)
    other = _denoisers.tables("random", seed=seed + 1, count=count)
    keys = jax.random.split(jax.random.key(seed), count)
    found = np.asarray(
        jax.lax.map(lambda x: errors(x[0], x[1], x[2]), (base, base + STEP * other, keys))
    )
    measures.append(
        harness.Measure(
            "error of a log ratio, of a response over of L times a token's",
            _denoisers.geometric(found[:, 0], found[:, 1]),
            "below",
            1.0,
        )
    )
    facts = {f"mean reward at the end, {name}": x[:, -1].mean() for name, x in curves.items()}
    facts |= {f"learning rate, {name}": rate for name, rate in chosen.items()}
    return harness.Claim(measures, _denoisers.curve_plot(curves), facts)
