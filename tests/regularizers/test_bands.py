"""EPO: the history of a turn's entropy, the phase of the training, the penalty outside a band."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import regularizers as reg

MASK, TURNS = jnp.ones(3, bool), jnp.zeros(3, int)
ENTROPY, HISTORY = jnp.array([0.4, 1.0, 2.0]), jnp.array([1.0])
BAND = {"turn_ids": TURNS, "history": HISTORY, "coef": 1.0, "low": 0.5, "high": 1.5}


@for_each(
    ("epoch", "weight"),
    [(0, 1.0), (25, 0.873576), (50, 0.827067), (51, 0.753412), (75, 0.178504), (100, 0.039830)],
)
def test_weights_of_the_phases(epoch, weight):
    close(reg.epo_phase_weight(epoch / 100), weight, atol=1e-6)


@for_each(("form", "penalty"), [("indicator", [0.1, 0.0, 0.1]), ("hinge", [0.01, 0.0, 0.05])])
def test_worked_penalties(form, penalty):
    loss = reg.entropy_band(ENTROPY, MASK, form=form, **BAND)
    close(loss + ENTROPY, penalty, atol=1e-6)
    none = reg.entropy_band(ENTROPY, MASK, form=form, weight=0.0, **BAND)
    bonus = reg.entropy_bonus(ENTROPY, MASK, coef=1.0)
    close(none, bonus, rtol=1e-6)


def test_penalties():
    # The released penalty has no gradient and the hinge has.
    def slope(form):
        return jax.grad(lambda h: reg.entropy_band(h, MASK, form=form, **BAND).sum())(ENTROPY)

    close(slope("indicator"), -np.ones(3))
    close(slope("hinge"), [-1.1, -1.0, -0.9], rtol=1e-5)

    # Penalties begin at a turn and need a history.
    turns, history = jnp.array([0, 1, 2]), jnp.array([1.0, 0.0, 1.0])
    options = BAND | {"turn_ids": turns, "history": history}
    far = jnp.full(3, 9.0)
    loss = reg.entropy_band(far, MASK, form="indicator", **options)
    close(loss + far, [0.1, 0.0, 0.1], atol=1e-5)
    late = reg.entropy_band(far, MASK, form="indicator", from_turn=1, **options)
    close(late + far, [0.0, 0.0, 0.1], atol=1e-5)
    outside = reg.entropy_band(far, MASK, form="indicator", **BAND | {"turn_ids": turns + 5})
    close(outside, -far)

    # Without turns the band is that of one turn.
    turns = jnp.zeros_like(BAND["turn_ids"])
    options = {name: x for name, x in BAND.items() if name not in ("turn_ids", "history")}
    one = reg.entropy_band(
        ENTROPY, MASK, turn_ids=turns, history=jnp.array([0.7]), form="hinge", **options
    )
    history = jnp.full((1,) * ENTROPY.ndim, 0.7)
    equal(reg.entropy_band(ENTROPY, MASK, history=history, form="hinge", **options), one)


@for_each("junk", [jnp.nan, jnp.inf, -jnp.inf, 1e4])
def test_masked_tokens_are_not_read(junk):
    mask, turns = jnp.array([True, False, True, True]), jnp.array([0, 0, 1, -1])
    entropy = jnp.array([1.0, junk, 3.0, 5.0])
    options = BAND | {"turn_ids": turns}
    loss, slope = jax.value_and_grad(lambda h: reg.entropy_band(h, mask, **options).sum())(entropy)
    assert np.isfinite(loss) and slope[1] == 0
    state = reg.entropy_history_init(turns=2)
    state = jax.jit(reg.entropy_history_update)(state, entropy, mask, turn_ids=turns)
    assert state.mean.tolist() == [1.0, 3.0] and state.steps.tolist() == [1.0, 1.0]


def test_histories():
    # A history is the mean over the steps in which a turn occurred.
    state = reg.entropy_history_init(turns=3)
    for entropy, turns in (
        ([1.0, 3.0, 8.0], [0, 0, 1]),
        ([4.0, 4.0, 4.0], [0, 0, 0]),
        ([6.0, 6.0, 9.0], [1, 1, 7]),
    ):
        state = reg.entropy_history_update(
            state, jnp.array(entropy), MASK, turn_ids=jnp.array(turns)
        )
    close(state.mean, [3.0, 7.0, 0.0])
    assert state.steps.tolist() == [2.0, 2.0, 0.0]

    # A turn of more tokens than float32 counts.
    shape = (5120, 4096)  # the first 2^24 tokens of entropy 0
    entropy = jnp.broadcast_to((jnp.arange(5120) >= 4096).astype(jnp.float32)[:, None], shape)
    state = reg.entropy_history_init(turns=1)
    update = jax.jit(reg.entropy_history_update)
    state = update(state, entropy, jnp.ones(shape, bool), turn_ids=jnp.zeros(shape, jnp.int8))
    close(state.mean, [0.2], rtol=1e-6)
    assert state.steps.tolist() == [1.0]
    empty = jnp.zeros((2, 0))
    after = reg.entropy_history_update(state, empty, empty > 0, turn_ids=empty.astype(int))
    assert after.steps.tolist() == [1.0]

    # A history of one turn is a controller.
    history = reg.entropy_history()
    state, mask = history.init(), jnp.array([[[True, True, False]], [[True, False, False]]])
    values = []
    for h in (1.0, 3.0, 2.0):
        entropy = jnp.full((2, 1, 3), h).at[1].add(0.3)
        value, state = history.update(jnp.ones((2, 1)), state, old_entropy=entropy, mask=mask)
        values.append(float(value))
    close(values, [1.1, 2.1, 2.1], rtol=1e-6)
    # A batch without tokens is no step, and groups that take no part do not count.
    where = jnp.array([[True], [False]])
    entropy = jnp.full((2, 1, 3), 6.0).at[1].set(jnp.nan)
    for there, after in ((where & False, 2.1), (where, (6.3 + 6.0) / 4)):
        value, state = history.update(
            jnp.ones((2, 1)), state, old_entropy=entropy, mask=mask, where=there
        )
        close(value, after, rtol=1e-6)

    # Each turn has a history of the steps in which it occurred.
    history = reg.entropy_history(turns=2)
    state, mask = history.init(), jnp.array([[[True, False, True, True]]])
    entropy = jnp.array([[[1.0, jnp.nan, 3.0, 5.0]]])
    turns = jnp.array([[[0, -1, 1, 1]]])
    context = {"old_entropy": entropy, "mask": mask}
    value, state = history.update(jnp.ones((1, 1)), state, turn_ids=turns, **context)
    assert value.tolist() == [[[1.0, 0.0, 4.0, 4.0]]]
    # Only the first turn occurs, and the third has no history.
    late = jnp.array([[[0, -1, 0, 2]]])
    value, state = history.update(jnp.ones((1, 1)), state, turn_ids=late, **context)
    assert value.tolist() == [[[1.5, 0.0, 1.5, 0.0]]] and state.mean.tolist() == [1.5, 4.0]
    nobody = jnp.zeros((1, 1), bool)
    _, same = history.update(jnp.ones((1, 1)), state, turn_ids=turns, where=nobody, **context)
    assert same.mean.tolist() == [1.5, 4.0] and same.steps.tolist() == [2.0, 1.0]


@for_each("name", ["history", "weight"])
def test_a_number_per_prompt_counts_at_its_tokens(name):
    entropy, mask = jnp.full((3, 2, 3), 5.0), jnp.ones((3, 2, 3), bool)

    def band(value):
        return reg.entropy_band(entropy, mask, **{"history": jnp.array(1.0), name: value})

    for fits in ((3, 1, 1), (1, 2, 1), (3, 2, 3)):
        close(band(jnp.full(fits, 0.5)), band(jnp.array(0.5)), rtol=1e-6)


def test_progress_outside_a_training_is_its_start_or_end():
    weight = jr.regularizers.epo_phase_weight
    assert weight(-1.0) == weight(0.0) and weight(2.0) == weight(1.0)
