"""Runs single functions of a paper's released code, taken out of a file of its checkout.

A trainer's file imports its engine before a formula can be called, so only the text of a function,
or of a passage of one, is executed, with torch, numpy and whatever else is handed to it. Nothing of
it is stored. Every script takes the path of a checkout and its commit:

    python tests/golden/make/SCRIPT.py CHECKOUT COMMIT
"""

import __future__

import ast
import math
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from estimator_cases import Writer, load_inputs
from torch_arrays import array, tensor

NAMES = {
    "np": np,
    "torch": torch,
    "nn": torch.nn,
    "F": torch.nn.functional,
    "math": math,
    "defaultdict": defaultdict,
}


def take(path, *wanted, **given):
    """Functions or classes of a file by name, those of a class too, without their decorators."""
    found = {}
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name in wanted
        ):
            node.decorator_list = []
            found.setdefault(node.name, node)
    missing = set(wanted) - set(found)
    if missing:
        raise LookupError(f"{path} has no {sorted(missing)}")
    names = NAMES | given
    tree = ast.Module([found[name] for name in wanted], [])
    exec(compile(tree, str(path), "exec", __future__.annotations.compiler_flag), names)
    return [names[name] for name in wanted]


def passage(path, first, last, *, after="", **given):
    """Runs the lines of a file from the one that starts with `first` up to that with `last`.

    `after` is the start of an earlier line. Returns all the names that the lines leave behind.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()

    def find(start, place):
        return next(i for i in range(place, len(lines)) if lines[i].strip().startswith(start))

    begin = find(first, find(after, 0))
    end = find(last, begin + 1)
    text = textwrap.dedent("\n".join(lines[begin:end]))
    names = NAMES | given
    exec(compile(text, str(path), "exec", __future__.annotations.compiler_flag), names)
    return names


def start(name, package, repository, **facts):
    """The root of the checkout, and a writer of the manifest `name` that says where it is from."""
    root, commit = sys.argv[1:]
    facts = {"version": commit[:7], "repository": repository, "commit": commit} | facts
    return Path(root), Writer(name, package, ["torch", "numpy"], f"{name}.py", **facts)


def peer(name, package, repository, **facts):
    """Marks the function of a script that adds the entries of `name`; a script that runs calls it.

    It gets what `start` returns, and what it has added is saved. It stands last in its file.
    """

    def run(add):
        if add.__module__ == "__main__":
            root, writer = start(name, package, repository, **facts)
            add(root, writer)
            writer.save()
        return add

    return run


def outcome(function, *, needs=(), name_of_mask="response_mask", **options):
    """Calls an estimator of verl's form on the rows that take part; `needs` are more inputs."""

    def compute(case, a):
        where = a["where"].reshape(-1)
        mask = tensor(case, a["mask"])[where]
        rewards = tensor(case, a["rewards"][..., None])[where]
        # On the first position: the estimators sum over it, and a masked row keeps its reward.
        token_rewards = torch.cat([rewards, rewards.new_zeros(len(mask), mask.shape[1] - 1)], 1)
        groups, size = a["rewards"].shape
        more = {n: tensor(case, a[n][..., None])[where] for n in needs}
        result = function(
            token_level_rewards=token_rewards,
            index=np.repeat(np.arange(groups), size)[where],
            **{name_of_mask: mask},
            **more,
            **options,
        )
        full = np.zeros(a["mask"].shape, np.float32).reshape(-1, mask.shape[1])
        full[where] = array(result[0])
        return {"advantages": full.reshape(a["mask"].shape)}

    return compute


def loss_of(function, name="logp"):
    """Value and gradient of `function(case, inputs, logp) -> loss` (a scalar)."""

    def compute(case, a):
        logp = tensor(case, a[name]).requires_grad_()
        loss = function(case, a, logp)
        (gradient,) = torch.autograd.grad(loss, [logp])
        return {"loss": array(loss), "gradient": array(gradient).reshape(a[name].shape)}

    return compute


def token_inputs(names, cases, **more):
    """Chosen arrays and cases of the shared tokens; `more` are arrays that every case gets."""
    shared = load_inputs("tokens")
    return {case: {n: shared[case][n] for n in names} | more for case in cases}


def spread(case, a, name="advantages"):
    """A value a sequence, at each of its tokens."""
    return tensor(case, np.broadcast_to(a[name][..., None], a["mask"].shape))
