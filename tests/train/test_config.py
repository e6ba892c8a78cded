"""Sections of a run's configuration: what is refused, and what their options do."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refuses
from rows import for_each
from tiny_run import CONFIG

import jaxrl_llm as jr
from jaxrl_llm.rollout import DenoisingOptions
from jaxrl_llm.train import (
    AsyncConfig,
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    EvaluationConfig,
    LoRAConfig,
    MeshConfig,
    OptimizerConfig,
    ReportConfig,
    SamplingConfig,
    make_optimizer,
)
from jaxrl_llm.train.batches import Passes
from jaxrl_llm.train.config import find_prompts, find_recipe
from jaxrl_llm.train.experiment.run_data import (
    warn_of_group_size,
    warn_of_length,
    warn_of_one_update,
)
from jaxrl_llm.train.experiment.setup import load_experiment
from jaxrl_llm.train.optimizer import make_schedule


def batch_reward(prompt, completion, metadata):
    return 0.0


batch_reward.score_batch = lambda prompts, completions, metadata: [0.0] * len(prompts)
batch_reward.patience = 60.0

OFFLINE = {"recipe": "dpo", "reward": None}  # of a run that samples nothing


REFUSED = {
    DataConfig: [
        ({"prompts": "gym:x", "held_out": 1.0}, "held_out must be a share below 1"),
        ({"prompts": "a.jsonl", "evaluation": "b.jsonl"}, "held_out has no effect"),
        ({"prompts": "a.jsonl", "chat": False, "system": "hi"}, "system has no effect"),
        ({"prompts": "a.jsonl", "seed": -1}, "seed must not be negative; got -1"),
    ],
    SamplingConfig: [
        ({"group_size": 0}, "group_size must be above 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": float("inf")}, "temperature must be finite and at most 3.* got inf"),
        ({"temperature": 1e39}, r"temperature must be finite .* got 1e\+39"),
        ({"max_new_tokens": 10**400}, "max_new_tokens must be finite and at most 4294967295"),
        ({"top_p": 1.0}, "top_p must be below 1"),
        ({"top_k": 0}, "top_k must be above 0"),
    ],
    OptimizerConfig: [
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"b2": 1.0}, "b2 must be below 1"),
        ({"warmup_steps": -1}, "warmup_steps must not be negative"),
        ({"decay_steps": 0}, "decay_steps must be above 0; got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite .* got nan"),
        ({"name": "adam"}, "name must be one of .* Did you mean 'adamw'"),
        ({"name": "sgd", "b1": 1.0}, "b1 must be below 1; got 1"),
        ({"name": "sgd", "b2": 0.99}, "b2 has no effect with sgd"),
        ({"name": "sgd", "eps": 1e-6}, "eps has no effect with sgd"),
        (
            {"name": "sgd", "b1": 0.0, "moment_dtype": "bfloat16"},
            "moment_dtype has no effect without momentum",
        ),
    ],
    LoRAConfig: [
        ({"rank": 4, "alpha": float("inf")}, "lora: alpha must be finite .*got inf"),
        ({"rank": 4, "seed": 2**64}, "lora: seed must be finite and at most"),
        ({"alpha": 8.0}, "lora: alpha has no effect without a rank"),
        ({"targets": ("q",)}, "lora: targets has no effect without a rank"),
        ({"seed": 3}, "lora: seed has no effect without a rank"),
        ({"rank": 0}, "lora: rank must be"),
        ({"rank": 4, "alpha": 0.0}, "lora: alpha must be"),
        ({"rank": 4, "targets": ()}, "lora: targets must be a tuple of rules"),
        ({"rank": 4, "targets": "mlp"}, "lora: targets must be a tuple of rules"),
        ({"rank": 4, "targets": ("mlp(",)}, r"'mlp\(' in targets is not a regular expression"),
    ],
    ReportConfig: [
        ({"profile": (1, 2**40)}, "report: profile must be finite"),
        ({"sinks": ("tensorbord",)}, "Did you mean 'tensorboard'"),
        ({"sinks": ("wandb", "wandb")}, "sinks has duplicates"),
        ({"profile": (0,)}, "profile must be above 0"),
        ({"peak_flops": 0.0}, "peak_flops must be above 0"),
    ],
    MeshConfig: [
        ({"data": 0}, "data must be above 0"),
        ({"data": -1, "fsdp": -1}, "only one mesh axis may be -1"),
    ],
    CheckpointConfig: [
        ({"keep": 0}, "keep must be above 0"),
        ({"every": 0, "best": "reward"}, "best has no effect if only the la"),
        ({"best": "loss"}, "checkpoint: best must be one of"),
    ],
    EvaluationConfig: [
        ({"enabled": False, "every": 2}, "no effect if not enabled"),
        ({"samples": 0}, "samples must be above 0"),
    ],
    DistributedConfig: [
        ({"coordinator": "a:1"}, "give coordinator, processes and process together, or detect"),
        ({"detect": True, "process": 0}, "together, or detect alone"),
        (
            {"coordinator": "a:1", "processes": 2, "process": 2},
            "must be below 2, the number of processes; got 2",
        ),
        ({"silence": 9}, "silence has no effect on a single process"),
        ({"detect": True, "silence": 0}, "silence must be above 0"),
    ],
}


@for_each("kind, options, message", [(k, *row) for k, rows in REFUSED.items() for row in rows])
def test_options_that_make_no_sense_are_refused(kind, options, message):
    refuses(message, kind, **options)


RUN = functools.partial(dataclasses.replace, CONFIG)


@for_each(
    "kind, options, message",
    [
        (SamplingConfig, {"top_k": 1.5}, "sampling: top_k must be an integer; got 1.5"),
        (SamplingConfig, {"group_size": True}, "group_size must be an integer; got True"),
        (SamplingConfig, {"denoising": 3}, "denoising must be of type DenoisingOptions; got 3"),
        (OptimizerConfig, {"learning_rate": "1"}, "learning_rate must be a number; got '1'"),
        (OptimizerConfig, {"learning_rate": None}, "learning_rate must be a number; got None"),
        (EvaluationConfig, {"limit": float("inf")}, "limit must be an integer; got inf"),
        (MeshConfig, {"fsdp": 1e30}, r"mesh: fsdp must be an integer; got 1e\+30"),
        (LoRAConfig, {"rank": True}, "lora: rank must be an integer; got True"),
        (ReportConfig, {"sinks": "wandb"}, "sinks must be a tuple; got 'wandb'"),
        (ReportConfig, {"profile": [2]}, "profile must be a tuple"),
        (RUN, {"data": "x.jsonl"}, "config: data must be of type DataConfig; got 'x.jsonl'"),
        (RUN, {"recipe": (1, 2)}, r"a recipe or the name of a preset; got \(1, 2\)"),
        (RUN, {"run_dir": None}, "config: run_dir must be a string; got None"),
    ],
)
def test_a_value_of_another_type_is_refused(kind, options, message):
    refuses(message, kind, error=TypeError, **options)


def sampled(group_size=2, **options):
    return {"sampling": SamplingConfig(group_size=group_size, **options)}


def by(recipe, **changes):
    return {"recipe": recipe, **changes}


def best(**options):
    checkpoint = CheckpointConfig(every=4, best="greedy")
    return {"checkpoint": checkpoint, "evaluation": EvaluationConfig(**options)}


NO_RATIO = jr.recipes.dapo().replace(surrogate=jr.surrogates.reinforce)
AHEAD = AsyncConfig(max_staleness=1)
EVOLVES = by("eggroll", remat="full")
UNASKED = "quantization 'off' has no effect: recipe 'dr_grpo' does not ask for a sampler in 8"
MASKS = r"'diffu_grpo' draws masks for 12 passes .*; got epochs 1; .*diffu_grpo\(epochs=1\)"
MEMBERS = "has no effect with 'eggroll' without an evaluation: members answer at the temperature of"


@for_each(
    ("changes", "message"),
    [
        ({"run_dir": " "}, "config: run_dir must name a folder; got ' '"),
        ({"seed": -1}, "seed must not be negative; got -1"),
        ({"samples_every": 0}, "samples_every must be above 0"),
        ({"samples_every": 2, "samples_shown": 0}, "samples_every has no effect with samples_show"),
        ({"steps": 0}, "steps must be above 0"),
        ({"microbatches": 3}, "4 prompts do not split into 3 microbatches"),
        ({"remat": "most"}, "remat must be one of 'none', 'dots', 'full'"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"dtype": "bfloat16"}, "dtype has no effect on a model that a function returns"),
        ({"quantization": "fp16"}, "quantization must be one of None, 'int8', 'fp8'"),
        ({"scan_layers": True}, "scan_layers has no effect on a model that a function"),
        ({"quantization": "fp8"}, "quantization has no effect on a model that a func"),
        (
            {"reward": batch_reward, "reward_deadline": 5.0},
            "no effect on a reward that has its own",
        ),
        (
            {"data": DataConfig(prompts="a.jsonl", evaluation="b.jsonl", held_out=0.0)},
            "data: evaluation has no effect if the evaluation is not enabled",
        ),
        (OFFLINE | {"reward_deadline": 5.0}, "reward_deadline has no effect without a reward"),
        (OFFLINE | {"reward_on_error": "zero"}, "reward_on_error has no effect without a reward"),
        (OFFLINE | sampled(top_k=50), "sampling: top_k has no effect if nothing is sampled"),
        (
            OFFLINE | sampled(denoising=DenoisingOptions(steps=4)),
            "sampling: denoising has no effect if nothing is sampled",
        ),
        # With a reward, of an evaluation that is off.
        (by("sft", **sampled(top_p=0.5)), "sampling: top_p has no effect if nothing is sampled"),
        (by("sft", **sampled(slots=4)), "slots has no effect if the data contain the responses"),
        (
            by("sft", asynchrony=dataclasses.replace(AHEAD, sampler_devices=1)),
            "asynchrony: sampler_devices has no effect if the data contain the responses",
        ),
        (EVOLVES | sampled(temperature=0.5), f"sampling: temperature {MEMBERS}"),
        (EVOLVES | sampled(top_k=4), f"sampling: top_k {MEMBERS}"),
        (sampled(quantization="off"), UNASKED),
        (by("rloo", epochs=2), "without a ratio to old_logp.* got epochs 2"),
        (by("diffu_grpo", epochs=1), MASKS),
        (by("grpos"), "config: no preset 'grpos'. Did you mean 'grpo'"),
        (by("dapo_clip"), "'dapo_clip'. The preset of this method is 'dapo'"),
        (by("retrace"), "This method has none: `jaxrl-llm methods retrace` shows"),
        ({"critic": OptimizerConfig()}, "config: critic has no effect: recipe 'dr_grpo' has none"),
        ({"minibatches": 3}, "config: 4 prompts do not split into 3 minibatches"),
        (
            {"minibatches": 2, "mesh": MeshConfig(data=4)},
            "a minibatch of 2 prompts .* over 4 device",
        ),
        (by(NO_RATIO, prompts_per_step=16), "without a ratio to old_logp.* minibatches 8"),
        (sampled(1), "group_size must be at least 2; got 1"),
        ({"report": ReportConfig(profile=(2, 7))}, "profile names step 7, but there are 6"),
        (best(), "best='greedy' needs an evaluation at each checkpoint"),
        (best(enabled=False), "best='greedy' needs an evaluation at each checkpoint"),
        (best(every=3), "best='greedy' needs an evaluation at each checkpoint"),
    ],
)
def test_runs_that_do_not_fit_together_are_refused(changes, message):
    refuses(message, dataclasses.replace, CONFIG, **changes)
    dataclasses.replace(CONFIG, **best(every=2))  # more often than checkpoints


def test_options_of_sampling_have_an_effect_on_an_evaluation():
    sampling = SamplingConfig(group_size=2, temperature=0.5, top_k=4)
    shared = {"sampling": sampling, "evaluation": EvaluationConfig(), "remat": "full"}
    for recipe in ("dpo", "sft", "eggroll"):
        assert dataclasses.replace(CONFIG, recipe=recipe, **shared).sampling.top_k == 4
    # Filters are also of members that do not answer greedily, and data are scored at a temperature.
    warm = dataclasses.replace(jr.recipes.eggroll(), temperature=1.0)
    members = dataclasses.replace(sampling, temperature=1.0)
    dataclasses.replace(CONFIG, recipe=warm, sampling=members, remat="full")
    dataclasses.replace(CONFIG, recipe="dpo", sampling=dataclasses.replace(sampling, top_k=None))


def warned_of(check, config):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        check(config, config.resolved_recipe)
    return [str(each.message) for each in seen]


def test_a_group_size_that_nothing_reads_is_told():
    """It is no error: a shared configuration has one, whatever the recipe."""

    def told(**changes):
        config = dataclasses.replace(CONFIG, **({"recipe": "dpo"} | changes))
        return warned_of(warn_of_group_size, config)

    (text,) = told()
    assert "group_size 2 has no effect: the groups of 'dpo' are 2 responses of the data" in text
    assert told(evaluation=EvaluationConfig(samples=3)) == [text]
    assert told(evaluation=EvaluationConfig(), reward=None) == [text]
    for changes in (
        {"evaluation": EvaluationConfig()},  # which samples as many
        {"sampling": SamplingConfig(max_new_tokens=4)},
        {"recipe": "sft"},  # of a row's demonstrations, at most as many train
        {"recipe": "dr_grpo"},
    ):
        assert told(**changes) == []


def test_pairs_of_the_data_need_no_group_size():
    one = SamplingConfig(group_size=1)
    config = dataclasses.replace(CONFIG, **OFFLINE, sampling=one, packing="always")
    assert config.sampling.group_size == 1
    with pytest.raises(ValueError, match='packing "always" has no effect with one rollout'):
        dataclasses.replace(CONFIG, recipe="dr_grpo", sampling=one, packing="always")


def test_reward_must_be_callable():
    with pytest.raises(
        TypeError, match=r"reward\(prompt, completion, metadata\).* takes \(completions"
    ):
        dataclasses.replace(CONFIG, reward=lambda completions, **columns: [0.0])

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):  # of verl
        return float(solution_str == ground_truth)

    def of_an_answer(prompt, completion, answer):
        return float(completion == answer)

    for reward in (compute_score, of_an_answer):
        with pytest.raises(TypeError, match=rf"{reward.__name__} takes .*answer is in metadata"):
            dataclasses.replace(CONFIG, reward=reward)

    @functools.wraps(lambda prediction, target: 0.0)  # only what is called counts
    def adapted(prompt, completion, metadata):
        return 0.0

    assert dataclasses.replace(CONFIG, reward=adapted).reward is adapted
    with pytest.raises(TypeError, match="reward must be callable; got 'last_integer'"):
        dataclasses.replace(CONFIG, reward="last_integer")


def test_recipe_by_name_or_as_it_is():
    sampling = SamplingConfig(max_new_tokens=33)
    recipe = jr.recipes.gspo()
    assert find_recipe(recipe, sampling) is recipe
    assert find_recipe("rloo", sampling) == jr.recipes.rloo()
    assert find_recipe("dr_grpo", sampling) == jr.recipes.dr_grpo(length=33)
    assert find_recipe("es_qiu", sampling) == jr.recipes.es_qiu()


def test_prompts_by_name(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    assert find_prompts(str(path))[0].answer == "2"
    assert find_prompts(lambda: "what it returns") == "what it returns"
    refuses("'sums' is neither a .jsonl", find_prompts, "sums")


@pytest.mark.slow
def test_prompts_of_a_gym_by_name():
    assert len(find_prompts("gym:chain_sum")) == 1000


def steps_of(config, gradient, count=3):
    """How far each of some equal steps moves a parameter."""
    optimizer = make_optimizer(config)
    params = {"w": jnp.ones(2)}
    state, moved = optimizer.init(params), []
    for _ in range(count):
        updates, state = optimizer.update({"w": jnp.full(2, gradient)}, state, params)
        params = optax.apply_updates(params, updates)
        moved.append(float(updates["w"][0]))
    return moved


def test_a_penalty_beyond_the_longest_response_is_told():
    """It begins above 80 of 100 tokens, and responses have at most four."""
    config = dataclasses.replace(CONFIG, recipe=jr.recipes.dapo(length=100))
    told = (
        "'dapo' penalizes responses of more than 80 tokens, and sampling.max_new_tokens is 4, so "
        "the penalty has no effect"
    )
    with pytest.warns(UserWarning, match=told):
        load_experiment(config)
    for most in (80, 81):
        longer = dataclasses.replace(config, **sampled(max_new_tokens=most))
        assert len(warned_of(warn_of_length, longer)) == (most == 80)
    for recipe in ("dapo", jr.recipes.dapo()):  # by its name the length is that of the responses
        assert not warned_of(warn_of_length, dataclasses.replace(CONFIG, recipe=recipe))


def test_optimizer_options_have_their_effect():
    plain = steps_of(OptimizerConfig(learning_rate=0.1), 3.0)
    np.testing.assert_allclose(plain, [-0.1] * 3, rtol=1e-4)  # Adam moves by the rate
    warm = steps_of(OptimizerConfig(learning_rate=0.1, warmup_steps=2), 3.0)
    np.testing.assert_allclose(warm, [-0.05, -0.1, -0.1], rtol=1e-4)
    falling = steps_of(OptimizerConfig(learning_rate=0.1, decay_steps=4), 3.0, count=5)
    np.testing.assert_allclose(falling, [-0.1, -0.075, -0.05, -0.025, 0.0], rtol=1e-4, atol=1e-9)
    both = steps_of(OptimizerConfig(learning_rate=0.1, warmup_steps=2, decay_steps=2), 3.0, count=5)
    np.testing.assert_allclose(both, [-0.05, -0.1, -0.1, -0.05, 0.0], rtol=1e-4, atol=1e-9)
    # Of a batch with two updates, both count as one step.
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=2, decay_steps=2)
    rates = [float(make_schedule(config, updates=2)(n)) for n in range(8)]
    np.testing.assert_allclose(rates[::2], [0.05, 0.1, 0.1, 0.05], rtol=1e-4)
    np.testing.assert_allclose(rates[5::2], [0.075, 0.025], rtol=1e-4)
    decayed = steps_of(OptimizerConfig(learning_rate=0.1, weight_decay=0.5), 3.0, count=1)
    np.testing.assert_allclose(decayed, [-0.1 - 0.05], rtol=1e-4)
    # eps shows how large the gradient was that Adam saw: 1 / sqrt(2) if cut to norm 1, else 3.
    cut = steps_of(OptimizerConfig(learning_rate=0.1, eps=1.0), 3.0, count=1)
    np.testing.assert_allclose(cut, [-0.1 * 0.5**0.5 / (0.5**0.5 + 1)], rtol=1e-4)
    free = OptimizerConfig(learning_rate=0.1, eps=1.0, max_grad_norm=None)
    np.testing.assert_allclose(steps_of(free, 3.0, count=1), [-0.1 * 3 / 4], rtol=1e-4)
    # Two gradients of one entry, by Adam's formula.
    for b1, b2 in ((0.9, 0.99), (0.0, 0.99), (0.9, 0.5)):
        config = OptimizerConfig(learning_rate=0.1, b1=b1, b2=b2, eps=1e-8)
        optimizer, params = make_optimizer(config), {"w": jnp.ones(1)}
        state = optimizer.init(params)
        for g in (0.5, -0.9):
            updates, state = optimizer.update({"w": jnp.full(1, g)}, state, params)
        mean = (0.5 * b1 - 0.9) / (1 + b1)
        scale = ((0.25 * b2 + 0.81) / (1 + b2)) ** 0.5
        np.testing.assert_allclose(updates["w"], [-0.1 * mean / scale], rtol=1e-4)


def test_sgd():
    def sgd(**options):
        given = {"name": "sgd", "learning_rate": 0.1, "b1": 0.0, "max_grad_norm": None}
        return OptimizerConfig(**{**given, **options})

    def moves(gradient, count, **options):
        return steps_of(sgd(**options), gradient, count=count)

    np.testing.assert_allclose(moves(3.0, 2), [-0.3] * 2, rtol=1e-6)
    # Momentum adds up what was, 1 + 0.9 + 0.81.
    np.testing.assert_allclose(moves(3.0, 3, b1=0.9), [-0.3, -0.57, -0.813], rtol=1e-6)
    # A bound is on the gradient, of two entries here; decay comes on top.
    cut = -0.1 * 0.5**0.5
    found = moves(3.0, 1, max_grad_norm=1.0, weight_decay=0.5)
    np.testing.assert_allclose(found, [cut - 0.05], rtol=1e-6)
    # Decay alone: momentum does not see it, so that every step takes the same share.
    found = moves(0.0, 3, b1=0.9, weight_decay=0.5)
    np.testing.assert_allclose(found, [-0.05, -0.05 * 0.95, -0.05 * 0.95**2], rtol=1e-5)
    found = moves(3.0, 5, warmup_steps=2, decay_steps=2, weight_decay=1.0)
    rates, place, expected = [0.05, 0.1, 0.1, 0.05, 0.0], 1.0, []
    for rate in rates:
        expected.append(-rate * (3.0 + place))
        place += expected[-1]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)
    cases = [
        ({}, []),
        ({"b1": 0.9}, ["float32"]),
        ({"b1": 0.9, "moment_dtype": "bfloat16"}, ["bfloat16"]),
    ]
    for options, kept in cases:
        leaves = jax.tree.leaves(make_optimizer(sgd(**options)).init({"w": jnp.ones((3, 2))}))
        assert [x.dtype.name for x in leaves if x.ndim] == kept


def test_a_preset_by_name_knows_the_size_of_the_data():
    sampling = SamplingConfig(max_new_tokens=33)
    tracked = find_recipe("spo_tracker", sampling, num_prompts=7)
    assert tracked == jr.recipes.spo_tracker(num_prompts=7, length=sampling.max_new_tokens)
    shapes = {np.shape(x) for x in tracked.init().advantage}
    assert (7,) in shapes
    # One rollout a prompt is enough for it, also before the data are read.
    one = SamplingConfig(group_size=1, max_new_tokens=4)
    assert dataclasses.replace(CONFIG, recipe="spo_tracker", sampling=one).recipe == "spo_tracker"


@for_each(
    ("changes", "expected"),
    [
        ({"recipe": "dapo", "prompts_per_step": 32}, Passes(1, 16, 1)),  # the paper's
        ({"recipe": "dapo", "prompts_per_step": 8}, Passes(1, 4, 1)),  # of two groups each
        ({"recipe": "dapo", "prompts_per_step": 24, "mesh": MeshConfig(data=2)}, Passes(1, 12, 1)),
        ({"recipe": "dapo", "prompts_per_step": 7, "mesh": MeshConfig(data=7)}, Passes(1, 1, 1)),
        ({"recipe": "dapo", "prompts_per_step": 8, "minibatches": 4}, Passes(1, 4, 1)),
        (
            {"recipe": "dapo", "prompts_per_step": 32, "epochs": 2, "microbatches": 8},
            Passes(2, 16, 8),
        ),
        ({"recipe": "dr_grpo", "epochs": 3}, Passes(3, 1, 1)),
        ({"recipe": "eggroll", "remat": "full"}, Passes()),
    ],
)
def test_a_batch_serves_the_optimizer_steps_of_its_paper_where_it_divides(changes, expected):
    assert dataclasses.replace(CONFIG, **changes).passes == expected


GDRO = jr.recipes.prompt_gdro(num_prompts=10)
BY_FAILURE = jr.chain(
    jr.stateless(jr.advantages.grpo), jr.curation.prompt_gdro(num_prompts=10, signal="failure")
)
CORRECTED = jr.recipes.llds().replace(correction=jr.recipes.sol_rl().correction)
IN_8_BITS = {"sampling": dataclasses.replace(CONFIG.sampling, quantization="int8")}


@for_each(
    ("recipe", "prompts", "changes", "warns"),
    [
        ("llds", 3, {}, True),
        ("llds", 4, {}, False),
        ("llds", 3, {"epochs": 2}, False),
        ("llds", 3, {"asynchrony": AHEAD}, False),
        ("llds", 3, IN_8_BITS, False),
        # With a correction the ratio is to the policy at the start of the step.
        (CORRECTED, 3, IN_8_BITS, True),
        (CORRECTED, 3, {"asynchrony": AHEAD}, True),
        ("kl_cov", 4, {"minibatches": 1}, True),
        (GDRO, 5, {}, True),
        (GDRO, 4, {}, False),
        (GDRO.replace(advantage=BY_FAILURE), 5, {}, False),
        ("grpo", 3, {}, False),
        ("dapo", 3, {}, False),
        ("poad", 3, {}, True),
        ("poad", 4, {}, False),
        ("eggroll", 4, {"remat": "full"}, False),
    ],
)
def test_a_term_that_one_update_makes_zero_warns(recipe, prompts, changes, warns):
    config = dataclasses.replace(CONFIG, recipe=recipe, prompts_per_step=prompts, **changes)
    told = warned_of(warn_of_one_update, config)
    name = config.resolved_recipe.name
    expected = f"config: {name!r} makes one update on a batch, where its own term, or its distance "
    assert [text.startswith(expected) for text in told] == [True] * warns


def test_the_start_of_a_run_warns_of_it(tmp_path):
    config = dataclasses.replace(CONFIG, recipe="llds", prompts_per_step=3, run_dir=str(tmp_path))
    with pytest.warns(UserWarning, match="'llds' makes one update on a batch"):
        load_experiment(config)
