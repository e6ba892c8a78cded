"""``EvolutionRecipe``: one frozen record of an evolution strategy for a language model."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm import evolution
from jaxrl_llm.core import Array, ArrayTree, bind, checks, masking
from jaxrl_llm.core.compose import accepted
from jaxrl_llm.curation.collectors.protocol import Collector
from jaxrl_llm.evolution.gradient import SCALES, Scale
from jaxrl_llm.evolution.leaves import LeafClass
from jaxrl_llm.recipes.needs import RunNeeds
from jaxrl_llm.recipes.optimizer import OptimizerConfig
from jaxrl_llm.recipes.recipe import AlgoState
from jaxrl_llm.recipes.records import format_fields, name_of, replace_fields
from jaxrl_llm.recipes.wiring import check_collector


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class EvolutionRecipe:
    """An evolution strategy: the noise of the members and their fitness. It holds no arrays.

        members     W_n = W + sigma E_n,  E_n drawn from (key, leaf, epoch, n)
        fitness     F = fitness(scores [P, G])
        gradient    -c sum_n F_n E_n, as optax takes it

    A population is used in one of two ways. With ``shared``, all N = G members answer all P prompts
    of a step, so each has a mean score over questions. Otherwise each prompt has G separate
    members, which are compared only with each other: N = P G.

    Attributes:
      name: Short name, for messages and metrics.
      sigma: Scale of the noise, above 0.
      fitness: ``(scores [P, G], where=[P, G]) -> [N]``, finite and higher for better: ``[G]`` if
        members are shared, ``[P, G]`` (or flat) otherwise. ``where`` is True for the scores that
        count; the others are 0.
      noise: "lowrank": matrices have noise of rank ``rank``, and one batch holds many members.
        "full": every entry has separate noise; members are evaluated one after another.
      rank: Rank of the noise of matrices; 1 with ``noise="full"``, where it is not read.
      shared: Whether every member answers every prompt.
      pairs: Whether members 2k and 2k+1 have opposite noise.
      baseline: Number of members without noise, which come first.
      noise_reuse: Number of epochs that share a draw; 1 draws new noise each epoch, 0 never.
      dtype: Dtype of the noise.
      rules: ``(pattern, class)`` for :func:`~jaxrl_llm.evolution.leaf_classes`.
      others: Class of norms and biases there.
      scale: Factor of the sum, as in :func:`~jaxrl_llm.evolution.eggroll_grad`.
      sign: Whether the update takes the signs of the factors.
      temperature: Sampling temperature; 0 is greedy, so that only the weights are random.
      tries: Responses of a member to a prompt, which ``outcome`` combines into one score.
      outcome: ``tries [..., S] -> [...]``: ``evolution.best_of`` for pass@k.
      chunk: Number of noise draws in memory during an update; it does not change the result.
      optimizer: The optimizer of its paper, which a run uses unless its config names one; None
        for the default of a run.
      collector: Chooses the P prompts of a step; None for each once an epoch. All are requested at
        once, and the rows of a batch hold all members in order.
      paper: Reference.

    Raises:
      TypeError: If a slot is not a function, or ``replace`` names an unknown field.
      ValueError: If an option is out of its range or has no effect.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> recipe = jr.recipes.eggroll(sigma=0.1)
      >>> params = {"up": {"kernel": jnp.ones((4, 3))}}
      >>> classes, scores = recipe.classes(params), jnp.array([[1.0, 0.0, 1.0, 1.0]])
      >>> fitness, missing = recipe.shape(scores)
      >>> grads = recipe.gradient(params, classes, jax.random.key(0), 0, fitness)
      >>> grads["up"]["kernel"].shape, int(missing)
      ((4, 3), 0)

    References:
      EGGROLL (arXiv:2511.16652).
    """

    name: str
    sigma: float
    fitness: Callable = evolution.mean_fitness
    noise: Literal["lowrank", "full"] = "lowrank"
    rank: int = 1
    shared: bool = True
    pairs: bool = True
    baseline: int = 0
    noise_reuse: int = 1
    dtype: str = "float32"
    rules: tuple[tuple[str, LeafClass], ...] = ()
    others: Literal["frozen", "full"] = "frozen"
    scale: Scale = "step"
    sign: bool = False
    temperature: float = 0.0
    tries: int = 1
    outcome: Callable = evolution.best_of
    chunk: int = 64
    optimizer: OptimizerConfig | None = None
    collector: Collector | None = None
    paper: str = ""

    def __post_init__(self):
        name = f"EvolutionRecipe {self.name!r}"
        for field in ("fitness", "outcome"):
            if not callable(getattr(self, field)):
                raise TypeError(f"{name}: {field} must be a function.")
        named = accepted(self.fitness).values()
        if not any(x.name == "where" or x.kind is x.VAR_KEYWORD for x in named):
            raise TypeError(
                f"{name}: fitness {name_of(self.fitness)} must take where, the scores that count: "
                "a member that could not be graded has none."
            )
        check_collector(name, self.collector)
        checks.check_sections(name, self)
        checks.check_positive(name, sigma=self.sigma, rank=self.rank, tries=self.tries)
        checks.check_positive(name, chunk=self.chunk)
        checks.check_non_negative(name, temperature=self.temperature, baseline=self.baseline)
        checks.check_non_negative(name, noise_reuse=self.noise_reuse)
        checks.check_option(name, "noise", self.noise, ("lowrank", "full"))
        checks.check_option(name, "others", self.others, ("frozen", "full"))
        checks.check_option(name, "scale", self.scale, SCALES)
        checks.check_option(name, "dtype", self.dtype, ("float32", "bfloat16", "float16"))
        if self.noise == "full" and (self.rank != 1 or self.sign):
            raise ValueError(f"{name}: rank and sign have no effect where noise is 'full'.")
        if self.tries > 1 and self.temperature == 0:
            raise ValueError(
                f"{name}: tries has no effect at temperature 0, where all tries are equal."
            )
        if self.tries == 1 and self.outcome != evolution.best_of:
            raise ValueError(f"{name}: outcome has no effect with one try.")

    def __repr__(self) -> str:
        """The fields that differ from their defaults, functions by their names."""
        return f"EvolutionRecipe({format_fields(self)})"

    @functools.cached_property
    def needs(self) -> RunNeeds:
        """What it needs of a training run: to sample from members, in their order."""
        return RunNeeds(
            samples_members=True,
            shares_prefix=self.shared,
            tries=self.tries,
            keeps_places=True,
            drops_failed=True,
            sums_gradients=False,
            reads_logp=False,
            reads_extras=False,
            freezes_leaves=True,
        )

    def replace(self, **changes) -> "EvolutionRecipe":
        """A copy with some fields changed, checked anew; TypeError if a name is not a field."""
        return replace_fields(self, changes)

    def population(self, prompts: int, group_size: int) -> int:
        """N, the number of members for P prompts with G each.

        Raises ValueError if there is only one member, a pair would be divided, or a group holds
        only members without noise.
        """
        name = f"recipe {self.name!r}"
        if self.pairs and group_size % 2:
            raise ValueError(
                f"{name} has pairs of members with opposite noise, so group_size must be even; got "
                f"{group_size}."
            )
        if group_size < 2:
            raise ValueError(f"{name} compares members, so group_size must be at least 2; got 1.")
        if self.pairs and self.baseline % 2:
            raise ValueError(f"{name}: baseline must be even with pairs; got {self.baseline}.")
        members = group_size if self.shared else prompts * group_size
        if self.baseline >= group_size:
            raise ValueError(
                f"{name}: baseline {self.baseline} leaves none of the {group_size} members of a "
                "prompt any noise."
            )
        return members

    def check_group_size(self, group_size: int) -> None:
        """Raises ValueError for an invalid number of members per prompt; see :meth:`population`."""
        self.population(1, group_size)

    def check_passes(self, epochs: int, minibatches: int) -> None:
        """Raises ValueError unless each population has one update, since an update changes it."""
        if epochs * minibatches > 1:
            raise ValueError(
                f"recipe {self.name!r}: the scores of a population serve one update; got epochs "
                f"{epochs} and minibatches {minibatches}."
            )

    def check_staleness(self, max_staleness: int) -> None:
        """Raises ValueError unless the members are those of the current weights."""
        if max_staleness > 0:
            raise ValueError(
                f"recipe {self.name!r} draws its members around the current weights, so older "
                f"rollouts cannot be used; got max_staleness {max_staleness}."
            )

    def init(self, output_shape: tuple[int, int] | None = None) -> AlgoState:
        """The state of the method, which is empty."""
        return AlgoState((), (), {}, jnp.zeros((), jnp.float32))

    def classes(self, params: ArrayTree) -> ArrayTree:
        """The class of each leaf of a model's parameters; "full" and "frozen" for full noise."""
        classes = evolution.leaf_classes(params, rules=self.rules, others=self.others)
        return evolution.full_rank(classes) if self.noise == "full" else classes

    def moving(self, params: ArrayTree) -> ArrayTree:
        """Whether each leaf of a model's parameters can move, a bool."""
        return evolution.moving(self.classes(params))

    def _noise(self, function: Callable) -> Callable:
        """A function of ``evolution`` with the options of this recipe's noise."""
        return bind(
            function,
            dtype=jnp.dtype(self.dtype),
            noise_reuse=self.noise_reuse,
            pairs=self.pairs,
            sigma=self.sigma,
            rank=self.rank,
        )

    def delta(
        self,
        params,
        classes,
        key: Array,
        epoch: Array | int,
        members: Array,
        *,
        share_pairs: bool = False,
    ) -> dict:
        """Members as the delta of a model's forward pass; see ``evolution.model_delta``.

        With ``share_pairs`` the two members of a pair share their factors.
        """
        delta = bind(self._noise(evolution.model_delta), baseline=self.baseline)
        return delta(params, classes, key, epoch, members, share_pairs=share_pairs)

    def member(self, params, classes, key: Array, epoch: Array | int, member: Array) -> ArrayTree:
        """The parameters of one member; see ``evolution.perturb``."""
        perturb = bind(self._noise(evolution.perturb), baseline=self.baseline)
        return perturb(params, classes, key, epoch, member)

    def outcomes(self, scores: Array, *, where: Array | None = None) -> tuple[Array, Array]:
        """The score of each member on each prompt, and the scores that count, both ``[P, G]``.

        A score counts if all tries of the member and of its antithetic partner were graded: they
        have a finite score. See ``evolution.graded``.

        Args:
          scores, where: As for :meth:`shape`.
        """
        if self.tries == 1:
            return scores, evolution.graded(scores, where=where, pairs=self.pairs)
        tried = evolution.graded(scores, where=where, pairs=False)
        split = scores.shape[0], -1, self.tries
        scores = self.outcome(masking.zero_masked(scores, tried).reshape(split))
        complete = jnp.all(tried.reshape(split), axis=-1)
        return scores, evolution.graded(scores, where=complete, pairs=self.pairs)

    def shape(self, scores: Array, *, where: Array | None = None) -> tuple[Array, Array]:
        """Fitness of the members, float32 ``[N]``, and the number of missing scores.

        A member that was not graded on a prompt, and its partner, do not count there; see
        :meth:`outcomes`. Pass the scores that count to :meth:`gradient`.

        Args:
          scores: ``[P, G tries]``, the tries of a member next to each other; higher is better.
          where: bool, True where there is a score; None for all.

        Raises:
          ValueError: If the tries do not divide the scores, or ``fitness`` returns another shape.
        """
        checks.check_rank("shape", 2, scores=scores)
        prompts, width = scores.shape
        if width % self.tries:
            raise ValueError(
                f"recipe {self.name!r}: {width} scores per prompt are not a multiple of its "
                f"{self.tries} tries per member."
            )
        members = self.population(prompts, width // self.tries)
        missing = jnp.sum(~evolution.graded(scores, where=where, pairs=False), dtype=jnp.int32)
        scores, counted = self.outcomes(scores, where=where)
        fitness = self.fitness(masking.zero_masked(scores, counted), where=counted)
        if fitness.size != members or (self.shared and fitness.ndim != 1):
            kind = "shared" if self.shared else "not shared"
            raise ValueError(
                f"recipe {self.name!r}: fitness {name_of(self.fitness)} must return one value "
                f"for each of {members} members, which are {kind}; got {fitness.shape} from scores "
                f"{scores.shape}."
            )
        return jnp.asarray(fitness, jnp.float32).reshape(-1), missing

    def graded_members(self, where: Array) -> Array:
        """The members ``[N]`` that count on some prompt, from ``where`` ``[P, G]``."""
        return jnp.any(where, axis=0) if self.shared else where.reshape(-1)

    def gradient(
        self,
        params: ArrayTree,
        classes: ArrayTree,
        key: Array,
        epoch: Array | int,
        fitness: Array,
        *,
        where: Array | None = None,
    ) -> ArrayTree:
        """The gradient from fitness ``[N]``; see ``evolution.eggroll_grad``.

        Members without noise contribute nothing, but they count in N. Members that count on no
        prompt, by ``where`` ``[P, G]`` of :meth:`outcomes`, do not: the gradient is that of a
        population without them.
        """
        where = None if where is None else self.graded_members(where)
        if self.baseline:
            fitness = jnp.where(jnp.arange(fitness.shape[0]) < self.baseline, 0.0, fitness)
        grad = bind(
            self._noise(evolution.eggroll_grad),
            sigma=None if self.scale == "mean" else self.sigma,
            scale=self.scale,
            sign=self.sign,
            chunk=self.chunk,
        )
        return grad(params, classes, key, epoch, fitness, where=where)
