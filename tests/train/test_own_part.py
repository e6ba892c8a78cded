"""A part of one's own, in one file: a snapshot of the policy, its second pass, and a teacher.

The recipe is REINFORCE with the advantage ``A + beta (wise_logp - snapshot_logp)``, where the
snapshot is the policy of every second step. Nothing of the library names it.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl_llm as jr
from jaxrl_llm.testing.cases import make_case
from jaxrl_llm.train import make_scorer
from jaxrl_llm.train.update.cost import forward_passes
from jaxrl_llm.train.update.part import Part, Read, Source, Teacher


@dataclasses.dataclass(frozen=True)
class Snapshot(jr.recipes.RecipePart):
    """The policy of every ``every`` steps, whose log-probabilities the advantage reads."""

    every: int = 2

    title: ClassVar[str] = "a snapshot"
    reserved: ClassVar[frozenset[str]] = frozenset({"snapshot_logp"})

    def computed_by_step(self, recipe):
        return self.reserved

    def step_part(self, setup):
        def reads(batch, at):
            return (Read(SNAPSHOT, {"snapshot_logp": "logp"}),)

        def after(state, done, at):
            new = at.policy_step % self.every == 0
            pairs = state.params, state.parts["snapshot"]
            moved = jax.tree.map(lambda a, b: jnp.where(new, a, b), *pairs)
            return state.with_parts(snapshot=moved), {"snapshot_age": at.policy_step % self.every}

        return Part("snapshot", lambda recipe, start: _copy(start.params), reads=reads, after=after)


def _copy(params):
    return jax.tree.map(jnp.copy, params)


SNAPSHOT = Source("snapshot", lambda at: (at.setup.scorer, at.state.parts["snapshot"]))


def advantage(rewards, *, wise_logp, snapshot_logp, mask, beta=0.5):
    """``[P, G, T]``."""
    centered = rewards - rewards.mean(-1, keepdims=True)
    gap = jnp.where(mask, wise_logp - snapshot_logp, 0.0)
    return centered[..., None] + beta * gap


def logp_of_targets(logits, targets):
    logp = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]


WISE_LOGP = jr.recipes.Computed("wise_logp", logp_of_targets, "teacher")
RECIPE = jr.recipes.dr_grpo(length=6).replace(
    name="snapshot",
    advantage=jr.stateless(advantage),
    computed=(WISE_LOGP,),
    parts=(Snapshot(),),
)


def test_its_passes_are_counted():
    assert forward_passes(RECIPE) == {"snapshot": 1, "teacher": 1}


@pytest.mark.slow
def test_its_state_looks_back_and_its_passes_reach_the_advantage(tmp_path):
    model, params = jr.testing.tiny_model(num_layers=1)
    teacher = Teacher(model, jax.tree.map(lambda x: 0.9 * x, params))
    optimizer, key = optax.sgd(0.5), jax.random.key(0)
    state = jr.train.init_state(params, optimizer, RECIPE, key=key)
    batch = make_case(recipe=jr.recipes.dr_grpo(length=6)).batch.replace(old_logp=None, extras={})
    step = jr.train.make_step(model, RECIPE, optimizer, teacher=teacher, donate=False)
    score = make_scorer(model)
    plain = jr.recipes.dr_grpo(length=6)
    by_hand = jr.train.make_step(
        model,
        plain.replace(advantage=jr.stateless(lambda rewards, values: values), inputs=("values",)),
        optimizer,
        donate=False,
    )
    mine, snapshot = state, params
    for number in (1, 2, 3):
        values = advantage(
            batch.rewards,
            wise_logp=score(teacher.params, batch),
            snapshot_logp=score(snapshot, batch),
            mask=batch.mask,
        )
        expected, _ = by_hand(mine._replace(parts={}), batch.with_extras({"values": values}))
        mine, metrics = step(mine, batch)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), mine.params, expected.params
        )
        assert metrics["snapshot_age"] == number % 2
        snapshot = mine.params if number % 2 == 0 else snapshot
        jax.tree.map(np.testing.assert_array_equal, mine.parts["snapshot"], snapshot)
    jr.train.save(tmp_path / "state", mine, model=model)
    again = jr.train.restore(tmp_path / "state", state, model=model)
    jax.tree.map(np.testing.assert_array_equal, again.parts["snapshot"], snapshot)
