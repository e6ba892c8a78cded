"""Masked-diffusion models so small that their likelihood is a sum over all orders, in float64."""

import itertools
import math
from typing import NamedTuple

import numpy as np


class Exact(NamedTuple):
    """What a tiny model says of one response of L tokens.

    Attributes:
      masks: ``[M, L]`` bool, all masks that hide something.
      logp: ``[M, L]``, of each token under each mask.
      log_likelihood: Of the response, over all orders of unmasking one token at a time.
      elbo: The mean over the orders of their log-probabilities.
    """

    masks: np.ndarray
    logp: np.ndarray
    log_likelihood: float
    elbo: float


class Denoiser(NamedTuple):
    """Log-probabilities ``[(V + 1)^L, L, V]`` by what the model sees, V for a masked token."""

    table: np.ndarray
    vocabulary: int
    length: int

    def __call__(self, tokens: np.ndarray, masks: np.ndarray) -> np.ndarray:
        """``[..., L]`` of the tokens ``[L]`` under masks ``[..., L]``."""
        seen = np.where(masks, self.vocabulary, tokens)
        row = seen @ (self.vocabulary + 1) ** np.arange(self.length)
        return self.table[row[..., None], np.arange(self.length), tokens]

    def exact(self, tokens: np.ndarray) -> Exact:
        """What enumeration says of a response ``[L]``."""
        masks = np.array(list(itertools.product([False, True], repeat=self.length)))[1:]
        logp = self(tokens, masks)
        of = {tuple(mask): row for mask, row in zip(masks, logp, strict=True)}
        orders = []
        for order in itertools.permutations(range(self.length)):
            hidden, total = np.ones(self.length, bool), 0.0
            for i in order:
                total += of[tuple(hidden)][i]
                hidden[i] = False
            orders.append(total)
        likelihood = np.logaddexp.reduce(orders) - math.lgamma(self.length + 1)
        return Exact(masks, logp, float(likelihood), float(np.mean(orders)))


def denoiser(seed: int, *, vocabulary: int = 2, length: int = 4, spread: float = 1.0) -> Denoiser:
    """Log-probabilities of each token that have nothing to do with each other."""
    rng = np.random.default_rng(seed)
    logits = spread * rng.normal(size=((vocabulary + 1) ** length, length, vocabulary))
    return Denoiser(_normalized(logits), vocabulary, length)


def consistent(joint: np.ndarray) -> Denoiser:
    """The conditionals of a distribution: all orders of unmasking agree.

    Args:
      joint: ``[V] * L``, logits of the responses.
    """
    vocabulary, length = joint.shape[0], joint.ndim
    rows = np.arange((vocabulary + 1) ** length)[:, None]
    seen = rows // (vocabulary + 1) ** np.arange(length) % (vocabulary + 1)
    every = np.array(list(np.ndindex(*joint.shape)))
    fits = ((seen[:, None] == vocabulary) | (seen[:, None] == every)).all(-1)
    chances = np.exp(joint.reshape(-1) - joint.max())
    value = every[:, :, None] == np.arange(vocabulary)
    table = np.einsum("rs,siv->riv", fits * chances, value.astype(float), optimize=True)
    with np.errstate(divide="ignore"):
        return Denoiser(_normalized(np.log(table)), vocabulary, length)


def _normalized(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def bernoulli(masks: np.ndarray, t: float | np.ndarray) -> np.ndarray:
    """The chance of each mask when tokens are masked with probability t."""
    return np.prod(np.where(masks, t, 1.0 - t), axis=-1)
