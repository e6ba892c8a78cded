"""Writes estimators/rax_lists.*: the losses of lists of rax, with which LiPO was made.

rax sums over all pairs of its arrays, so each list is a call of its own. Its weights of LambdaLoss
are those of a discount in base 2, times the size of the list.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import rax
from estimator_cases import written

LISTS, SIZE = 4, 5


def cases():
    made = {}
    for seed, name in enumerate(("full", "ragged", "tied_labels")):
        rng = np.random.default_rng(70 + seed)
        labels = np.stack([rng.permutation(SIZE) / (SIZE - 1) for _ in range(LISTS)])
        if name == "tied_labels":
            labels = np.round(labels)
        where = np.ones((LISTS, SIZE), bool)
        if name == "ragged":
            where = np.arange(SIZE) < np.array([[5], [3], [2], [1]])
        scores = rng.normal(size=(LISTS, SIZE))
        made[name] = {
            "scores": scores.astype(np.float32),
            "labels": labels.astype(np.float32),
            "where": where,
        }
    return made


def of_each_list(loss):
    def compute(case, a):
        def one(scores, labels, where):
            return loss(scores, labels, where=where)

        arrays = [jnp.asarray(a[name]) for name in ("scores", "labels", "where")]
        made = [jax.value_and_grad(one)(*row) for row in zip(*arrays, strict=True)]
        return {
            "loss": np.stack([np.asarray(value) for value, _ in made]),
            "gradient": np.stack([np.asarray(slope) for _, slope in made]),
        }

    return compute


@written("rax_lists", "rax", ["rax", "jax", "numpy"])
def main(writer):
    writer.inputs("lists", cases())
    total = {"reduce_fn": jnp.sum}
    entries = {
        "lambda": (rax.pairwise_logistic_loss, total | {"lambdaweight_fn": rax.dcg_lambdaweight}),
        "logistic": (rax.pairwise_logistic_loss, total),
        "logistic_mean": (rax.pairwise_logistic_loss, {"reduce_fn": jnp.mean}),
        "hinge": (rax.pairwise_hinge_loss, total),
        "softmax": (
            rax.softmax_loss,
            total | {"label_fn": lambda a, where: jax.nn.softmax(a, where=where)},
        ),
        "listmle": (rax.listmle_loss, total),
    }
    for name, (function, options) in entries.items():
        more = {}
        if name in ("listmle", "softmax"):  # ties of its order are random; alone it has a loss
            more["cases"] = ["full", "ragged"] if name == "listmle" else ["full", "tied_labels"]
        writer.add(name, of_each_list(functools.partial(function, **options)))
