"""Writes estimators/ospo.*: RS2002/OSPO's rewards of a fleet."""

from types import SimpleNamespace

import numpy as np
from paper_code import passage, peer, take

PLATFORM, WORKER = "OSPO/Platform.py", "GRPO/Worker.py"
GAMMA = 0.9


def fleet_cases():
    """Six moments of five agents; the one of `idle` without a task never has one."""
    rng = np.random.default_rng(16)
    rewards = rng.normal(size=(2, 6, 5)).astype(np.float32)
    where = rng.uniform(size=(6, 5)) < 0.7
    where[:, 2] = False
    where[:, 3] = True
    busy = np.ones((6, 5), bool)
    return {
        "full": {"rewards": rewards[0], "where": busy},
        "idle": {"rewards": rewards[1], "where": where},
    }


def platform(path):
    """One step of the simulator after the other, with what the agents earn given."""

    def compute(case, a):
        rewards = np.float64(a["rewards"])
        names = ("Pickup_Num", "Confirmation_Time", "Pickup_Time", "Total_Reward")
        state = SimpleNamespace(
            total_reward_list=np.zeros(5), reward_std_list=[], discount_factor=1.0
        )
        vars(state).update(dict.fromkeys(names, 0.0))
        found = np.zeros(rewards.shape)
        lists = "new_route new_route_time new_remaining_time new_total_travel_time new_detour"
        for time, (row, busy) in enumerate(zip(rewards, a["where"], strict=True)):
            results = [
                [[None, x] if kept else None, 0, 0, 0, 0, 0, (0, 0)]
                for x, kept in zip(row, busy, strict=True)
            ]
            passage(
                path,
                "old_std = np.std(self.total_reward_list)",
                "return feedback_table, new_route_table",
                self=state,
                results=results,
                assignment=[0] * 5,
                reward=0.0,
                reward_list=[],
                current_time=time,
                feedback_table=[],
                **{f"{name}_table": [] for name in lists.split()},
            )
            found[time] = [0.0 if r[0] is None else r[0][1] for r in results]
        return {"advantages": found}

    return compute


def fairness(inputs):
    """What the platform hands to the buffer as `punishment`."""
    earned = np.cumsum(np.where(inputs["where"], np.float64(inputs["rewards"]), 0.0), axis=0)
    return -np.diff(earned.std(-1), prepend=0.0)


def buffer(process, **options):
    def compute(case, a):
        time, agent = np.nonzero(a["where"])
        gaps = []
        for t, i in zip(time, agent, strict=True):
            later = time[(agent == i) & (time > t)]
            gaps.append(later.min() - t if later.size else 1)
        state = SimpleNamespace(
            reward=list(np.float64(a["rewards"])[a["where"]]),
            punishment=list(fairness(a)[time]),
            time_step=list(time),
            worker_id=list(agent),
            delta_t=gaps,
            gamma=GAMMA,
        )
        process(state, **options)
        found = np.zeros(a["rewards"].shape)
        found[a["where"]] = state.reward
        return {"advantages": found}

    return compute


@peer("ospo", "OSPO", "RS2002/OSPO")
def main(root, writer):
    writer.inputs("fleet", fleet_cases())
    writer.add("ospo", platform(root / PLATFORM))
    (process,) = take(root / WORKER, "process")
    for norm, kind in ((2, 0), (2, 1), (2, 2), (1, 0), (1, 2)):
        options = {"reward_type": 2, "norm_type": norm, "punishment_type": kind}
        writer.add(f"grpo_norm{norm}_punishment{kind}", buffer(process, **options))
