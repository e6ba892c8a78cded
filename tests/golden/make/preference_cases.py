"""Inputs of the golden data of preferences: pairs of responses, and responses with labels."""

import numpy as np
import torch
from torch_arrays import array

PAIRS, TOKENS, HISTORY = 5, 6, 2
LENGTHS = np.array([[6, 3, 5, 1, 4], [2, 6, 5, 4, 1]])


def _float32(arrays):
    return {k: np.asarray(x, np.float32) if x.dtype == np.float64 else x for k, x in arrays.items()}


def _mask(lengths):
    return np.arange(TOKENS) < np.asarray(lengths)[..., None]


def pair_cases():
    """Log-probabilities of tokens ``[2, pair, token]``, the chosen responses first."""

    def case(rng, lengths=LENGTHS, spread=0.35):
        ref = -rng.gamma(2.0, 0.5, (2, PAIRS, TOKENS)) - 0.05
        logp = np.minimum(ref + spread * rng.normal(size=ref.shape), -0.02)
        return _float32(
            {
                "logp": logp if spread else ref,
                "ref_logp": ref,
                "mask": _mask(lengths),
                "history_logp": logp.sum(-1)[..., None] + rng.normal(size=(2, PAIRS, HISTORY)),
                "win_rates": rng.uniform(0.0, 1.0, (2, PAIRS)),
                "policy_chosen": rng.random(PAIRS) < 0.5,
            }
        )

    rngs = iter(np.random.default_rng((7, i)) for i in range(100))
    even = LENGTHS.copy()
    even[0] = 4
    cases = {
        "ragged": case(next(rngs)),
        "reference": case(next(rngs), spread=0.0),
        "even": case(next(rngs), even),
        "apart": case(next(rngs), spread=4.0),
    }
    cases["reference"]["policy_chosen"][:2] = [True, False]
    return cases


def response_cases():
    """Log-probabilities of tokens ``[response, token]``, of mismatched responses too."""

    def case(rng, desirable=None, shift=0.0):
        count = 2 * PAIRS
        ref = -rng.gamma(2.0, 0.5, (count, TOKENS)) - 0.05
        kl_ref = -rng.gamma(2.0, 0.5, (count, TOKENS)) - 0.05
        some = rng.random(count) < 0.5
        some[:2] = [True, False]
        return _float32(
            {
                "logp": np.minimum(ref + 0.5 * rng.normal(size=ref.shape), -0.02),
                "ref_logp": ref,
                "kl_logp": kl_ref + 0.5 * rng.normal(size=ref.shape) + shift,
                "kl_ref_logp": kl_ref,
                "mask": _mask(LENGTHS.reshape(-1)),
                "desirable": some if desirable is None else np.full(count, desirable),
                "win_rate": rng.uniform(0.0, 1.0, count),
            }
        )

    rngs = iter(np.random.default_rng((8, i)) for i in range(100))
    return {
        "both": case(next(rngs), shift=0.3),
        "below": case(next(rngs), shift=-0.6),
        "good": case(next(rngs), desirable=True, shift=0.3),
        "bad": case(next(rngs), desirable=False, shift=0.3),
    }


def pair_losses(losses):
    """A computation of an entry: `losses(sums, reference sums, arrays)` one a pair, and gradients.

    The sums are `[2, pair]`, over the tokens; the gradient is that of the sum in the tokens.
    """

    def compute(case, a):
        logp = torch.from_numpy(a["logp"]).requires_grad_()
        mask = torch.from_numpy(a["mask"])
        ref = (torch.from_numpy(a["ref_logp"]) * mask).sum(-1)
        value = losses((logp * mask).sum(-1), ref, {k: torch.from_numpy(x) for k, x in a.items()})
        (gradient,) = torch.autograd.grad(value.sum(), [logp])
        return {"loss": array(value), "gradient": array(gradient)}

    return compute
