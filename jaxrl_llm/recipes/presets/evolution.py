"""Presets of evolution strategies, each named by the method's short key.

Each returns an :class:`EvolutionRecipe` and raises ValueError if an option is out of its range. A
run without an optimizer in its config has that of the paper, as the docstring says.
Shared options:

    sigma: Scale of the noise.
    temperature: Sampling temperature of the members.
"""

from collections.abc import Callable

from jaxrl_llm import evolution
from jaxrl_llm.core import bind
from jaxrl_llm.recipes.evolution import EvolutionRecipe
from jaxrl_llm.recipes.optimizer import OptimizerConfig


def _sgd(learning_rate: float) -> OptimizerConfig:
    """Plain steps along the estimate, whose norm is mostly that of its noise."""
    return OptimizerConfig(name="sgd", learning_rate=learning_rate, b1=0.0, max_grad_norm=None)


def eggroll(
    *,
    sigma: float = 1e-3,
    rank: int = 1,
    fitness: Callable = evolution.mean_fitness,
    shared: bool = True,
    noise_reuse: int = 1,
    sign: bool = False,
    temperature: float = 0.0,
) -> EvolutionRecipe:
    """EGGROLL: a population in one batch, with antithetic low-rank noise on the layers' matrices.

        W_n = W + s_n sigma / sqrt(r) A_n B_n^T,     s_n = +-1
        grad = -sigma / sqrt(N) sum_n F_n E_n

    Its optimizer is SGD with a rate of 0.125, without momentum and without a bound of the
    gradient's norm. One step with rate lr moves each weight by ``lr sigma`` (RMS), whatever N and
    r.

    Args:
      sigma: Large enough that members give different answers, and small enough that few of them are
        broken: 1e-3 to 4e-3 for small language models.
      rank: Rank of the noise.
      fitness: ``(scores [P, G], where=) -> [N]``; by default the z-score of the members' mean
        scores.
      shared: Whether every member answers every prompt; if not, use a fitness of groups, such as
        ``evolution.zscore``.
      noise_reuse: Number of epochs that share a draw; 1 draws new noise each epoch, 0 never.
      sign: Whether to update by the signs of the factors.

    Example:
      >>> import jaxrl_llm as jr
      >>> recipe = jr.recipes.eggroll(sigma=2e-3)
      >>> recipe.optimizer.name, recipe.optimizer.learning_rate
      ('sgd', 0.125)

    References:
      EGGROLL (arXiv:2511.16652). Its scripts for language models: sigma 7e-4 to 2e-3, SGD with
      rates of 0.06 to 0.125, populations of 512 to 8192.
    """
    return EvolutionRecipe(
        name="eggroll",
        sigma=sigma,
        rank=rank,
        fitness=fitness,
        shared=shared,
        noise_reuse=noise_reuse,
        sign=sign,
        optimizer=_sgd(0.125),
        temperature=temperature,
        paper="arXiv:2511.16652",
    )


def open_es(*, sigma: float = 0.02, temperature: float = 0.0) -> EvolutionRecipe:
    """OpenAI-ES: antithetic noise at each weight, centered ranks, an estimate of the gradient.

        theta_n = theta + s_n sigma eps_n
        grad = -1 / (N sigma) sum_n F_n s_n eps_n,     F in [-1/2, 1/2]

    Members are evaluated one after another, each with a copy of the weights. Every weight has
    noise, of embeddings and norms too; ``replace(rules=())`` leaves only the matrices of layers.
    Its optimizer is Adam with a rate of 0.01, without a bound of the gradient's norm. The rate is
    for small networks that are trained from the start; fine-tuning needs a much smaller one, such
    as ``optimizer=dataclasses.replace(recipe.optimizer, learning_rate=1e-5)`` in the config.

    References:
      OpenAI-ES (arXiv:1703.03864). Its released code adds 0.005 times the weights to the gradient,
      which would draw a pretrained model to 0, so it is left out. Here equal scores share the mean
      of their ranks, since language models often have equal scores.
    """
    ranks = bind(evolution.centered_ranks, ties="mean")
    return EvolutionRecipe(
        name="open_es",
        sigma=sigma,
        fitness=bind(evolution.mean_fitness, shape=ranks),
        noise="full",
        rules=(("*", "full"),),
        scale="gradient",
        optimizer=OptimizerConfig(learning_rate=0.01, max_grad_norm=None),
        temperature=temperature,
        chunk=1,
        paper="arXiv:1703.03864",
    )


def es_qiu(*, sigma: float = 1e-3) -> EvolutionRecipe:
    """Plain evolution strategies for all parameters of a language model.

        theta <- theta + alpha / N sum_n Z_n eps_n,     Z = (R - mean(R)) / std(R)

    It has no pairs, no ranks and greedy answers, and updates every parameter, including the
    embedding. The paper has N = 30 and alpha = 5e-4: its optimizer is SGD with this rate, without
    momentum and without a bound of the gradient's norm, which is about sqrt(number of weights / N).

    References:
      Qiu et al., Evolution Strategies at Scale (arXiv:2509.24372).
    """
    return EvolutionRecipe(
        name="es_qiu",
        sigma=sigma,
        fitness=bind(evolution.mean_fitness, shape=bind(evolution.zscore, eps=0.0)),
        noise="full",
        pairs=False,
        rules=(("*", "full"),),
        scale="mean",
        optimizer=_sgd(5e-4),
        chunk=1,
        paper="arXiv:2509.24372",
    )
