"""Which rollouts train, how trees are credited and what certainty does, against released code."""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
from golden_data import Difference, Ours

from golden_ours import graded
from jaxrl_llm import (
    advantages,
    aggregate,
    corrections,
    curation,
    preferences,
    recipes,
    regularizers,
    rewards,
    rollout,
    surrogates,
)
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import LENGTH, UNFINISHED


def selection(count, least):
    def run(a):
        options = {"count": count, "min_wrong": least, "min_right": least}
        keep = curation.resample_on_correct(a["rewards"], penalty=a["penalty"], **options)
        return {"keep": keep}

    return Ours(run)


def penalty(a):
    counts = {name: a[name] for name in ("answers", "opened", "closed", "turns")}
    return {"penalty": curation.trace_penalty(a["errors"], a["calls"], **counts)}


def filtration(rule):
    return Ours(lambda a: {"weights": curation.filtration_weights(a["rewards"], rule=rule)})


def magnitude(a):
    """The released signal of certain tokens has the other sign."""
    return {"magnitude": jnp.abs(advantages.entropy_signal(a["entropy"], a["mask"]).signal)}


def hapo(dual_clip):
    def run(a):
        def loss(logp):
            tokens = surrogates.hapo(
                logp,
                a["old_logp"],
                a["advantages"],
                a["mask"],
                signal=a["signal"],
                dual_clip=dual_clip,
            )
            return aggregate.weighted_sum(tokens, aggregate.token_mean(a["mask"]))

        return graded(loss, a["logp"])

    return Ours(run)


def growth(stride, most):
    def run(a):
        found = advantages.rank_growth(a["hidden"], a["mask"], stride=stride, max_tokens=most)
        return {"growth": jnp.stack(found, axis=-1)}

    return Ours(run)


def tree(weighted):
    def run(a):
        more = {"edge_logp": a["logp"]} if weighted else {}
        nodes = advantages.node_rewards(a["parents"], a["depth"], a["rewards"], max_depth=2, **more)
        values = advantages.depth_advantages(nodes, a["depth"], a["tree"], trees=2, max_depth=2)
        return {"rewards": nodes, "advantages": values}

    return Ours(run)


def branches(low, gap):
    def run(a):
        found = curation.branch_candidates(a["probs"], candidates=3, min_prob=low, max_gap=gap)
        return {"keep": found.keep, "tokens": found.tokens}

    return Ours(run)


def limit(most):
    def run(a):
        found = curation.branch_candidates(a["probs"], candidates=3, min_prob=0.05, max_gap=0.5)
        return {"keep": curation.branch_capacity(found.keep, a["roots"], capacity=most)}

    return Ours(run)


def band(a):
    """The penalty alone, as what it takes off the bonus."""
    loss = regularizers.entropy_band(
        a["entropy"],
        jnp.ones_like(a["turn_ids"], bool),
        turn_ids=a["turn_ids"],
        history=a["history"],
        coef=1.0,
        low=0.8,
        high=1.2,
        form="indicator",
    )
    return {"penalty": loss + a["entropy"]}


def predictions(a):
    def appears(right):
        counted = jnp.where(right[:, None], a["has"], False)
        return jnp.sum(counted, axis=0)

    notions = appears(a["rewards"] == 1) - appears(a["rewards"] == 0)
    guess = rewards.Prediction(
        a["length"], a["eighths"] / 8, jnp.broadcast_to(notions, a["chosen"].shape), a["chosen"]
    )
    return {"rewards": rewards.meta_rewards(guess, a["rewards"], a["lengths"])}


def crpg(a):
    calibrated = rewards.calibrated_rewards(a["rewards"], baseline=a["baseline"])
    constraints = {"satisfied": a["satisfied"], "log_ratio": a["log_ratio"]}
    return {"rewards": rewards.constrained_rewards(calibrated, budget=5.0, **constraints)}


def cgpo_loss(recipe, *, answers, differences):
    """A recipe on the code's groups; without ``answers`` the last rollout of each is left out."""

    def run(a):
        shape = a["mask"].shape
        batch = recipes.Batch(
            tokens=jnp.zeros(shape, jnp.int32),
            mask=a["mask"],
            rewards=a["rewards"],
            where=jnp.full(shape[:2], True) if answers else ~a["imitated"],
            prompt_tokens=jnp.zeros((shape[0], 1), jnp.int32),
            prompt_mask=jnp.full((shape[0], 1), True),
            old_logp=a["old_logp"],
            ref_logp=a["ref_logp"],
            extras={"satisfied": a["satisfied"], "imitated": a["imitated"]},
        )
        prepared, _ = recipe.prepare(batch, recipe.init())
        return graded(lambda logp: recipe.loss(logp, prepared), a["logp"])

    return Ours(run, differences)


def times_rollouts(a, theirs):
    return {name: 4 * x for name, x in theirs.items()}


def codpo_in_numpy(a, theirs):
    """Mean over tied pairs, and over groups with one; of the rollouts before the answer."""
    mask, logp = a["mask"], np.float64(a["logp"])
    d = np.where(mask, logp - a["ref_logp"], 0.0).sum(-1)
    used, value, gradient = 0, 0.0, np.zeros_like(logp)
    for p, (rewards_, satisfied) in enumerate(zip(a["rewards"], a["satisfied"], strict=True)):
        own = [i for i in range(len(rewards_)) if not a["imitated"][p, i]]
        good = [i for i in own if satisfied[i]]
        bad = [i for i in own if not satisfied[i]] or own
        best = [i for i in good if rewards_[i] == max(rewards_[j] for j in good)]
        worst = [i for i in bad if rewards_[i] == min(rewards_[j] for j in bad)]
        if not good or best == worst:
            continue
        used += 1
        for w in best:
            for loser in worst:
                share = 1 / (len(best) * len(worst))
                z = 0.1 * (d[p, w] - d[p, loser])
                mean = logp[p, w][mask[p, w]].mean()
                value += share * (np.log1p(np.exp(-z)) - 5.0 * mean)
                pull = 0.1 / (1 + np.exp(z))
                gradient[p, w] -= share * mask[p, w] * (pull + 5.0 / mask[p, w].sum())
                gradient[p, loser] += share * mask[p, loser] * pull
    return {"loss": np.float32(value / used), "gradient": np.float32(gradient / used)}


def crraft_in_numpy(a, theirs):
    """As in the code, but the tied best rollouts of a group count as one."""
    mask, logp = a["mask"], np.float64(a["logp"])
    distance = np.where(mask, np.float64(a["old_logp"]) - a["ref_logp"], 0.0).sum(-1)
    allowed = a["satisfied"] & (distance <= 3.0)
    tokens, value, gradient = 0.0, 0.0, np.zeros_like(logp)
    for p, (own, answer) in enumerate(zip(~a["imitated"], a["imitated"], strict=True)):
        gap = np.float64(a["rewards"][p]) - a["rewards"][p][answer]
        members = own & allowed[p] if (own & allowed[p]).any() else answer & allowed[p]
        best = [i for i in np.flatnonzero(members) if gap[i] == gap[members].max()]
        for i in best:
            share, reward = 1 / len(best), 1 / (1 + np.exp(-gap[i]))
            tokens += share * mask[p, i].sum()
            value -= share * reward * logp[p, i][mask[p, i]].sum()
            gradient[p, i] -= share * reward * mask[p, i]
    return {"loss": np.float32(value / tokens), "gradient": np.float32(gradient / tokens)}


DIVIDED = Difference("the code's CRPG divides by the number of rollouts too", times_rollouts)
FIRST = "of tied rollouts the code takes the first; we take the mean over them"
SIGNED = "the code multiplies rewards by verdicts, which chooses others below 0"
CGPO = {
    "crpg": Ours(crpg),
    "crpg_loss": cgpo_loss(
        recipes.cgpo(budget=3.0, answers="answer"),
        answers=True,
        differences=dict.fromkeys(("positive", "signed", "ties"), DIVIDED),
    ),
    "codpo_loss": cgpo_loss(
        recipes.cgpo(optimizer="codpo"),
        answers=False,
        differences={
            "signed": Difference(SIGNED, codpo_in_numpy),
            "ties": Difference(FIRST, codpo_in_numpy),
        },
    ),
    "crraft_loss": cgpo_loss(
        recipes.cgpo(optimizer="crraft", budget=3.0, answers="answer"),
        answers=True,
        differences={"ties": Difference(FIRST, crraft_in_numpy)},
    ),
}


def tree_values(a):
    nodes = advantages.node_rewards(
        a["parents"], a["depth"], a["rewards"], max_depth=3, over="children"
    )
    return {"values": nodes}


def segments(scale):
    def run(a):
        values = advantages.node_rewards(
            a["parents"], a["depth"], a["rewards"], max_depth=3, over="children"
        )
        return {"advantages": advantages.sibling_advantages(values, a["parents"], scale=scale)}

    return Ours(run)


def whitened(a):
    ids = jnp.arange(4)[:, None] + jnp.zeros_like(a["mask"], jnp.int32)
    taken = {"node_ids": ids, "old_logp": a["old_logp"], "max_prob": 0.9}
    x = advantages.whiten_segments(a["advantages"], a["mask"], **taken)
    return {
        "advantages": x,
        "keep": curation.segment_tokens(a["advantages"], a["mask"], **taken),
    }


def of_the_batch(a):
    centered = advantages.dr_grpo(a["rewards"], singleton="raw")
    return {"advantages": advantages.clip(advantages.batch_normalize(centered), bound=3.0)}


def factor(a):
    moved = corrections.sequential_factor(a["factor"], a["logp"], a["old_logp"], a["mask"])
    return {"factor": moved}


def agents(a):
    taken = curation.entropy_branches(a["first"], a["now"], a["draws"], slots=a["slots"])
    return {"taken": taken}


def first_tokens(a):
    return {"entropy": curation.top_k_entropy(a["logp"], vocab_size=151936, reduce="sum")}


def progress(a):
    return {"rewards": rewards.progress_rewards(a["rewards"], embeddings=a["embeddings"])}


def turns(a, name):
    """Rows of turns as one row a rollout."""
    return a[name].reshape(*a[name].shape[:2], -1)


def turn_ids(a):
    shape = a["mask"].shape
    return jnp.broadcast_to(jnp.arange(shape[2])[:, None], shape).reshape(*shape[:2], -1)


def two_levels(base):
    def run(a):
        return {
            "advantages": advantages.oprl(
                a["rewards"],
                prm_logp=turns(a, "prm_logp"),
                old_logp=turns(a, "old_logp"),
                mask=turns(a, "mask"),
                turn_ids=turn_ids(a),
                turn_where=a["turn_where"],
                alpha=0.7,
                base=base,
            )
        }

    return Ours(run)


def process_loss(a):
    def loss(prm_logp):
        return preferences.trajectory_dpo(
            prm_logp, turns(a, "old_logp"), turns(a, "mask"), a["rewards"], turn_ids=turn_ids(a)
        )

    value, gradient = jax.value_and_grad(loss)(turns(a, "prm_logp"))
    return {"loss": value, "gradient": gradient.reshape(a["mask"].shape)}


def of_outcomes(normalize):
    def run(a):
        inputs = {name: a[name] for name in ("prm_logp", "ref_logp", "mask")}
        found = advantages.prime(a["rewards"], **inputs, alpha=0.7, normalize=normalize)
        return {"advantages": found}

    return Ours(run)


def outcome_loss(a):
    def loss(prm_logp):
        return preferences.outcome_cross_entropy(prm_logp, a["ref_logp"], a["mask"], a["rewards"])

    return graded(loss, a["prm_logp"])


def majority(a):
    ids = a["answer_ids"]
    votes = rewards.majority_rewards(jnp.zeros(ids.shape), answer_ids=ids)
    return {"rewards": votes, "share": rewards.majority_label(ids).share}


def pool(a):
    """The age of a rollout is how long ago it was made."""
    pooled = curation.pooled_groups(a["rewards"], age=-a["time"], stored=a["stored"], count=4)
    return {"replace": pooled.replace, "keep": pooled.keep}


def extremes(count):
    return Ours(lambda a: {"keep": curation.contrasts(a["rewards"], count=count)})


def drawn(a):
    """The released code has no filter by reward: what it may take stands for what differs."""

    def draw(key):
        options = {"local": a["local"], "count": 0, "foreign": 4}
        found = curation.swarm_groups(key, a["eligible"], **options)
        return jnp.zeros(a["local"].shape).at[found.index].add(found.where), found.where.sum()

    taken, count = jax.vmap(draw)(jax.random.split(jax.random.key(0), 4000))
    return {"frequency": taken.mean(0), "count": count[:1]}


def swarm_loss(a):
    def loss(logp):
        options = {"eps_low": 0.2, "eps_high": 0.28}
        rest = (a["old_logp"], a["advantages"], a["mask"])
        each = surrogates.ppo_clip(logp, *rest, **options)
        return aggregate.weighted_sum(each, aggregate.token_mean(a["mask"]))

    return graded(loss, a["logp"])


class Ticks:
    """A generation without a model, in which every response gets a token a tick."""

    def __init__(self, limits):
        self.limits, self.groups, self.budgets = limits, [], np.zeros(limits.shape, int)

    def submit(self, group):
        self.groups.append(group)
        for request in group.requests:
            so_far = len(group.partial.get(request, ()))
            if so_far < self.limits[request]:
                left = rollout.resume_budget(so_far, max_new_tokens=group.max_new_tokens)
                self.budgets[request] = left

    def longer(self, group):
        partial = {}
        for request in group.requests:
            n = min(len(group.partial.get(request, ())) + 1, self.limits[request])
            finish = LENGTH if n == self.limits[request] else UNFINISHED
            partial[request] = rollout.Completion(request, Tokens(*[np.zeros(n)] * 5), finish)
        return group._replace(partial=partial)

    def __iter__(self):
        while self.groups:
            self.groups = [self.longer(group) for group in self.groups]
            for group in list(self.groups):
                done = tuple(group.partial.values())
                if all(each.finish == LENGTH for each in done):
                    self.groups.remove(group)
                    yield rollout.FinishedGroup(group, done)

    def stop(self):
        return self.groups


def rounds(n, target):
    """Four rounds of pairs of at most twelve tokens."""

    def run(a):
        limits = np.minimum(a["lengths"].reshape(-1), 12)
        groups = [
            rollout.Group(id=i, prompt=[1], requests=(2 * i, 2 * i + 1), max_new_tokens=12)
            for i in range(len(limits) // 2)
        ]
        new, buffered, tokens = iter(groups), deque(), np.zeros(limits.shape, int)
        found = {"trained": [], "tokens": [], "budgets": []}
        for _ in range(4):
            ticks = Ticks(limits)
            batch = list(rollout.sample_round(ticks, buffered, new, n=n, target=target))
            for each in [*batch, *buffered]:
                done = each.completions if each in batch else each.partial.values()
                for completion in done:
                    tokens[completion.request] = len(completion)
            found["trained"].append(sorted(each.id for each in batch))
            found["tokens"].append(tokens.copy())
            found["budgets"].append(ticks.budgets)
        return {name: np.array(x) for name, x in found.items()}

    return Ours(run, host=True)


TABLES = {
    "sol_rl": {f"best_worst_{count}": extremes(count) for count in (4, 5)},
    "rl_swarm": {"foreign": Ours(drawn)},
    "genrl": {
        "advantages": Ours(lambda a: {"advantages": advantages.grpo(a["rewards"], eps=1e-8)}),
        "loss": Ours(swarm_loss),
    },
    "april": {f"rounds_{n}_{target}": rounds(n, target) for n, target in ((1, 3), (2, 4))},
    "rstar": {
        f"select_{count}_{least}": selection(count, least)
        for count, least in ((4, 1), (4, 2), (6, 2), (2, 1))
    }
    | {"penalty": Ours(penalty)},
    "pf_ppo": {rule: filtration(rule) for rule in ("best_worst", "best_random", "power")},
    "hapo": {
        "signal": Ours(magnitude),
        "loss_3": hapo(3.0),
        "loss_10": hapo(10.0),
        "advantages": Ours(
            lambda a: {"advantages": advantages.token_grpo(a["rewards"], a["mask"])}
        ),
    },
    "verl_erank": {f"growth_{k}_{n}": growth(k, n) for k, n in ((4, 512), (3, 16))},
    "branch_grpo": {"mean": tree(False), "weighted": tree(True)},
    "latr": {"branches_0.25": branches(0.25, 0.15), "branches_0.15": branches(0.15, 0.25)}
    | {f"limit_{most}": limit(most) for most in (6, 8)}
    | {
        "suffix": Ours(lambda a: {"suffix": curation.suffix_match(a["a"], a["b"])}),
        "overlap": Ours(lambda a: {"overlap": curation.rouge_l(a["a"], a["b"])}),
    },
    "epo": {
        "weight": Ours(lambda a: {"weight": regularizers.epo_phase_weight(a["epoch"] / 100)}),
        "penalty": Ours(band),
    },
    "masa": {"rewards": Ours(predictions)},
    "sage": {"levels": Ours(lambda a: {"level": curation.hint_level(a["level"], a["accuracy"])})},
    "cgpo": CGPO,
    "ttrl": {"majority": Ours(majority)},
    "scaf_grpo": {"least": Ours(lambda a: {"level": curation.minimal_hint(a["rewards"])})},
    "dart": {"pool": Ours(pool)},
    "spo": {
        "values": Ours(tree_values),
        "rloo": segments(None),
        "grpo": segments("std"),
        "whiten": Ours(whitened),
    },
    "seeupo": {
        name: Ours(of_the_batch) for name in ("worked", "binary", "outlier", "equal", "alone")
    }
    | {"factor": Ours(factor)},
    "arpo": {"branches": Ours(agents), "entropy": Ours(first_tokens)},
    "siirl": {"progress": Ours(progress)},
    "istar": {base: two_levels(base) for base in ("rloo", "grpo", "center")}
    | {"loss": Ours(process_loss)},
    "verl_prime": {
        "batch_norm": of_outcomes(True),
        "none": of_outcomes(False),
        "loss": Ours(outcome_loss),
    },
}
