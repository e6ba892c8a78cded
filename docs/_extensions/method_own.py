"""Figures of methods that no kind of figure suits: what each does with a few numbers."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from method_curves import CHANCE, COLORS, RIGHT, STEPS, curves

import jaxrl_llm as jr
from jaxrl_llm.curation.turns import ROLES

KEY = jax.random.key(0)
KEYS = 1000  # draws, where a figure shows how often something happens


def cells(axis: plt.Axes, colors: Sequence[Sequence[str | None]], labels: Sequence[str]) -> None:
    """A row of colored cells a label; None leaves a cell out."""
    for row, line in enumerate(colors):
        for column, color in enumerate(line):
            if color is not None:
                box = plt.Rectangle((column, row), 1, 1, facecolor=color, edgecolor="white")
                axis.add_patch(box)
    axis.set(xlim=(0, max(map(len, colors))), ylim=(len(labels), 0))
    axis.set_yticks(np.arange(len(labels)) + 0.5, labels)


def bars(axis: plt.Axes, values: Mapping[str, np.ndarray], colors: Sequence[str]) -> None:
    """Bars side by side, one of each name at each place."""
    width = 0.8 / len(values)
    for i, ((name, y), color) in enumerate(zip(values.items(), colors, strict=True)):
        place = np.arange(len(y)) + (i - (len(values) - 1) / 2) * width
        axis.bar(place, y, width, color=color, label=name)
    axis.legend(frameon=False, fontsize=7)


def capo() -> tuple[Figure, str]:
    """Which tokens are kept, by probability and advantage."""
    chance, advantages = np.linspace(0.005, 0.995, 397), np.linspace(-2, 2, 401)

    @jax.jit
    def kept(tau_h: float, tau_f: float) -> jax.Array:
        logits = jnp.log(jnp.stack([chance, 1 - chance], -1))
        square, cube = (
            jnp.broadcast_to(of(logits, None), (advantages.size, chance.size))
            for of in (jr.advantages.sum_pi_squared, jr.curation.sum_pi_cubed)
        )
        return jr.curation.capo_selection(
            jnp.asarray(advantages), square > 0, old_logp=jnp.log(chance) + 0 * square,
            sum_pi_sq=square, sum_pi_cubed=cube, hidden_sq=5.0, learning_rate=0.01,
            tau_h=tau_h, tau_f=tau_f,
        ).astype(jnp.float32)  # fmt: skip

    figure, axis = plt.subplots(figsize=(5, 2.8), layout="constrained")
    axis.contourf(chance, advantages, kept(0.01, 1e-4), [0.5, 1], colors=["lightsteelblue"])
    for name, color, taus in (("tau_h", COLORS[1], (0.01, 1e9)), ("tau_f", COLORS[3], (1e9, 1e-4))):
        axis.contour(chance, advantages, kept(*taus), [0.5], colors=[color])
        axis.plot([], color=color, label=name)
    axis.set(title="capo_selection", xlabel="probability of the sampled token", ylabel="advantage")
    axis.legend(frameon=False, loc="lower left")
    return figure, (
        "The tokens that `capo_selection` keeps, in blue, by probability (of a choice between two "
        "tokens) and advantage, with its defaults, a learning rate of 0.01 and a squared norm of "
        "5; the lines are its two bounds. The less likely a token is, the smaller the advantage "
        "from which its step is too large."
    )


def ps_grpo() -> tuple[Figure, str]:
    """Similarities of responses across paraphrases, and the rewards."""
    texts = [
        ["it is Paris", "Paris", "it is Lyon"],
        ["it is Paris", "it is Paris", "maybe Nice"],
        ["it is Paris", "Paris", "no idea"],
    ]
    similarity = jr.rewards.paraphrase_similarity(texts, metadata=[{"paraphrases": texts}] * 3)
    rewards = np.asarray(jax.jit(jr.rewards.paraphrase_rewards)(
        np.zeros((3, 3), np.float32), similarity=similarity
    ))  # fmt: skip
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(6.4, 2.8), width_ratios=[1.4, 1], layout="constrained"
    )
    image = left.imshow(similarity.reshape(9, 9), cmap="Blues", vmin=0, aspect="auto")
    figure.colorbar(image, label="similarity", pad=0.02)
    right.barh(range(9), rewards.ravel(), color=np.repeat(COLORS[:3], 3))
    labels = [f"{1 + i}: {text}" for i, row in enumerate(texts) for text in row]
    left.set(title="paraphrase_similarity", yticks=range(9), yticklabels=labels,
             xticks=[1, 4, 7], xticklabels=["1", "2", "3"],
             xlabel="responses to paraphrase")  # fmt: skip
    right.set(title="paraphrase_rewards", xlabel="reward", ylim=left.get_ylim(), yticks=[])
    for axis in left, right:
        for edge in (2.5, 5.5):
            axis.axhline(edge, color="black", linewidth=0.5)
    for edge in (2.5, 5.5):
        left.axvline(edge, color="black", linewidth=0.5)
    return figure, (
        "How similar three responses to each of three paraphrases (rows) are to the responses to "
        "the other paraphrases (columns), and their rewards. Answers that occur under all "
        "paraphrases get the most."
    )


def mua_rl() -> tuple[Figure, str]:
    """The tokens of a dialog by role."""
    spans = [("system", 2), ("user", 4), ("generation_prompt", 1), ("assistant", 5), ("tool", 4),
             ("generation_prompt", 1), ("assistant", 4), ("user", 3), ("generation_prompt", 1),
             ("assistant", 3)]  # fmt: skip
    roles = np.concatenate([[ROLES.index(name)] * count for name, count in spans])
    trains = np.asarray(jax.jit(jr.curation.role_loss_mask)(roles))
    colors = [[None] * roles.size for _ in ROLES]
    for token, (role, trained) in enumerate(zip(roles, trains, strict=True)):
        colors[role][token] = COLORS[0] if trained else "lightgray"
    figure, axis = plt.subplots(figsize=(6.4, 2), layout="constrained")
    cells(axis, colors, ROLES)
    axis.set(title="role_loss_mask", xlabel="token")
    return figure, (
        "The tokens of a dialog with a tool and a simulated user, in the row of their role. "
        "`role_loss_mask` trains those in blue: all that the assistant wrote, and nothing else."
    )


def arpo() -> tuple[Figure, str]:
    """How often a rollout branches by its gain of entropy."""
    gain = np.linspace(-4, 4, 81)
    draws = np.tile((np.arange(KEYS) + 0.5) / KEYS, (gain.size, 1))

    @jax.jit
    def share(weight: float) -> jax.Array:
        branches = jr.curation.entropy_branches(
            jnp.zeros(gain.shape), *map(jnp.asarray, (gain, draws)), slots=draws.size, weight=weight
        )
        return branches.mean(-1)

    figure = curves(
        {f"weight {weight:g}": share(weight) for weight in (0.0, 0.2, 0.5)},
        x=gain,
        title="entropy_branches",
        xlabel="entropy of the last turn less that of the first",
        ylabel="share that branches",
    )
    return figure, (
        f"The share of {KEYS} evenly spaced draws in which a rollout branches by "
        "`entropy_branches`, against the gain of entropy since its first turn, for three weights "
        "of the gain; 0.2 is the default. "
        "An uncertain rollout branches more often."
    )


def prefix_rl() -> tuple[Figure, str]:
    """What is given and what is trained of responses with a prefix."""
    lengths, size = np.array([100, 60]), 100

    @jax.jit
    def masks() -> tuple[jax.Array, jax.Array]:
        cuts = jr.curation.prefix_cuts(KEY, jnp.array(lengths))
        cuts = jnp.concatenate([jnp.zeros((2, 1), jnp.int32), cuts], -1)
        whole = jnp.broadcast_to(lengths[:, None], cuts.shape)
        return cuts, jr.curation.continuation_mask(cuts, whole, size=size)

    cuts, trained = (np.asarray(x).reshape(8, -1) for x in masks())
    given = np.arange(size) < cuts
    figure, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    shown = np.where(trained, 0.8, np.where(given, 0.3, np.nan))
    axis.imshow(shown, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for edge in np.arange(7) + 0.5:
        axis.axhline(edge, color="white", linewidth=2)
    labels = [f"trace {1 + row // 4}, {cut} given" for row, cut in enumerate(cuts[:, 0])]
    axis.set(title="prefix_cuts, continuation_mask", xlabel="token of the response",
             yticks=range(8), yticklabels=labels)  # fmt: skip
    return figure, (
        "Two hard prompts with correct traces of 100 and 60 tokens, each without a prefix and "
        "with three that `prefix_cuts` draws (light): 40% to 80% of the trace. Only what the "
        "policy writes after it is trained (dark), here as long as the rest of the trace."
    )


def scope() -> tuple[Figure, str]:
    """A response, the scores of its steps, and the repaired response."""
    scores, size = np.array([0.9, 0.8, 0.3, 0.7, 0.2]), 4

    @jax.jit
    def repaired() -> tuple:
        bad = jr.curation.first_bad_step(jnp.array(scores))
        tokens, new = jnp.arange(1, 21), jnp.arange(1, 7)
        return bad, jr.curation.splice(tokens, size * bad, new, jnp.int32(new.size))

    bad, after = jax.device_get(repaired())
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6.4, 2.8), sharex=True,
                                         height_ratios=[1.4, 1], layout="constrained")  # fmt: skip
    place = size * (np.arange(scores.size) + 0.5)
    wrong = np.arange(scores.size) == bad
    top.bar(place, scores, size - 0.4, color=np.where(wrong, COLORS[3], COLORS[0]))
    top.axhline(0.5, color="black", linewidth=0.5, linestyle=":")
    top.set(title="first_bad_step, splice", ylabel="score of the step", ylim=(0, 1))
    steps = np.repeat(np.arange(scores.size), size)
    before = np.where(steps < bad, COLORS[0], "lightgray")
    there = np.where(after.foreign, COLORS[1], COLORS[0])[: int(after.length)]
    cells(bottom, [before.tolist(), there.tolist()], ["before", "after"])
    bottom.set(xlabel="token", xticks=range(0, 21, size))
    return figure, (
        "A wrong response of five steps of four tokens, and what becomes of it. `first_bad_step` "
        "finds the first step whose score is below 0.5, in red; `splice` keeps the tokens before "
        "it, in blue, and replaces the rest, in gray, by a continuation of six tokens, in orange."
    )


def spark() -> tuple[Figure, str]:
    """How often a group becomes a task of each kind."""

    @jax.jit
    def shares() -> tuple:
        draw = jax.vmap(lambda key: jr.curation.judge_items(key, RIGHT))
        items = draw(jax.random.split(KEY, KEYS))
        one = items.kind == 1
        tasks = {
            "judge a right answer": one & (items.label == 1),
            "judge a wrong answer": one & (items.label == 0),
            "compare two": items.kind == 2,
        }
        return {name: x.mean(0) for name, x in tasks.items()}, (items.reflect >= 0).mean(0)

    tasks, refined = jax.device_get(shares())
    figure, axis = plt.subplots(figsize=(5.6, 2.8), layout="constrained")
    base = np.zeros(9)
    for (name, share), color in zip(sorted(tasks.items()), COLORS, strict=False):
        axis.bar(range(9), share, 0.7, bottom=base, color=color, label=name)
        base = base + share
    axis.plot(range(9), refined, "ko", markersize=4, label="refine a wrong answer")
    axis.set(title="judge_items", xlabel="right answers of 8", ylabel="share of draws",
             xticks=range(9), ylim=(0, 1.05))  # fmt: skip
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure, (
        "What `judge_items` makes of groups with 0 to 8 right answers, with its defaults, as "
        f"shares of {KEYS} draws. A mixed group mostly gives two answers to compare, and every "
        "group with a wrong answer also gives one to refine."
    )


def sapo_swarm() -> tuple[Figure, str]:
    """How often a group is trained on, by where it comes from."""
    right = np.array([0, 2, 4, 1, 3, 2, 0, 3, 4, 1, 2, 4, 3, 1])
    local = np.arange(right.size) < 6

    @jax.jit
    def shares() -> jax.Array:
        rewards = (jnp.arange(4) < jnp.array(right)[:, None]).astype(jnp.float32)
        informative = jr.curation.informative_groups(rewards).any(-1)

        def drawn(key: jax.Array) -> jax.Array:
            groups = jr.curation.swarm_groups(
                key, informative, local=jnp.array(local), count=4, foreign=4
            )
            return jnp.zeros(right.size).at[groups.index].add(groups.where)

        return jax.vmap(drawn)(jax.random.split(KEY, KEYS)).mean(0)

    figure, axis = plt.subplots(figsize=(5.6, 2.6), layout="constrained")
    share = np.asarray(shares())
    for name, of, color in (("local", local, COLORS[0]), ("foreign", ~local, COLORS[1])):
        axis.bar(np.flatnonzero(of), share[of], color=color, label=name)
    axis.set_xticks(range(right.size), [f"{count}/4" for count in right])
    axis.set(title="swarm_groups", xlabel="right answers of the group", ylabel="share of draws",
             ylim=(0, 1))  # fmt: skip
    axis.legend(frameon=False)
    return figure, (
        f"How often `swarm_groups` takes each of 14 groups, over {KEYS} draws of four local and "
        "four foreign ones. Any local group may be drawn, but of the foreign ones only those with "
        "both right and wrong answers."
    )


def verl_erank() -> tuple[Figure, str]:
    """The bonus by rank, and the advantage with it."""
    rank, advantage = np.linspace(0, 3, 61), np.linspace(-2, 2, 81)

    @jax.jit
    def by_rank(acceleration: float) -> jax.Array:
        ones = jnp.ones(rank.shape)
        growth = jr.advantages.RankGrowth(jnp.asarray(rank), ones, acceleration * ones)
        baseline = jr.advantages.RankBaseline(*jnp.ones(3), jnp.int32(1))
        return jr.advantages.rank_bonus(growth, baseline)

    @jax.jit
    def by_advantage(bonus: float) -> jax.Array:
        mask = jnp.ones((advantage.size, 1), bool)
        given = jnp.full(advantage.shape, bonus)
        return jr.advantages.bounded_bonus(jnp.asarray(advantage), mask, bonus=given)

    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
    for factor, color in zip((0.5, 1.0, 2.0), COLORS, strict=False):
        left.plot(rank, by_rank(factor), color=color, label=f"acceleration {factor:g}")
    for bonus, color in zip((-0.5, 0.4, 1.0), COLORS, strict=False):
        right.plot(advantage, by_advantage(bonus), color=color, label=f"bonus {bonus:g}")
    left.set(title="rank_bonus", xlabel="effective rank", ylabel="bonus")
    right.set(title="bounded_bonus", xlabel="advantage", ylabel="advantage with the bonus")
    for axis in left, right:
        axis.axhline(0, color="black", linewidth=0.5)
        axis.legend(frameon=False, fontsize=7)
    return figure, (
        "Left: the bonus of `rank_bonus` against the effective rank of a response, where all "
        "averages and the velocity are 1; with a larger acceleration the rank counts more. Right: "
        "the advantage after `bounded_bonus`, which adds at most half of its magnitude and never "
        "lowers it."
    )


def arrol() -> tuple[Figure, str]:
    """The chance to survive by the chance of being right."""
    figure = curves(
        {f"others {rate:g}": survival(rate) for rate in (0.2, 0.5, 0.8)},
        x=CHANCE,
        title="survival_rates",
        xlabel="estimated chance that the rollout is right",
        ylabel="chance to continue",
    )
    return figure, (
        "The chance that `survival_rates` gives a rollout to continue, with its defaults, against "
        "the estimated chance that it is right, in groups whose other seven have 0.2, 0.5 or 0.8. "
        "Among mostly wrong rollouts the good ones continue, and among mostly right ones the bad."
    )


@jax.jit
def survival(rate: float) -> jax.Array:
    """The survival rates of one rollout by its chance, among seven others."""
    group = jnp.full((CHANCE.size, 8), rate).at[:, 0].set(CHANCE)
    return jr.curation.survival_rates(group)[:, 0]


def masa() -> tuple[Figure, str]:
    """The reward of a prediction by its pass rate and by its length."""
    rates, lengths = np.linspace(0, 1, 101), np.linspace(0, 200, 101)

    @jax.jit
    def reward(rate: jax.Array, length: jax.Array) -> jax.Array:
        notions = jnp.broadcast_to(jnp.array([1, -1]), (101, 2))
        prediction = jr.rewards.Prediction(
            length + 0 * rates, rate + 0 * rates, notions, jnp.ones(notions.shape, bool)
        )
        right, tokens = jnp.arange(8) < 5, 20 * jnp.arange(3, 11)
        return jr.rewards.meta_rewards(prediction, right.astype(jnp.float32), tokens)

    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6), sharey=True, layout="constrained")
    for length, color in zip((100, 180), COLORS, strict=False):
        left.plot(rates, reward(rates, length), color=color, label=f"predicted length {length}")
    for rate, color in zip((0.625, 0.375), COLORS, strict=False):
        right.plot(lengths, reward(rate, lengths), color=color, label=f"predicted rate {rate:g}")
    left.set(title="meta_rewards", xlabel="predicted pass rate", ylabel="reward")
    right.set(title="meta_rewards", xlabel="predicted length", ylim=(0, 1))
    for axis in left, right:
        axis.legend(frameon=False, fontsize=7)
    return figure, (
        "The reward by `meta_rewards` of a prediction against its pass rate and its length, where "
        "five of eight solutions are right, with 60 to 140 tokens, and one of two predicted "
        "notions is good. It falls with the error of the rate, and a length between the shortest "
        "and the longest right one adds a third."
    )


def wpo() -> tuple[Figure, str]:
    """The weights of responses by who sampled them."""
    random = np.random.default_rng(0)
    logits, gumbel = 3 * random.normal(size=(40, 32)), random.gumbel(size=(KEYS, 40, 32))

    @jax.jit
    def weights(temperature: float) -> jax.Array:
        tokens = (logits / temperature + gumbel).argmax(-1)
        logp = jax.nn.log_softmax(logits)[jnp.arange(40), tokens]
        square = jnp.broadcast_to(jr.advantages.sum_pi_squared(jnp.asarray(logits)), logp.shape)
        return jr.preferences.alignment_weights(logp, square, logp <= 0)

    figure, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
    policies = {"the policy": 1.0, "a sharper one": 0.5, "a flatter one": 2.0}
    for (name, temperature), color in zip(policies.items(), COLORS, strict=False):
        axis.hist(weights(temperature), 40, color=color, alpha=0.6, label=name)
    axis.set(title="alignment_weights", xlabel="weight", ylabel="responses")
    figure.legend(loc="outside right center", frameon=False, title="sampled by")
    return figure, (
        f"The weights by `alignment_weights` of {KEYS} responses of 40 tokens that the policy, at "
        "temperature 1, or one at 0.5 or at 2 sampled. What the policy would rarely say "
        "gets little weight."
    )


def spo_degree() -> tuple[Figure, str]:
    """The words that remain at each degree."""
    words = ["The", "capital", "of", "France", "is", "the", "old", "city", "of", "Paris"]
    shares = np.arange(4) / 4

    @jax.jit
    def kept() -> jax.Array:
        salience = jnp.array([float(len(word)) for word in words])
        there = jnp.ones(len(words), bool)
        return jax.vmap(
            lambda share: jr.preferences.degrade_mask(KEY, salience, there, fraction=share)
        )(jnp.asarray(shares))

    remain = np.asarray(kept())
    figure, axis = plt.subplots(figsize=(6.4, 1.9), layout="constrained")
    colors = [["lightsteelblue" if here else "whitesmoke" for here in row] for row in remain]
    cells(axis, colors, [f"{share:.0%} less" for share in shares])
    for (row, column), here in np.ndenumerate(remain):
        if here:
            axis.text(column + 0.5, row + 0.5, words[column], ha="center", va="center")
    axis.set(title="degrade_mask", xlabel="token", ylabel="copy", xticks=[])
    return figure, (
        "A response and three copies of it that `degrade_mask` degrades: they lose a quarter, "
        "half and three quarters of the tokens, those with the longest texts first and ties at "
        "random. The policy learns to tell the degrees apart."
    )


def merge() -> tuple[Figure, str]:
    """Two models in the plane and their merges."""
    start = {"w": np.zeros(2, np.float32)}
    models = {"w": np.float32([2.0, 0.8])}, {"w": np.float32([-0.4, 1.8])}

    @jax.jit
    def merged() -> tuple:
        tasks = [jr.models.task_vector(model, start) for model in models]

        def dare(key: jax.Array) -> jax.Array:
            sparse = [jr.models.dare(k, task, drop=0.3)
                      for k, task in zip(jax.random.split(key), tasks, strict=True)]  # fmt: skip
            return jr.models.task_arithmetic(start, sparse, scale=0.5)["w"]

        points = {
            "average_params": jr.models.average_params(models),
            "slerp": jr.models.slerp(*models, t=0.5),
            "ties_merge": jr.models.ties_merge(start, tasks, density=1.0),
            "model_stock": jr.models.model_stock(start, models),
            "task_arithmetic": jr.models.task_arithmetic(start, tasks),
        }
        arc = jnp.stack([jr.models.slerp(*models, t=t / 10)["w"] for t in range(11)])
        return points, arc, jax.vmap(dare)(jax.random.split(KEY, 100))

    points, arc, random = jax.device_get(merged())
    figure, axis = plt.subplots(figsize=(5.6, 3), layout="constrained")
    for model in models:
        axis.annotate("", model["w"], (0, 0), arrowprops={"arrowstyle": "->"})
    axis.plot(*arc.T, color="lightgray", zorder=0)
    axis.plot(*random.T, "x", color="gray", label="dare, the average")
    for (name, point), mark in zip(points.items(), "os^DP", strict=True):
        axis.plot(*point["w"], mark, label=name)
    axis.set(title="merges of two models", xlabel="first weight", ylabel="second weight",
             aspect="equal")  # fmt: skip
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure, (
        "Two models of two weights, the ends of the arrows from their base, and their merges. "
        "`slerp` lies on an arc and `average_params` between them; `ties_merge`, at density 1, "
        "drops the entry whose sign loses; `model_stock` stays nearer to the base; `dare` drops "
        "30% of the entries at random, here before the average."
    )


def accelerated_po() -> tuple[Figure, str]:
    """A weight over the iterations, by how far they are extrapolated."""

    def run(alpha: float) -> jax.Array:
        rule = jr.regularizers.extrapolated(every=20, alpha=alpha)

        def step(carry: tuple, now: jax.Array) -> tuple:
            state, params = carry
            w, reference = params["w"], state.reference["w"]
            params = {"w": w + 0.04 * (1 - w - 4 * (w - reference))}
            state, params = rule(state, params, now)
            return (state, params), params["w"]

        start = {"w": jnp.float32(0)}
        return jax.jit(jax.lax.scan, static_argnums=0)(
            step, (rule.init(start), start), jnp.arange(1, STEPS.size + 1)
        )[1]

    figure = curves(
        {f"alpha {alpha:g}": run(alpha) for alpha in (0.0, 0.3, 0.6)},
        x=STEPS + 1,
        title="extrapolated",
        xlabel="step",
        ylabel="weight of the policy",
    )
    return figure, (
        "A weight that gradient steps move to 1, while a penalty holds it at the reference, with "
        "`extrapolated(every=20)`. After each iteration the policy and its reference jump on by "
        "`alpha` times the change of the iteration, so the larger `alpha`, the sooner it arrives."
    )


def past_future() -> tuple[Figure, str]:
    """The tokens of running requests over the time, and their peak."""
    history = np.random.default_rng(0).integers(20, 120, 50)
    generated, most = np.array([95, 70, 40, 10]), 160
    used = generated + 21
    expected = jr.rollout.predict_remaining(history, generated, max_new_tokens=most)
    worst = most - generated - 1
    time = np.arange(80)
    held = np.where(time <= expected[:, None], used[:, None] + time, 0)
    figure, axis = plt.subplots(figsize=(5.6, 2.8), layout="constrained")
    axis.stackplot(time, held, step="mid", colors=plt.cm.Blues([0.3, 0.45, 0.6, 0.75]))
    for name, remaining, color in (
        ("if the lengths are as expected", expected, COLORS[1]),
        ("if all reach the limit", worst, COLORS[3]),
    ):
        peak = jr.rollout.future_peak(used, remaining)
        axis.axhline(peak, color=color, label=f"peak {name}: {peak}")
    axis.set(title="future_peak, predict_remaining", xlabel="steps from now", ylabel="tokens held",
             ylim=(0, 1.5 * peak))  # fmt: skip
    axis.legend(frameon=False)
    return figure, (
        "The tokens that four running requests hold over time, if each ends after the steps that "
        "`predict_remaining` expects from 50 earlier lengths. The total is largest just before "
        "one of them ends, which is the number of `future_peak`, well below that for responses of "
        "the greatest length."
    )


def slot_sampler() -> tuple[Figure, str]:
    """When each slot is busy, by the order of the groups."""
    lengths = [[12, 18], [10, 16], [14, 9], [11, 15], [44, 38]]

    def busy_times(expected: Sequence[float]) -> list[tuple[int, int, int, int]]:
        waiting = [list(group) for group in lengths]
        row_group, until, spans = np.full(2, -1), np.zeros((2, 2), int), []
        for now in range(sum(map(sum, lengths))):
            left = [len(group) for group in waiting]
            starts = jr.rollout.pick_next(left, expected, row_group, until > now)
            for group, row, slot in zip(starts.group, starts.row, starts.slot, strict=True):
                row_group[row], count = group, waiting[group].pop(0)
                until[row, slot] = now + count
                spans.append((group, 2 * row + slot, now, count))
        return spans

    orders = {"longest first": [max(group) for group in lengths], "in order of arrival": [1] * 5}
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.2), sharex=True, sharey=True,
                                layout="constrained")  # fmt: skip
    for axis, (name, expected) in zip(axes, orders.items(), strict=True):
        for group, slot, start, count in busy_times(expected):
            axis.barh(slot, count, left=start, color=f"C{group}", edgecolor="white")
            axis.text(start + count / 2, slot, group + 1, ha="center", va="center", color="white")
        axis.set(title=name, xlabel="step", yticks=range(4), yticklabels=range(1, 5))
    axes[0].set(ylabel="slot")
    axes[0].invert_yaxis()
    return figure, (
        "Which group each of four slots decodes over time: `pick_next` fills two rows of two "
        "slots from five groups of two responses. If it knows the lengths, the group with the "
        "longest starts first; if it expects equal ones, that group comes last and the other row "
        "idles."
    )


def sampling_reference() -> tuple[Figure, str]:
    """A distribution after each filter."""
    before = np.array([0.45, 0.25, 0.12, 0.1, 0.05, 0.03])
    both = {"top_p": 0.75, "min_p": 0.2}
    options = {
        "plain": {},
        "temperature 0.5": {"temperature": 0.5},
        "top_k 4": {"top_k": 4},
        "top_p 0.75": {"top_p": 0.75},
        "top_p and min_p, hf": both,
        "top_p and min_p, vllm": both | {"order": "vllm"},
    }

    @jax.jit
    def filtered() -> list[jax.Array]:
        logits = jnp.log(before)
        return [
            jax.nn.softmax(jr.rollout.filter_logits(logits, **each)) for each in options.values()
        ]

    figure, axes = plt.subplots(2, 3, figsize=(7, 3), sharex=True, sharey=True,
                                layout="constrained")  # fmt: skip
    for axis, name, chances in zip(axes.flat, options, filtered(), strict=True):
        axis.bar(range(1, 7), before, color="lightgray")
        axis.bar(range(1, 7), chances, 0.5, color=COLORS[0])
        axis.set(title=name, xticks=range(1, 7))
    axes[0, 0].set(ylabel="probability")
    axes[1, 0].set(ylabel="probability")
    for axis in axes[1]:
        axis.set(xlabel="token")
    return figure, (
        "The distribution of six tokens after `filter_logits`, in blue, on that before it, in "
        "gray. In the last two panels top-p is 0.75 and min-p 0.2: before top-p, as in vLLM, "
        "min-p leaves fewer tokens than after it, as in transformers."
    )


def prefix_shared_attention() -> tuple[Figure, str]:
    """Attention to two sets of keys and to both; tokens of a draft and of the policy."""
    scores = np.array([1.0, 2.0, 0.0, -1.0, 1.5, 2.5])
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.3, 0.25, 0.35])
    count = 10 * KEYS
    draft = np.random.default_rng(0).choice(4, (count, 1), p=q)

    @jax.jit
    def values() -> tuple:
        first = jnp.arange(6) < 4
        parts = [jnp.where(of, scores, -jnp.inf) for of in (first, ~first)]
        # Each key's value is a direction of its own, so an output is the weights of the keys.
        alone = [(jax.nn.softmax(part), jax.nn.logsumexp(part)) for part in parts]
        merged, _ = jr.models.merge_attention(*alone[0], *alone[1])
        given = (jnp.broadcast_to(x, (count, n, 4)) for x, n in ((p, 2), (q, 1)))
        accepted, token = jr.rollout.spec_accept(KEY, *given, jnp.asarray(draft))
        found = jnp.where(accepted > 0, draft[:, 0], token)
        return alone[0][0], alone[1][0], merged, jnp.bincount(found, length=4) / count

    prompt, own, merged, share = jax.device_get(values())
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
    bars(left, {"prompt": prompt, "response": own, "merged": merged}, [*COLORS[1:3], COLORS[0]])
    left.set(title="merge_attention", xlabel="key, four of the prompt and two of the response",
             ylabel="attention", xticks=range(6), xticklabels=range(1, 7))  # fmt: skip
    bars(right, {"draft": q, "returned": share, "policy": p}, [COLORS[1], COLORS[0], "lightgray"])
    right.set(title="spec_accept", xlabel="token", ylabel="probability", xticks=range(4),
              xticklabels=range(1, 5), ylim=(0, 0.5))  # fmt: skip
    return figure, (
        "Left: the weights of six keys in the attention to the prompt alone and to the response "
        "alone, and in what `merge_attention` makes of the two. Right: what a draft samples a "
        f"token from, the shares of the tokens that `spec_accept` returns for {count} drafts, and "
        "the policy's distribution, which they follow."
    )


def jet_rl() -> tuple[Figure, str]:
    """Log-probabilities of a trainer less those of an 8-bit sampler."""
    random = np.random.default_rng(0)
    inputs = [random.normal(size=(300, 256)), random.normal(size=(256, 32)) / 8,
              random.gumbel(size=(300, 32))]  # fmt: skip

    @jax.jit
    def values() -> tuple:
        x, w, noise = map(jnp.asarray, inputs)
        logits = jr.models.quantized_matmul(x[:, None], w)[:, 0]  # one token at a time
        tokens = (logits + noise).argmax(-1)
        sampler, same, other = (
            jax.nn.log_softmax(each)[jnp.arange(300), tokens]
            for each in (logits, jr.models.quantized_matmul(x, w), x @ w)
        )
        mask = tokens >= 0
        trainers = {"float32": other, "the same 8 bits": same}
        return sampler, {
            name: (logp, jr.diagnostics.mismatch(logp, sampler, mask).mean_abs)
            for name, logp in trainers.items()
        }

    sampler, trainers = jax.device_get(values())
    figure, axis = plt.subplots(figsize=(5.6, 2.8), layout="constrained")
    for (name, (logp, mean)), color in zip(reversed(trainers.items()), COLORS, strict=False):
        label = f"{name}: {mean:.2g} on average"
        axis.plot(sampler, logp - sampler, ".", markersize=4, color=color, label=label)
    axis.set(title="quantized_matmul", xlabel="log-probability under the sampler, nats",
             ylabel="trainer less sampler, nats", ylim=(-0.5, 0.3))  # fmt: skip
    axis.legend(frameon=False, title="trainer", loc="lower left")
    return figure, (
        "The log-probabilities of 300 tokens under a trainer less those under a sampler whose "
        "output layer is `quantized_matmul`, one token at a time. A trainer in float32 differs by "
        "the error of the 8 bits, and one that rounds all tokens at once in the same way does "
        "not."
    )


def eggroll_forward() -> tuple[Figure, str]:
    """The entries and the singular values of noise of several ranks."""

    def noise(kind: str, rank: int) -> jax.Array:
        params, classes = {"w": np.zeros((32, 32), np.float32)}, {"w": kind}

        def member(n: jax.Array) -> jax.Array:
            return jr.evolution.perturb(params, classes, KEY, 0, n, sigma=1.0, rank=rank)["w"]

        return jax.vmap(member)(jnp.arange(0, 64, 2))  # the even ones: the odd are their opposites

    @jax.jit
    def kinds() -> dict[str, jax.Array]:
        low = {f"rank {rank}": noise("lowrank", rank) for rank in (1, 4)}
        return low | {"full": noise("full", 1)}

    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
    for (name, x), color in zip(jax.device_get(kinds()).items(), COLORS, strict=False):
        left.hist(x.ravel(), np.linspace(-6, 6, 61), density=True, histtype="step", color=color,
                  label=name)  # fmt: skip
        sizes = np.linalg.svd(x, compute_uv=False).mean(0)
        right.plot(np.arange(1, 33), sizes, ".-", color=color, label=name)
    left.set(title="entries", xlabel="entry of the noise", ylabel="density", yscale="log",
             ylim=(1e-4, 2))  # fmt: skip
    left.minorticks_off()
    right.set(title="singular values", xlabel="singular value by size", ylabel="mean over members")
    right.legend(frameon=False)
    return figure, (
        "The noise of 32 members by `perturb` for a matrix of 32 x 32, of rank 1, of rank 4 and "
        "of full rank. The higher the rank, the more singular values are above 0, and the closer "
        "the entries, always of variance 1, are to a normal distribution."
    )


def eggroll_update() -> tuple[Figure, str]:
    """How well the estimated gradient points along the true one."""
    sizes = np.array([4, 8, 16, 32, 64, 128, 256, 512])
    params, members = {"w": np.zeros((8, 8), np.float32)}, np.arange(sizes[-1])
    target = np.random.default_rng(0).normal(size=(8, 8))

    def score(params: dict) -> jax.Array:
        return -jnp.square(params["w"] - target).sum()

    def cosines(kind: str, rank: int) -> jax.Array:
        classes, options = {"w": kind}, {"sigma": 0.1, "rank": rank}
        exact = -jax.grad(score)(params)["w"]

        def of(key: jax.Array) -> jax.Array:
            perturb = jax.vmap(
                lambda n: score(jr.evolution.perturb(params, classes, key, 0, n, **options))
            )
            fitness = perturb(members)

            def of_size(size: jax.Array) -> jax.Array:
                first = jnp.where(members < size, fitness, 0.0)  # the others change nothing
                grad = jr.evolution.eggroll_grad(params, classes, key, 0, first, **options)["w"]
                return (grad * exact).sum() / jnp.linalg.norm(grad) / jnp.linalg.norm(exact)

            return jax.vmap(of_size)(jnp.array(sizes))

        return jax.vmap(of)(jax.random.split(KEY, 6)).mean(0)

    found = {
        name: jax.jit(cosines, static_argnums=(0, 1))(kind, rank)
        for name, (kind, rank) in {
            "rank 1": ("lowrank", 1),
            "full": ("full", 1),
        }.items()
    }
    figure = curves(found, x=sizes, title="eggroll_grad", marks="o-", xlabel="members",
                    ylabel="cosine to the gradient")  # fmt: skip
    figure.axes[0].set_xscale("log", base=2)
    figure.axes[0].set_xticks(sizes, sizes)
    return figure, (
        "The cosine between `eggroll_grad` and the exact gradient of a loss of an 8 x 8 matrix, "
        "against the number of members, on average over six draws. More members point it along "
        "the gradient, and noise of rank 1 does nearly as well as full noise."
    )


OWN: dict[str, Callable[[], tuple[Figure, str]]] = {
    draw.__name__: draw
    for draw in (
        capo, ps_grpo, mua_rl, arpo, prefix_rl, scope, spark, sapo_swarm, verl_erank, arrol, masa,
        wpo, spo_degree, merge, accelerated_po, past_future, slot_sampler, sampling_reference,
        prefix_shared_attention, jet_rl, eggroll_forward, eggroll_update,
    )
}  # fmt: skip
