"""Our advantages and importance weights against the numbers of TRL's trainers."""

from golden_data import Ours

from jaxrl_llm import advantages, corrections


def of_group(function, **options):
    def run(a):
        return {"advantages": function(a["rewards"], where=a["where"], **options)}

    return run


def gdpo(weights):
    def run(a):
        columns = {f"r{i}": x for i, x in enumerate(a["columns"])}
        given = {f"r{i}": w for i, w in enumerate(weights)}
        return {"advantages": advantages.gdpo(columns, where=a["where"], weights=given)}

    return run


def importance(function, **options):
    return lambda a: {"weights": function(a["old_logp"], a["behavior_logp"], a["mask"], **options)}


TABLE = {
    "advantages_group": Ours(of_group(advantages.grpo, eps=1e-4)),
    "advantages_batch": Ours(of_group(advantages.grpo, scale="batch", eps=1e-4)),
    "advantages_none": Ours(of_group(advantages.dr_grpo)),
    "rloo": Ours(of_group(advantages.rloo)),
    "gdpo": Ours(gdpo([1.0, 1.0, 1.0])),
    "gdpo_weighted": Ours(gdpo([1.0, 0.5, 2.0])),
    "is_token_truncate": Ours(importance(corrections.importance_weights, cap=1.3)),
    "is_sequence_truncate": Ours(
        importance(corrections.importance_weights, level="sequence", cap=1.3)
    ),
    "is_token_truncate_floor": Ours(importance(corrections.importance_weights, cap=1.3, floor=0.8)),
    "is_sequence_truncate_floor": Ours(
        importance(corrections.importance_weights, level="sequence", cap=1.3, floor=0.8)
    ),
    "is_token_mask": Ours(importance(corrections.masked_importance_weights, lower=0.8, upper=1.25)),
    "is_sequence_mask": Ours(
        importance(corrections.masked_importance_weights, level="sequence", lower=0.7, upper=1.4)
    ),
}
TABLES = {"trl_advantages": TABLE}
