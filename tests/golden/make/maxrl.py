"""Writes estimators/maxrl.*: tajwarfahim/maxrl's MaxRL, PKPO and Maclaurin series."""

from types import SimpleNamespace

from einops import rearrange
from paper_code import outcome, peer, take
from passk_cases import binary_cases

CORE, SERIES = "verl/trainer/ppo/core_algos.py", "verl/trainer/ppo/maclaurin.py"


@peer("maxrl", "maxrl", "tajwarfahim/maxrl")
def main(root, writer):
    (series,) = take(root / SERIES, "maclaurin_weights")
    given = {"rearrange": rearrange, "maclaurin_weights": series}
    writer.inputs("binary", binary_cases())

    def add(name, keys, function, inputs="binary", arguments=None, **more):
        (estimate,) = take(root / CORE, function, **given)
        options = {"config": SimpleNamespace(**arguments)} if arguments else {}
        compute = outcome(estimate, **options)
        place = f"{CORE}: {function}"
        writer.add(name, keys, place, compute, inputs=inputs, arguments=arguments, **more)

    add("maxrl", ["maxrl"], "compute_maxrl_outcome_advantage")
    add(
        "maxrl_rows",
        ["maxrl"],
        "compute_maxrl_outcome_advantage",
        inputs="rewards",
        cases=["binary", "all_equal", "singleton"],
    )
    add("one_sided", ["maxrl"], "compute_one_sided_grpo_outcome_advantage")
    for k in (1, 2, 3):
        function = "compute_pkpo_outcome_advantage"
        add(f"pkpo_k{k}", ["pkpo"], function, arguments={"pass_k": k})
    for order in (1, 2, 4):
        function = "compute_maclaurin_outcome_advantage"
        add(f"maclaurin_{order}", ["maxrl"], function, arguments={"truncate_order": order})
