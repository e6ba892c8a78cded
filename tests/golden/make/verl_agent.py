"""Writes estimators/verl_agent.*: langfengQ/verl-agent's GiGPO and HGPO.

python tests/golden/make/verl_agent.py CHECKOUT COMMIT

The checkout is a copy of it with the same files, zzj1111/alfworldauto.
"""

import uuid
from difflib import SequenceMatcher
from types import SimpleNamespace

import numpy as np
import torch
from paper_code import array, start, take

GIGPO, HGPO = "gigpo/core_gigpo.py", "recipe/hgpo/core_hgpo.py"
GAMMA, LETTERS = 0.95, "abcdefgh"
SHAPE = (2, 4, 4)


def case(rng, states, counts):
    """Rollouts with some of four turns, and a reward at most of them."""
    turn_where = np.arange(SHAPE[-1]) < np.asarray(counts)[..., None]
    turn_rewards = np.where(turn_where, rng.normal(size=SHAPE).round(2), 0.0).astype(np.float32)
    return {
        "turn_rewards": turn_rewards,
        "rewards": turn_rewards.sum(-1),
        "state_ids": states,
        "turn_where": turn_where,
        "where": turn_where.any(-1),
    }


def episodes():
    rng = np.random.default_rng(21)
    some, full = [[4, 2, 3, 4], [1, 4, 2, 3]], np.full(SHAPE[:2], 4)
    equal = case(rng, np.zeros(SHAPE, int), full)
    equal["turn_rewards"][:] = 0.125
    equal["rewards"] = equal["turn_rewards"].sum(-1)
    return {
        "few_states": case(rng, rng.integers(0, 3, SHAPE), some),
        "two_states": case(rng, rng.integers(0, 2, SHAPE), full),
        "distinct": case(rng, np.arange(32).reshape(SHAPE), some),
        "alone": case(rng, rng.integers(0, 3, SHAPE), [[0, 3, 0, 0], [0, 0, 1, 0]]),
        "equal": equal,
    }


def rows(a):
    """One row a turn, as their batch has them; what no turn is, is left out."""
    places = np.argwhere(a["turn_where"])
    p, g, k = places.T
    batch = SimpleNamespace(
        non_tensor_batch={
            "rewards": a["turn_rewards"][p, g, k],
            "traj_uid": p * SHAPE[1] + g,
            "active_masks": np.ones(len(p)),
        },
        batch={"input_ids": torch.zeros(1)},
    )
    return batch, {
        "token_level_rewards": torch.from_numpy(a["rewards"][p, g])[:, None],
        "response_mask": torch.ones(len(p), 1),
        "index": p,
        "traj_index": p * SHAPE[1] + g,
        "anchor_obs": a["state_ids"][p, g, k],
    }


def back(a, values):
    out = np.zeros(SHAPE, np.float32)
    out[a["turn_where"]] = array(values)[:, 0]
    return {"advantages": out}


def texts():
    """Observations of one group as numbers of letters: some a letter apart, some far."""
    rng = np.random.default_rng(22)
    first = rng.integers(0, 8, (3, 12))
    codes = first[rng.integers(0, 3, 9)]
    changed = rng.integers(0, 12, 9)
    codes[np.arange(9), changed] = rng.integers(0, 8, 9)
    return {"letters": {"codes": codes}}


def main():
    root, writer = start("verl_agent", "verl-agent (copy)", "zzj1111/alfworldauto")
    writer.inputs("episodes", episodes())
    writer.inputs("texts", texts())
    given = {"uuid": uuid, "SequenceMatcher": SequenceMatcher, "print": lambda *_: None}
    returns, gigpo, episode, group, step, *_ = take(
        root / GIGPO,
        "compute_step_discounted_returns",
        "compute_gigpo_outcome_advantage",
        "episode_norm_reward",
        "build_step_group",
        "step_norm_reward",
        "are_similar",
        "to_hashable",
        **given,
    )

    def with_turns(mode):
        def run(_, a):
            batch, options = rows(a)
            to_come = returns(batch, GAMMA)
            return back(a, gigpo(step_rewards=to_come, mode=mode, **options)[0])

        return run

    def with_rollouts(_, a):
        batch, x = rows(a)
        mask, to_come = x["response_mask"], returns(batch, GAMMA)
        groups = group(x["anchor_obs"], x["index"])
        whole = episode(
            x["token_level_rewards"],
            mask,
            x["index"],
            x["traj_index"],
            remove_std=False,
            compute_mean_std_cross_steps=False,
        )
        return back(a, whole + 0.5 * step(to_come, mask, groups, remove_std=False))

    for mode in ("mean_norm", "mean_std_norm"):
        writer.add(f"gigpo_{mode}", with_turns(mode))
    writer.add("gigpo_rollouts", with_rollouts)

    def similar(_, a):
        words = np.array(["".join(LETTERS[i] for i in row) for row in a["codes"]])
        made = group(words, np.zeros(len(words)), enable_similarity=True, similarity_thresh=0.85)
        order = list(dict.fromkeys(made))
        return {"ids": np.array([order.index(x) for x in made], np.float32)}

    writer.add("similar", similar)
    hgpo, *_ = take(
        root / HGPO, "hgpo_advantage_estimate", "trajectory_advantages", "to_hashable", **given
    )

    def histories(options):
        def run(_, a):
            batch, x = rows(a)
            x["step_rewards"] = returns(batch, GAMMA)
            return back(a, hgpo(**x, **options))

        return run

    for name, options in {
        "mean_std": {"history_length": 2},
        "mean": {"history_length": 2, "mode": "mean_norm"},
        "base": {"history_length": 1, "length_weight_alpha": 0.5, "base_group": True},
        "short": {"history_length": 0, "mode": "mean_norm"},
    }.items():
        writer.add(f"hgpo_{name}", histories(options))
    writer.save()


if __name__ == "__main__":
    main()
