"""The fields that the loop attaches to a batch, and the rewards that a method takes."""

import inspect
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refuses
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import Question
from jaxrl_llm.recipes import PRESETS, Batch, Computed, Recipe, catalog
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout.episodes import EPISODES, Episode, Turn
from jaxrl_llm.train.data.fields import (
    Texts,
    attach_fields,
    check_fields,
    check_rewards,
    host_fields,
    needs_environment,
)

P, G, T = 2, 3, 4
REWARDS = np.array([1, 0, 1, 0, 0, 1], np.float32)


def needing(*names, inputs=(), computed=()) -> Recipe:
    """A recipe that cannot do without some entries of the context."""

    def advantage(rewards, **context):
        return rewards

    options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    rewards = inspect.Parameter("rewards", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    advantage.__signature__ = inspect.Signature([rewards, *options])
    slots = {"advantage": jr.stateless(advantage), "surrogate": jr.surrogates.ppo_clip}
    if any(entry.source == "teacher" for entry in computed):
        slots["surrogate"] = jr.recipes.sdpo().surrogate
    return Recipe(name="plain", inputs=inputs, computed=computed, **slots)


def questions(**metadata):
    """P questions; each name of the metadata has a list of P values."""
    rows = [{k: v[i] for k, v in metadata.items()} for i in range(P)]
    return [Question(Prompt(f"q{i}", id=f"q{i}", metadata=x), [1, 2]) for i, x in enumerate(rows)]


RESPONSES = [["ab\nc", "a\nbc", "abc\n"], ["abcd", "\n\nab", "a"]]


def encode(text):
    return list(text.encode())


def bring(
    recipe,
    *,
    components=(),
    details=(),
    failures=0,
    metadata=(),
    greedy=None,
    room=1000,
    asked=None,
    prompt_length=2,
):
    """What ``recipe`` gets of rollouts that have these rewards, questions and so on."""
    tokens = np.zeros((P, G, T), np.int32)
    kept = np.zeros((P, G, T), bool)
    for place in np.ndindex(P, G):
        response = encode(RESPONSES[place[0]][place[1]])
        tokens[place][: len(response)], kept[place][: len(response)] = response, True
    batch = Batch(
        tokens=tokens,
        mask=kept,
        rewards=REWARDS.reshape(P, G),
        where=kept[..., 0],
        prompt_tokens=np.ones((P, prompt_length), np.int32),
        prompt_mask=np.ones((P, prompt_length), bool),
    )

    def entry(x):
        return x if isinstance(x, str | Episode | None) else np.float32(x)

    scores = Scores(
        REWARDS,
        {k: np.asarray(x, np.float32) for k, x in dict(components).items()},
        np.arange(P * G) < failures,
        details={name: tuple(map(entry, entries)) for name, entries in dict(details).items()},
    )
    texts = {"write": encode, "context": room}
    return attach_fields(
        batch,
        recipe,
        scores=scores,
        rollout=SimpleNamespace(
            finish=jnp.array([[0, 1, 1], [1, 0, 1]]), version=jnp.full((P, G, T), 6)
        ),
        step=7,
        indices=[9, 4],
        questions=questions(**dict(metadata)) if asked is None else asked,
        texts=Texts(
            RESPONSES, [[None] * G] * P, encode, lambda x: bytes(x).decode(), room, **texts
        ),
        greedy=greedy or (lambda: pytest.fail("nobody asked for greedy responses")),
    )


def test_what_the_loop_knows_by_itself():
    names = ("prompt_ids", "truncated", "versions", "current_version", "greedy_rewards")
    recipe = needing(*names)
    assert host_fields(recipe) == set(names)
    check_fields(recipe, questions())
    greedy = np.array([0.25, 0.5])
    extras = bring(recipe, greedy=lambda: greedy).extras
    assert extras["prompt_ids"].tolist() == [9, 4]
    assert extras["truncated"].tolist() == [[True, False, False], [False, True, False]]
    assert extras["versions"].shape == (P, G, T) and (extras["versions"] == 6).all()
    assert extras["current_version"].tolist() == [7, 7]
    assert extras["greedy_rewards"].tolist() == [0.25, 0.5]
    kinds = [extras[name].dtype.name for name in names]
    assert kinds == ["int32", "bool", "int32", "int32", "float32"]
    assert host_fields(jr.recipes.ppo_max()) == set()
    batch = bring(jr.recipes.dapo(), components={"a": REWARDS})  # which needs nothing
    assert batch.extras == {} and batch.reward_components is None


def test_a_number_a_rollout_comes_from_the_rewards_components():
    flawed = [0, 1, 0, 1, 0, 0]
    batch = bring(jr.recipes.fapo(), components={"reward": REWARDS, "flawed": flawed})
    assert batch.extras["flawed"].dtype == bool
    assert batch.extras["flawed"].tolist() == [[False, True, False], [True, False, False]]
    assert batch.reward_components is None
    both = bring(
        needing("budgets", "reward_components"),
        components={"reward": REWARDS, "style": REWARDS / 2, "budgets": 8 * REWARDS},
    )
    assert both.extras["budgets"].tolist() == (8 * REWARDS).reshape(P, G).tolist()
    assert set(both.reward_components) == {"reward", "style"}  # a budget is no reward


def test_a_reward_may_have_the_name_of_a_field():
    """It trains, unless the field is read from it."""
    named = ("similarity", "truncated", "margin", "prior", "budgets", "turn_rewards", "prompt_ids")
    rewards = {name: (i + 2) * REWARDS for i, name in enumerate(("right", *named))}
    batch = bring(jr.recipes.gdpo(), components=rewards)
    assert set(batch.reward_components) == {"right", *named}
    for name, values in rewards.items():
        np.testing.assert_array_equal(batch.reward_components[name], values.reshape(P, G))
    # A field that the loop or the data have is another array than the reward of its name.
    batch = bring(
        needing("truncated", "prior", "reward_components"),
        components=rewards,
        metadata={"prior": [0.5, 1]},
    )
    assert set(batch.reward_components) == {"right", *named}
    assert batch.extras["truncated"].tolist() == [[True, False, False], [False, True, False]]
    assert batch.extras["prior"].tolist() == [0.5, 1.0]


def test_what_a_reward_returns_for_other_recipes_is_no_reward():
    graded = {"answer_ids": 7 * REWARDS, "flawed": REWARDS, "satisfied": REWARDS}
    steps = {"turn_rewards": [[0.5]] * (P * G), "feedback": ["no"] * (P * G)}
    given = {"components": {"reward": REWARDS, "style": REWARDS / 2, **graded}}
    batch = bring(jr.recipes.gdpo(), details=steps, **given)
    assert set(batch.reward_components) == {"reward", "style"}
    told = "returns only 'answer_ids', 'flawed', 'satisfied', which methods read as fields and not"
    with pytest.raises(ValueError, match=f"'gdpo' keeps several rewards apart, but .*{told}"):
        bring(jr.recipes.gdpo(), components=graded)


def test_a_number_a_prompt_comes_from_the_metadata():
    recipe = jr.recipes.v05_baseline()
    check_fields(recipe, questions(prior=[0.5, 1]))
    # A column of that name has one number a rollout, which is not what is meant.
    reward_components = {"reward": REWARDS, "prior": REWARDS}
    for options in ({}, {"components": reward_components}):
        batch = bring(recipe, metadata={"prior": [0.5, 1]}, **options)
        assert batch.extras["prior"].tolist() == [0.5, 1.0]
        assert batch.extras["prior"].dtype == np.float32


def test_names_of_ones_own_come_from_either():
    recipe = needing("mine", inputs=("mine",))
    check_fields(recipe, questions())  # what the reward returns is not known yet
    found = bring(recipe, metadata={"mine": [[1.0, 2.0], [3.0, 4.0]]}).extras["mine"]
    assert found.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    found = bring(recipe, components={"reward": REWARDS, "mine": 2 * REWARDS}).extras["mine"]
    assert found.shape == (P, G)
    refuses("'q0' has none in its metadata, and the reward", bring, recipe)


def episodes(*infos, end="done"):
    """Episodes for all responses, whose first turn has all tokens, with the info of each turn."""
    turns = tuple(Turn(T, f"turn {i}", info=info) for i, info in enumerate(infos))
    return {EPISODES: (Episode(turns, end),) * (P * G)}


def test_names_of_ones_own_come_from_the_turns_of_an_environment():
    recipe = needing("progress", "turn_where", inputs=("progress",))
    check_fields(recipe, questions(), environment=True)
    turns = ({"progress": 0.25}, {"progress": 0.5, "low": 1.0}, {"progress": 1.0})
    extras = bring(recipe, details=episodes(*turns)).extras
    expected = np.broadcast_to(np.float32([0.25, 0.5, 1.0, 0.0]), (P, G, 4))
    np.testing.assert_array_equal(extras["progress"], expected)
    np.testing.assert_array_equal(extras["turn_where"], expected > 0)
    # The environment did not answer to a turn that was cut off; it may be the only one.
    extras = bring(recipe, details=episodes(turns[2], {}, end="length")).extras
    np.testing.assert_array_equal(extras["progress"], np.broadcast_to([1.0, 0.0], (P, G, 2)))
    assert not bring(recipe, details=episodes({}, end="length")).extras["progress"].any()
    for lacks, has in (((turns[0], {"low": 1.0}), r"\['low'\]"), (({},), "nothing")):
        told = f"'progress' of each turn, but the info of the environment has {has} for the turn"
        with pytest.raises(ValueError, match=f"{told} .*, and no prompt has it in its metadata"):
            bring(recipe, details=episodes(*lacks))


def test_an_environment_does_not_hide_what_else_has_a_name_of_ones_own():
    recipe, details = needing("mine", inputs=("mine",)), episodes({"mine": 0.25})
    extras = bring(recipe, metadata={"mine": [1.0, 2.0]}, details=details).extras
    assert extras["mine"].tolist() == [1.0, 2.0]

    def lengths(texts):
        return np.float32([[len(text) for text in row] for row in texts])

    computed = (Computed("mine", lengths, "responses"),)
    extras = bring(needing("mine", computed=computed), details=details).extras
    np.testing.assert_array_equal(extras["mine"], [[4, 4, 4], [4, 4, 1]])


@for_each(
    ("recipe", "name"),
    [
        (jr.recipes.ttrl_majority(votes=1), "answer_ids"),
        (jr.recipes.cgpo(), "satisfied"),
        (jr.recipes.trloo(), "turn_ids"),
        (needing("test_passes"), "test_passes"),
        (needing("mine", inputs=("mine",)), "mine"),
    ],
)
def test_what_the_reward_gives_is_there_for_all_responses_of_a_collector(recipe, name):
    """A stored response, or a demonstration with its reward, has no more than that number."""
    replayed = partial(jr.curation.replayed, capacity=8, share=0.5)
    for collector in (
        replayed(),
        jr.curation.mixed((jr.curation.in_order(), 0.5), (replayed(), 0.5)),
        jr.curation.demonstrations(reward=1.0),
        jr.curation.windowed(),
    ):
        with pytest.raises(ValueError, match=f"needs '{name}' from the run's reward, .*regrade=T"):
            check_fields(recipe.replace(collector=collector), questions())
    for collector in (replayed(regrade=True), jr.curation.demonstrations()):
        check_fields(recipe.replace(collector=collector), questions())


def test_texts_come_with_their_weight():
    texts = jr.curation.mixed((jr.curation.in_order(), 0.5), (jr.curation.plain_texts(), 0.5))
    recipe = jr.recipes.rloo()
    check_fields(recipe.replace(text_coef=0.5, collector=texts), questions())
    with pytest.raises(ValueError, match=r"'rloo' has text_coef 0, so it would train on the text"):
        check_fields(recipe.replace(collector=texts), questions())
    with pytest.raises(ValueError, match=r"has text_coef 0.5, but its collector brings no texts"):
        check_fields(recipe.replace(text_coef=0.5), questions())


def test_what_does_not_come_from_the_reward_is_there_for_stored_responses():
    recipe = needing("steered", "truncated", "prior", "mine", inputs=("mine",))
    recipe = recipe.replace(collector=jr.curation.replayed(capacity=8, share=0.5))
    check_fields(recipe, questions(prior=[0.5, 1], mine=[1.0, 2.0]))
    steps = needing("turn_rewards").replace(collector=jr.curation.offline_steps())
    check_fields(steps, questions())  # which have the rewards of their steps


def parts(**components):
    return {"components": components}


def columns(**metadata):
    return {"metadata": metadata}


@for_each(
    ("name", "options", "words"),
    [
        ("flawed", {}, r"needs 'flawed' \(whether .*\), which is missing from the mapping"),
        ("flawed", columns(flawed=[True, False]), ", which is missing from the mapping"),
        ("flawed", parts(right=REWARDS, flawed=REWARDS), "sum of all .*; add an entry 'reward'"),
        ("flawed", parts(reward=REWARDS, flawed=REWARDS / 2), "0 and 1 in 'flawed' .*; got 0.5"),
        ("flawed", parts(reward=REWARDS, flawed=[0, 1, 0, 1, np.nan, 0]), "NaN for prompt 'q1'"),
        (
            "prior",
            parts(reward=REWARDS, prior=REWARDS),
            r"\(predicted .*\); prompt 'q0' has none in",
        ),
        ("prior", columns(prior=[0.5, "high"]), "'q1' has 'high', which is not a finite num"),
        ("prior", columns(prior=[None, 0.5]), "'q0' has None, which is not a finite number"),
        ("prior", columns(prior=[0.5, np.nan]), "'q1' has nan, which is not a finite number"),
        ("prior", columns(prior=[0.5, [1.0]]), r"'q1' has \[1.0\], which is not a finite number"),
        ("mine", columns(mine=[[1.0], [1.0, 2.0]]), r"'q1' .* shape \(2,\), but .* shape \(1,\)"),
        ("reward_components", {}, "rewards apart, but the reward returns one number; r"),
        ("reward_components", {"failures": 6}, "one number, or failed in all 6 calls; return a"),
    ],
)
def test_what_is_nowhere_or_no_number_is_one_sentence(name, options, words):
    recipe = needing(name, inputs=("mine",) if name == "mine" else ())
    refuses(f"recipe 'plain' .*{words}", bring, recipe, **options)


@pytest.mark.slow
def test_a_run_brings_what_every_preset_needs():
    rows = questions(prior=[0.5, 0.5], demonstration=["ab", "a"])
    for name in (x.preset for x in catalog.CATALOG if x.preset):
        recipe = catalog.preset(name, length=8, num_prompts=P)
        if recipe.needs.reads_extras:
            check_fields(recipe, rows, environment=needs_environment(recipe))


TRACK = jr.advantages.spo_tracker(num_prompts=P, rho=None)
VALUES = jr.chain(jr.stateless(jr.advantages.terminal_rewards), jr.stateless(jr.advantages.gae))


@for_each(
    "recipe, words",
    [
        (jr.recipes.v05_baseline(), "'v05_baseline' needs 'prior' .* prompt 'q1' has None"),
        (
            jr.recipes.spo_tracker(num_prompts=P, rho=0.5).replace(advantage=TRACK),
            "'spo_tracker' needs 'policy_shift'.*'q0' has none in",
        ),
        (needing("hot_logp"), "'hot_logp' .* which no training run provides; call train.mak"),
        (
            needing(inputs=("values",)).replace(advantage=VALUES),
            "needs 'values' .* which no training run provides",
        ),
    ],
)
def test_what_is_missing_is_told_before_the_first_step(recipe, words):
    with pytest.raises(ValueError, match=words):
        check_fields(recipe, questions(prior=[0.5, None]))


ENDS = [[3, 4], [2, 4], [4], [4], [2, 3, 4], [1]]


def test_turns_come_from_lists_of_the_reward():
    rewards = [[0.5] * len(ends) for ends in ENDS]
    rewards[0] = [1.0, -1.0]
    batch = bring(jr.recipes.trloo(), details={"turn_rewards": rewards, "turn_ends": ENDS})
    assert set(batch.extras) == {"turn_rewards", "turn_where", "turn_ids"}
    assert batch.extras["turn_rewards"].shape == (P, G, 4)  # three turns at most, a power of two
    assert batch.extras["turn_rewards"][0, 0].tolist() == [1.0, -1.0, 0.0, 0.0]
    counts = batch.extras["turn_where"].sum(-1).tolist()
    assert counts == [[2, 2, 1], [1, 3, 1]]
    assert batch.extras["turn_ids"].tolist() == [
        [[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]],
        [[0, 0, 0, 0], [0, 0, 1, 2], [0, -1, -1, -1]],
    ]
    # Without ends a single number is for the full response.
    batch = bring(jr.recipes.trloo(), details={"turn_rewards": [[0.5]] * 6})
    assert batch.extras["turn_rewards"].tolist() == [[[0.5]] * G] * P
    assert (batch.extras["turn_ids"] == np.where(batch.mask, 0, -1)).all()


def test_unit_tests_of_one_attempt_or_of_several():
    passes = [[1, 0, 1]] * 3 + [[1], [0], [1]]
    batch = bring(jr.recipes.verpo(), details={"test_passes": passes})
    extras = batch.extras
    assert extras["test_passes"].dtype == bool and extras["test_passes"].shape == (P, G, 1, 4)
    assert extras["test_where"].tolist() == [[True] * 3 + [False], [True] + [False] * 3]
    assert extras["test_passes"][0, 0, 0].tolist() == [True, False, True, False]
    several = [[[1, 0]] * len(ends) for ends in ENDS]
    batch = bring(jr.recipes.verpo(), details={"test_passes": several, "turn_ends": ENDS})
    assert batch.extras["turn_where"].sum(-1).tolist() == [[2, 2, 1], [1, 3, 1]]
    # A call that failed has none, and takes no part.
    batch = bring(jr.recipes.verpo(), details={"test_passes": [None, *passes[1:]]}, failures=1)
    assert not batch.extras["turn_where"][0, 0].any()


def turns(rewards, ends=None):
    return {"turn_rewards": [rewards] * 6} | ({} if ends is None else {"turn_ends": [ends] * 6})


@for_each(
    ("name", "details", "words"),
    [
        ("trloo", {}, "needs 'turn_rewards' .*; the reward returns no mapping with a list under"),
        ("verpo", {}, "needs 'test_passes' .*; the reward returns no mapping with a list under"),
        ("trloo", turns("good"), "'turn_rewards' of .* prompt 'q0' is a text"),
        ("trloo", turns([[1.0]]), "prompt 'q0' has 2 axes; it must have one number per"),
        ("trloo", turns([]), "is empty; a response has at least one step"),
        ("trloo", turns([1.0, 2.0]), "has 2 steps, but 'turn_ends' has 1; the reward"),
        ("trloo", turns([1.0, 2.0], [3, 2]), r"\['3', '2'\], .* ascending integers up to the 4 "),
        ("trloo", turns([1.0], [2.5]), r"\['2.5'\], which"),
        ("trloo", turns([1.0], [9]), r"\['9'\], which must"),
        ("verpo", {"test_passes": [[0.5]] * 6}, "needs 0 and 1 in 'test_passes' .*; got 0.5"),
    ],
)
def test_turns_that_cannot_be_read_are_one_sentence(name, details, words):
    with pytest.raises(ValueError, match=f"recipe {name!r}:? .*{words}"):
        bring(PRESETS[name](), details=details)


def teacher_texts(extras):
    """The prompts of the teacher as text, None for a rollout without one."""
    tokens, mask = extras["teacher_prompt_tokens"], extras["teacher_prompt_mask"]
    texts = np.full((P, G), None)
    for place in np.argwhere(extras["has_teacher"]):
        row = tuple(place)
        texts[row] = bytes(tokens[row][mask[row]].tolist()).decode()
    return texts.tolist()


def test_a_teacher_reads_the_solution_of_a_sibling_or_feedback():
    recipe = jr.recipes.sdpo()
    extras = bring(recipe).extras
    assert extras["teacher_prompt_tokens"].shape == (P, G, 128)  # a power of two
    (a, b, c), (d, e, f) = teacher_texts(extras)
    # Rewards are 1 0 1 and 0 0 1: the first right response that is not the rollout's.
    assert all(x.startswith("q0\n\n") for x in (a, b, c)) and all("q1" in x for x in (d, e))
    assert "abc\n" not in b and "ab\nc" in b and "ab\nc" in c and "abc" in a and f is None
    assert "\na\n" in d and "\na\n" in e
    # Feedback counts where there is no solution; an empty one says nothing.
    feedback = ["no"] * 5 + ["you are right"]
    told = teacher_texts(bring(recipe, details={"feedback": feedback}).extras)
    assert "you are right" in told[1][2] and told[0] == [a, b, c] and told[1][:2] == [d, e]
    silent = bring(recipe, details={"feedback": ["no"] * 5 + [" "]}).extras
    assert teacher_texts(silent)[1][2] is None
    # What the model has no room for teaches nothing; the prompt stands in its place.
    srpo = bring(jr.recipes.srpo()).extras  # the same from a threshold on
    assert teacher_texts(srpo) == [[a, b, c], [d, e, f]]
    assert not bring(jr.recipes.srpo(success=1.5)).extras["has_teacher"].any()
    narrow = bring(recipe, room=10).extras
    assert not narrow["has_teacher"].any() and narrow["teacher_prompt_mask"].sum(-1).max() == 2
    assert narrow["teacher_prompt_tokens"].shape == (P, G, 16)


def test_an_answer_stands_behind_what_a_recipe_puts_before_it():
    recipe = jr.recipes.igpo(before="A: ")
    assert host_fields(recipe) == {"ground_truth", "ground_truth_mask", "turn_ids", "turn_where"}
    turns = {"turn_rewards": [[1.0]] * 6}
    asked = [Question(Prompt(f"q{i}", answer, id=f"q{i}"), [1, 2]) for i, answer in enumerate("xy")]
    extras = bring(recipe, details=turns, asked=asked).extras
    tokens, mask = extras["ground_truth"], extras["ground_truth_mask"]
    assert tokens.shape == (P, 16) and tokens[mask].tolist() == list(b"xy")
    assert bytes(tokens[0, :4].tolist()) == b"A: x" and mask.sum() == 2
    with pytest.raises(ValueError, match="'igpo': prompt 'q0' has 2 tokens and its answer 4, .* 5"):
        bring(recipe, details=turns, asked=asked, room=5)
    # What the model reads of an episode is its first observation, not the text of the row.
    bring(recipe, details=turns, asked=asked, room=6)
    with pytest.raises(ValueError, match="'igpo': prompt 'q0' has 3 tokens and its answer 4, .* 6"):
        bring(recipe, details=turns, asked=asked, room=6, prompt_length=3)
    refuses("answer_texts: prompt 'q0' has the answer None", bring, recipe, details=turns)
    blank = Computed("answer_texts", lambda texts: [("", "")] * P, "responses")
    with pytest.raises(ValueError, match="'igpo': the answer of prompt 'q0' has no token"):
        bring(recipe.replace(computed=(blank,)), details=turns)


def test_what_is_computed_of_the_responses():
    def lengths(texts, *, rewards, metadata):
        assert rewards.shape == (P, G) and metadata[0]["id"] == "q0"
        return np.array([[float(len(text)) for text in row] for row in texts])

    computed = (Computed("mine", lengths, "responses"),)
    recipe = needing("mine", computed=computed)
    check_fields(recipe, questions())
    assert bring(recipe).extras["mine"].tolist() == [[4, 4, 4], [4, 4, 1]]
    with pytest.raises(ValueError, match="no function reads computed 'unread' .responses."):
        needing("mine", computed=(*computed, Computed("unread", lengths, "responses")))
    of_teacher = jr.recipes.sdpo().computed
    one = Computed("teacher_texts", lambda texts: [["one"]], "responses")
    few = needing("has_teacher", computed=of_teacher).replace(computed=(one, *of_teacher[1:]))
    refuses("teacher_texts has 1 messages, but the batch has 2 x 3", bring, few)


QUESTIONS = [Question(Prompt("What?", id="a"), [1]), Question(Prompt("Who?"), [1])]


BETWEEN = r"rewards in \[0, 1\]; "
COUNTED = r"rewards of 0 and 1, which .*dars_extra_rollouts.*; "
KEEPS = jr.recipes.grpo().replace(name="own", curation=jr.stateless(jr.curation.dars_keep))


@for_each(
    "recipe, good, bad, words",
    [
        *((x, 0.25, 1.5, BETWEEN) for x in ("spo_tracker", "mssr", "v05_baseline")),
        *((x, 0.25, -0.5, BETWEEN) for x in ("mopps", "v0_budget", "dots", "spo_tracker")),
        ("maxrl", 40.0, -40.0, "rewards of at least 0; "),
        *(("dars", 1.0, x, COUNTED) for x in (0.5, 1 / 3, 2.0, -1.0)),
        (KEEPS, 1.0, 0.5, "rewards of 0 and 1, which dars_keep counts; "),
        ("grpo", -7.0, None, ""),
    ],
)
def test_a_method_takes_the_rewards_that_it_is_defined_for(recipe, good, bad, words):
    if isinstance(recipe, str):
        recipe = catalog.preset(recipe, length=4, num_prompts=2)
    rewards = np.array([[0.0, 1.0], [good, 1.0]], np.float32)
    check_rewards(recipe, rewards, QUESTIONS)
    # Three float32 parts of 0.1, 0.2 and 0.7 may add up to the next number above 1.
    check_rewards(recipe, np.nextafter(rewards, np.float32(2)), QUESTIONS)
    if bad is not None:
        rewards[1, 0] = bad
        told = rf"prompt 'Who\?' has a reward of {bad:g}\.$"
        with pytest.raises(ValueError, match=f"^recipe '{recipe.name}' .*for {words}{told}"):
            check_rewards(recipe, rewards, QUESTIONS)
