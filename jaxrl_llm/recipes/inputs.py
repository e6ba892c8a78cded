"""Arrays that only some methods need, by name: the possible entries of ``Batch.extras``."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array


class Extra(NamedTuple):
    """An array of ``Batch.extras``: its axes, its kind ("float", "int" or "bool"), its meaning.

    ``axes`` has one letter per axis: P prompts, G rollouts, T tokens; any other letter is free.
    """

    axes: str
    kind: str
    about: str


EXTRAS: dict[str, Extra] = {
    # Of a prompt.
    "prompt_ids": Extra("P", "int", "place of the prompt in its data set"),
    "greedy_rewards": Extra("P", "float", "reward of the most likely response"),
    "task_ids": Extra("P", "int", "which of the recipe's tasks the prompt belongs to"),
    "prior": Extra("P", "float", "predicted reward, before any rollout"),
    "density": Extra("P", "float", "how much more often good responses have such a prompt"),
    "margin": Extra("P", "float", "by how much the better response of a pair is better"),
    "current_version": Extra("P", "int", "version of the weights that are trained"),
    "policy_shift": Extra("P", "float", "mean |change of logp| on the prompt's last response"),
    "test_where": Extra("PU", "bool", "unit tests that exist"),
    "teacher_prompt_tokens": Extra("PGL", "int", "prompts the teacher sees, right padded"),
    "teacher_prompt_mask": Extra("PGL", "bool", "their tokens that exist"),
    "ground_truth": Extra("PL", "int", "what stands before a reference answer, and the answer"),
    "ground_truth_mask": Extra("PL", "bool", "tokens of the answer"),
    # Of a rollout.
    "flawed": Extra("PG", "bool", "whether a judge calls the reasoning flawed"),
    "satisfied": Extra("PG", "bool", "whether all judges agree"),
    "answer_ids": Extra("PG", "int", "its answer: equal numbers for equal ones, below 0 for none"),
    "budgets": Extra("PG", "float", "token budget in the rollout's prompt"),
    "steered": Extra("PG", "bool", "sampled with help, or by another policy"),
    "texts": Extra("PG", "bool", "a text of the data, which is no response"),
    "has_teacher": Extra("PG", "bool", "whether the teacher reads a different prompt"),
    "similarity": Extra("PGH", "float", "to the rollouts of the same question's paraphrases"),
    "hidden_rank": Extra("PGN", "float", "RankGrowth of the last hidden states, old policy"),
    "embeddings": Extra("PGD", "float", "of each response, by a frozen encoder"),
    "grad_sq_norms": Extra("PG", "float", "squared norm of the gradient of its logp, old policy"),
    "call_advantages": Extra("PG", "float", "of a subagent's answer, among all of its query"),
    "median_advantages": Extra("PG", "float", "rewards minus their group median, scaled"),
    "truncated": Extra("PG", "bool", "ended by its length and not by a stop token"),
    "unfinished": Extra("PG", "bool", "goes on in a later batch"),
    "roles": Extra("PG", "int", "what each rollout is to the batch, as in curation.Request"),
    "imitated": Extra("PG", "bool", "a demonstration"),
    "kl_logp": Extra("PG", "float", "logp of the response after the prompt of another row"),
    "kl_ref_logp": Extra("PG", "float", "the same under the reference"),
    # Of the masks of a likelihood, J draws of them.
    "masked": Extra("PGTJ", "bool", "tokens that a draw hides from the denoiser"),
    "masked_prompt": Extra("PGLJ", "bool", "tokens of the prompt that a draw hides"),
    "written": Extra("PGT", "bool", "tokens of the response, whatever trains"),
    "noise": Extra("PGJ", "float", "level of a draw, see diffusion.Draws"),
    "old_draw_logp": Extra("PGTJ", "float", "1[masked] logp / t of each draw, old policy"),
    "ref_draw_logp": Extra("PGTJ", "float", "the same under the reference"),
    # Of the steps of a flow policy, T of them, on latents of D numbers.
    "latents": Extra("PGT2D", "float", "the latent before and after a step"),
    "old_step_mean": Extra("PGTD", "float", "mean of the step's Gaussian under the old policy"),
    "ref_step_mean": Extra("PGTD", "float", "the same under the reference"),
    "ref_velocity": Extra("PGTD", "float", "velocity under the reference"),
    "anchor_velocity": Extra("PGTD", "float", "velocity under the first reference, which moved"),
    "forward_noise": Extra("PGTD", "float", "noise of the forward process at each level"),
    # Of a turn.
    "turn_rewards": Extra("PGK", "float", "reward of each turn"),
    "turn_formats": Extra("PGK", "float", "what the form of each turn earns"),
    "turn_where": Extra("PGK", "bool", "turns that exist"),
    "turn_ids": Extra("PGT", "int", "turn of each token"),
    "state_ids": Extra("PGK", "int", "what the turn observes: equal numbers for equal states"),
    "next_state_ids": Extra("PGK", "int", "what it leads to, in the same numbers"),
    "action_ids": Extra("PGK", "int", "the text of the turn: equal numbers for equal texts"),
    "step_rewards": Extra("PGK", "float", "what a step earns for its format or tools, apart"),
    "expert_match": Extra("PGK", "bool", "whether the turn did what the expert did"),
    "switches": Extra("PGK", "bool", "whether the turn says that it begins another subgoal"),
    "subgoal_ids": Extra("PGK", "int", "its subgoal: equal numbers for equal texts, -1 for none"),
    "won": Extra("PGK", "bool", "whether the turn won the episode"),
    "answer_logp": Extra(
        "PGA", "float", "mean logp of the reference answer before the first turn and after each"
    ),
    "test_passes": Extra("PGKU", "bool", "unit tests that a turn's program passes"),
    "token_roles": Extra("PGT", "int", "1 in the action of its turn, 2 subgoal, 3 switch, else 0"),
    # Of a segment of a response.
    "prefix_values": Extra("PGK", "float", "mean reward of rollouts that go on from before it"),
    "segment_where": Extra("PGK", "bool", "segments that exist"),
    "segment_ids": Extra("PGT", "int", "segment of each token; -1 for none"),
    # Of a token.
    "sum_pi_sq": Extra("PGT", "float", "sum of squared probabilities under the old policy"),
    "sum_pi_cubed": Extra("PGT", "float", "sum of cubed probabilities under the old policy"),
    "hidden_sq": Extra("PGT", "float", "squared norm of the last hidden state / T, old policy"),
    "step_effects": Extra("PGT2", "float", "changes of objective and policy by the token's step"),
    "old_entropy": Extra("PGT", "float", "entropy under the old policy"),
    "old_mean_log_probs": Extra("PGT", "float", "mean log-probability of the vocabulary, old"),
    "hot_logp": Extra("PGT", "float", "the same at a temperature above the sampler's"),
    "cold_logp": Extra("PGT", "float", "the same at one below"),
    "behavior_known": Extra("PGT", "bool", "whether behavior_logp is known"),
    "hint_mask": Extra("PGT", "bool", "tokens of a response that the policy did not write"),
    "versions": Extra("PGT", "int", "weights that drew the token; -1 unknown"),
    "node_ids": Extra("PGT", "int", "rollout that drew the token, one number where they fork"),
    "prm_logp": Extra("PGT", "float", "log-probability under a process reward model"),
    "values": Extra("PGT", "float", "critic's value of the state before the token"),
    "old_values": Extra("PGTC", "float", "the same, of each head"),
    "returns": Extra("PGTC", "float", "what each head of the critic is to predict"),
    "earlier_logp": Extra("PGT", "float", "mean log-probability under earlier policies"),
    "chunk_ids": Extra("PGT", "int", "action of each token, from 1; 0 outside"),
    "selected": Extra("PGT", "bool", "tokens a covariance rule picked"),
    "top_ids": Extra("PGTS", "int", "most likely tokens under the old policy or the teacher"),
    "teacher_logp": Extra("PGTS", "float", "the teacher's log-probabilities of those"),
    "teacher_token_logp": Extra("PGT", "float", "the teacher's log-probability of the token"),
    "teacher_entropy": Extra("PGT", "float", "the teacher's entropy"),
    "teacher_hidden": Extra("PGTD", "float", "the teacher's last hidden states"),
    "teacher_span_logp": Extra("PGT", "float", "the teacher's log-probability of the token's span"),
    "span_ids": Extra("PGT", "int", "span of each token's text in both tokenizations; -1 for none"),
}

_KINDS = {"float": jnp.floating, "int": jnp.integer, "bool": jnp.bool_}


def check_extra(name: str, value: Array, sizes: dict[str, int]) -> None:
    """Raises unless an extra has the shape and dtype of its name; unknown names need only axis P.

    ValueError if the shape disagrees with ``sizes`` of P, G and T; TypeError if the dtype is of
    another kind.
    """
    shape = jnp.shape(value)
    spec = EXTRAS.get(name)
    axes = "P" if spec is None else spec.axes
    rank_ok = len(shape) >= 1 if spec is None else len(shape) == len(axes)
    if not rank_ok or any(sizes.get(a, n) != n for a, n in zip(axes, shape, strict=False)):
        want = ", ".join(f"{a}={sizes[a]}" if a in sizes else a for a in axes)
        more = "" if spec is not None else ", ..."
        raise ValueError(f"Batch: extras[{name!r}] must have shape [{want}{more}]; got {shape}.")
    if spec is not None and not jnp.issubdtype(jnp.result_type(value), _KINDS[spec.kind]):
        raise TypeError(
            f"Batch: extras[{name!r}] must be {spec.kind} ({spec.about}); "
            f"got {jnp.result_type(value)}."
        )


def shaped_extras(recipe, prompts: int, group: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of all extras that the recipe needs, for a dry run."""
    dtypes = {"float": jnp.float32, "int": jnp.int32, "bool": jnp.bool_}
    heads = 1 if recipe.critic is None else recipe.critic.heads
    sizes = {"P": prompts, "G": group, "T": length, "H": group, "C": heads, "A": 3}
    return {
        name: jax.ShapeDtypeStruct([sizes.get(a, 2) for a in EXTRAS[name].axes], dtypes[kind])
        for name, kind in (
            (n, EXTRAS[n].kind) for n in sorted(recipe.required_fields) if n in EXTRAS
        )
    }
