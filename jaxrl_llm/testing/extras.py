"""Made-up arrays for every extra that a method may need, consistent with a batch."""

import numpy as np

from jaxrl_llm.recipes import Batch

P, G, T = 8, 4, 6
PARAPHRASES = 2  # of a question, which are neighbors in the batch
_TURNS, _TESTS, _SUPPORT, _DRAWS = 3, 3, 3, 2
_WIDTH = 32  # of the tiny model; its output matrix maps a teacher's hidden states to logits


def make_extras(batch: Batch, *, seed: int = 0, heads: int = 1) -> dict[str, np.ndarray]:
    """All of ``recipes.inputs.EXTRAS`` that a run has from the start, with values like those.

    ``batch`` must hold its log-probabilities. ``heads`` is the number of predictions of a critic.
    """
    rng = np.random.default_rng(seed + 1000)
    mask = np.asarray(batch.mask)
    p, g, t = mask.shape
    old_logp = np.asarray(batch.old_logp)

    def near(x, spread=0.3):
        return x + rng.normal(0.0, spread, x.shape)

    turn_ids = np.broadcast_to(np.arange(t) * _TURNS // t, mask.shape)
    turns = [(mask & (turn_ids == k)).any(-1) for k in range(_TURNS)]
    floats = {
        "greedy_rewards": rng.uniform(0, 1, p),
        "prior": rng.uniform(0.2, 0.8, p),
        "policy_shift": rng.uniform(0, 0.05, p),
        "budgets": rng.choice([2.0, 4.0, 8.0], (p, g)),
        "similarity": rng.uniform(0, 1, (p, g, g)),
        "grad_sq_norms": rng.uniform(0.5, 2.0, (p, g)),
        "median_advantages": rng.normal(0, 1, (p, g)),
        "turn_rewards": rng.uniform(0, 1, (p, g, _TURNS)),
        # At least the square of the sampled token's probability.
        "sum_pi_sq": np.exp(2 * np.minimum(old_logp, 0)) + rng.uniform(0, 0.1, mask.shape),
        "sum_pi_cubed": np.exp(3 * np.minimum(old_logp, 0)) + rng.uniform(0, 0.01, mask.shape),
        "hidden_sq": rng.uniform(20.0, 40.0, mask.shape),
        "step_effects": rng.normal(0, 1, (*mask.shape, 2)) * np.array([5e-3, 5e-5]),
        "old_entropy": rng.uniform(0.5, 2.0, mask.shape),
        "old_mean_log_probs": -rng.uniform(3, 6, mask.shape),
        "hot_logp": near(old_logp),
        "cold_logp": near(old_logp),
        "values": rng.uniform(0, 1, mask.shape),
        "old_values": rng.uniform(0, 1, (*mask.shape, heads)),
        "returns": rng.uniform(0, 1, (*mask.shape, heads)),
        "teacher_logp": -rng.uniform(1.5, 4.0, (*mask.shape, _SUPPORT)),
        "teacher_token_logp": near(old_logp),
        "teacher_entropy": rng.uniform(0.5, 2.0, mask.shape),
    }
    ints = {
        "current_version": np.full(p, 4),
        "prompt_ids": rng.permutation(p),
        "teacher_prompt_tokens": rng.integers(0, 100, (p, g, 7)),
        "turn_ids": turn_ids,
        "versions": rng.integers(0, 4, mask.shape) + 1,
        "chunk_ids": np.where(mask, turn_ids + 1, 0),
        "top_ids": rng.integers(0, 100, (*mask.shape, _SUPPORT)),
    }
    bools = {
        "test_where": (np.arange(p)[:, None] + np.arange(_TESTS)) % 4 > 0,
        "teacher_prompt_mask": np.broadcast_to(np.arange(7) < 5, (p, g, 7)),
        "flawed": rng.random((p, g)) < 0.3,
        "satisfied": np.arange(p * g).reshape(p, g) % 3 > 0,
        "steered": rng.random((p, g)) < 0.3,
        "has_teacher": rng.random((p, g)) < 0.7,
        "truncated": rng.random((p, g)) < 0.2,
        "turn_where": np.stack(turns, -1),
        "test_passes": rng.random((p, g, _TURNS, _TESTS)) < 0.5,
        "selected": mask & (rng.random(mask.shape) < 0.3),
    }
    # Drawn last, so that the values above do not change. One rollout of each group disagrees with
    # all others, so no vote is tied: a permutation would change the first answer, which wins ties.
    answers = rng.permuted(np.broadcast_to(np.arange(g) == 0, (p, g)), axis=1).astype(int)
    # In group 3 two have no answer, as many as agree; in group 1 only the one that would disagree.
    answers[3] = [-1, 0, -1, 0]
    answers[1] = -answers[1]
    ints["answer_ids"] = answers
    floats["hidden_rank"] = rng.uniform(1.0, 4.0, (p, g, 3))
    # The policy wrote all tokens; the effect of help is tested with the presets that use it.
    ints["roles"] = np.zeros((p, g))
    ints["span_ids"] = np.broadcast_to(np.arange(mask.shape[-1]), mask.shape)  # one token each
    # Two nodes per row. Rows share no node, since their tokens differ.
    rows = np.arange(p * g).reshape(p, g, 1)
    ints["node_ids"] = 2 * rows + (np.arange(mask.shape[-1]) > 1)
    bools["unfinished"] = np.arange(p * g).reshape(p, g) % 4 == 1
    floats["prefix_values"] = rng.uniform(0, 1, (p, g, _TURNS))
    ints["segment_ids"], bools["segment_where"] = turn_ids, bools["turn_where"]
    floats["embeddings"] = rng.normal(0.0, 1.0, (p, g, 5))
    floats["turn_formats"] = rng.uniform(0, 0.2, (p, g, _TURNS))
    floats["prm_logp"] = near(old_logp)
    floats["earlier_logp"] = near(old_logp)
    floats["density"] = rng.uniform(0.5, 2.0, p)
    floats["margin"] = rng.uniform(0.0, 1.0, p)
    floats["kl_logp"] = -rng.uniform(5, 9, (p, g))
    floats["kl_ref_logp"] = floats["kl_logp"] - 1.0
    bools["imitated"] = np.zeros((p, g), bool)
    bools["texts"] = np.broadcast_to(np.arange(p)[:, None] % 3 == 2, (p, g))
    bools["hint_mask"] = np.zeros(mask.shape, bool)
    bools["written"] = mask
    bools["masked"] = mask[..., None] & (rng.random((*mask.shape, _DRAWS)) < 0.7)
    bools["masked_prompt"] = np.zeros((p, g, batch.prompt_mask.shape[-1], _DRAWS), bool)
    floats["noise"] = np.full((p, g, _DRAWS), 0.7)
    floats["old_draw_logp"] = bools["masked"] * near(old_logp)[..., None] / 0.7
    floats["ref_draw_logp"] = bools["masked"] * near(old_logp)[..., None] / 0.7
    shape = (p, g, _TURNS)
    ints["state_ids"] = rng.integers(0, 3, shape)
    ints["next_state_ids"] = rng.integers(0, 3, shape)
    ints["action_ids"] = rng.integers(0, 2, shape)
    floats["step_rewards"] = rng.uniform(0, 1, shape)
    floats["answer_logp"] = -rng.uniform(0.1, 3.0, (p, g, _TURNS + 1))
    bools["expert_match"] = rng.random(shape) < 0.7
    ground_truth = rng.integers(0, 100, (p, 4))
    bools["ground_truth_mask"] = np.broadcast_to(np.arange(7) % 3 > 0, (p, 7))
    bools["won"] = rng.random(shape) < 0.3
    floats["teacher_span_logp"] = near(old_logp)
    floats["teacher_hidden"] = rng.normal(0.0, 1.0, (*mask.shape, _WIDTH))
    latents = rng.normal(0.0, 1.0, (*mask.shape, 2, 2))
    bools["switches"] = np.arange(p * g * _TURNS).reshape(shape) % 2 > 0
    ints["subgoal_ids"] = np.arange(p * g * _TURNS).reshape(shape) % 3 - 1
    ints["token_roles"] = np.broadcast_to(np.arange(t) % 4, mask.shape)
    floats["latents"] = latents
    for name in ("old_step_mean", "ref_step_mean", "ref_velocity"):
        floats[name] = near(latents[..., 1, :])
    others = rng.uniform(0, 1, (p, g, (PARAPHRASES - 1) * g))
    floats["similarity"] = np.concatenate([floats["similarity"], others], -1)
    floats["call_advantages"] = rng.normal(0, 1, (p, g))
    # Seven tokens, since a second axis of length g is that of the rollouts.
    ints["ground_truth"] = np.concatenate([ground_truth, rng.integers(0, 100, (p, 3))], -1)
    ints["task_ids"] = np.arange(p) % 2
    floats["forward_noise"] = rng.normal(0.0, 1.0, latents[..., 1, :].shape)
    floats["anchor_velocity"] = near(latents[..., 1, :])
    for name in ("turn_ids", "segment_ids", "span_ids", "versions"):  # -1 for none, as in a run
        ints[name] = np.where(mask, ints[name], -1)
    kinds = ((floats, np.float32), (ints, np.int32), (bools, np.bool_))
    return {name: np.asarray(x, dtype) for group, dtype in kinds for name, x in group.items()}
