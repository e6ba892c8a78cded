"""Writes estimators/arpo.*: RUC-NLPIR/ARPO's branches after the answers of tools."""

import math
import types

import numpy as np
from paper_code import passage, peer, take

PATH = "ARPO/verl_arpo_entropy/verl/workers/rollout/vllm_rollout/vllm_rollout_with_tools.py"
ROWS, BRANCHES = 6, 2


def rounds():
    rng = np.random.default_rng(15)
    slots = {"none": 0, "one": 1, "three": 3, "many": 20}
    return {
        name: {
            "first": rng.uniform(0, 1, ROWS).astype(np.float32),
            "now": rng.uniform(0, 3, ROWS).astype(np.float32),
            "draws": rng.random((ROWS, BRANCHES)).astype(np.float32),
            "slots": np.array(n),
        }
        for name, n in slots.items()
    }


def turns():
    rng = np.random.default_rng(16)
    logp = np.log(rng.dirichlet(np.ones(30), (3, 8))[..., :10])
    return {"ten": {"logp": logp.astype(np.float32)}}


@peer("arpo", "ARPO", "RUC-NLPIR/ARPO")
def main(root, writer):

    def branches(case, a):
        """Its draws come in order, so a row that tries fewer leaves those of the next in place."""
        taken = np.zeros((ROWS, BRANCHES), bool)
        place = {"row": 0, "try": -1}

        class Inputs(dict):
            """Notes which row is copied."""

            def __getitem__(self, row):
                taken[row, place["try"]] = True
                return []

        def draw():
            return float(a["draws"][place["row"], place["try"]])

        class Entropies(dict):
            """Read once a try, before the draw, so that it tells which row tries."""

            def get(self, row, default):
                place["try"] = place["try"] + 1 if row == place["row"] and place["try"] >= 0 else 0
                place["row"] = row
                return float(a["now"][row])

        me = types.SimpleNamespace(
            entropy_weight=0.2,
            branch_probability=0.5,
            initial_entropy_dict={i: float(x) for i, x in enumerate(a["first"])},
        )
        empty = {i: [] for i in range(ROWS)}
        passage(
            root / PATH,
            "for orig_sample, active_idxs in active_by_sample.items():",
            "# Add non-active samples",
            after="# Apply beam search",
            self=me,
            random=types.SimpleNamespace(random=draw),
            active_by_sample={0: list(range(ROWS))},
            num_samples=ROWS + int(a["slots"]),
            rollouts_per_sample=[ROWS],
            beam_size=BRANCHES + 1,
            current_entropy_dict=Entropies(),
            curr_inputs=Inputs(),
            init_inputs=empty,
            result_masks=empty,
            call_counters=dict.fromkeys(range(ROWS), 0),
            new_inputs=[],
            new_init_inputs=[],
            new_result_masks=[],
            new_call_counters=[],
            new_sample_origins=[],
        )
        return {"taken": taken}

    writer.inputs("arpo_rounds", rounds())
    writer.add("branches", branches)
    (entropy,) = take(root / PATH, "_calc_entropy")

    def of_turns(case, a):
        flat = [entropy(None, row.reshape(-1).tolist()) for row in np.float64(a["logp"])]
        return {"entropy": np.array(flat) / math.log(151936)}

    writer.inputs("arpo_turns", turns())
    writer.add("entropy", of_turns)
