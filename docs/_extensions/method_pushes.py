"""The figure of a preset: how strongly its loss pushes each token of a group, beside GRPO."""

import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from jaxrl_llm import recipes
from jaxrl_llm.core import accepted
from jaxrl_llm.diffusion import FlowLikelihood
from jaxrl_llm.recipes import Recipe, catalog, wiring
from jaxrl_llm.testing import cases

REWARDS = [1.0, 0.75, 0.25, 0.0]
# Four rollouts that branch after two and after four tokens, and a walk through common states.
NODES = [[0, 0, 1, 1, 3, 3], [0, 0, 1, 1, 4, 4], [0, 0, 2, 2, 5, 5], [0, 0, 2, 2, 6, 6]]
STATES = [[0, 1, 2], [0, 1, 3], [0, 2, 3], [0, 2, 3]]
# Presets that train like one of these differ in what they roll out, which their push cannot show.
PLAIN = "grpo", "dr_grpo", "rloo", "dapo", "online_dpo"


def caption(preset: str) -> str:
    """What the figure shows."""
    return (
        f"How strongly `{preset}` pushes each token of a standard group, next to `grpo`: minus the "
        f"derivative of the loss with respect to the {pushed(preset)}, over the largest of the "
        "panel. Rows are rollouts with their rewards, and gray cells lie after their ends. The "
        "policy has moved a little since the rollouts, so some tokens are clipped: they are white."
    )


def pushed(preset: str) -> str:
    """What the loss of a preset pushes."""
    recipe = made(preset)
    if next(iter(accepted(recipe.surrogate))) == "values":
        return "score that the reward model gives the token"
    if isinstance(recipe.likelihood, FlowLikelihood):
        return "log-density of the denoising step, which is here a token"
    return f"token's {'estimated ' if recipe.likelihood else ''}log-probability"


def made(preset: str) -> Recipe:
    """The recipe of a preset for the standard batch."""
    if preset == "ttrl_majority":  # all rollouts of the batch vote
        return recipes.ttrl_majority(votes=1)
    return catalog.preset(preset, length=cases.T, num_prompts=cases.P)


@functools.cache
def push(preset: str) -> tuple[np.ndarray, np.ndarray]:
    """What the loss of a preset pushes in a group, and which tokens the responses have."""
    recipe = made(preset)
    case = standard(cases.make_case(recipe=recipe))
    # A denoiser's tokens are masked in several draws, and some methods weigh each draw.
    draws = {name: x for name, x in case.statistics.items() if name == wiring.DRAW_LOGP}

    @jax.jit
    def gradient(case: cases.Case, draws: dict) -> tuple:
        batch, _ = cases.prepare(recipe)(case.batch, recipe.init())

        def loss(logp: jax.Array, draws: dict) -> jax.Array:
            statistics = {**case.statistics, **draws}
            return recipe.loss(logp, batch, entropy=case.entropy, statistics=statistics)

        return jax.grad(loss, argnums=(0, 1))(case.logp, draws)

    by_token, by_draw = gradient(case, draws)
    total = np.asarray(by_token[0])
    for each in by_draw.values():
        total = total + np.asarray(each[0]).sum(-1)
    return -total / max(np.abs(total).max(), 1e-30), np.asarray(case.batch.mask[0])


def standard(case: cases.Case) -> cases.Case:
    """The case with distinct rewards, branches and states in its first group."""
    batch = case.batch
    rewards = batch.rewards.at[0].set(jnp.array(REWARDS))
    correct = (rewards > 0.5).astype(jnp.float32)
    extras = dict(batch.extras)
    for name, rows in (("node_ids", NODES), ("state_ids", STATES), ("action_ids", STATES)):
        extras[name] = jnp.asarray(extras[name]).at[0].set(jnp.array(rows))
    components = {**batch.reward_components, "correct": correct}
    return case._replace(
        batch=batch.replace(rewards=rewards, reward_components=components, extras=extras)
    )


def show(preset: str) -> Figure:
    """The pushes of a preset and of GRPO; ValueError where the first shows nothing of its own."""
    own, mask = push(preset)
    if not own.any() or not np.isfinite(own).all():
        raise ValueError(f"{preset} does not push tokens by their log-probabilities.")
    if any(preset == plain or np.allclose(own, push(plain)[0], atol=5e-3) for plain in PLAIN):
        raise ValueError(f"{preset} pushes like a plain method.")
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2), sharey=True, layout="constrained")
    for axis, name in zip(axes, (preset, "grpo"), strict=True):
        axis.set_facecolor("lightgray")
        image = axis.imshow(np.where(mask, push(name)[0], np.nan), cmap="RdBu", vmin=-1, vmax=1,
                            aspect="auto")  # fmt: skip
        axis.set(title=name, xlabel="token", xticks=range(cases.T),
                 xticklabels=range(1, cases.T + 1))  # fmt: skip
    axes[0].set_yticks(range(len(REWARDS)), [f"reward {r:g}" for r in REWARDS])
    figure.colorbar(image, ax=axes, label="push", ticks=[-1, 0, 1])
    return figure
