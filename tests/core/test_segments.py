"""Labels of tuples of ids, and reductions over them, against a dictionary."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.segments import dense_labels, over_label


def test_labels_are_equal_where_all_ids_are():
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 4, (2, 5, 30))
    a[0, :3] = 2**31 - 1, -(2**31), 2**31 - 1
    where = rng.random((5, 30)) < 0.7
    labels = np.asarray(jax.jit(dense_labels)((a, b), where))
    for row in range(5):
        keys = [(a[row, i], b[row, i]) for i in range(30) if where[row, i]]
        order = {key: n for n, key in enumerate(sorted(set(keys)))}
        assert labels[row, where[row]].tolist() == [order[key] for key in keys]
    assert (labels[~where] == -1).all()


def test_reductions_over_labels():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 3, 8)).astype(np.float32)
    labels = rng.integers(-1, 3, (2, 3, 8))
    x[labels < 0] = np.nan
    for name, reduce in (("sum", np.sum), ("max", np.max), ("min", np.min)):
        out = np.asarray(over_label(x, labels, name))
        for p, g, n in np.ndindex(x.shape):
            same = x[p, g][labels[p, g] == labels[p, g, n]]
            expected = reduce(same) if labels[p, g, n] >= 0 else 0.0
            np.testing.assert_allclose(out[p, g, n], expected, rtol=1e-5, atol=1e-6)
    slope = jax.grad(lambda x: (over_label(x, labels) ** 2).sum())(jnp.asarray(x))
    assert np.isfinite(slope).all() and not np.asarray(slope)[labels < 0].any()
    assert over_label(jnp.zeros((2, 0)), jnp.zeros((2, 0), jnp.int32)).shape == (2, 0)
