"""A check that the training loop runs a complete method and changes its state."""

import dataclasses
import math
import tempfile
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.curation import no_update
from jaxrl_llm.curation.collectors.messages import SeveralMessages
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import collector_parts, sized
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.diffusion import FlowLikelihood
from jaxrl_llm.models.lora import Adapted, trainable
from jaxrl_llm.recipes import EvolutionRecipe, Recipe, catalog
from jaxrl_llm.recipes.parts import EarlierIterations
from jaxrl_llm.testing.model import tiny_flow_model, tiny_model, tiny_text_flow_model
from jaxrl_llm.testing.tokenizer import ByteTokenizer
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
    train,
)
from jaxrl_llm.train.config import find_prompts
from jaxrl_llm.train.data.reward_values import reward_values
from jaxrl_llm.train.experiment.run_models import load_reference
from jaxrl_llm.train.experiment.setup import load_experiment
from jaxrl_llm.train.optimizer import policy_optimizer

_ROUNDED = 1e-4  # of float32, sampler and trainer differ by less, in nats a token
_PROMPTS = 10  # of the data set; no other axis of a state has this size
_EQUAL = "37"  # last digits of the prompts whose rewards are equal


def _model():
    return *tiny_model(num_layers=1), ByteTokenizer()


def _denoiser():
    return *tiny_model(num_layers=1, causal=False, vocab_size=260, mask_id=259), ByteTokenizer()


def _predictor():
    """A model that now and then writes a prediction of its own solutions."""
    text = '{"math_notion": [], "pass_rate": 4, "solution_length": 6}'
    return *tiny_model(num_layers=1), ByteTokenizer({i: text for i in range(240, 256)})


def _flow():
    return *tiny_flow_model(), ByteTokenizer()


def _text_flow():
    return *tiny_text_flow_model(), ByteTokenizer()


def _first_number(prompt: str, completion: str, metadata) -> float:
    """A reward from 0 to 1 that grows with the first number of a latent."""
    return 1.0 / (1.0 + math.exp(-float(completion.split("\n")[-1].split()[0])))


def _prompts() -> PromptSet:
    def columns(n: int) -> dict[str, Any]:
        return {
            "hints": ["digits", "use digits", "write 0123"],  # weakest first
            "demonstration": "012345"[: 2 + n % 4],
            "pretraining": f"page {n} of a book",
            "paraphrases": [f"Q{n:02}", f"{n:02}q"],
            "difficulty": n / _PROMPTS,
            "prior": 0.1 + 0.05 * n,
            "stage": n // 4,
        }

    def prompt(n: int) -> Prompt:
        row = columns(n)
        return Prompt(f"q{n:02}", row["demonstration"][-1], metadata=row, id=f"q{n:02}")

    prompts = (prompt(n) for n in range(_PROMPTS))
    return PromptSet(prompts, source="tiny")


def _long_references() -> PromptSet:
    """The prompts with references of several chunks, whose last digit is the answer."""

    def with_reference(prompt: Prompt) -> Prompt:
        trace = "0123456789" * 3 + str(prompt.answer)
        return dataclasses.replace(prompt, metadata={**prompt.metadata, "demonstration": trace})

    return PromptSet(map(with_reference, _prompts()), source="tiny")


def _digits(prompt: str, completion: str, metadata) -> float:
    """1 where more than a tenth of the letters are digits, as in a part of a reference."""
    return float(10 * sum(c.isdigit() for c in completion) > len(completion))


def _reward(prompt: str, completion: str, metadata) -> dict[str, Any]:
    """Components in [0, 1], an answer, a judge's verdict, and what else a reward may return.

    Few rewards of a group are above a half. Two prompts in ten have equal rewards, so their groups
    have no learning signal. A response has two turns, each with a reward and two unit tests.
    """
    low = sum(ord(c) < 64 for c in completion) if prompt[-1] not in _EQUAL else 0
    ends = [len(completion) // 2, len(completion)]
    turns = [completion[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return {
        "reward": min(low, 5) / 5,
        "short": 1.0 / (1 + len(completion)),
        "task": low / (1 + len(completion)),
        "grounding": min(low, 5) / 5,
        "history": len(set(completion)) / (1 + len(completion)),
        "answer_ids": ord(completion[0]) % 3 if completion else -1,
        "flawed": len(set(completion)) < len(completion),
        "satisfied": low % 2 == 0,
        "right_steps": 0,
        "feedback": f"{low} of {len(completion)} are digits or signs",
        "turn_ends": ends,
        "turn_rewards": [sum(ord(c) < 64 for c in turn) / 3 for turn in turns],
        "test_passes": [[any(c < "@" for c in x), any(c > "@" for c in x)] for x in turns],
    }


def _reward_above_zero(prompt: str, completion: str, metadata) -> dict[str, Any]:
    """As :func:`_reward`, but the rewards that are equal are not 0.

    A running mean that begins at 0 moves for every prompt. A collector that helps where all
    rewards are 0 would have no such group.
    """
    values = _reward(prompt, completion, metadata)
    return values | {"reward": 0.2} if prompt[-1] in _EQUAL else values


def _right(prompt: str, completion: str, metadata) -> dict[str, Any]:
    """As :func:`_reward`, with a reward of 0 or 1."""
    values = _reward(prompt, completion, metadata)
    return values | {"reward": float(values["reward"] > 0.5)}


def _teacher():
    return *tiny_model(seed=1), ByteTokenizer()


_CONFIG = TrainConfig(
    model=_model,
    data=DataConfig(prompts=_prompts, chat=False),
    reward=_reward,
    sampling=SamplingConfig(group_size=6, max_new_tokens=6),  # G above the k of pass@k
    optimizer=OptimizerConfig(learning_rate=1e-2),
    prompts_per_step=4,
)


def assert_loop_runs_whole(
    recipe: str | Recipe | EvolutionRecipe, *, config: TrainConfig | None = None, steps: int = 3
) -> None:
    """Trains a tiny model with ``train`` and checks that every part of the method has an effect.

    After the run, the losses are finite and the parameters have changed (or have not, with
    ``curation.no_update``). The KL of the last update is above 0 if the recipe reads it. A tracker
    of prompts has counted the prompts that were drawn. The critic, a moving reference, a subagent,
    and the states of every controller and of the collector have changed. If the run covered an
    epoch, a collector that resamples groups with equal rewards, or adds help where all rewards are
    low, has done so, and responses around tokens of the data are in a batch. Help that every group
    gets, texts and stored groups are in a batch. A prediction of the policy was read.

    Args:
      recipe: The name of a preset, or a recipe.
      config: Model, data, reward and sizes. The default model has one layer with random weights (or
        is a flow model). The data set has 10 prompts, and a step uses 4 of them with 6 rollouts
        each. The reward is in [0, 1], or 0 or 1 where a method means that, and has further
        components; two prompts in ten have equal rewards. Data and reward supply all that a preset
        may read: hints, demonstrations, paraphrases, turns, unit tests.
      steps: Number of training steps; one more if responses take this many or a fraction of it.

    Raises:
      AssertionError: If a part had no effect; it names the recipe and the part.
      ValueError: If the loop cannot run the method; one sentence says why.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.testing.assert_loop_runs_whole("rloo", steps=1)
    """
    default, config = config is None, _CONFIG if config is None else config
    num_prompts = len(find_prompts(config.data.prompts))
    made: Any = recipe
    if isinstance(recipe, str):
        length = config.sampling.max_new_tokens
        made = catalog.preset(recipe, length=length, num_prompts=num_prompts)
    if default and made.needs.sums_gradients and made.collector is None:
        config = dataclasses.replace(config, reward=_reward_above_zero)
    if default and reward_values(made).binary is not None:
        config = dataclasses.replace(config, reward=_right)
    likelihood = made.needs.likelihood
    if default and isinstance(likelihood, FlowLikelihood):
        # A tree of 16 leaves; its last split is at the tenth step.
        sampling = SamplingConfig(group_size=16, max_new_tokens=12)
        network = _flow if likelihood.steps is None else _text_flow
        config = dataclasses.replace(config, model=network, reward=_first_number, sampling=sampling)
    elif default and likelihood is not None:
        config = dataclasses.replace(config, model=_denoiser)
    if default and needs_of(made.collector).fixes_tokens:
        data, sampling = DataConfig(prompts=_long_references, chat=False), config.sampling
        sampling = dataclasses.replace(sampling, max_new_tokens=32)
        config = dataclasses.replace(config, data=data, reward=_digits, sampling=sampling)
    if default and hasattr(getattr(made, "collector", None), "parse"):
        config = dataclasses.replace(config, model=_predictor)
    segments = getattr(made.collector, "segments", None)
    if segments is not None and steps % segments == 0:
        steps += 1  # after whole responses, a collector of parts has none to go on with
    if default and getattr(made, "optimizer", None) is not None:
        config = dataclasses.replace(config, optimizer=None)  # the method has its own
    optimizer = config.optimizer
    if made.needs.computed_from("optimizer"):
        # At the usual learning rate of a tiny run, bounds on the effect of a step mask all tokens.
        optimizer = dataclasses.replace(policy_optimizer(config), learning_rate=1e-5)
    if made.needs.learns_from_model and config.teacher is None:
        config = dataclasses.replace(config, recipe=recipe, teacher=_teacher)
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(
            config,
            run_dir=folder,
            recipe=recipe,
            optimizer=optimizer,
            checkpoint=CheckpointConfig(every=0),
            evaluation=EvaluationConfig(enabled=False),
            steps=steps,
            max_skipped=steps + 1,  # to the end, so that the first skipped step is named
            remat="none" if made.needs.sums_gradients else "full",
        )
        result = train(config)
        start = _start(config)
    state, name = result.state, f"recipe {made.name!r}"
    _require(int(state.step) == steps == len(result.history), f"{name}: not all steps were made")
    for row in result.history:
        loss, what = row.get("loss", 0.0), f"{name}: step {row['step']}"
        if loss is None:  # as metrics.jsonl has what is not finite
            loss = math.nan
        _require(row.get("skipped", 0) == 0, f"{what} was skipped, with a loss of {loss}")
        _require(math.isfinite(loss), f"{what} has a loss of {loss}")
    if config.rounds_rollouts:
        gaps = [row.get("sampler_gap", 0.0) for row in result.history]
        _require(min(gaps) > _ROUNDED, f"{name}: the sampler is not rounded")
    trained = (state.params, start.params)
    moved = _differ(*(x["model"] for x in trained) if made.needs.head else trained)
    if ("update_scale", no_update) not in made.needs.computed_from("batch").items():
        _require(moved, f"{name}: the parameters did not move")
    else:
        _require(not moved, f"{name}: the parameters moved")
    finite = all(
        np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(state.params)
    )
    _require(finite, f"{name}: a parameter is not finite")
    if made.needs.sums_gradients:
        _check_memory(made, state, name, config, start, num_prompts)
        if made.collector is not None:
            _check_collector(made.collector, result, name, config, num_prompts)


class _Start(NamedTuple):
    """The parameters at the start of a run.

    ``params`` are those that train, which may be an adapter; ``base`` those of the policy's model
    without one; ``reference`` those of a moving reference; ``subagent`` its own.
    """

    params: Any
    base: Any
    reference: Any
    subagent: Any


def _start(config: TrainConfig) -> _Start:
    """The parameters that a run with this configuration starts from."""
    experiment, policy = load_experiment(config)
    params = reference = trainable(policy)
    if config.reference is not None and experiment.recipe.needs.moves_reference:
        reference = trainable(load_reference(config, experiment.model, policy, experiment.mesh))
    base = policy.base if isinstance(policy, Adapted) else policy
    subagent = experiment.subagent and experiment.subagent.params
    return _Start(params, base, reference, subagent)


def _check_memory(
    recipe: Recipe, state, name: str, config: TrainConfig, start: _Start, num_prompts: int
) -> None:
    """Raises AssertionError unless all states of the recipe have changed."""
    algo, first = state.algo_state, recipe.init()
    steps, batch = config.steps, config.prompts_per_step
    if recipe.reads_last_kl:
        # Rounding gives an unchanged policy a KL that is not exactly 0.
        kl = float(algo.last_kl)
        _require(kl > 1e-6, f"{name} reads the KL of the last update, which is {kl:g}")
    for slot in ("advantage", "curation"):
        new, old = (jax.tree.leaves(getattr(x, slot)) for x in (algo, first))
        seen = [
            np.count_nonzero(_changed(a, b))
            for a, b in zip(new, old, strict=True)
            if np.shape(a)[:1] == (num_prompts,)
        ]
        # A collector may draw a prompt again before it draws others.
        drawn = min(num_prompts, steps * batch) if recipe.collector is None else batch
        most = max(seen, default=drawn)
        _require(most >= drawn, f"{name}: {slot} saw {most} of {drawn} prompts")
        _require(not new or _differ(new, old), f"{name}: the state of its {slot} did not move")
    for key, value in algo.controllers.items():
        moved = not jax.tree.leaves(value) or _differ(value, first.controllers[key])
        _require(moved, f"{name}: the state of its controller {key!r} did not move")
    for key, value in algo.rules.items():
        moved = all(np.any(np.asarray(x) != 0) for x in jax.tree.leaves(value))
        _require(moved, f"{name}: the state of its rule {key!r} did not move")
    if recipe.second_model is not None:
        body = state.critic.params["model"]
        moved = _differ(body, start.base)
        _require(moved, f"{name}: the critic or process reward model did not move")
    rule = recipe.reference
    every = dict(getattr(rule, "options", ())).get("every", getattr(rule, "every", 0))
    if rule is not None and every <= steps:
        moved = _differ(state.reference_params, start.reference)
        _require(moved, f"{name}: the reference did not move")
    if recipe.needs.subagent is not None:
        moved = _differ(state.subagent.params, start.subagent)
        _require(moved, f"{name}: the parameters of its subagent did not move")
    if (earlier := recipe.part(EarlierIterations)) is not None and earlier.value.every <= steps:
        latest = state.earlier.policies[0]
        _require(_differ(latest, start.params), f"{name}: its earlier policies did not move")


def _check_collector(collector, result, name: str, config: TrainConfig, num_prompts: int) -> None:
    """Raises AssertionError unless a collector replaced what it dropped, or changed its state.

    Help from the data or for every group, texts and stored groups must be in a batch.
    """
    size, batch, steps = config.sampling.group_size, config.prompts_per_step, config.steps
    length = config.sampling.max_new_tokens
    collector = sized(collector, group_size=size, max_new_tokens=length, num_groups=batch)
    first, state = collector.init(num_prompts), result.state.collector_state
    remembers = bool(jax.tree.leaves(first))
    if remembers:
        _require(_differ(state, first), f"{name}: the state of its collector did not move")
    if isinstance(state, dict) and "parsed" in state:
        _require(state["parsed"] > 0, f"{name}: no prediction of its policy was read")
    parts, covered = list(collector_parts(collector)), batch * steps >= num_prompts
    for part in parts:
        _check_roles(part, result.history, name, config, covered)
    asked = sum(row["rollouts_sampled"] for row in result.history)
    if needs_of(collector).slots:
        return  # the collector changes how rollouts are sampled, not how many
    # One that sends several messages, or divides a batch between others, drops nothing itself.
    drops = any(
        needs_of(part).asks_again
        and not isinstance(part, SeveralMessages)
        and not hasattr(part, "groups_of_sources")
        for part in parts
    )
    if (policy := getattr(collector, "policy", None)) is not None:
        # A collector that helps every group splits the G rollouts into those with and those
        # without help. Responses from the data are not sampled.
        needs = needs_of(policy)
        samples = needs.sends_text or needs.slots or needs.fixes_tokens
        from_start = getattr(policy, "warmup", 0) < steps
        drops = drops and samples and not _always_helps(policy, size) and from_start
    if covered and not remembers and drops:
        # An allocator may at first request fewer rollouts than a group has.
        first_size = getattr(collector, "first", None) or size
        _require(
            asked > batch * first_size * steps,
            f"{name}: its collector asked for no more rollouts though the rewards of groups agree",
        )


def _check_roles(part, history, name: str, config: TrainConfig, covered: bool) -> None:
    """Raises AssertionError if no batch has the help, texts or stored groups of a collector.

    Responses of the data may help only groups that fail: in an epoch, that is ``covered``, some do.
    """
    entered = {key for row in history for key, value in row.items() if value}
    if (policy := getattr(part, "policy", None)) is not None:
        from_data = needs_of(policy).brings_responses and covered
        if from_data or _always_helps(policy, config.sampling.group_size):
            helped = not entered.isdisjoint({"rollouts/hinted", "rollouts/demonstration"})
            _require(helped, f"{name}: no help of its collector is in a batch")
        # Without a chunk in its place, a rollout of the second round succeeds by chance alone.
        fixed = not needs_of(policy).fixes_tokens or "hint_tokens" in entered
        _require(fixed or not covered, f"{name}: no token of the data is in a batch")
    if needs_of(part).brings_texts:
        _require("rollouts/text" in entered, f"{name}: no text of its collector is in a batch")
    # Nothing is stored before the first batch. A store that others fill has no start.
    start = getattr(part, "start", None)
    if needs_of(part).stores_responses and start is not None:
        replays = "rollouts/replayed" in entered
        _require(replays or config.steps <= max(start, 1), f"{name}: no stored group is in a batch")


def _always_helps(policy, group_size: int) -> bool:
    """Whether a policy of a collector leaves places for help in every group."""
    return policy.first(group_size) != group_size


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _differ(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(np.any(_changed(x, y)) for x, y in pairs)


def _changed(a, b) -> np.ndarray:
    """Where two arrays differ; a NaN that is still a NaN has not changed."""
    a, b = np.asarray(a), np.asarray(b)
    return (a != b) & ~((a != a) & (b != b))
