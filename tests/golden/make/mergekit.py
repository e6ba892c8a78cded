"""Writes estimators/mergekit.*: TIES, arcs, model stock of arcee-ai/mergekit."""

from types import SimpleNamespace
from typing import Literal, Union

import numpy as np
import torch
from paper_code import passage, peer, take

METHODS = "mergekit/merge_methods"


def models():
    """A base, and three models that moved away from it in part alike."""
    made = {}
    for seed, (name, alike, apart) in enumerate((("alike", 0.3, 0.1), ("apart", 0.1, 0.3))):
        rng = np.random.default_rng(83 + seed)
        base, common = rng.normal(size=(2, 5, 7))
        made[name] = {"base": base.astype(np.float32)}
        for i in range(3):
            moved = base + alike * common + apart * rng.normal(size=(5, 7))
            made[name][f"model{i}"] = moved.astype(np.float32)
    return made


def tensors(a):
    return [torch.from_numpy(np.array(a[n])) for n in ("base", "model0", "model1", "model2")]


def ties(root, density, scale, weights):
    typed = {"RescaleNorm": SimpleNamespace, "Literal": Literal, "Optional": Union}
    (magnitude, _) = take(
        root / "mergekit/sparsify.py", "magnitude", "rescaled_masked_tensor", **typed
    )
    path = root / METHODS / "generalized_task_arithmetic.py"
    (mask,) = take(path, "get_mask", **typed)
    magnitude.__globals__["rescaled_masked_tensor"] = lambda tensor, mask, norm: tensor * mask

    def compute(case, a):
        base, *others = tensors(a)
        vectors = [
            {"delta": magnitude(x - base, density), "weight": w}
            for x, w in zip(others, weights, strict=True)
        ]
        settings = SimpleNamespace(
            method=SimpleNamespace(consensus_method="sum"),
            int8_mask=False,
            normalize=True,
            lambda_=scale,
        )
        made = passage(
            path,
            'deltas = torch.stack([tv["delta"]',
            "return (base + mixed_delta)",
            self=settings,
            tvs=vectors,
            base=base,
            get_mask=mask,
        )
        return {"merged": (base + made["mixed_delta"]).numpy()}

    return compute


@peer("mergekit", "mergekit", "arcee-ai/mergekit")
def main(root, writer):
    writer.inputs("models", models())
    names = {"Union": Union, "DOT_THRESHOLD": 0.9995}
    (slerp, *_) = take(
        root / METHODS / "slerp.py", "slerp", "lerp", "maybe_torch", "normalize", **names
    )

    def arc(t):
        def compute(case, a):
            base, first, *_ = tensors(a)
            return {"merged": slerp(t, base, first).numpy()}

        return compute

    def stock(case, a):
        base, *others = tensors(a)
        made = passage(
            root / METHODS / "model_stock.py",
            "offsets = [w - w_0 for w in ws]",
            "return w_h.reshape(out_shape)",
            w_0=base.view(-1),
            ws=[x.view(-1) for x in others],
        )
        return {"merged": made["w_h"].numpy().reshape(a["base"].shape)}

    for name, density, scale, weights in (
        ("ties", 0.2, 1.0, (1 / 3, 1 / 3, 1 / 3)),
        ("ties_weighted", 0.5, 0.7, (0.5, 0.2, 0.3)),
    ):
        compute = ties(root, density, scale, weights)
        writer.add(name, compute)
    writer.add("slerp", arc(0.3))
    writer.add("model_stock", stock)
