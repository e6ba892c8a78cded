"""Whole losses of the presets with teachers, guides and controllers, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from preset_cases import batch_of, clip, double, loss_of, near, z
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes.wiring import statistic_shapes

P, G, T, S = 2, 4, 3, 2
MASK = np.arange(T) < np.array([[3, 2, 1, 3], [2, 3, 3, 0]])[..., None]
REWARDS = np.array([[1.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 1.0]], np.float32)
STEERED = np.array([[False, False, True, False], [True, False, False, False]])


def make(**extras):
    rng = np.random.default_rng(0)
    logp = rng.normal(-1.5, 0.5, (P, G, T)).astype(np.float32)
    others = {name: near(rng, logp, 0.3) for name in ("old_logp", "ref_logp")}
    return logp, batch_of(MASK, REWARDS, **others, extras=extras)


def test_rover():
    rng = np.random.default_rng(1)
    q, old_q = rng.uniform(-5, -3, (2, P, G, T)).astype(np.float32)
    logp, batch = make(old_mean_log_probs=old_q)
    got = loss_of(jr.recipes.rover(rho=0.5), logp, batch, mean_log_probs=q)
    x, old, new, before, r = double(logp, batch.old_logp, q, old_q, REWARDS)
    gap = np.where(MASK, new - before, 0)
    later = np.concatenate([gap[..., 1:], 0 * gap[..., :1]], -1)
    target = (r - r.mean(-1, keepdims=True))[..., None] + 0.5 * later
    expected = ((0.5 * (x - old) - target) ** 2)[MASK].mean()
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_sft_is_the_mean_log_likelihood_whatever_the_rewards():
    logp, batch = make()
    (x,) = double(logp)
    got = loss_of(jr.recipes.sft(), logp, batch)
    np.testing.assert_allclose(got, -x[MASK].mean(), rtol=1e-6)


def test_dft_weighs_the_log_likelihood_by_the_probability():
    logp, batch = make()
    (x,) = double(logp)
    got = loss_of(jr.recipes.dft(), logp, batch)
    np.testing.assert_allclose(got, -(np.exp(x) * x)[MASK].mean(), rtol=1e-6)


@for_each("samples", [None, 64])
def test_otr_is_the_mean_of_its_statistic(samples):
    logp, batch = make()
    recipe = jr.recipes.otr(samples=samples)
    loss = np.random.default_rng(2).uniform(0, 1, (P, G, T)).astype(np.float32)
    got = loss_of(recipe, logp, batch, one_token_loss=loss)
    np.testing.assert_allclose(got, loss[MASK].mean(), rtol=1e-6)
    ready, _ = recipe.prepare(batch, recipe.init(), key=jax.random.key(1))
    assert ("token_seeds" in ready.extras) == (samples is not None)
    assert statistic_shapes(recipe, ready)["one_token_loss"].shape == (P, G, T)


HAS_TEACHER = np.array([[True, True, False, True], [False, True, True, True]])


def distributions(seed):
    rng = np.random.default_rng(seed)
    return np.log(rng.dirichlet(np.ones(S + 1), (2, P, G, T))[..., :S]).astype(np.float32)


def divergence(student, teacher):
    s, t = (np.exp(np.asarray(x, np.float64)) for x in (student, teacher))
    s, t = (np.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1) for x in (s, t))
    m = (s + t) / 2
    return 0.5 * ((s * np.log(s / m)).sum(-1) + (t * np.log(t / m)).sum(-1))


SUPPORT = np.zeros((P, G, T, S), np.int32)


def test_sdpo_averages_over_the_taught_tokens():
    student, teacher = distributions(3)
    teacher = np.where(HAS_TEACHER[..., None, None], teacher, np.nan)
    logp, batch = make(has_teacher=HAS_TEACHER, top_ids=SUPPORT, teacher_logp=teacher)
    got = loss_of(jr.recipes.sdpo(), logp, batch, student_logp=student)
    x, old = double(logp, batch.old_logp)
    token = np.minimum(np.exp(x - old), 2.0) * divergence(student, teacher)
    expected = token[MASK & HAS_TEACHER[..., None]].mean()
    np.testing.assert_allclose(got, expected, rtol=1e-4)


@for_each("decay", [None, 4])
def test_rlsd_weighs_the_advantages_of_tokens(decay):
    teacher = np.random.default_rng(8).normal(-1.5, 0.5, (P, G, T)).astype(np.float32)
    taught = np.where(HAS_TEACHER[..., None], teacher, np.nan)
    logp, batch = make(has_teacher=HAS_TEACHER, teacher_token_logp=taught)
    recipe = jr.recipes.rlsd(lam=0.8, decay=decay, weight_eps=0.3)
    x, old, r, t = double(logp, batch.old_logp, REWARDS, teacher)
    a = z(r)[..., None]
    weight = np.clip(np.exp(np.sign(a) * (t - old)), 0.7, 1.3)
    weight = np.where(HAS_TEACHER[..., None], weight, 1.0)
    state = recipe.init()
    for lam in (0.8, 0.8, 0.8) if decay is None else (0.8, 0.6, 0.4):
        ready, state = recipe.prepare(batch, state)
        found = float(recipe.loss(jnp.asarray(logp), ready))
        token = clip(np.exp(x - old), a * ((1 - lam) + lam * weight))
        np.testing.assert_allclose(found, token[MASK].mean(), rtol=1e-4)


def test_srpo():
    student, teacher = distributions(4)
    entropy = np.random.default_rng(5).uniform(0, 2, (P, G, T)).astype(np.float32)
    taught = {"teacher_logp": teacher, "teacher_entropy": entropy, "top_ids": SUPPORT}
    logp, batch = make(has_teacher=HAS_TEACHER, **taught)
    got = loss_of(jr.recipes.srpo(beta=0.7), logp, batch, student_logp=student)
    x, old, r, h = double(logp, batch.old_logp, REWARDS, entropy)
    routed = ((r < 1) & HAS_TEACHER)[..., None] & MASK
    weight = np.exp(-0.7 * h)
    weight = weight / weight[routed].mean()
    ratio = np.exp(x - old)
    taught = weight * np.minimum(ratio, 2.0) * divergence(student, teacher)
    token = np.where(routed, taught, clip(ratio, z(r)[..., None]))
    np.testing.assert_allclose(got, token[MASK].mean(), rtol=1e-4)


def shaped(x, a):
    return -a * np.exp(x) / (np.exp(x) + 0.1)


def test_luffy():
    logp, batch = make(steered=STEERED)
    entropy = np.random.default_rng(7).uniform(0.5, 2, (P, G, T)).astype(np.float32)
    got = loss_of(jr.recipes.luffy_shaping(length=5), logp, batch, entropy=entropy)
    x, old, r = double(logp, batch.old_logp, REWARDS)
    a = (r - r.mean(-1, keepdims=True))[..., None]
    token = np.where(STEERED[..., None], shaped(x, a), -a * np.exp(x - old))
    expected = ((token - 1e-3 * entropy) * MASK).sum() / (P * G * 5)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert jr.recipes.luffy_shaping(length=5, entropy_coef=0.0).required_fields == {"steered"}


@for_each("phi", [True, False])
def test_chord_has_a_mean_of_the_rollouts_and_one_of_the_experts(phi):
    logp, batch = make(steered=STEERED)
    # What an expert's response is rewarded with changes nothing.
    batch = batch.replace(rewards=jnp.where(jnp.asarray(STEERED), 7.0, batch.rewards))
    recipe = jr.recipes.chord(phi=phi, peak=0.5, valley=0.1, warmup=2, decay=2)
    assert recipe.required_fields == {"steered"}
    x, old, r = double(logp, batch.old_logp, REWARDS)
    own, expert = MASK & ~STEERED[..., None], MASK & STEERED[..., None]
    a = np.zeros((P, G, 1))
    for p in range(P):
        chosen = r[p][~STEERED[p]]
        a[p, ~STEERED[p], 0] = (chosen - chosen.mean()) / (chosen.std(ddof=1) + 1e-6)
    grpo = clip(np.exp(x - old), a)[own].mean()
    sft = -((np.exp(x) * (1 - np.exp(x)) if phi else 1.0) * x)[expert].mean()
    state = recipe.init()
    for mu in (0.0, 0.25, 0.5, 0.3, 0.1, 0.1):
        ready, state = recipe.prepare(batch, state)
        found = float(recipe.loss(jnp.asarray(logp), ready))
        np.testing.assert_allclose(found, (1 - mu) * grpo + mu * sft, rtol=1e-5)


def test_ampo():
    entropy = np.random.default_rng(6).uniform(0.5, 2, (P, G, T)).astype(np.float32)
    # Of the second group all rollouts fail: the answer of a teacher takes the place of the second,
    # and the probe leaves. In the first group one is right.
    roles = np.array([[0, 0, 0, 0], [2, 0, 0, 4]])
    steered = roles == 2
    logp, batch = make(roles=roles, steered=steered)
    batch = batch.replace(rewards=jnp.array([REWARDS[0], [1.0, 0.0, 0.0, 0.0]]))
    recipe = jr.recipes.ampo(length=5, dual_clip=1.1, entropy_coef=0.02, k_max=1)
    ready, _ = recipe.prepare(batch, recipe.init())
    where = np.array([[True] * 4, [True, False, True, False]])
    assert ready.where.tolist() == where.tolist()
    got = loss_of(recipe, logp, batch, entropy=entropy)
    x, old, r = double(logp, batch.old_logp, batch.rewards)
    a = (r - np.array([r[0].mean(), 0.0])[:, None])[..., None]
    token = np.where(steered[..., None], shaped(x, a), clip(np.exp(x - old), a, dual=1.1))
    mask = MASK & where[..., None]
    expected = ((token - 0.02 * entropy) * mask).sum() / (mask.any(-1).sum() * 5)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_icpo_swaps_good_steered_rollouts_in():
    # In the second group the steered rollout failed, so it leaves; in the first it is right, so
    # that one of the three others leaves. Its reward counts double at the first step.
    rewards = np.array([[1.0, 0.0, 1.0, 0.5], REWARDS[1]], np.float32)
    logp, batch = make(steered=STEERED)
    batch = batch.replace(rewards=jnp.asarray(rewards))
    recipe = jr.recipes.icpo(anneal=2)
    ready, state = recipe.prepare(batch, recipe.init(), key=jax.random.key(3))
    where = np.asarray(ready.where)
    assert where.sum(-1).tolist() == [3, 3] and where[0, 2] and not where[1, 0]
    x, old, ref = double(logp, batch.old_logp, batch.ref_logp)
    total, kept = 0.0, MASK & where[..., None]
    for p in range(P):
        r = np.where(STEERED[p], 2.0, 1.0) * rewards[p].astype(np.float64)
        a = np.zeros(G)
        a[where[p]] = (r[where[p]] - r[where[p]].mean()) / (r[where[p]].std(ddof=1) + 1e-6)
        token = np.where(
            STEERED[p][:, None], shaped(x[p], a[:, None]), clip(np.exp(x - old)[p], a[:, None])
        )
        d = (x - ref)[p]
        total += ((token + 1e-3 * (np.exp(-d) - 1 + d)) * kept[p]).sum()
    np.testing.assert_allclose(float(recipe.loss(jnp.asarray(logp), ready)), total / kept.sum(),
                               rtol=1e-4)  # fmt: skip
    # One step later the factor has fallen to 1.5.
    later, _ = recipe.prepare(batch, state, key=jax.random.key(3))
    np.testing.assert_allclose(later.extras["steered_factor"][0, 0, 0], 1.5)


@for_each("level", ["action", "response"])
def test_llds(level):
    chunks = np.where(MASK, np.array([1, 1, 2]), 0).astype(np.int32)
    logp, batch = make(chunk_ids=chunks)
    got = loss_of(jr.recipes.llds(coef=0.3, level=level), logp, batch)
    x, old, ref, r = double(logp, batch.old_logp, batch.ref_logp, REWARDS)
    a, d, lost = z(r), x - ref, np.where(MASK, old - x, 0.0)
    token = clip(np.exp(x - old), a[..., None]) + 1e-3 * (np.exp(-d) - 1 + d)
    for p, g, t in zip(*np.nonzero(MASK), strict=True):
        same = (chunks[p, g] == chunks[p, g, t]) | (level == "response")
        if a[p, g] >= 0 and lost[p, g][same & MASK[p, g]].sum() > 0:
            token[p, g, t] += 0.3 * max(0.0, lost[p, g, t])
    np.testing.assert_allclose(got, token[MASK].mean(), rtol=1e-4)


def test_the_penalty_of_safe_has_the_slope_of_its_controller():
    rng = np.random.default_rng(7)
    values = rng.uniform(0, 1, (P, G, T, 2)).astype(np.float32)
    recipe = jr.recipes.safe(entropy_coef=0.0, kl_estimator="k1+")
    logp, batch = make(old_values=values, old_entropy=np.full((P, G, T), 0.4, np.float32))
    batch = batch.replace(ref_logp=batch.old_logp - 6.0)
    pessimistic = np.asarray(recipe.critic.combine(jnp.asarray(values)))
    batch = batch.replace(extras={**batch.extras, "values": jnp.asarray(pessimistic)})
    ready, state = recipe.prepare(batch, recipe.init())
    coef = 0.2 * 0.1 * (0.6 - 0.45) * 4.0
    np.testing.assert_allclose(ready.extras["penalty_coef"][:, 0, 0], coef, rtol=1e-4)
    np.testing.assert_allclose(state.controllers["penalty_coef"].kl_short, 0.6, rtol=1e-5)
    # Advantages: the reward minus the soft minimum, whitened over the tokens of the batch.
    v = values.astype(np.float64)
    soft = -0.3 * np.log(np.exp(-v / 0.3).mean(-1))
    a = (REWARDS[..., None] - soft)[MASK]
    a = (a - a.mean()) / a.std(ddof=1)
    np.testing.assert_allclose(np.asarray(ready.advantages)[MASK], a, rtol=1e-3, atol=1e-4)
    x, old, ref = double(logp, batch.old_logp, batch.ref_logp)
    expected = (clip(np.exp(x - old)[MASK], a) + coef * (x - ref)[MASK]).mean()
    np.testing.assert_allclose(float(recipe.loss(jnp.asarray(logp), ready)), expected, rtol=1e-3)
    new = rng.uniform(0, 1, values.shape).astype(np.float32)
    got = float(recipe.critic.total_loss(jnp.asarray(new), ready))
    returns = np.broadcast_to(REWARDS[..., None, None], values.shape).astype(np.float64)
    huber = lambda d: np.where(np.abs(d) < 0.5, d**2 / 2, 0.5 * (np.abs(d) - 0.25))  # noqa: E731
    near = v + np.clip(new - v, -0.2, 0.2)
    errors = 0.5 * (huber(new - returns) + huber(near - returns))
    np.testing.assert_allclose(got, errors[MASK].mean(0).sum(), rtol=1e-4)


@for_each("scaled", [True, False])
def test_adaptive_kl_puts_the_divergence_into_the_reward(scaled):
    numbers = {"initial": 0.5, "target": 0.1, "horizon": 10.0, "gamma": 0.9, "lam": 0.8}
    recipe = jr.recipes.adaptive_kl(**numbers, **({} if scaled else {"whiten_rewards": False}))
    values = np.random.default_rng(8).uniform(0, 1, (P, G, T)).astype(np.float32)
    _, batch = make(values=values, old_values=values[..., None])
    ready, state = recipe.prepare(batch, recipe.init())
    old, ref = double(batch.old_logp, batch.ref_logp)
    raw, kls = np.zeros((P, G, T)), []
    rewards = -0.5 * (old - ref)
    for p, g in np.ndindex(P, G):
        if n := MASK[p, g].sum():
            kls.append((old - ref)[p, g, :n].mean())
            rewards[p, g, n - 1] += REWARDS[p, g]
    if scaled:  # and not shifted
        mean = rewards[MASK].mean()
        rewards = mean + (rewards - mean) / rewards[MASK].std(ddof=1)
    for p, g in np.ndindex(P, G):
        n, running = MASK[p, g].sum(), 0.0
        for t in reversed(range(n)):
            after = values[p, g, t + 1] if t < n - 1 else 0.0
            running = rewards[p, g, t] + 0.9 * after - values[p, g, t] + 0.9 * 0.8 * running
            raw[p, g, t] = running
    np.testing.assert_allclose(
        np.asarray(ready.extras["returns"])[MASK, 0], (raw + values)[MASK], rtol=1e-4, atol=1e-5
    )
    white = (raw - raw[MASK].mean()) / raw[MASK].std(ddof=1)
    np.testing.assert_allclose(
        np.asarray(ready.advantages)[MASK], white[MASK], rtol=1e-3, atol=1e-4
    )
    error = np.clip(np.mean(kls) / 0.1 - 1, -0.2, 0.2)
    expected = 0.5 * (1 + error * len(kls) / 10.0)
    np.testing.assert_allclose(state.controllers["kl_coef"], expected, rtol=1e-5)


def demonstrations():
    tokens = np.random.default_rng(9).integers(0, 50, (4, 1, 6))
    prompts = np.arange(8).reshape(4, 2)
    return batch_of(
        np.ones(tokens.shape, bool), np.zeros((4, 1)), tokens=tokens, prompt_tokens=prompts
    )


@pytest.mark.slow
def test_a_teacher_who_sees_the_same_prompt_teaches_nothing():
    model, params = jr.testing.tiny_model(num_layers=1)
    recipe = jr.recipes.srpo(top=7)
    batch = demonstrations()
    batch = batch.replace(
        tokens=batch.tokens.reshape(2, 2, 6),
        mask=batch.mask.reshape(2, 2, 6),
        where=jnp.ones((2, 2), bool),
        rewards=jnp.zeros((2, 2)),
        prompt_tokens=batch.prompt_tokens[:2],
        prompt_mask=batch.prompt_mask[:2],
    )
    step = jr.train.make_step(model, recipe, optax.sgd(1.0), microbatches=2, donate=False)

    def run(teacher_prompts, has_teacher):
        more = 4 - teacher_prompts.shape[-1]  # of one length, so that one program takes both
        extras = {
            "has_teacher": jnp.full((2, 2), has_teacher),
            "teacher_prompt_tokens": jnp.pad(teacher_prompts, ((0, 0), (0, 0), (0, more))),
            "teacher_prompt_mask": jnp.broadcast_to(jnp.arange(4) < 4 - more, (2, 2, 4)),
        }
        state = jr.train.init_state(params, optax.sgd(1.0), recipe, key=jax.random.key(0))
        state, metrics = step(state, batch.replace(extras=extras))
        moved = max(
            float(jnp.abs(a - b).max())
            for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True)
        )
        return state, float(metrics["loss"]), moved

    same = jnp.broadcast_to(batch.prompt_tokens[:, None], (2, 2, 2))
    hint = jnp.concatenate([same + 9, same], axis=-1)
    _, loss, moved = run(same, True)
    assert abs(loss) < 1e-5 and moved < 1e-4
    _, loss, moved = run(hint, False)
    assert loss == 0 and moved == 0  # all rewards agree, so rewards teach nothing either
    state, loss, moved = run(hint, True)
    assert loss > 1e-3 and moved > 1e-3
    # The teacher's weights have moved a twentieth of the way.
    for old, new, teacher in zip(
        *map(jax.tree.leaves, (params, state.params, state.reference)), strict=True
    ):
        np.testing.assert_allclose(teacher, old + 0.05 * (new - old), rtol=1e-4, atol=1e-6)


# --- hints, prefixes and repairs ---------------------------------------------------------------


@for_each(
    ("name", "eps", "high"),
    [("nurl", 1e-6, 1.2), ("sage", 1e-6, 1.28), ("scaf_grpo", 1e-6, 1.2), ("ghpo", 1e-4, 1.2)],
)
def test_what_changes_the_groups_alone_trains_as_grpo(name, eps, high):
    logp, batch = make()
    got = loss_of(getattr(jr.recipes, name)(), logp, batch)
    x, old, r = double(logp, batch.old_logp, REWARDS)
    expected = clip(np.exp(x - old), z(r, eps)[..., None], high=high)[MASK].mean()
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_prefix_rl_is_reinforce_with_the_mean_of_the_group():
    logp, batch = make()
    x, r = double(logp, REWARDS)
    expected = (-(r - r.mean(-1, keepdims=True))[..., None] * x)[MASK].mean()
    np.testing.assert_allclose(loss_of(jr.recipes.prefix_rl(), logp, batch), expected, rtol=1e-5)


def test_adhint_weighs_both_kinds_and_spares_its_hints():
    hint = np.zeros((P, G, T), bool)
    hint[STEERED, 0] = True
    entropy = np.random.default_rng(3).uniform(0.2, 2, (P, G, T)).astype(np.float32)
    logp, batch = make(steered=STEERED, hint_mask=hint, old_entropy=entropy)
    got = loss_of(jr.recipes.adhint(kappa=0.5), logp, batch)
    x, old, r, h = double(logp, batch.old_logp, REWARDS, entropy)
    a = z(r)
    helped = [row[s].mean() - row[~s].mean() for row, s in zip(r, STEERED, strict=True)]
    sign = np.where(STEERED, -1, 1) * np.sign(a)
    a = np.repeat((a * np.exp(0.5 * np.array(helped)[:, None] * sign))[..., None], T, -1)
    after = np.where(MASK & ~hint, h, 0).sum(-1) / np.maximum((MASK & ~hint).sum(-1), 1)
    ratio = np.minimum(h, after[..., None]) / np.maximum(h, after[..., None])
    a = np.where(hint, np.maximum(ratio * a, 0), a)
    np.testing.assert_allclose(got, clip(np.exp(x - old), a)[MASK].mean(), rtol=1e-5)


def test_scope_shapes_the_continuation_alone():
    foreign = np.zeros((P, G, T), bool)
    foreign[0, 0, 1:] = True
    logp, batch = make(hint_mask=foreign)
    x, old, r = double(logp, batch.old_logp, REWARDS)
    a = z(r)[..., None]
    expected = np.where(foreign, shaped(x, a), clip(np.exp(x - old), a))[MASK].mean()
    np.testing.assert_allclose(loss_of(jr.recipes.scope(), logp, batch), expected, rtol=1e-5)


@for_each("agree", [0.0, 1.0, None])
def test_cog_rethinker_imitates_what_is_right_after_help(agree):
    """Groups of accuracy 0 or 1 leave the mean, but for what is imitated."""
    logp, batch = make(imitated=STEERED)
    rewards = REWARDS.copy()
    if agree is not None:
        rewards[1] = np.where(STEERED[1], 1.0, agree)
    batch = batch.replace(rewards=jnp.asarray(rewards))
    got = loss_of(jr.recipes.cog_rethinker(imitation=0.3), logp, batch)
    x, old, r = double(logp, batch.old_logp, rewards)
    total, count = 0.0, 0
    for p in range(P):
        own = ~STEERED[p]
        a = np.zeros(G)
        a[own] = (r[p, own] - r[p, own].mean()) / (r[p, own].std(ddof=1) + 1e-6)
        token = clip(np.exp(x - old)[p], a[:, None], high=1.28)
        token = np.where(STEERED[p][:, None], -0.3 * x[p], token)
        trains = MASK[p] & (STEERED[p] | (np.ptp(r[p, own]) > 0))[:, None]
        total, count = total + token[trains].sum(), count + trains.sum()
    np.testing.assert_allclose(got, total / count, rtol=1e-5)


def test_the_best_teacher_is_the_one_whose_reasoning_leads_to_the_answer():
    roles = jnp.array([[0, 0, 2, 2, 4, 4], [0, 0, 0, 0, 0, 0]])
    mask = jnp.ones((2, 6, 2), bool).at[0, 4, 0].set(False)
    prob = jnp.full((2, 6, 2), 0.1).at[0, 4].set(jnp.array([0.99, 0.5])).at[0, 5].set(0.4)
    rewards = jnp.array([[0.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0.0] * 6])
    inputs = {"roles": roles, "mask": mask, "old_logp": jnp.log(prob)}
    where = jr.curation.best_teachers(rewards, **inputs, k_max=1)
    assert where.astype(int).tolist() == [[0, 1, 1, 0, 0, 0], [1] * 6]
    both = jr.curation.best_teachers(rewards, **inputs)
    assert both[0].astype(int).tolist() == [0, 0, 1, 1, 0, 0]
    solved = jr.curation.best_teachers(rewards.at[0, 1].set(1.0), **inputs)
    assert solved[0].astype(int).tolist() == [1, 1, 0, 0, 0, 0]
