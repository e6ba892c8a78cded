"""Host-side checks of a batch: one sentence, with the prompt's name."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm.recipes import Batch, validate_batch

IDS = ["sum-17", "sum-23"]


def arrays() -> dict:
    mask = np.ones((2, 2, 3), bool)
    mask[1, 1, 2] = False
    return {
        "tokens": np.full((2, 2, 3), 5, np.int32),
        "mask": mask,
        "rewards": np.array([[1.0, 0.0], [0.0, 0.5]], np.float32),
        "where": np.ones((2, 2), bool),
        "prompt_tokens": np.full((2, 4), 7, np.int32),
        "prompt_mask": np.ones((2, 4), bool),
    }


def check(a, **options):
    return validate_batch(Batch(**a), **{"vocab_size": 10, "prompt_ids": IDS, **options})


def test_a_good_batch_passes_unchanged():
    a = arrays()
    batch = check(a)
    assert batch.tokens is a["tokens"]


def test_rewards_of_rollouts_have_their_shape():
    """Of any other, reshaped, they would be those of other rollouts."""
    a = arrays()
    others = dict.fromkeys(("behavior_logp", "support", "experts", "ends"))
    names = ("tokens", "mask", "prompt_tokens", "prompt_mask")
    rollout = types.SimpleNamespace(**others, **{name: a[name][:, :1] for name in names[:2]})
    rollout.prompt_tokens, rollout.prompt_mask = a["prompt_tokens"], a["prompt_mask"]
    for rewards in ([1.0, 0.0], [[1.0], [0.0]], np.float32([1, 0])):
        assert Batch.from_rollout(rollout, rewards).rewards.tolist() == [[1.0], [0.0]]
    with pytest.raises(ValueError, match=r"from_rollout: rewards must have shape \(2, 1\) or"):
        Batch.from_rollout(rollout, np.ones((1, 2)))
    with pytest.raises(TypeError, match="from_rollout: rewards must hold numbers; got .*'good'"):
        Batch.from_rollout(rollout, [["good"], [0.0]])


def put(field, place, value):
    """A change of one cell, or of all that a place names."""

    def change(a):
        if field not in a:
            a[field] = np.zeros((2, 2, 3), np.float32)
        a[field][place] = value
        return a

    return change


def put_experts(place, value):
    """Two experts of each token in two layers; others at one token, and none at another."""

    def change(a):
        a["experts"] = np.tile(np.array([1, 2], np.int16), (2, 2, 3, 2, 1))
        a["experts"][place] = value
        a["experts"][1, 1, 0] = 0
        return a

    return change


# What is refused, and where it is masked and so passes.
VALUES = [
    *(
        (
            put("rewards", (1, 0), value),
            put("where", (1, 0), False),
            f"reward of prompt 'sum-23', rollout 0, is {value}",
        )
        for value in (np.nan, np.inf)
    ),
    *(
        (
            put("tokens", (1, 1, 1), token),
            put("mask", (1, 1, 1), False),
            rf"a response of prompt 'sum-23' holds token {token} at \[1, 1\].*vocabulary of 10",
        )
        for token in (-1, 10)
    ),
    *(
        (
            put("prompt_tokens", (0, 3), token),
            put("prompt_mask", (0, 3), False),
            r"the text of prompt 'sum-17' .* at \[3\]",
        )
        for token in (-1, 10)
    ),
    *(
        (
            put(field, (0, 1, 2), value),
            put("mask", (0, 1, 2), False),
            f"{field} of prompt 'sum-17', rollout 1, token 2 is {value}",
        )
        for field in ("old_logp", "behavior_logp", "ref_logp")
        for value in (np.nan, -np.inf)
    ),
    *(
        (
            put_experts((0, 1, 2, 1), experts),
            put("mask", (0, 1, 2), False),
            r"experts of token 2 of prompt 'sum-17', rollout 1, are \[\[1, 2\], "
            rf"\[{experts[0]}, {experts[1]}\]\]; those of a layer",
        )
        for experts in ((3, 0), (-1, -1), (-1, 4), (4, 4))
    ),
    (
        put("mask", 0, False),
        put("where", 0, False),
        "all tokens of prompt 'sum-17' are masked",
    ),
    (put("prompt_mask", 1, False), put("where", 1, False), "prompt 'sum-23' has no tokens"),
]


@for_each(("spoil", "leave_out", "words"), VALUES)
def test_bad_values_are_named_and_masked_ones_are_not_read(spoil, leave_out, words):
    a = arrays()
    spoil(a)
    with pytest.raises(ValueError, match=words):
        check(a)
    leave_out(a)
    check(a)


@for_each(
    ("change", "prompt_ids", "words"),
    [
        (put("rewards", (1, 0), np.nan), None, "reward of prompt 1, rollout 0"),
        (lambda a: {k: v[:0] for k, v in a.items()}, [], r"batch is empty.*\(0, 2, 3\)"),
        (put("where", ..., False), IDS, "no rollout takes part"),
        (lambda a: a, ["a", "b", "c"], "3 names for 2 prompts"),
    ],
)
def test_what_a_batch_cannot_be(change, prompt_ids, words):
    with pytest.raises(ValueError, match=words):
        check(change(arrays()), prompt_ids=prompt_ids)


def changed(**fields):
    return Batch(**{**arrays(), **fields}).check()


def extra(name, shape, dtype=np.float32):
    return changed(extras={name: np.zeros(shape, dtype)})


def column(shape, dtype=np.float32):
    return changed(reward_components={"style": np.zeros(shape, dtype)})


BAD = r"""
ValueError:
changed(rewards=np.zeros((2, 3), np.float32))  # !.*rewards .*\(2, 2\); got \(2, 3\)
changed(mask=np.ones((2, 2, 4), bool))  # !.*mask .*\(2, 2, 3\); got \(2, 2, 4\)
changed(tokens=np.zeros((2, 6), np.int32))  # !.*tokens must have 3 axes
changed(prompt_tokens=np.zeros((3, 4), np.int32))  # !.*\(2, 4\); got \(3, 4\)
changed(prompt_mask=np.ones((2, 3), bool))  # !.*\(2, 4\); got \(2, 3\)
changed(old_logp=np.zeros((2, 2, 2), np.float32))  # !.*old_logp .*got \(2, 2, 2\)
changed(advantages=np.zeros((2,), np.float32))  # !.*advantages .*got \(2,\)
column((2,))  # !Batch: .*reward_components\['style'\] must have shape \(2, 2\); got \(2,\)
extra("prompt_ids", (3,), int)  # !Batch: .*'prompt_ids'\] .* \[P=2\]; got \(3,\)
extra("prompt_ids", (2, 1), int)  # !Batch: .*'prompt_ids'\] .* \[P=2\]; got \(2, 1\)
extra("flawed", (2, 3), bool)  # !Batch: .*'flawed'\] .* \[P=2, G=2\]; got \(2, 3\)
extra("turn_rewards", (2, 2))  # !.*'turn_rewards'\] must have shape \[P=2, G=2, K\]; got \(2, 2\)
extra("turn_ids", (2, 2, 4), int)  # !.*'turn_ids'\] must .* \[P=2, G=2, T=3\]; got \(2, 2, 4\)
extra("top_ids", (2, 2, 3), int)  # !.*'top_ids'\] must .* \[P=2, G=2, T=3, S\]; got \(2, 2, 3\)
extra("mine", (3, 2))  # !Batch: .*'mine'\] must have shape \[P=2, ...\]; got \(3, 2\)
extra("mine", ())  # !Batch: .*'mine'\] must have shape \[P=2, ...\]; got \(\)
TypeError:
changed(rewards=np.zeros((2, 2), np.int32))  # !.*rewards must be floating
changed(mask=np.ones((2, 2, 3), np.float32))  # !.*mask must be bool
changed(tokens=np.zeros((2, 2, 3), np.float32))  # !.*tokens must hold integers
changed(advantages=np.zeros((2, 2), np.int32))  # !.*advantages must be floating
column((2, 2), np.int32)  # !.*reward_components\['style'\] must be floating point; got int32
extra("prompt_ids", (2,))  # !.*'prompt_ids'\] must be int \(place of.*float32
extra("prior", (2,), int)  # !.*extras\['prior'\] must be float \(predicted
extra("flawed", (2, 2))  # !.*extras\['flawed'\] must be bool .*; got float32
"""


@for_each("error, call, message", bad_calls(BAD))
def test_shapes_and_dtypes_are_named(error, call, message):
    raises(error, call, message, globals())


def test_a_batch_is_a_pytree_and_absent_fields_are_absent():
    batch = Batch(**arrays())
    assert len(jax.tree.leaves(batch)) == 6
    half = jax.tree.map(lambda x: x[:1], batch)
    assert half.tokens.shape == (1, 2, 3) and half.old_logp is None
    full = batch.replace(old_logp=jnp.zeros((2, 2, 3)))
    assert len(jax.tree.leaves(full)) == 7


def test_columns_and_extras_that_fit():
    zeros = np.zeros((2, 2), np.float32)
    components = {"function": zeros, "a name": zeros}
    extras = {
        "prompt_ids": np.array([5, 7]),
        "turn_rewards": np.zeros((2, 2, 5), np.float32),
        "top_ids": np.zeros((2, 2, 3, 4), np.int32),
        "mine": np.array([[1], [2]]),  # of any kind, since nobody here knows what it is
    }
    batch = Batch(**arrays(), reward_components=components, extras=extras).check()
    assert len(jax.tree.leaves(batch)) == 6 + 2 + 4
    half = jax.tree.map(lambda x: x[:1], batch)
    assert half.extras["top_ids"].shape == (1, 2, 3, 4)
    assert half.reward_components["a name"].shape == (1, 2)
    half.check()
