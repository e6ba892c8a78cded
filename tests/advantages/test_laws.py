"""What every estimator promises of arrays that are partly masked.

- What is masked, dropped or did not happen is neither read, in value or gradient, nor written.
- The gradient is that of finite differences.
- bfloat16 is counted in float32.
- Rollouts and prompts may stand in any order, and a group does not see another.
- A NaN that is kept is seen, and arrays without elements are no error.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm import advantages as adv

PROMPTS, ROLLOUTS, TOKENS, TURNS = 3, 4, 5, 3


def arrays(seed=0, prompts=PROMPTS, rollouts=ROLLOUTS):
    """A batch with a lone and a dropped rollout, gaps of tokens, and turns that did not happen."""
    rng = np.random.default_rng(seed)
    rollout, token, turn = (
        (prompts, rollouts),
        (prompts, rollouts, TOKENS),
        (prompts, rollouts, TURNS),
    )
    where = np.ones(rollout, bool)
    where[1:2, 1:], where[2:, -1:] = False, False
    mask = rng.random(token) < 0.7
    mask[..., 0] = True
    logp = -rng.exponential(size=(4, *token)).astype(np.float32)
    names = ("old_logp", "ref_logp", "behavior_logp", "hot_logp")
    floats = {
        "rewards": rng.normal(0.5, 1.0, rollout),
        "other_rewards": rng.normal(size=rollout),
        "budgets": rng.uniform(0.1, 1.0, rollout),
        "norms": rng.exponential(size=rollout) + 0.1,
        "values": rng.normal(size=token),
        "action_values": rng.normal(size=token),
        "token_rewards": rng.normal(size=token),
        "old_entropy": rng.exponential(size=token),
        "sum_pi_sq": rng.uniform(0.2, 0.9, token),
        "turn_rewards": rng.normal(size=turn),
        "prior": rng.uniform(0.2, 0.8, prompts),
        **dict(zip(names, logp, strict=True)),
    }
    return {name: x.astype(np.float32) for name, x in floats.items()} | {
        "where": where,
        "mask": mask,
        "happened": np.arange(TURNS) < rng.integers(1, TURNS + 1, rollout)[..., None],
        "turn_ids": np.sort(rng.integers(0, TURNS, token), axis=-1).astype(np.int32),
    }


def turns(x):
    return {"turn_ids": x.turn_ids, "turn_where": x.happened}


def off_policy(x):
    return {"old_logp": x.old_logp, "behavior_logp": x.behavior_logp}


def tempered(x):
    return {"old_logp": x.old_logp, "hot_logp": x.hot_logp, "cold_logp": x.ref_logp}


def components(x):
    return {"a": x.rewards, "b": x.other_rewards}


# Groups do not see each other.
OF_GROUPS = {
    "asymre": lambda x: adv.asymre(x.rewards, where=x.where),
    "gpg": lambda x: adv.gpg(x.rewards, where=x.where, mode="nonzero_reward", scale="group"),
    "hbpo": lambda x: adv.hbpo(x.rewards, budgets=x.budgets, where=x.where),
    "maxrl": lambda x: adv.maxrl(x.rewards, where=x.where),
    "maxrl_root": lambda x: adv.maxrl(x.rewards, where=x.where, scale="root"),
    "maclaurin": lambda x: adv.maclaurin(x.rewards, where=x.where),
    "mc_grpo": lambda x: adv.mc_grpo(x.rewards, where=x.where),
    "mc_grpo_std": lambda x: adv.mc_grpo(x.rewards, where=x.where, scale="std"),
    "mc_grpo_none": lambda x: adv.mc_grpo(x.rewards, where=x.where, scale="none"),
    "grpo": lambda x: adv.grpo(x.rewards, where=x.where),
    "grpo_population": lambda x: adv.grpo(x.rewards, where=x.where, ddof=0),
    "dr_grpo": lambda x: adv.dr_grpo(x.rewards, where=x.where),
    "rloo": lambda x: adv.rloo(x.rewards, where=x.where),
    "grpo_split": lambda x: adv.grpo_split(x.rewards, steered=x.mask[..., 1], where=x.where),
    "passk_training": lambda x: adv.passk_training(x.rewards, where=x.where, k=2),
    "pkpo": lambda x: adv.pkpo(x.rewards, where=x.where, k=2),
    "pkpo_loo": lambda x: adv.pkpo(x.rewards, where=x.where, k=2, loo=True),
    "grpo_passk": lambda x: adv.grpo_passk(x.rewards, where=x.where),
    "v05_baseline": lambda x: adv.v05_baseline(x.rewards, prior=x.prior, where=x.where),
    "v05_group": lambda x: adv.v05_baseline(x.rewards, prior=x.prior, where=x.where, scale="group"),
    "opo": lambda x: adv.opo(x.rewards, x.mask, where=x.where),
    "vcpo": lambda x: adv.vcpo_advantage(
        x.rewards, **off_policy(x), mask=x.mask, where=x.where, grad_sq_norms=x.norms
    ),
    "remax": lambda x: adv.remax(x.rewards, greedy_rewards=x.prior, where=x.where),
    "remax_token": lambda x: adv.remax_token(
        x.token_rewards, x.mask, greedy_rewards=x.prior, where=x.where
    ),
    "otb": lambda x: adv.otb_token(
        x.token_rewards, x.mask, where=x.where, old_logp=x.old_logp, sum_pi_sq=x.sum_pi_sq
    ),
    "otb_compact": lambda x: adv.otb_token(
        x.token_rewards,
        x.mask,
        where=x.where,
        old_logp=x.old_logp,
        sum_pi_sq=x.sum_pi_sq,
        weights=x.old_entropy,
        compact=True,
    ),
    "trloo": lambda x: adv.trloo(x.turn_rewards, turn_where=x.happened, where=x.where, gamma=0.9),
    "gae": lambda x: adv.gae(x.token_rewards, x.values, x.mask, gamma=0.9, lam=0.5),
    "turn_gae": lambda x: adv.turn_gae(x.turn_rewards, x.values, x.mask, **turns(x), gamma=0.9),
    "pdppo": lambda x: adv.pdppo(x.turn_rewards, x.values, x.mask, **turns(x)),
    "poad": lambda x: adv.poad(
        adv.turn_end_rewards(x.turn_rewards, x.mask, **turns(x)),
        x.values,
        x.mask,
        turn_ids=x.turn_ids,
        gamma=0.8,
    ),
    "vtrace": lambda x: adv.vtrace(x.token_rewards, x.values, x.mask, **off_policy(x)),
    "retrace_returns": lambda x: adv.retrace_returns(
        x.token_rewards, x.values, x.mask, action_values=x.action_values, **off_policy(x)
    ),
    "corrected_td_errors": lambda x: adv.corrected_td_errors(
        x.token_rewards, x.values, x.mask, **off_policy(x)
    ),
    "n_step_returns": lambda x: adv.n_step_returns(x.token_rewards, x.values, x.mask, n=2),
    "novelty_sharpening": lambda x: adv.novelty_sharpening(
        x.rewards, x.mask, old_logp=x.old_logp, where=x.where
    ),
    "ace": lambda x: adv.ace(
        x.rewards, x.mask, old_logp=x.old_logp, ref_logp=x.ref_logp, where=x.where
    ),
    "ace_mean": lambda x: adv.ace(
        x.rewards,
        x.mask,
        old_logp=x.old_logp,
        ref_logp=x.ref_logp,
        where=x.where,
        length_normalize=True,
    ),
    "entropy_shaping": lambda x: adv.entropy_shaping(x.rewards, x.mask, old_entropy=x.old_entropy),
    "sampled_entropy_shaping": lambda x: adv.sampled_entropy_shaping(
        x.rewards, x.mask, old_logp=x.old_logp
    ),
}  # fmt: skip
OF_BATCHES = {
    "jspo": lambda x: adv.jspo(x.rewards, where=x.where),
    "grpo_batch": lambda x: adv.grpo(x.rewards, where=x.where, scale="batch"),
    "gdpo": lambda x: adv.gdpo(components(x), where=x.where),
    "gdpo_token": lambda x: adv.gdpo_token(components(x), x.mask, where=x.where),
    "reinforce_pp": lambda x: adv.reinforce_pp(
        x.rewards, x.mask, where=x.where, old_logp=x.old_logp, ref_logp=x.ref_logp, kl_coef=0.1
    ),
    "pp_baseline_token": lambda x: adv.reinforce_pp_baseline(x.rewards, x.mask, where=x.where),
    "pp_baseline_sequence": lambda x: adv.reinforce_pp_baseline(
        x.rewards, x.mask, where=x.where, norm="sequence"
    ),
    "spo": lambda x: adv.spo(x.rewards, x.prior, where=x.where),
    "gpg_informative": lambda x: adv.gpg(x.rewards, where=x.where, scale="group"),
    "dcpo_distribution": lambda x: adv.dcpo_distribution(
        x.other_rewards, x.mask, rewards=x.rewards, **tempered(x), where=x.where,
        policy_entropy=jnp.float32(0.45),
    ),
}  # fmt: skip
ALL = OF_GROUPS | OF_BATCHES
# A component that is NaN does not apply, and what is compared with a threshold is not above it.
NAN_IS_NONE = {"gdpo", "gdpo_token", "dcpo_distribution"}


class Reading:
    """The arrays of a batch, and which of them were read."""

    def __init__(self, batch):
        self._batch, self.names = batch, set()

    def __getattr__(self, name):
        self.names.add(name)
        return self._batch[name]


def weights_of(out):
    """Of a sum, so that no two values count the same."""
    return np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape)


def program(name, batch):
    """The case as a program of its floating arrays and the others, and which it reads."""
    reading = Reading(batch)
    jax.eval_shape(lambda: ALL[name](reading))
    floats = [x for x in sorted(reading.names) if batch[x].dtype == np.float32]

    def run(floats, others):
        def total(floats):
            out = ALL[name](types.SimpleNamespace(**floats, **others))
            return jnp.sum(weights_of(out) * out), out

        return jax.value_and_grad(total, has_aux=True)(floats)

    return jax.jit(run), floats, reading.names


def read_of(name, batch, used):
    """Where an array is read: of which rollouts, tokens and turns."""
    rollouts = batch["where"] if "where" in used else np.ones_like(batch["where"])
    if batch[name].ndim == 1:
        return np.ones(batch[name].shape, bool)
    if batch[name].ndim == 2:
        return rollouts
    inner = "happened" if batch[name].shape[-1] == TURNS else "mask"
    return rollouts[..., None] & (batch[inner] if inner in used else True)


def split(batch, floats):
    return {k: batch[k] for k in floats}, {k: x for k, x in batch.items() if k not in floats}


@for_each("name", ALL)
def test_laws(name):
    batch = arrays()
    run, names, used = program(name, batch)
    read = {k: read_of(k, batch, used) for k in names}
    floats, others = split(batch, names)
    (total, out), slope = jax.tree.map(np.asarray, run(floats, others))
    assert out.dtype == np.float32 and np.isfinite(out).all()
    # What is not read.
    for junk in (1e4, np.nan, np.inf, -np.inf):
        dirty = {k: np.where(read[k], x, np.float32(junk)) for k, x in floats.items()}
        jax.tree.map(equal, run(dirty, others), ((total, out), slope))
    for key, gradient in slope.items():
        assert np.isfinite(gradient).all() and not gradient[~read[key]].any(), key
    like = {2: "rewards", 3: "turn_rewards" if out.shape[-1] == TURNS else "values"}[out.ndim]
    assert not out[~read_of(like, batch, used)].any() and out.any()
    # Gradients along a direction.
    rng = np.random.default_rng(1)
    step = {k: 1e-3 * rng.normal(size=x.shape) for k, x in floats.items()}
    ends = [
        run({k: np.float32(x + sign * step[k]) for k, x in floats.items()}, others)[0][1]
        for sign in (1, -1)
    ]
    moved = (np.float64(ends[0]) - np.float64(ends[1])) / 2
    expected = sum((np.float64(slope[k]) * step[k]).sum() for k in slope)
    close((weights_of(out) * moved).sum(), expected, rtol=3e-2, atol=2e-5)
    # Orders.
    for order in (np.ix_([2, 0, 1], range(ROLLOUTS)), np.ix_(range(PROMPTS), [2, 0, 3, 1])):
        again = {k: x[order] if x.ndim > 1 else x[order[0][:, 0]] for k, x in batch.items()}
        found = run(*split(again, names))[0][1]
        close(found, out[order], rtol=1e-4, atol=1e-5)
    # Other groups.
    if name in OF_GROUPS:
        first = {k: np.concatenate([x[:1] * 3 + 1, x[1:]]) for k, x in floats.items()}
        found = run({k: np.float32(x) for k, x in first.items()}, others)[0][1]
        close(found[1:], out[1:], rtol=1e-5, atol=1e-6)
    # Equal rewards have no gradient that is none.
    flat = {k: np.full_like(x, 0.1) if "rewards" in k else x for k, x in floats.items()}
    for key, gradient in run(flat, others)[1].items():
        assert np.isfinite(gradient).all(), key
    # A number that is none.
    if name not in NAN_IS_NONE:
        key = next(k for k in ("rewards", "token_rewards", "turn_rewards") if k in names)
        bad = floats[key].copy()
        bad[(0,) * bad.ndim] = np.nan
        assert np.isnan(run(floats | {key: bad}, others)[0][1]).any()
    # Half precision: a program of its own.
    half = {k: x.astype(jnp.bfloat16) for k, x in floats.items()}
    found = jax.jit(lambda x: ALL[name](types.SimpleNamespace(**x, **others)))(half)
    assert found.dtype == jnp.float32
    expected = run({k: x.astype(np.float32) for k, x in half.items()}, others)[0][1]
    close(found, expected, rtol=1e-5, atol=1e-5)
    # Axes without elements.
    for shape in ((0, ROLLOUTS), (PROMPTS, 0), (PROMPTS, 1)):
        empty = types.SimpleNamespace(**arrays(0, *shape))
        assert jax.eval_shape(lambda x=empty: ALL[name](x)).shape[:2] == shape
