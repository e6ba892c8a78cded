"""Presets of preferences: the loss of a batch of pairs, in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import batch_of
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import catalog

P, T = 4, 6


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


def log_odds(a):
    return a - np.log1p(-np.exp(a))


def plackett_luce(scores, order):
    ranked = scores[order]
    return sum(np.log(np.exp(ranked[k:]).sum()) - ranked[k] for k in range(len(ranked) - 1))


def lipo(scores, labels):
    place = np.argsort(np.argsort(-scores)) + 1
    gain, discount = 2.0**labels, 1 / np.log1p(place)
    return sum(
        abs(gain[i] - gain[j])
        * abs(discount[i] - discount[j])
        * -log_sigmoid(scores[i] - scores[j])
        for i in range(len(scores))
        for j in range(len(scores))
        if labels[i] > labels[j]
    )


def of_group(c, r, *others):
    """Sums of both sides, under the policy and the others."""
    return [
        np.array([x.sum(), y.sum()])
        for x, y in zip((c, *others[::2]), (r, *others[1::2]), strict=True)
    ]


def sppo(c, r, ref_c, ref_r, old_c, old_r):
    """The reference is what sampled; rewards 1 and 0 beat each other by sigmoid(1)."""
    p = (0.5 + 1 / (1 + np.exp(-1.0))) / 2
    pairs = ((c.sum() - old_c.sum(), p), (r.sum() - old_r.sum(), 1 - p))
    return sum((x - (rate - 0.5) / 1e-3) ** 2 for x, rate in pairs) / 2


def brain(c, r, ref_c, ref_r, old_c, old_r):
    logp, ref, old = of_group(c, r, ref_c, ref_r, old_c, old_r)

    def log_softmax(x):
        return x - np.log(np.exp(x - x.max()).sum()) - x.max()

    a, b = log_softmax(ref + [1.0, 0.0] - old), log_softmax(logp - old)
    return (np.exp(a) * (a - b)).sum()


def inpo(c, r, ref_c, ref_r, old_c, old_r):
    gap, ref, old = (x[0] - x[1] for x in of_group(c, r, ref_c, ref_r, old_c, old_r))
    return (gap - ref / 3 - old * 2 / 3 - 1 / (2 * 0.0075)) ** 2


def implicit(c, r, ref_c, ref_r, beta=0.1):
    return beta * (c - ref_c).sum(), beta * (r - ref_r).sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def exo_pair(c, r, ref_c, ref_r, *_):
    w, loser = implicit(c, r, ref_c, ref_r)
    q = sigmoid(w - loser)
    return q * np.log(q / 0.999) + (1 - q) * np.log((1 - q) / 0.001)


def discopop(c, r, ref_c, ref_r, *_):
    w, loser = implicit(c, r, ref_c, ref_r)
    blend = sigmoid((w - loser) / 0.05)
    return -(1 - blend) * log_sigmoid(w - loser) + blend * np.exp(loser - w)


def nca(c, r, ref_c, ref_r, *_):
    w, loser = implicit(c, r, ref_c, ref_r)
    return -log_sigmoid(w) - (log_sigmoid(-w) + log_sigmoid(-loser)) / 2


def apo(c, r, ref_c, ref_r, *_):
    w, loser = implicit(c, r, ref_c, ref_r)
    return 1 - sigmoid(w) + sigmoid(loser)


def ld_dpo(c, r, ref_c, ref_r, *_):
    both = min(len(c), len(r))
    gap = [(x[:both].sum() + 0.5 * x[both:].sum()) for x in (c - ref_c, r - ref_r)]
    return -log_sigmoid(0.1 * (gap[0] - gap[1]))


# Loss of one pair: token log-probabilities of both sides, and the same under the reference and
# under what sampled.
PAIR_LOSS = {
    "dpo": lambda c, r, ref_c, ref_r, *_: (
        -log_sigmoid(0.1 * (c.sum() - ref_c.sum() - r.sum() + ref_r.sum()))
    ),
    "ipo": lambda c, r, ref_c, ref_r, *_: (
        ((c - ref_c).mean() - (r - ref_r).mean() - 1 / (2 * 0.1)) ** 2
    ),
    "slic": lambda c, r, *_: max(0.0, 1.0 - (c.mean() - r.mean())) - c.mean(),
    "orpo": lambda c, r, *_: -c.mean() - 0.1 * log_sigmoid(log_odds(c.mean()) - log_odds(r.mean())),
    "simpo": lambda c, r, *_: -log_sigmoid(2.0 * (c.mean() - r.mean()) - 1.0),
    "cpo": lambda c, r, *_: -log_sigmoid(0.1 * (c.sum() - r.sum())) - c.mean(),
    "lipo_lambda": lambda c, r, ref_c, ref_r, *_: lipo(
        0.05 * np.array([(c - ref_c).sum(), (r - ref_r).sum()]), np.array([1.0, 0.0])
    ),
    "plackett_luce": lambda c, r, ref_c, ref_r, *_: plackett_luce(
        0.1 * np.array([(c - ref_c).sum(), (r - ref_r).sum()]), [0, 1]
    ),
    # Before the first update R is 1 and d is 0.
    "p3o": lambda c, r, *_: 0.0,
    "brain": brain,
    "sppo": sppo,
    "inpo": inpo,
    "mnpo": inpo,  # where the mean of the earlier policies is what sampled
    "exo_pair": exo_pair,
    "discopop": discopop,
    "nca": nca,
    "apo": apo,
    "ld_dpo": ld_dpo,
    "fspo": lambda c, r, ref_c, ref_r, *_: ((c - ref_c).sum() - (r - ref_r).sum() - 50.0) ** 2,
}
PAIR_LOSS["online_dpo"] = PAIR_LOSS["accelerated_po"] = PAIR_LOSS["dpo"]
# Of the values of a head, of which the last one counts.
PAIR_LOSS["reward_model"] = lambda c, r, *_: (
    -log_sigmoid(c[-1] - r[-1]) + 0.01 * (c[-1] + r[-1]) ** 2
)
PAIR_LOSS["reward_model_listwise"] = lambda c, r, *_: -log_sigmoid(c[-1] - r[-1])


def batch_of_pairs(seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, T + 1, (P, 2))
    mask = np.arange(T) < lengths[..., None]
    logp = -rng.uniform(0.1, 3.0, (P, 2, T))
    ref_logp, behavior_logp = logp + rng.normal(0.0, 0.4, (2, P, 2, T))
    where = np.ones((P, 2), bool)
    where[3, 1] = False  # no pair
    sampled = np.where(mask, behavior_logp, 1e4)
    batch = batch_of(
        mask,
        np.tile([1.0, 0.0], (P, 1)),
        where=where,
        ref_logp=np.where(mask, ref_logp, 1e4),
        behavior_logp=sampled,
        extras={"earlier_logp": sampled},
    )
    sides = [
        [x[p, g][mask[p, g]] for x in (logp, ref_logp, behavior_logp) for g in range(2)]
        for p in range(3)
    ]
    return np.where(mask, logp, np.nan), batch, sides


def loss_of(recipe, logp, batch, key=None, **extras):
    """The loss of a policy that did not move since it was scored, and the state after it."""
    logp, extras = jnp.asarray(logp, jnp.float32), batch.extras | jax.tree.map(jnp.float32, extras)
    batch = batch.replace(old_logp=logp, extras=extras)
    prepared, state = jax.jit(recipe.prepare)(batch, recipe.init(), key=key)
    return float(jax.jit(recipe.loss)(logp, prepared)), state


@for_each("name", PAIR_LOSS)
def test_a_preset_is_the_mean_of_its_loss_over_pairs(name):
    logp, batch, sides = batch_of_pairs()
    loss, _ = loss_of(catalog.preset(name, length=T, num_prompts=P), logp, batch)
    want = np.mean([PAIR_LOSS[name](*side) for side in sides])
    np.testing.assert_allclose(loss, want, rtol=1e-5, atol=1e-6)


@for_each("name", ["dpo", "reward_model"])
def test_margins_come_from_the_data(name):
    logp, batch, sides = batch_of_pairs()
    recipe, margins = getattr(jr.recipes, name)(margins=True), np.float32([0.5, 0.0, 1.5, 9.0])
    assert "margin" in recipe.required_fields
    loss, _ = loss_of(recipe, logp, batch, margin=margins)
    want = []
    for margin, (c, r, ref_c, ref_r, *_) in zip(margins, sides, strict=False):
        if name == "dpo":
            want.append(-log_sigmoid(0.1 * ((c - ref_c).sum() - (r - ref_r).sum()) - margin))
        else:
            gap = c[-1] - r[-1] - margin
            want.append(-log_sigmoid(gap) + 0.01 * (c[-1] + r[-1]) ** 2)
    np.testing.assert_allclose(loss, np.mean(want), rtol=1e-5)


def test_pairs_come_from_the_data_or_from_the_policy():
    assert jr.recipes.dpo().collector == jr.curation.offline_pairs()
    assert jr.recipes.online_dpo().collector is None


def test_a_process_reward_model_learns_at_the_ends_of_steps():
    logp, batch, _ = batch_of_pairs()
    rng = np.random.default_rng(2)
    labels, steps = rng.uniform(0, 1, (P, 2, 2)), np.arange(T) * 2 // T
    extras = {
        "turn_rewards": jnp.asarray(np.where(np.arange(2) < 1, labels, np.nan), jnp.float32),
        "turn_where": jnp.tile(jnp.array([True, False]), (P, 2, 1)),
        "turn_ids": jnp.broadcast_to(steps, (P, 2, T)),
    }
    recipe = jr.recipes.process_reward_model()
    loss, _ = loss_of(recipe, logp, batch.replace(extras=extras))
    want, count = 0.0, 0
    for p, g in np.argwhere(np.asarray(batch.where)):
        taken = np.flatnonzero(np.asarray(batch.mask)[p, g])
        count += len({steps[t] for t in taken})
        z, y = logp[p, g, max(t for t in taken if steps[t] == 0)], labels[p, g, 0]
        want -= y * log_sigmoid(z) + (1 - y) * log_sigmoid(-z)
    np.testing.assert_allclose(loss, want / count, rtol=1e-5)


def test_kto_compares_each_response_with_the_divergence_elsewhere():
    logp, batch, sides = batch_of_pairs()
    kl_logp, kl_ref_logp = np.random.default_rng(1).uniform(-9, -8, (2, P, 2))
    kl_logp[0, 0] += 9.0  # above 0 in the mean
    recipe = jr.recipes.kto(desirable_weight=1.5)
    loss, _ = loss_of(recipe, logp, batch, kl_logp=kl_logp, kl_ref_logp=kl_ref_logp)
    where = np.asarray(batch.where)
    z = max(0.0, (kl_logp - kl_ref_logp)[where].mean())
    want = []
    for p in range(P):
        for g in range(2):
            if where[p, g]:
                ratio = (logp - np.asarray(batch.ref_logp))[p, g][
                    np.asarray(batch.mask)[p, g]
                ].sum()
                x = 0.1 * (ratio - z) * (1 if g == 0 else -1)
                want.append((1.5 if g == 0 else 1.0) * (1 - 1 / (1 + np.exp(-x))))
    assert z > 0
    np.testing.assert_allclose(loss, np.mean(want), rtol=1e-5)


def sums_of(sides):
    """Of all responses ``[pair, side]``: under the policy, under the reference."""
    every = np.array([[x.sum() for x in side] for side in sides])
    return every[:, 0:2], every[:, 2:4]


def test_bco_compares_with_the_mean_reward_so_far():
    logp, batch, sides = batch_of_pairs()
    recipe = jr.recipes.bco(beta=0.3, undesirable_weight=0.5)
    loss, state = loss_of(recipe, logp, batch)
    where = np.asarray(batch.where)
    taken = np.asarray(batch.mask) & where[..., None]
    x = 0.3 * np.where(taken, np.nan_to_num(logp) - np.asarray(batch.ref_logp), 0.0).sum(-1)
    d = x[where].mean()
    good, bad = -log_sigmoid(x[:, 0] - d), -0.5 * log_sigmoid(d - x[:, 1])
    np.testing.assert_allclose(loss, np.mean([*good[where[:, 0]], *bad[where[:, 1]]]), rtol=1e-5)
    np.testing.assert_allclose(state.controllers["center"].mean, d, rtol=1e-5)


def test_bco_weighs_bad_responses_by_their_density():
    logp, batch, _ = batch_of_pairs()

    def loss(density):
        return loss_of(jr.recipes.bco(density=True), logp, batch, density=density)[0]

    np.testing.assert_allclose(loss(np.ones(P)), loss_of(jr.recipes.bco(), logp, batch)[0])
    good = loss(np.zeros(P))
    each = [loss(row) - good for row in np.eye(P)]
    density = np.array([0.5, 2.0, 3.0, 1.0])
    np.testing.assert_allclose(loss(density), good + density @ each, rtol=1e-5)
    assert each[3] == 0 < min(each[:3])  # the last pair has no bad response


def test_aot_matches_the_ranks_of_a_batch_and_its_parts_add_up():
    logp, batch, sides = batch_of_pairs(seed=5)
    policy, ref = sums_of(sides)
    a, b = policy[:, 0] - policy[:, 1], ref[:, 0] - ref[:, 1]
    assert (np.argsort(a) != np.argsort(b)).any()
    want = -log_sigmoid(0.3 * (np.sort(a) - np.sort(b))).mean()
    recipe = jr.recipes.aot(beta=0.3)
    loss, _ = loss_of(recipe, logp, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    logp = jnp.asarray(logp, jnp.float32)
    prepared, _ = recipe.prepare(batch.replace(old_logp=logp), recipe.init())
    parts = [jax.tree.map(lambda x, p=p: x[p : p + 1], prepared) for p in range(P)]
    total = sum(recipe.loss(logp[p : p + 1], part) for p, part in enumerate(parts))
    np.testing.assert_allclose(total, want, rtol=1e-5)


def halved(x, other):
    """A sum in which tokens past the length of another response count half."""
    both = min(len(x), len(other))
    return x[:both].sum() + 0.5 * x[both:].sum()


def test_mpo_and_its_center_count_long_responses_alike():
    logp, batch, sides = batch_of_pairs(seed=5)
    x = 0.3 * np.array(
        [
            [halved(c, r) - halved(ref_c, ref_r), halved(r, c) - halved(ref_r, ref_c)]
            for c, r, ref_c, ref_r, *_ in sides
        ]
    )
    recipe = jr.recipes.mpo(beta=0.3, likelihood=0.0, excess=0.5)
    loss, state = loss_of(recipe, logp, batch)
    center = x.mean()
    np.testing.assert_allclose(state.controllers["center"].mean, center, rtol=1e-5)
    classes = -log_sigmoid(x[:, 0] - center) - log_sigmoid(center - x[:, 1])
    want = -0.8 * log_sigmoid(x[:, 0] - x[:, 1]) + 0.2 * classes
    np.testing.assert_allclose(loss, want.mean(), rtol=1e-5)


@for_each(("options", "cap"), [({}, 1.0), ({"cap": None}, np.inf)])
def test_wpo_weighs_a_pair_by_how_likely_the_policy_is_to_write_it(options, cap):
    """The authors' code lets no pair count more than 1, TRL's does."""
    logp, batch, sides = batch_of_pairs()
    energy = np.random.default_rng(2).uniform(0.2, 0.9, logp.shape)
    energy[1] = 0.1
    squares = np.where(np.asarray(batch.mask), energy, -1.0)
    loss, _ = loss_of(jr.recipes.wpo(**options), logp, batch, sum_pi_sq=squares)
    want, counts = [], []
    for p in range(3):
        taken = np.asarray(batch.mask)[p]
        weights = [
            np.exp((logp[p, g][taken[g]] - np.log(energy[p, g][taken[g]])).mean()) for g in range(2)
        ]
        counts.append(weights[0] * weights[1])
        want.append(min(counts[-1], cap) * PAIR_LOSS["dpo"](*sides[p]))
    assert min(counts) < 1 < max(counts)
    np.testing.assert_allclose(loss, np.mean(want), rtol=1e-5)


def batch_of_groups(group, seed=3):
    """Groups of full length; the log-probabilities, the batch, and both as sums ``[P, G]``."""
    rng = np.random.default_rng(seed)
    logp = -rng.uniform(0.1, 2.0, (P, group, T))
    ref_logp = logp + rng.normal(0.0, 0.4, logp.shape)
    rewards = rng.uniform(0.0, 2.0, (P, group))
    batch = batch_of(np.ones(logp.shape, bool), rewards, ref_logp=ref_logp)
    return logp, batch, logp.sum(-1), ref_logp.sum(-1)


def test_tpo_has_a_pair_and_a_gold_response():
    logp, batch, policy, _ = batch_of_groups(3)
    batch = batch.replace(rewards=jnp.tile(jnp.array([1.0, 0.0, 2.0]), (P, 1)), ref_logp=None)
    loss, _ = loss_of(jr.recipes.tpo(beta=0.2, gamma=0.1), logp, batch)
    gap = 0.2 * (policy[:, 0] - policy[:, 1]) - 0.1
    np.testing.assert_allclose(loss, np.mean(-log_sigmoid(gap) - policy[:, 2] / T), rtol=1e-5)


def test_nash_md_plays_against_a_mixture():
    logp, batch, policy, ref = batch_of_groups(4)
    loss, _ = loss_of(jr.recipes.nash_md(beta=0.3, mixture=0.4), logp, batch)
    rewards, want = np.float64(batch.rewards), []
    for p in range(P):
        for i in range(4):
            others = [j for j in range(4) if j != i]
            weights = np.exp(0.4 * (ref - policy)[p, others])
            wins = sigmoid(rewards[p, i] - rewards[p, others])
            rate = (weights * wins).sum() / weights.sum()
            penalty = ((logp[p, i] - np.asarray(batch.ref_logp)[p, i]) * logp[p, i]).sum()
            want.append(0.3 * penalty - (rate - 0.5) * policy[p, i])
    np.testing.assert_allclose(loss, np.mean(want), rtol=1e-5)


def test_xpo_pairs_a_rollout_with_a_response_of_the_reference():
    logp, batch, policy, ref = batch_of_groups(3)
    other = np.tile([False, False, True], (P, 1))
    rewards = np.asarray(batch.rewards).copy()
    rewards[0] = [0.5, 1.5, 0.5]  # equal rewards are no pair
    batch = batch.replace(rewards=jnp.asarray(rewards), extras={"steered": jnp.asarray(other)})
    loss, _ = loss_of(jr.recipes.xpo(beta=0.3, alpha=0.01), logp, batch)
    want = []
    for p in range(P):
        losses = []
        for i in range(2):
            if rewards[p, i] != rewards[p, 2]:
                sign = 1 if rewards[p, i] > rewards[p, 2] else -1
                gap = 0.3 * sign * ((policy - ref)[p, i] - (policy - ref)[p, 2])
                losses.append(-log_sigmoid(gap) + 0.01 * policy[p, 2])
        want.append(np.mean(losses))
    np.testing.assert_allclose(loss, np.mean(want), rtol=1e-5)


@for_each("name", ["seppo", "spin"])
def test_the_data_are_the_better_response_whatever_the_rewards(name):
    """SePPO turns the sample round where the policy has fallen below its reference."""
    logp, batch, policy, ref = batch_of_groups(3)
    steered = np.tile([False, True, False], (P, 1))
    steered[2] = False  # no response of the data, no pair
    batch = batch.replace(extras={"steered": jnp.asarray(steered)})
    recipe = getattr(jr.recipes, name)(beta=0.3)
    loss, _ = loss_of(recipe, logp, batch)
    x, want = 0.3 * (policy - ref), []
    assert len({bool(value >= 0) for value in x[[0, 1, 3], 1]}) == 2
    for p in range(P):
        sign = 1 if x[p, 1] >= 0 or name == "spin" else -1
        losses = [-log_sigmoid(x[p, 1] - sign * x[p, i]) for i in (0, 2)]
        want.append(np.mean(losses) if steered[p].any() else 0.0)
    np.testing.assert_allclose(loss, np.mean(want), rtol=1e-5)
    assert loss_of(recipe, logp, batch.replace(rewards=1.0 - batch.rewards))[0] == loss


def test_spin_samples_from_its_reference_which_is_the_policy_of_the_last_iteration():
    assert jr.recipes.spin().sampled_by == "reference"
    old, new = {"w": jnp.zeros(1)}, {"w": jnp.ones(1)}
    every = jr.recipes.spin(every=2).reference
    assert [float(every(old, new, n)["w"][0]) for n in range(5)] == [0, 0, 1, 0, 1]


def test_mnpo_compares_with_the_weighted_mean_of_earlier_policies():
    logp, batch, sides = batch_of_pairs()
    recipe = jr.recipes.mnpo(eta=0.5, ratio=0.2, weights=(3.0, 1.0))
    history = np.random.default_rng(5).normal(-1.0, 0.5, (2, *logp.shape))
    earlier = jnp.asarray(0.75 * history[0] + 0.25 * history[1], jnp.float32)
    loss, _ = loss_of(recipe, logp, batch.replace(extras={"earlier_logp": earlier}))
    mask, pairs = np.asarray(batch.mask), []
    for p, (c, r, ref_c, ref_r, *_) in enumerate(sides):
        old_c, old_r = (np.where(mask[p, g], history[:, p, g], 0).sum(-1) for g in range(2))
        rows = jnp.asarray([[x.sum()] for x in (c, r, ref_c, ref_r)], jnp.float32)
        pairs.append(
            jr.preferences.mnpo(
                *rows,
                jnp.float32(old_c)[None],
                jnp.float32(old_r)[None],
                weights=jnp.array([3.0, 1.0]),
                eta=0.5,
                ratio=0.2,
            )
        )
    np.testing.assert_allclose(loss, np.mean(pairs), rtol=1e-5)
    with pytest.raises(ValueError, match="earlier has policies that nothing uses"):
        jr.recipes.inpo().replace(earlier=recipe.earlier)


def test_spo_degree_adds_what_tells_copies_apart():
    logp, batch, policy, ref = batch_of_groups(4)
    rewards = np.tile([0.5, 1.0, 0.0, 0.75], (P, 1)).astype(np.float32)
    recipe = jr.recipes.spo_degree(beta=0.3, degree_coef=0.2)
    logits = np.random.default_rng(6).normal(size=(*logp.shape, 4))
    prepared, _ = recipe.prepare(batch.replace(rewards=jnp.asarray(rewards)), recipe.init())
    statistics = {"degree_logits": jnp.asarray(logits, jnp.float32)}
    loss = recipe.loss(jnp.asarray(logp, jnp.float32), prepared, statistics=statistics)
    mask, want = np.asarray(batch.mask), []
    for p in range(P):
        pair = -log_sigmoid(0.3 * ((policy - ref)[p, 1] - (policy - ref)[p, 2]))
        degrees = []
        for g, degree in ((0, 2), (1, 0), (3, 1)):
            z = logits[p, g, np.flatnonzero(mask[p, g]).max()]
            degrees.append(np.log(np.exp(z).sum()) - z[degree])
        want.append((pair, np.mean(degrees)))
    pair, degrees = np.mean(want, axis=0)
    np.testing.assert_allclose(loss, pair + 0.2 * degrees, rtol=1e-5)
    alone = jr.recipes.spo_degree(beta=0.3, degree_coef=0.0)
    loss = alone.loss(jnp.asarray(logp, jnp.float32), prepared, statistics=statistics)
    np.testing.assert_allclose(loss, pair, rtol=1e-5)


def test_lspo_pairs_the_likeliest_strategy_with_the_least_likely():
    logp, batch, policy, ref = batch_of_groups(4)
    # Utterances of three kinds; those of the third group are all of one.
    kinds = np.array([[0, 1, 1, 2], [2, 0, 1, 0], [1, 1, 1, 1], [0, 2, 2, 0]])[:P]
    rewards = np.random.default_rng(4).uniform(0.0, 1.0, (P, 4)).astype(np.float32)
    embeddings = 9 * np.eye(3, 8, dtype=np.float32)[kinds]
    recipe = jr.recipes.lspo(num_prompts=P, beta=0.3, clusters=3)
    batch = batch.replace(
        rewards=jnp.asarray(rewards),
        extras={"embeddings": jnp.asarray(embeddings), "prompt_ids": jnp.arange(P)},
    )
    prepared, state = recipe.prepare(batch, recipe.init(), key=jax.random.key(0))
    loss, want = recipe.loss(jnp.asarray(logp, jnp.float32), prepared), []
    for p in range(P):
        here = np.flatnonzero(np.asarray(batch.where)[p])
        u = {a: np.mean(rewards[p, here[kinds[p, here] == a]]) for a in set(kinds[p, here])}
        if len(u) < 2:
            continue
        # At the first visit the policy has in proportion what is better than the mean.
        gain = {a: max(x - np.mean(list(u.values())), 0) for a, x in u.items()}
        value = np.array([gain[kinds[p, g]] for g in here])
        best, worst = (here[value == x] for x in (value.max(), value.min()))
        pairs = [(w, x) for w in best for x in worst]
        gaps = [(policy - ref)[p, w] - (policy - ref)[p, x] for w, x in pairs]
        want.append(np.mean([-log_sigmoid(0.3 * gap) for gap in gaps]))
    assert len(want) == P - 1
    np.testing.assert_allclose(loss, np.mean(want), rtol=1e-5)
    assert int(state.advantage.batches) == 1 and state.advantage.regrets.any(-1).tolist() == [
        True, True, False, True,
    ][:P]  # fmt: skip


@for_each(
    ("recipe", "trains"),
    [
        (jr.recipes.p3o(kl_coef=0.1), True),
        (jr.recipes.p3o(kl_coef=0.0), False),
        (jr.recipes.brain(), True),
        (jr.recipes.listwise(jr.preferences.list_softmax, offline=False), True),
        (jr.recipes.listwise(jr.preferences.plackett_luce, offline=False), False),
    ],
    ids=["p3o with a penalty", "p3o", "brain", "list_softmax", "plackett_luce"],
)
def test_groups_of_equal_rewards_train_where_their_loss_is_not_zero(recipe, trains):
    logp, batch, _, _ = batch_of_groups(2)
    batch = batch.replace(rewards=jnp.ones_like(batch.rewards), behavior_logp=batch.ref_logp)
    prepared, _ = recipe.prepare(batch, recipe.init(), key=jax.random.key(0))
    slope = jax.grad(lambda x: recipe.loss(x, prepared))(jnp.asarray(logp, jnp.float32))
    assert bool(jnp.any(slope != 0)) == trains


def test_vlm_spo_pairs_the_best_and_the_worst_plan_of_three_criteria():
    logp, batch, policy, ref = batch_of_groups(4)
    grades = np.random.default_rng(4).uniform(0.0, 1.0, (3, P, 4))
    grades[:, 2] = 0.5 + 0.01 * grades[:, 2]  # too close to be a pair
    score = np.tensordot([0.5, 0.3, 0.2], grades, 1)
    components = dict(zip(("task", "grounding", "history"), map(jnp.float32, grades), strict=True))
    recipe = jr.recipes.vlm_spo(
        beta=0.3, min_gap=0.05, task_weight=0.5, grounding_weight=0.3, history_weight=0.2
    )
    batch = batch.replace(reward_components=components)
    loss, _ = loss_of(recipe, logp, batch)
    want = []
    for p in (0, 1, 3):
        w, loser = np.argmax(score[p]), np.argmin(score[p])
        want.append(-log_sigmoid(0.3 * ((policy - ref)[p, w] - (policy - ref)[p, loser])))
    np.testing.assert_allclose(loss, np.mean(want), rtol=1e-5)
    del components["history"]
    with pytest.raises(ValueError, match="vlm_spo: the reward must return .* has no 'history'"):
        recipe.prepare(batch.replace(reward_components=components), recipe.init())


def test_any_loss_of_pairs_or_lists_is_a_recipe():
    names = ("hinge", "bco", "apo_down", "sft")
    logp, batch, _ = batch_of_pairs()
    for name in names:
        recipe = jr.recipes.pairwise(getattr(jr.preferences, name))
        prepared, _ = recipe.prepare(batch, recipe.init())
        assert recipe.name == name
        assert np.isfinite(recipe.loss(jnp.asarray(logp, jnp.float32), prepared))
    ranked = jr.recipes.listwise(jr.preferences.list_softmax, offline=False)
    assert ranked.collector is None and ranked.name == "list_softmax"
    with pytest.raises(ValueError, match="needs chosen_previous_logp, rejected_previous_logp"):
        recipe = jr.recipes.pairwise(jr.preferences.inpo)
        recipe.loss(jnp.asarray(logp, jnp.float32), recipe.prepare(batch, recipe.init())[0])


def test_any_loss_of_single_responses_is_a_recipe():
    logp, batch, _ = batch_of_pairs()
    recipe = jr.recipes.unpaired(jr.bind(jr.preferences.apo_zero_unpaired, beta=0.3))
    assert recipe.collector == jr.curation.offline_labels()
    assert recipe.name == "apo_zero_unpaired" and recipe.uses_reference
    where = np.asarray(batch.where)
    ratio = np.where(batch.mask, logp - np.asarray(batch.ref_logp), 0.0).sum(-1)
    push = 1 / (1 + np.exp(-0.3 * ratio))
    want = np.where([True, False], 1 - push, push)[where].mean()
    np.testing.assert_allclose(loss_of(recipe, logp, batch)[0], want, rtol=1e-5)

    def likelihood(chosen_logp, desirable):
        return jnp.where(desirable, -chosen_logp, 0.0)

    assert not jr.recipes.unpaired(likelihood).uses_reference
    with pytest.raises(ValueError, match="kto needs kl"):
        loss_of(jr.recipes.unpaired(jr.preferences.kto), logp, batch)


def test_p3o_begins_as_a_policy_gradient_on_differences():
    logp, batch, _ = batch_of_pairs()
    recipe = jr.recipes.p3o(kl_coef=0.0)
    prepared, _ = recipe.prepare(batch, recipe.init())
    grads = jax.grad(lambda x: recipe.loss(x, prepared))(jnp.asarray(logp, jnp.float32))
    mask = np.asarray(batch.mask) & np.array([True, True, True, False])[:, None, None]
    # -(r_1 - r_2) / 2 for the better response and the reverse for the other, in each of 3 pairs.
    want = np.array([-0.5, 0.5])[:, None] / 3 * mask
    np.testing.assert_allclose(np.where(mask, grads, 0.0), want, rtol=1e-5)
