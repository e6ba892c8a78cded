"""Density ratios of prompts, and the runs that weigh bad responses by them."""

import compiled_curation as cur
import numpy as np
import pytest
from cheap import close

from jaxrl_llm.data import Prompt, PromptSet, with_density


def test_density():
    # Ratios are those of the penalized classifier.
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.random(40) < 0.3
    ratio = np.float64(cur.density_ratios(x, y, low=1e-6, high=1e6))
    z = np.log(ratio)
    # The parameters, read back from the log odds, are where the gradient is 0.
    design = np.concatenate([x, np.ones((40, 1))], axis=1)
    theta = np.linalg.lstsq(design, z, rcond=None)[0]
    close(design @ theta, z, atol=1e-4)
    counts = np.where(y, 40 / (2 * y.sum()), 40 / (2 * (~y).sum()))
    gradient = design.T @ (counts * (1 / (1 + np.exp(-z)) - y)) + theta * [1, 1, 1, 0]
    close(gradient, 0, atol=1e-3)
    bounded = cur.density_ratios(x, y, low=0.9, high=1.1)
    close(bounded, np.clip(ratio, 0.9, 1.1), rtol=1e-5)

    # Prompts of one class alone count less or more.
    one_hot = np.eye(3)[[0] * 10 + [1] * 10 + [2] * 10]
    labels = np.array([True] * 10 + [True, False] * 5 + [False] * 10)
    good, both, bad = cur.density_ratios(one_hot, labels)[[0, 10, 20]]
    assert good > 2 and both == pytest.approx(1, abs=1e-4) and bad == 0.5
    with pytest.raises(ValueError, match="with rows of both classes"):
        cur.density_ratios(one_hot, np.ones(30, bool))
    with pytest.raises(ValueError, match=r"finite \[N, D\] and desirable \[N\]"):
        cur.density_ratios(one_hot, labels[:3])
    with pytest.raises(ValueError, match="low must be at most high; got 2 and 1"):
        cur.density_ratios(one_hot, labels, low=2.0, high=1.0)
    with pytest.raises(ValueError, match="'label' of prompt 'x' must be true or false; got None"):
        with_density(PromptSet([Prompt("x")]))
