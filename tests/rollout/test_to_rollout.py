"""From finished groups to a batch: against the whole-batch sampler, and what is refused."""

import jax
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.rollout import Completion, FinishedGroup, Group, to_rollout
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import CANCELLED, LENGTH, UNFINISHED


def finished(name, lengths, finish=LENGTH, prompt=(5, 6)):
    completions = []
    for request, n in enumerate(lengths):
        numbers, integers = np.full(n, -1.0, np.float32), np.arange(1, n + 1, dtype=np.int32)
        out = Tokens(integers, numbers, numbers, numbers * 0, integers * 0 + 3)
        completions.append(Completion(request, out, finish))
    group = Group(name, list(prompt), tuple(range(len(lengths))))
    return FinishedGroup(group, tuple(completions))


def test_the_arrays_by_hand():
    rollout = to_rollout(
        [finished("a", [3, 1]), finished("b", [0, 2], CANCELLED, [9])],
        max_new_tokens=4,
        prompt_width=3,
        pad_id=7,
    )
    assert rollout.prompt_tokens.tolist() == [[5, 6, 0], [9, 0, 0]]
    assert rollout.prompt_mask.tolist() == [[True, True, False], [True, False, False]]
    assert rollout.tokens[0].tolist() == [[1, 2, 3, 7], [1, 7, 7, 7]]
    assert rollout.tokens[1].tolist() == [[7] * 4, [1, 2, 7, 7]]
    assert rollout.mask.sum(-1).tolist() == [[3, 1], [0, 2]]
    assert rollout.behavior_logp[0].tolist() == [[-1, -1, -1, 0], [-1, 0, 0, 0]]
    assert rollout.version[0].tolist() == [[3, 3, 3, 0], [3, 0, 0, 0]]
    # Cancelled responses are told from the others by their end.
    assert rollout.finish.tolist() == [[LENGTH] * 2, [CANCELLED] * 2]
    assert rollout.support is None


def test_the_batch_of_an_engine_is_that_of_the_sampler():
    model, params = jr.testing.tiny_model()  # of two layers
    prompts, key = [[65, 66, 67], [70]], jax.random.key(4)
    options = {"max_new_tokens": 24, "stop_ids": tuple(range(12)), "temperature": 0.7, "pad_id": 7}
    engine = jr.rollout.make_engine(model, rows=1, width=4, prompt_length=16, **options)
    generation = jr.rollout.Generation(engine, params, key=key, version=2)
    for i, prompt in enumerate(prompts):
        generation.submit(Group(i, prompt, tuple(range(6 * i, 6 * i + 6))))
    groups = sorted(generation, key=lambda done: done.id)
    ours = to_rollout(groups, max_new_tokens=24, prompt_width=16, pad_id=7)
    sample = jr.rollout.make_sampler(model, group_size=6, buckets=(16,), **options)
    theirs = jax.device_get(sample(params, key, prompts, version=2))
    theirs = theirs._replace(sampled_at=None)  # each request of an engine may have its own
    for name, x in theirs._asdict().items():
        if x is None:
            assert getattr(ours, name) is None
        else:
            np.testing.assert_allclose(getattr(ours, name), x, atol=1e-5, err_msg=name)
            assert getattr(ours, name).dtype == x.dtype, name


@for_each(
    ("groups", "message"),
    [
        ([], "there are no groups"),
        ([finished("a", [1, 2]), finished("b", [1])], "group 'b' has 1 completions, but the first"),
        ([finished("a", [1], prompt=[1] * 4)], "the prompt of group 'a' has 4 tokens, more than"),
        ([finished("a", [5])], "request 0 of group 'a' has 5 tokens, more than max_new_tokens 4"),
        ([finished("a", [2], UNFINISHED)], "request 0 of group 'a' is unfinished"),
    ],
)
def test_groups_that_are_not_a_batch_are_named(groups, message):
    with pytest.raises(ValueError, match=f"to_rollout: .*{message}"):
        to_rollout(groups, max_new_tokens=4, prompt_width=3)
