"""Writes estimators/vcpo.*: mit-han-lab/vcpo's baseline and effective sample size."""

from types import SimpleNamespace

import numpy as np
from paper_code import passage, peer, take

UTILS = "recipe/fully_async_policy/staleness_utils.py"
ACTOR = "verl/workers/actor/megatron_actor.py"


def records():
    rng = np.random.default_rng(30)

    def case(spread):
        arrays = {
            "rewards": rng.integers(0, 2, (3, 4)),
            "log_weights": spread * rng.normal(size=(3, 4)),
            "grad_norms": rng.gamma(2.0, 1.0, (3, 4)),
        }
        arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
        return arrays | {"lengths": rng.integers(1, 9, (3, 4)).astype(np.int32)}

    return {"near": case(0.1), "stale": case(1.0), "on_policy": case(0.0)}


def trajectories(a):
    rows = zip(*(a[name].reshape(-1) for name in a), strict=True)
    made = []
    for i, values in enumerate(rows):
        x = dict(zip(a, map(float, values), strict=True))
        ratio = np.exp(x["log_weights"])
        made.append(
            SimpleNamespace(
                group_uid=i // 4,
                reward_scalar=x["rewards"],
                rollout_seq_is=ratio,
                rollout_seq_is_clipped=min(ratio, 8.0),
                grad_norm_unscaled=x["grad_norms"],
                response_length=x["lengths"],
            )
        )
    return made


def baseline(root, **options):
    _, function = take(root / UTILS, "get_weighted_mean", "compute_opob_baseline", List=list)

    def compute(case, a):
        made = trajectories(a)
        return {"baseline": np.array([function(made, group, **options) for group in range(3)])}

    return compute


def effective(root):
    parallel = SimpleNamespace(
        get_data_parallel_group=lambda **_: None,
        get_tensor_model_parallel_rank=lambda: 0,
        get_pipeline_model_parallel_rank=lambda: 0,
    )
    (function,) = take(
        root / UTILS,
        "compute_ess_info",
        mpu=parallel,
        asdict=vars,
        allgather_dict_into_list=lambda found, group: found,
        List=list,
    )

    def scale(share, rule):
        config = SimpleNamespace(base_ess_ratio=0.9, scaling_rule=rule)
        group = {"lr": 1.0}
        optimizer = SimpleNamespace(param_groups=[group])
        names = {"ess_ratio_for_scaling": share, "base_lrs": [1.0]}
        names["self"] = SimpleNamespace(
            config=SimpleNamespace(ess_scaling=config), actor_optimizer=optimizer
        )
        path = root / ACTOR
        passage(path, "base_ess_ratio = max(", "lrs_now = self.get_lr()", **names)
        return group["lr"]

    def compute(case, a):
        info = function(trajectories(a), None)
        share = info["ess_ratio"]
        scales = {rule: scale(share, rule) for rule in ("sqrt", "linear")}
        return {"ess": info["ess"]} | scales

    return compute


@peer("vcpo", "vcpo", "mit-han-lab/vcpo")
def main(root, writer):
    writer.inputs("records", records())
    for name, options in (
        ("baseline", {}),
        ("unweighted", {"use_is_weights": False}),
        ("by_length", {"normalize_by_length": True}),
    ):
        writer.add(name, baseline(root, **options))
    writer.add("sample_size", effective(root))
