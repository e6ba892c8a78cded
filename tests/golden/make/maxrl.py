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

    for name in ("maxrl", "one_sided_grpo", "pkpo", "maclaurin"):
        name = f"compute_{name}_outcome_advantage"
        (estimate,) = take(root / CORE, name, **given)

        def make(estimate=estimate, **arguments):
            return outcome(
                estimate, **({"config": SimpleNamespace(**arguments)} if arguments else {})
            )

        writer.each(name, make)
