"""Writes estimators/stable_pg.*: luckeciano/stable-pg-llm's curvatures of tokens.

In the cases of single scores, indexing replaces its lookup of Adam's moments by token.
"""

from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import RAGGED
from paper_code import array, peer, take

TRAINER = "src/open_r1/grpo_entropy_trainer.py"
ADAM = "src/open_r1/sparse_optim_models/sparse_adam_model.py"
METHODS = (
    "_compute_token_level_gradients",
    "_compute_grad_norm_sq",
    "_compute_and_log_hessian_coefficient",
    "_compute_and_log_fisher_curvature",
)
WIDTH, VOCABULARY, TOP = 4, 5, 3
LEVELS = ("token", "sentence", "global")


def hidden_cases():
    rng = np.random.default_rng(28)

    def case(count):
        logits = 2 * rng.normal(size=(3, 4, 6, VOCABULARY))
        probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        arrays = {
            "hidden": rng.normal(size=(3, 4, 6, WIDTH)),
            "probs": probs,
            "advantages": rng.normal(size=(3, 4)),
            "mu": 0.1 * rng.normal(size=(VOCABULARY, WIDTH)),
            "nu": 0.01 * rng.uniform(0.1, 1.0, (VOCABULARY, WIDTH)),
        }
        arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
        actions = rng.integers(0, VOCABULARY, (3, 4, 6)).astype(np.int32)
        return arrays | {"actions": actions, "mask": RAGGED, "count": np.int32(count)}

    return {"early": case(1), "late": case(40)}


def adam_step(path, case, a, gradients):
    mu, nu = (torch.from_numpy(a[name]) for name in ("mu", "nu"))
    moments = SimpleNamespace(densify_gradient_dict=lambda table, ids, *_: table[ids].clone())
    given = {"sparse_grad_ops": moments, "SparseSGDModel": object}
    (model,) = take(path, "SparseAdamModel", Dict=dict, Hashable=object, List=list, **given)
    made = model()
    made.m, made.v, made.t = mu, nu, int(a["count"])
    ids = torch.arange(VOCABULARY).expand(12, 6, VOCABULARY)
    cpu = torch.device("cpu")
    return made.batch_compute_effective_token_gradients(gradients.clone(), ids, cpu)


def scores(root, lr, adam):
    gradient_of, norm_of, hessian, fisher = take(root / TRAINER, *METHODS, DEFAULT_STATS={})
    names = ("token", "sentence", "global")
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(gather=lambda x: x),
        lr_scheduler=SimpleNamespace(get_last_lr=lambda: [lr]),
        _accumulate_stats=lambda **_: None,
        _gather_masked_tensor_across_processes=lambda x, _: x,
        **{f"{kind}_{name}_lambda": 0.0 for kind in ("hessian", "fisher") for name in names},
    )

    def compute(case, a):
        hidden = torch.from_numpy(a["hidden"].reshape(12, 6, WIDTH))
        probs = torch.from_numpy(a["probs"].reshape(12, 6, VOCABULARY))
        actions = torch.from_numpy(a["actions"].reshape(12, 6).astype(np.int64))
        chosen = torch.nn.functional.one_hot(actions, VOCABULARY)
        advantages = torch.from_numpy(a["advantages"].reshape(12))
        mask = torch.from_numpy(a["mask"].reshape(12, 6).astype(np.int64))
        gradients = gradient_of(trainer, hidden, probs, chosen, advantages, mask, None)
        step = adam_step(root / ADAM, case, a, gradients) if adam else gradients
        norms = norm_of(trainer, gradients, step, None, None, "token")
        given = (trainer, hidden, chosen, probs, advantages, mask, step)
        _, rise = hessian(*given, norms, "token", "train")
        _, kl = fisher(*given, "token", mode="train")
        found = {"objective": rise, "policy": kl}
        return {n: array(x * mask).reshape(3, 4, 6) for n, x in found.items()}

    return compute


def path_cases():
    """Updates one after the other; the first has a learning rate of 0, as a warmup begins."""
    rng = np.random.default_rng(30)
    steps = 4
    arrays = {
        "hidden": rng.normal(size=(steps, 3, 4, 6, WIDTH)),
        "logits": 2 * rng.normal(size=(steps, 3, 4, 6, VOCABULARY)),
        "advantages": rng.normal(size=(steps, 3, 4)),
        "lr": np.array([0.0, 0.002, 0.004, 0.003]),
    }
    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
    actions = rng.integers(0, VOCABULARY, (steps, 3, 4, 6)).astype(np.int32)
    return {"warmup": arrays | {"actions": actions, "mask": RAGGED}}


def path(root):
    """Token scores, the tokens left and Adam's moments of every update."""
    numbers = take(root / TRAINER, *METHODS, "_compute_entropy", DEFAULT_STATS={})
    gradient_of, norm_of, hessian, fisher, likely = numbers
    bounds = take(root / TRAINER, "_compute_hessian_token_mask", "_compute_fisher_token_mask")
    (totals,) = take(root / TRAINER, "_sparsify_global_gradients")
    (densify,) = take(root / "src/open_r1/sparse_grad_ops.py", "densify_gradient_dict")
    operations = SimpleNamespace(densify_gradient_dict=densify)
    given = {"sparse_grad_ops": operations, "SparseSGDModel": object}
    (model,) = take(root / ADAM, "SparseAdamModel", Dict=dict, Hashable=object, List=list, **given)

    def compute(case, a):
        adam, cpu, rows = model(), torch.device("cpu"), []
        for step, lr in enumerate(a["lr"]):
            trainer = SimpleNamespace(
                accelerator=SimpleNamespace(gather=lambda x: x, device=cpu),
                lr_scheduler=SimpleNamespace(get_last_lr=lambda lr=lr: [float(lr)]),
                _accumulate_stats=lambda **_: None,
                _gather_masked_tensor_across_processes=lambda x, _: x,
                hessian_token_mask_tau=0.01,
                fisher_token_mask_tau=1e-4,
                hessian_symmetric_clipping=True,
                **{f"{k}_{n}_lambda": 0.0 for k in ("hessian", "fisher") for n in LEVELS},
            )
            hidden = torch.from_numpy(a["hidden"][step].reshape(12, 6, WIDTH))
            logits = torch.from_numpy(a["logits"][step].reshape(12, 6, VOCABULARY))
            actions = torch.from_numpy(a["actions"][step].reshape(12, 6, 1).astype(np.int64))
            advantages = torch.from_numpy(a["advantages"][step].reshape(12))
            mask = torch.from_numpy(a["mask"].reshape(12, 6).astype(np.int64))
            _, probs, ids = likely(trainer, logits, k=TOP)
            chosen = (actions == ids).float()
            rows_of = (trainer, hidden, chosen, probs, advantages, mask)
            gradients = gradient_of(trainer, hidden, probs, chosen, advantages, mask, ids)
            move = adam.compute_effective_token_gradients(gradients.clone(), ids, cpu)
            norms = norm_of(trainer, gradients, move, None, None, "token")
            _, rise = hessian(*rows_of, move, norms, "token", "train")
            _, kl = fisher(*rows_of, move, "token", mode="train")
            left = mask * bounds[0](trainer, {"token": rise}, torch.ones_like(mask), {})
            left = left * bounds[1](trainer, {"token": kl}, torch.ones_like(mask), {})
            sums = totals(trainer, gradients, WIDTH, ids, left, hidden.dtype)
            adam.update_effective_gradient_moments({k: x / n for k, (x, n) in sums.items()})
            row = {"objective": array(rise * mask), "policy": array(kl * mask)}
            row["keep"] = left.numpy() > 0
            row = {name: x.reshape(3, 4, 6) for name, x in row.items()}
            for name, moments in (("mu", adam.m), ("nu", adam.v)):
                row[name] = np.zeros((VOCABULARY, WIDTH), np.float32)
                for token, values in moments.items():
                    row[name][token] = values.numpy()
            rows.append(row)
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    return compute


def masks(root, symmetric):
    names = ("_compute_hessian_token_mask", "_compute_fisher_token_mask")
    hessian, fisher = take(root / TRAINER, *names)
    trainer = SimpleNamespace(
        hessian_token_mask_tau=0.01,
        fisher_token_mask_tau=1e-4,
        hessian_symmetric_clipping=symmetric,
    )

    def compute(case, a):
        mask = torch.from_numpy(a["mask"].astype(np.int64))
        rise, kl = (torch.from_numpy(a[name]) for name in ("objective", "policy"))
        kept = hessian(trainer, {"token": rise}, mask, {})
        return {"keep": fisher(trainer, {"token": kl}, kept, {}).numpy() > 0}

    return compute


@peer("stable_pg", "stable-pg-llm", "luckeciano/stable-pg-llm")
def main(root, writer):
    writer.inputs("hidden", hidden_cases())
    for name, adam in (("ascent", False), ("adam", True)):
        writer.add(name, scores(root, 0.01, adam))
    writer.inputs("path", path_cases())
    writer.add("path", path(root))
    rng = np.random.default_rng(29)
    random = {
        "objective": 0.01 * rng.normal(size=(12, 6)).astype(np.float32),
        "policy": 1e-4 * rng.gamma(1.0, 0.7, (12, 6)).astype(np.float32),
        "mask": RAGGED.reshape(12, 6),
    }
    writer.inputs("scores", {"random": random})
    for symmetric in (True, False):
        writer.add("keep_symmetric" if symmetric else "keep_rising", masks(root, symmetric))
