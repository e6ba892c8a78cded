"""Kinds of figures of a function: what it returns for standard inputs, given by their names.

A kind has a function for the values to show, and one that shows them. Both raise TypeError or
ValueError where the kind does not suit.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

import jaxrl_llm as jr

RATIO = jnp.exp2(jnp.linspace(-3, 4, 141))
LOG_RATIO = jnp.linspace(-3, 3, 121)
OLD = jnp.full((RATIO.size, 1), jnp.log(0.05))
GROUPS = {
    "one right": [1.0, 0.0, 0.0, 0.0],
    "half right": [1.0, 1.0, 0.0, 0.0],
    "all right": [1.0, 1.0, 1.0, 1.0],
    "graded": [0.2, 0.9, 0.4, 0.0],
}
REWARDS = jnp.array(list(GROUPS.values()))
TURNS = jnp.array([[0.0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]])
MARGIN = jnp.linspace(-4, 4, 161)
RIGHT = (jnp.arange(8) < jnp.arange(9)[:, None]).astype(jnp.float32)
LENGTHS = jnp.arange(0, 121, 4)
SCORES = jnp.array([0.0, 0.1, 0.2, 0.35, 0.5, 0.6, 0.9, 1.0])
ENTROPY = jnp.linspace(0, 4, 121)
VALUES = jnp.linspace(-1, 2, 121)
CHANCE = jnp.linspace(0.01, 0.99, 99)
LEVELS = jnp.linspace(0.05, 1, 96)
STEPS = np.arange(100)
COLORS = "tab:blue", "tab:orange", "tab:green", "tab:red"


def call(function: Callable, context: Mapping) -> jax.Array:
    """The array that a function returns for those entries of the context that it names."""

    def called():
        return jr.core.call_with(function, context=context)

    try:
        value = jax.jit(called)()  # one program compiles faster than its operations
    except jax.errors.TracerArrayConversionError:  # a function of NumPy
        value = called()
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{function} returns no array.")
    return jnp.asarray(value, jnp.float32)


def curves(values: Mapping[str, jax.Array], *, x, title: str = "", marks: str = "-", **axes):
    """Curves over the same x; an error where they are one flat line, which would show nothing."""
    ys = {name: np.asarray(y) for name, y in values.items()}
    title = title or ", ".join(ys)
    if any(y.shape != np.shape(x) or not np.isfinite(y).all() for y in ys.values()):
        raise ValueError(f"{title}: not one number for each {axes['xlabel']}.")
    every = np.stack(list(ys.values()))
    if not every.any() or (len(ys) == 1 and np.ptp(every) <= 1e-5 * np.abs(every).max()):
        raise ValueError(f"{title}: it does not depend on the {axes['xlabel']}.")
    figure, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
    for (name, y), color in zip(ys.items(), COLORS, strict=False):
        axis.plot(x, y, marks, color=color, label=name)
    axis.set(title=title, **axes)
    if len(ys) > 1:
        axis.legend(frameon=False)
    return figure


def ratio_curves(values: Mapping[str, jax.Array], **axes) -> Figure:
    """Curves over the standard ratios."""
    figure = curves(values, x=RATIO, **axes)
    axis = figure.axes[0]
    axis.set_xscale("log", base=2)
    axis.set_xticks([0.125, 0.5, 1, 2, 4, 16], ["⅛", "½", "1", "2", "4", "16"])
    axis.axvline(1, color="black", linewidth=0.5, linestyle=":")
    axis.axhline(0, color="black", linewidth=0.5)
    return figure


def weight(function: Callable) -> dict[str, jax.Array]:
    """The weight of a token at the standard ratios, by its advantage."""
    ones = jnp.ones(OLD.shape, bool)
    context = {"behavior_logp": OLD - 0.3, "selected": ones, "steered": ones[:, 0],
               "turn_ids": jnp.zeros(OLD.shape, int)}  # fmt: skip

    def loss(logp: jax.Array, advantage: jax.Array) -> jax.Array:
        own = jnp.full(RATIO.size, advantage)
        given = context | {"median_advantages": own}
        return jr.core.call_with(function, logp, OLD, own, ones, context=given).sum()

    logp = OLD + jnp.log(RATIO)[:, None]
    push = jax.jit(jax.grad(loss))
    return {f"advantage {a:+.0f}": -push(logp, jnp.float32(a))[:, 0] / a for a in (1.0, -1.0)}


def show_weight(values: Mapping[str, dict[str, jax.Array]]) -> Figure:
    """The weights of a token against its ratio."""
    ((name, by_sign),) = values.items()
    axes = {"xlabel": "ratio of new to old probability", "ylabel": "weight", "ylim": (-2.2, 6)}
    return ratio_curves(by_sign, title=name, **axes)


def advantages(function: Callable) -> jax.Array:
    """The advantages of the rollouts of four groups."""
    half = jnp.full(REWARDS.shape[:1], 0.5)
    context = {"rewards": REWARDS, "mask": jnp.ones((*REWARDS.shape, 2), bool),
               "greedy_rewards": half, "prior": half, "k": 2}  # fmt: skip
    if "turn_where" in jr.core.accepted(function):
        raise TypeError(f"{function} takes rewards of turns.")
    values = call(function, context)
    if values.shape[:2] != REWARDS.shape or not np.any(values):
        raise TypeError(f"{function}: not one advantage a rollout.")
    return values if values.ndim == 2 else values[..., 0]


def show_advantages(values: Mapping[str, jax.Array]) -> Figure:
    """The advantages of four groups, beside those of GRPO."""
    ((name, value),) = values.items()
    figure, axes = plt.subplots(1, 4, figsize=(7, 2), sharey=True, layout="constrained")
    grpo = jr.advantages.grpo(REWARDS)
    for axis, title, own, others in zip(axes, GROUPS, value, grpo, strict=True):
        axis.bar(np.arange(4) - 0.2, own, 0.4, color=COLORS[0], label=name)
        if name != "grpo":
            axis.bar(np.arange(4) + 0.2, others, 0.4, color="lightgray", label="grpo")
        axis.axhline(0, color="black", linewidth=0.5)
        rewards = ", ".join(f"{r:g}" for r in GROUPS[title])
        axis.set(title=title, xlabel=f"rewards {rewards}", xticks=[])
    axes[0].set_ylabel("advantage")
    axes[0].legend(frameon=False, fontsize=7)
    return figure


def turn_advantages(function: Callable) -> jax.Array:
    """The advantages of the turns of a group."""
    takes_turns = "turn_where" in jr.core.accepted(function)
    value = call(function, {"rewards": TURNS, "turn_where": jnp.ones(TURNS.shape, bool)})
    if value.shape != TURNS.shape or not takes_turns:
        raise TypeError(f"{function}: not one advantage a turn.")
    return value


def show_turn_advantages(values: Mapping[str, jax.Array]) -> Figure:
    """A cell a turn with its reward, in the color of its advantage."""
    ((name, value),) = values.items()
    most = np.abs(value).max()
    figure, axis = plt.subplots(figsize=(4.4, 2.4), layout="constrained")
    image = axis.imshow(value, cmap="RdBu", vmin=-most, vmax=most, aspect="auto")
    for (row, turn), reward in np.ndenumerate(TURNS):
        color = "white" if abs(value[row, turn]) > 0.6 * most else "black"
        axis.text(turn, row, f"{reward:g}", ha="center", va="center", color=color)
    axis.set(title=name, xlabel="turn", ylabel="rollout", xticks=range(4), yticks=range(4),
             xticklabels=range(1, 5), yticklabels=range(1, 5))  # fmt: skip
    figure.colorbar(image, label="advantage")
    return figure


def pair_loss(function: Callable) -> jax.Array:
    """The loss of a pair at the standard margins."""
    zero = jnp.zeros(MARGIN.shape)
    context = {"chosen_lengths": zero + 10, "rejected_lengths": zero + 10,
               "target_lengths": zero + 10, "policy_chosen": zero == 0}  # fmt: skip
    for policy in ("target", "chosen_ref", "rejected_ref", "chosen_previous", "rejected_previous"):
        context[f"{policy}_logp"] = zero - 5
    context |= dict.fromkeys(("chosen_history_logp", "rejected_history_logp"), zero[:, None] - 5)
    context |= {"chosen_logp": MARGIN / 2 - 5, "rejected_logp": -MARGIN / 2 - 5}
    context |= {"chosen_rewards": MARGIN / 2, "rejected_rewards": -MARGIN / 2}
    return call(function, context)


def show_pair_loss(values: Mapping[str, jax.Array], **axes) -> Figure:
    """The loss of a pair against a margin."""
    figure = curves(values, x=MARGIN, ylabel="loss", **axes)
    figure.axes[0].axvline(0, color="black", linewidth=0.5, linestyle=":")
    return figure


def correction(function: Callable) -> jax.Array:
    """The weight that a token keeps at the standard ratios to the policy that sampled it."""
    ones = jnp.ones(OLD.shape, bool)
    context = {"old_logp": OLD, "behavior_logp": OLD - jnp.log(RATIO)[:, None], "mask": ones}
    weights = call(function, context).reshape(RATIO.shape)
    if np.ptp(weights) < 1e-9:
        raise ValueError(f"{function} keeps all of these tokens.")
    return weights


def penalty(function: Callable) -> jax.Array:
    """The penalty of a token by its log-ratio to another policy."""
    base = jnp.full((LOG_RATIO.size, 1), -4.0)
    ones = jnp.ones(base.shape, bool)
    context = {"logp": base + LOG_RATIO[:, None], "old_logp": base, "ref_logp": base, "mask": ones,
               "advantages": ones[:, 0].astype(jnp.float32)}  # fmt: skip
    return call(function, context).reshape(LOG_RATIO.shape)


def entropy_loss(function: Callable) -> jax.Array:
    """The loss of a token by the entropy of its distribution."""
    shape = ENTROPY.size, 1
    context = {"entropy": ENTROPY[:, None], "mask": jnp.ones(shape, bool), "history": jnp.ones(1),
               "turn_ids": jnp.zeros(shape, int)}  # fmt: skip
    return call(function, context).reshape(ENTROPY.shape)


def length_reward(function: Callable) -> dict[str, jax.Array]:
    """The reward of right and wrong responses by their lengths."""
    full = jnp.ones((1, LENGTHS.size))
    context = {"lengths": LENGTHS[None].astype(jnp.float32), "max_length": 100.0, "buffer": 40.0,
               "mask": jnp.arange(120) < LENGTHS[None, :, None], "budgets": 50 * full,
               "coef": 0.01}  # fmt: skip

    def reward(right: float) -> jax.Array:
        return call(function, context | {"rewards": right * full, "correct": right * full > 0})[0]

    return {"right": reward(1.0), "wrong": reward(0.0)}


def show_length_reward(values: Mapping[str, dict[str, jax.Array]]) -> Figure:
    """The reward of a response against its length."""
    ((name, rewards),) = values.items()
    if np.allclose(*rewards.values()):  # a penalty of the length alone
        rewards = {name: rewards["right"]}
    axes = {"xlabel": "tokens of the response", "ylabel": "reward"}
    return curves(rewards, x=LENGTHS, title=name, **axes)


def of_groups(function: Callable) -> np.ndarray:
    """What a rule makes of groups of eight with 0 to 8 right answers."""
    if "key" in jr.core.accepted(function):
        raise TypeError("a random draw would show one outcome only.")
    context = {"rewards": RIGHT, "count": 4, "best": 2, "worst": 2, "budget": 32,
               "max_rollouts": 24}  # fmt: skip
    value = np.asarray(call(function, context))
    if value.shape == RIGHT.shape and (value == value[:, :1]).all():
        value = value[:, 0]
    # Below 0 is the index of no rollout, not a share or a number of them.
    if value.shape not in (RIGHT.shape[:1], RIGHT.shape) or np.ptp(value) < 1e-9 or value.min() < 0:
        raise ValueError(f"{function}: nothing about groups.")
    return value


def show_groups(values: Mapping[str, np.ndarray]) -> Figure:
    """A bar a group, or a row of cells where its rollouts differ."""
    ((name, value),) = values.items()
    figure, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
    axis.set(title=name)
    if value.ndim == 1:
        axis.bar(range(9), value, color=COLORS[0])
        axis.set(xlabel="right answers of 8", ylabel="result", xticks=range(9))
        return figure
    image = axis.imshow(value, cmap="Blues", vmin=0, aspect="auto")
    for row in range(9):  # between the right answers and the wrong ones
        axis.plot([row - 0.5] * 2, [row - 0.5, row + 0.5], color=COLORS[1], linewidth=2)
    axis.set(xlabel="rollout, right answers left of the line", ylabel="right answers of 8",
             xticks=range(8), xticklabels=range(1, 9), yticks=range(9),
             xlim=(-0.6, 7.6))  # fmt: skip
    figure.colorbar(image, label="result")
    return figure


def fitness(function: Callable) -> jax.Array:
    """The fitness of the members of a population by their scores."""
    value = call(function, {"scores": SCORES[None]}).reshape(-1)
    if value.size == SCORES.size // 2:
        value = jnp.repeat(value, 2)
    if value.shape != SCORES.shape or np.ptp(value) < 1e-9:
        raise ValueError(f"{function}: not one fitness a member or a pair.")
    return value


def show_fitness(values: Mapping[str, jax.Array]) -> Figure:
    """Bars of the members, ordered by score."""
    figure, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
    width = 0.8 / len(values)
    for i, ((name, y), color) in enumerate(zip(values.items(), COLORS, strict=False)):
        place = np.arange(SCORES.size) + (i - (len(values) - 1) / 2) * width
        axis.bar(place, y, width, color=color, label=name)
    axis.axhline(0, color="black", linewidth=0.5)
    axis.set_xticks(range(SCORES.size), [f"{s:g}" for s in SCORES])
    axis.set(xlabel="score of the member", ylabel="fitness", title=", ".join(values))
    if len(values) > 1:
        axis.legend(frameon=False)
    return figure


def credit(function: Callable) -> dict[str, jax.Array]:
    """What the tokens of a right and of a wrong response get."""
    values = jnp.linspace(0.3, 0.7, 9)[None, None]
    context = {
        "values": values, "action_values": values, "mask": jnp.ones(values.shape, bool), "n": 3,
        "old_logp": jnp.full(values.shape, -1.0), "behavior_logp": jnp.full(values.shape, -0.8),
        "turn_ids": jnp.arange(9)[None, None] // 3, "unfinished": jnp.zeros((1, 1), bool),
    }  # fmt: skip

    def tokens(reward: float) -> jax.Array:
        ends = {f"{name}_rewards": jnp.zeros((1, 1, count)).at[..., -1].set(reward)
                for name, count in (("token", 9), ("turn", 3))}  # fmt: skip
        return call(function, context | ends)[0, 0]

    return {"reward 1": tokens(1.0), "reward 0": tokens(0.0)}


def show_credit(values: Mapping[str, dict[str, jax.Array]]) -> Figure:
    """The tokens of a right and of a wrong response."""
    ((name, by_reward),) = values.items()
    kind = "return" if "returns" in name else "advantage"
    axes = {"title": name, "xlabel": "token", "ylabel": kind, "marks": "o-"}
    figure = curves(by_reward, x=np.arange(1, 10), **axes)
    figure.axes[0].axhline(0, color="black", linewidth=0.5)
    return figure


def choice_loss(function: Callable) -> jax.Array:
    """The loss of a choice between two tokens by the probability of the first."""
    student = jnp.log(jnp.stack([CHANCE, 1 - CHANCE], -1))
    teacher = jnp.broadcast_to(jnp.log(jnp.array([0.7, 0.3])), student.shape)
    context = {"logits": student, "student_logp": student, "teacher_logits": teacher,
               "teacher_logp": teacher, "targets": jnp.zeros(CHANCE.shape, int)}  # fmt: skip
    return call(function, context)


def value_loss(function: Callable) -> jax.Array:
    """The loss of predicted values whose old one is 0 and whose return is 0.5."""
    zero = jnp.zeros((VALUES.size, 1))
    context = {"values": VALUES[:, None], "old_values": zero, "returns": zero + 0.5,
               "mask": zero == 0}  # fmt: skip
    return call(function, context)[:, 0]


def token_weights(function: Callable) -> jax.Array:
    """The weights of the tokens of four responses."""
    mask = jnp.arange(8) < jnp.array([8, 5, 3, 2])[:, None]
    return call(function, {"mask": mask[None], "length": 8.0})[0]


def show_token_weights(values: Mapping[str, jax.Array]) -> Figure:
    """A panel a function, all on one scale."""
    figure, axes = plt.subplots(1, len(values), figsize=(7, 2), sharey=True, squeeze=False,
                                layout="constrained")  # fmt: skip
    for axis, (name, value) in zip(axes[0], values.items(), strict=True):
        image = axis.imshow(value, cmap="Blues", vmin=0, aspect="auto")
        axis.set(title=name, xlabel="token", xticks=[])
        figure.colorbar(image)
    axes[0, 0].set(ylabel="response", yticks=range(4), yticklabels=range(1, 5))
    return figure


def level_weight(function: Callable) -> jax.Array:
    """How strongly a masked token counts by the noise level of the first of its two draws."""
    yes = jnp.ones((2, LEVELS.size, 1), bool)
    context = {"masked": yes, "t": jnp.stack([LEVELS, jnp.full(LEVELS.shape, 0.5)]),
               "valid": yes[0]}  # fmt: skip

    def total(logp: jax.Array) -> jax.Array:
        return call(function, context | {"logp": logp}).sum()

    return jax.jit(jax.grad(total))(jnp.full(yes.shape, -2.0))[0, :, 0]


def path(function: Callable) -> jax.Array:
    """Where a reference is while the policy moves by 1 each step."""
    now, found = {"w": jnp.zeros(1)}, []
    for step in range(STEPS.size):
        context = {"reference": now, "params": {"w": jnp.full(1, float(step))}, "step": step,
                   "every": 30}  # fmt: skip
        now = jr.core.call_with(function, context=context)
        found.append(now["w"][0])
    return jnp.stack(found)


def show_path(values: Mapping[str, jax.Array]) -> Figure:
    """The reference beside the policy."""
    paths = {"policy": jnp.asarray(STEPS, jnp.float32), **values}
    return curves(paths, x=STEPS, title=", ".join(values), xlabel="step", ylabel="weight")


class Sweep(NamedTuple):
    """Values of an input, and what they are."""

    values: jax.Array
    label: str


RATES = Sweep(jnp.linspace(0, 1, 101), "share of right answers")
SWEEPS = {
    "rates": RATES,
    "accuracy": RATES,
    "success": RATES,
    "variance": Sweep(jnp.linspace(0, 0.25, 101), "variance of the rewards"),
    "kl": Sweep(jnp.linspace(0, 1, 26), "KL divergence, nats"),
    "shift": Sweep(jnp.linspace(0, 0.2, 101), "KL divergence since the last visit, nats"),
    "kl_window": Sweep(jnp.linspace(0, 0.05, 101), "KL divergence, nats"),
    "step": Sweep(jnp.arange(401), "step"),
    "steps": Sweep(jnp.arange(1, 21), "steps"),
    "progress": Sweep(jnp.linspace(0, 1, 101), "share of the training that is done"),
    "order": Sweep(jnp.arange(64), "serial number of a stored item, the newest last"),
    "versions": Sweep(jnp.arange(11), "version that sampled the item; 10 is trained"),
    "length": Sweep(jnp.arange(129), "tokens so far"),
    "regrets": Sweep(jnp.linspace(-1, 1, 41), "regret of a strategy"),
    "scores": Sweep(jnp.linspace(0, 1, 41), "score"),
    "values": Sweep(jnp.linspace(0.02, 0.98, 97), "value"),
    "updates": Sweep(jnp.linspace(-3, 3, 121), "update"),
    "advantages": Sweep(jnp.linspace(-2, 2, 101), "advantage"),
    "alpha": Sweep(jnp.linspace(0.5, 12, 116), "alpha"),
}
STANDARD = {"rollouts": 8, "max_rollouts": 32, "count": 8, "group_size": 8, "mean_rollouts": 8.0,
            "max_new_tokens": 128, "version": 10, "scale": 3.0, "level": 1, "start": 0.25,
            "end": 0.75, "alpha": 0.5, "beta": 4.0, "tau": 1.0, "q": np.int8(0),
            "share": 1 / 101, "target": 0.1, "samples": 8, "coef": 0.1, "center": 0.5,
            "batch_size": 8}  # fmt: skip


class Swept(NamedTuple):
    """What a rule returns over the input ``over``, the others being ``rest``."""

    over: str
    rest: dict[str, float]
    result: jax.Array


def swept(function: Callable) -> Swept:
    """What a rule returns over its first input that has a standard range."""
    takes = jr.core.accepted(function)
    names = [name for name, p in takes.items() if p.default is p.empty]
    over = next((name for name in names if name in SWEEPS), None)
    rest = {name: STANDARD[name] for name in names if name in STANDARD and name != over}
    if over is None or len(rest) + 1 < len(names):
        raise ValueError(f"{function} takes what has no standard range.")
    x = SWEEPS[over].values
    # An option is a number of Python, and an input beside x an array like it.
    inputs = {name: value if takes[name].kind is takes[name].KEYWORD_ONLY
              else jnp.full(x.shape, value) for name, value in rest.items()}  # fmt: skip
    try:
        result = call(function, inputs | {over: x})
    except ValueError:  # it takes one number, as the rules of a controller do
        result = jnp.stack([call(function, rest | {over: one}) for one in x])
    return Swept(over, rest, result)


def show_swept(values: Mapping[str, Swept]) -> Figure:
    """A rule against its input."""
    ((name, value),) = values.items()
    x, label = SWEEPS[value.over]
    return curves({name: value.result}, x=x, xlabel=label, ylabel="result")


def swept_text(values: Mapping[str, Swept]) -> str:
    """What the figure of a sweep shows."""
    ((_, value),) = values.items()
    given = " and ".join(f"`{name}` {number:.3g}" for name, number in value.rest.items())
    return f"{{name}} against `{value.over}`, with its defaults" + (
        f" and {given}." if given else "."
    )


RULES = ("curation", "evolution", "regularizers", "advantages", "rollout", "surrogates", "models",
         "diffusion")  # fmt: skip


class Kind(NamedTuple):
    """A kind of figure: the functions that it suits by their first arguments, and its caption.

    ``text`` is the caption or makes it of the values. At most ``most`` functions share a figure.
    """

    layers: tuple[str, ...]
    places: tuple[str, ...]
    text: str | Callable[[Mapping], str]
    values: Callable
    show: Callable[[Mapping], Figure]
    most: int = 1

    def suits(self, layer: str, function: Callable) -> bool:
        """Whether a function of a layer takes what the kind gives."""
        try:
            takes = tuple(jr.core.accepted(function))
        except (TypeError, ValueError):  # it has no signature
            return False
        return layer in self.layers and takes[: len(self.places)] == self.places

    def caption(self, values: Mapping) -> str:
        """What the figure of these values by function shows."""
        text = self.text if isinstance(self.text, str) else self.text(values)
        return text.format(name=" and ".join(f"`{name}`" for name in values))


KINDS = (
    Kind(
        ("surrogates", "diffusion"),
        ("logp", "old_logp", "advantages", "mask"),
        "How strongly {name} pushes a token: minus the derivative of the loss with respect to its "
        "log-probability, over the advantage, for a response of one token. 1 is the plain policy "
        "gradient.",
        weight,
        show_weight,
    ),
    Kind(
        ("advantages",),
        ("rewards",),
        "Advantages of {name}, with its defaults, for four groups of four rewards, next to `grpo`. "
        "Where it takes the reward of a greedy response or a prior, this is 0.5; k is 2.",
        advantages,
        show_advantages,
    ),
    Kind(
        ("advantages",),
        ("rewards",),
        "Advantages of {name}, with its defaults, for a group of four rollouts of four turns. Each "
        "cell has the reward of the turn.",
        turn_advantages,
        show_turn_advantages,
    ),
    Kind(
        ("preferences",),
        ("chosen_logp", "rejected_logp"),
        "Loss of {name} for a pair against the margin between its responses of ten tokens each.",
        pair_loss,
        functools.partial(
            show_pair_loss, xlabel="log-ratio of the chosen less that of the rejected, nats"
        ),
    ),
    Kind(
        ("preferences",),
        ("chosen_rewards", "rejected_rewards"),
        "Loss of {name} for a pair against the margin between the rewards of its responses.",
        pair_loss,
        functools.partial(show_pair_loss, xlabel="reward of the chosen less that of the rejected"),
    ),
    Kind(
        ("corrections",),
        ("old_logp", "behavior_logp", "mask"),
        "What {name} multiplies a token by, with its defaults, against the ratio of its "
        "probability under the trained policy to that under the policy that sampled it: a batch "
        "of responses of one token.",
        correction,
        functools.partial(
            ratio_curves, xlabel="ratio of old to sampling probability", ylabel="weight"
        ),
        most=3,
    ),
    Kind(
        ("regularizers",),
        ("logp", "ref_logp", "mask"),
        "The penalty of {name} for a token, with the defaults, against its log-ratio to the "
        "reference.",
        penalty,
        functools.partial(
            curves, x=LOG_RATIO, xlabel="log-ratio to the reference, nats", ylabel="penalty"
        ),
        most=3,
    ),
    Kind(
        ("regularizers",),
        ("logp", "old_logp", "mask"),
        "The penalty of {name} for a token of advantage 1, with its defaults, against the "
        "log-ratio of the new policy to the old one.",
        penalty,
        functools.partial(
            curves, x=LOG_RATIO, xlabel="log-ratio of new to old policy, nats", ylabel="penalty"
        ),
    ),
    Kind(
        ("regularizers",),
        ("entropy", "mask"),
        "The loss that {name} adds to a token, with its defaults, against its entropy. Where it "
        "compares with past entropies, their mean is 1.",
        entropy_loss,
        functools.partial(curves, x=ENTROPY, xlabel="entropy of a token, nats", ylabel="loss"),
    ),
    *(
        Kind(
            ("rewards",),
            places,
            "The reward of {name} for responses of 0 to 120 tokens, with its defaults and, where "
            "it takes them, a maximum of 100, a buffer of 40, a budget of 50 and a cost of 0.01 "
            "for each token beside it.",
            length_reward,
            show_length_reward,
        )
        for places in (("lengths",), ("correct", "lengths"), ("rewards", "mask"))
    ),
    Kind(
        ("curation",),
        ("rewards",),
        "What {name} makes of groups of eight rewards, 1 for a right answer and 0 for a wrong one, "
        "with its defaults and, where it takes them, a count of 4 (2 best, 2 worst), a budget of "
        "32 further rollouts and at most 24 for a group.",
        of_groups,
        show_groups,
    ),
    Kind(
        ("evolution",),
        ("scores",),
        "The fitness by {name}, with the defaults, of a population of eight. Members 1 and 2, 3 "
        "and 4, and so on are pairs of opposite noise.",
        fitness,
        show_fitness,
        most=3,
    ),
    *(
        Kind(
            ("advantages",),
            (rewards, "values", "mask"),
            "What {name} gives the tokens of a right and of a wrong response, with its defaults "
            "and n = 3 where it takes an n: three turns of three tokens, with predicted values "
            "from 0.3 to 0.7 and the reward at the end, sampled at 1.2 times the probability.",
            credit,
            show_credit,
        )
        for rewards in ("token_rewards", "turn_rewards")
    ),
    *(
        Kind(
            ("surrogates",),
            places,
            "What {name} returns, with its defaults, for a choice between two tokens against the "
            "policy's probability of the first, which was sampled. A teacher gives it 0.7.",
            choice_loss,
            functools.partial(
                curves, x=CHANCE, xlabel="probability of the first token", ylabel="result"
            ),
        )
        for places in (("student_logp", "teacher_logp"), ("logits", "targets"))
    ),
    Kind(
        ("surrogates",),
        ("values", "old_values", "returns", "mask"),
        "The loss of {name} for a prediction, with its defaults, whose value was 0 at the rollout "
        "and whose return is 0.5.",
        value_loss,
        functools.partial(curves, x=VALUES, xlabel="predicted value", ylabel="loss"),
    ),
    Kind(
        ("aggregate",),
        ("mask",),
        "The weights by {name} of the tokens of a group of responses of 8, 5, 3 and 2 tokens.",
        token_weights,
        show_token_weights,
        most=3,
    ),
    Kind(
        ("diffusion",),
        ("logp", "masked", "t"),
        "How strongly the log-probability of a masked token counts in {name}, with the defaults, "
        "against the noise level of its draw. The token has log-probability -2 in each of two "
        "draws, the other at noise level 0.5.",
        level_weight,
        functools.partial(
            curves, x=LEVELS, xlabel="noise level, the share of masked tokens", ylabel="weight"
        ),
        most=3,
    ),
    Kind(
        ("regularizers",),
        ("reference", "params", "step"),
        "Where a reference is by {name}, with the defaults and a reset every 30 steps, while a "
        "weight of the policy grows by 1 each step.",
        path,
        show_path,
        most=3,
    ),
)
# For any rule, where no other kind suits it.
SWEEP = Kind(RULES, (), swept_text, swept, show_swept)
