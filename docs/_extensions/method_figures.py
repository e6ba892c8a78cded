"""One figure a method, on the same inputs: what it makes of a ratio, a group or a margin."""

import io
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxrl_llm as jr
from jaxrl_llm.recipes import catalog

RATIO = jnp.exp2(jnp.linspace(-3, 4, 141))
OLD = jnp.full((RATIO.size, 1), jnp.log(0.05))
GROUPS = {
    "one right": [1.0, 0.0, 0.0, 0.0],
    "half right": [1.0, 1.0, 0.0, 0.0],
    "all right": [1.0, 1.0, 1.0, 1.0],
    "graded": [0.2, 0.9, 0.4, 0.0],
}
REWARDS = jnp.array(list(GROUPS.values()))
MARGIN = jnp.linspace(-4, 4, 161)
COLORS = "tab:blue", "tab:orange"


def drawing(method: catalog.Method) -> tuple[str, str, Callable] | None:
    """How a method is drawn: by which function of it, named, and with what figure."""
    for path in method.functions:
        function = operator.attrgetter(path)(jr)
        layer, name = path.split(".", 1) if "." in path else ("", path)
        draw = DRAWINGS.get(layer)
        if draw is None or not callable(function):
            continue
        try:
            takes = tuple(jr.core.accepted(function))
        except (TypeError, ValueError):
            continue
        if takes[: len(draw.places)] == draw.places:
            return name, draw.text, lambda f=function, d=draw, n=name: d.plot(f, n)
    return None


def caption(method: catalog.Method) -> str:
    """What the figure shows."""
    name, text, _ = drawing(method) or ("", "", None)
    return text.format(name=f"`{name}`")


def draw(methods: Sequence[catalog.Method]) -> dict[str, bytes]:
    """Figures by key, of the methods that one of the three kinds of figure suits."""
    figures = {}
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        for method in methods:
            found = drawing(method)
            if found is None:
                continue
            try:
                figure = found[2]()
            except (TypeError, ValueError):  # it takes more than these inputs
                continue
            buffer = io.BytesIO()
            figure.savefig(buffer, dpi=110, metadata={"Software": None})
            plt.close(figure)
            figures[method.key] = buffer.getvalue()
    return figures


def weight(function: Callable, name: str):
    """The weight of a token against its ratio."""
    context = {"behavior_logp": OLD - 0.3, "selected": jnp.ones(OLD.shape, bool),
               "turn_ids": jnp.zeros(OLD.shape, int)}  # fmt: skip

    def loss(logp: jax.Array, advantage: jax.Array) -> jax.Array:
        arrays = logp, OLD, jnp.full(RATIO.size, advantage), jnp.ones(OLD.shape, bool)
        return jr.core.call_with(function, *arrays, context=context).sum()

    logp = OLD + jnp.log(RATIO)[:, None]
    figure, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
    for advantage, color in zip((1.0, -1.0), COLORS, strict=True):
        values = -jax.grad(loss)(logp, jnp.float32(advantage))[:, 0] / advantage
        axis.plot(RATIO, values, color=color, label=f"advantage {advantage:+.0f}")
    axis.axvline(1, color="black", linewidth=0.5, linestyle=":")
    axis.axhline(0, color="black", linewidth=0.5)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="ratio of new to old probability", ylabel="weight", title=name, ylim=(-2.2, 6))
    axis.set_xticks([0.125, 0.5, 1, 2, 4, 16], ["⅛", "½", "1", "2", "4", "16"])
    axis.legend(frameon=False)
    return figure


def advantages(function: Callable, name: str):
    """The advantages of four groups, beside those of GRPO."""
    context = {"mask": jnp.ones((*REWARDS.shape, 2), bool)}
    values = jr.core.call_with(function, REWARDS, context=context)
    if not isinstance(values, jax.Array) or values.shape[:2] != REWARDS.shape:
        raise TypeError(f"{name}: not one advantage a rollout.")
    values = values if values.ndim == 2 else values[..., 0]
    figure, axes = plt.subplots(1, 4, figsize=(7, 2), sharey=True, layout="constrained")
    grpo = jr.advantages.grpo(REWARDS)
    for axis, title, own, others in zip(axes, GROUPS, values, grpo, strict=True):
        axis.bar(np.arange(4) - 0.2, own, 0.4, color=COLORS[0], label=name)
        if name != "grpo":
            axis.bar(np.arange(4) + 0.2, others, 0.4, color="lightgray", label="grpo")
        axis.axhline(0, color="black", linewidth=0.5)
        rewards = ", ".join(f"{r:g}" for r in GROUPS[title])
        axis.set(title=title, xlabel=f"rewards {rewards}", xticks=[])
    axes[0].set_ylabel("advantage")
    axes[0].legend(frameon=False, fontsize=7)
    return figure


def margin(function: Callable, name: str):
    """The loss of a pair against the margin of its log-ratios."""
    zero = jnp.zeros(MARGIN.shape)
    context = {"chosen_lengths": zero + 10, "rejected_lengths": zero + 10}
    arrays = MARGIN / 2 - 5, -MARGIN / 2 - 5, zero - 5, zero - 5
    takes = tuple(jr.core.accepted(function))
    if "chosen_ref_logp" not in takes:
        arrays = arrays[:2]
    loss = jr.core.call_with(function, *arrays, context=context)
    if not isinstance(loss, jax.Array) or loss.shape != MARGIN.shape:
        raise TypeError(f"{name}: not one loss a pair.")
    figure, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
    axis.plot(MARGIN, loss, color=COLORS[0])
    axis.axvline(0, color="black", linewidth=0.5, linestyle=":")
    axis.set(xlabel="log-ratio of the chosen less that of the rejected, nats", ylabel="loss",
             title=name)  # fmt: skip
    return figure


class Drawing:
    """A kind of figure: the first arguments of the functions that it suits."""

    def __init__(self, places: tuple[str, ...], text: str, plot: Callable):
        self.places, self.text, self.plot = places, text, plot


DRAWINGS = {
    "surrogates": Drawing(
        ("logp", "old_logp", "advantages", "mask"),
        "How strongly {name} pushes a token: minus the derivative of the loss with respect to its "
        "log-probability, over the advantage, for a response of one token. 1 is the plain policy "
        "gradient.",
        weight,
    ),
    "advantages": Drawing(
        ("rewards",),
        "Advantages of {name}, with its defaults, for four groups of four rewards, next to `grpo`.",
        advantages,
    ),
    "preferences": Drawing(
        ("chosen_logp", "rejected_logp"),
        "Loss of {name} for a pair against the margin between its responses of ten tokens each.",
        margin,
    ),
}
