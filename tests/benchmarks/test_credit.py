"""The benchmark of credit: its exact numbers, its verdicts on rules, and its page."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from benchmarks import credit, credit_rules, credit_world, harness

BY_NAME = {rule.name: rule for rule in credit_rules.RULES}


@pytest.fixture(scope="module")
def setting():
    return credit.setting(cost=0.1, turns=4)


@pytest.fixture(scope="module")
def episodes(setting):
    return credit.record(setting, "episodes", 2048, 4, seed=3, rollouts=3)


def test_values_solve_the_linear_system(setting):
    world, exact = setting.world, setting.exact
    _, _, policy = credit_world.chances(setting.theta)
    K, S = world.turns, len(world.ended)
    step = np.einsum("sa,sat->st", policy, world.transition) * ~world.ended[:, None]
    earned = np.einsum("sa,sat,sat->s", policy, world.transition, world.reward) * ~world.ended
    matrix = np.eye(K * S) - np.kron(np.eye(K, k=1), step)
    values = np.linalg.solve(matrix, np.tile(earned, K)).reshape(K, S)
    np.testing.assert_allclose(exact.V[:K], values, atol=1e-12)
    np.testing.assert_allclose(exact.J, values[0, world.starts].mean(), atol=1e-12)
    np.testing.assert_allclose(world.transition.sum(-1), 1.0)


def test_gradient_and_fisher_are_derivatives(setting):
    exact, theta, h = setting.exact, setting.theta, 1e-5
    steps = h * np.eye(theta.size).reshape(theta.size, *theta.shape)
    up, down = (credit_world.returns(setting.world, theta + sign * steps) for sign in (1, -1))
    np.testing.assert_allclose(((up - down) / (2 * h)).reshape(theta.shape), exact.gradient,
                               atol=1e-9)  # fmt: skip
    # The KL of an episode to second order.
    moved = theta + 1e-3
    total = 0.0
    for x, y in zip(credit_world.chances(theta)[2], credit_world.chances(moved)[2], strict=True):
        total = np.append(total, (x * np.log(x / y)).sum())
    kl = exact.occupancy.sum(0) @ total[1:]
    np.testing.assert_allclose(kl, exact.fisher.sum() * 1e-6 / 2, rtol=1e-2)


@for_each("kind", credit.KINDS)
def test_samples_are_of_the_process(setting, kind):
    policy = setting.older if kind == "stale" else setting.theta
    sample, _ = credit.record(setting, kind, 2000, 4, seed=1, rollouts=1)
    group = sample.rewards.mean(-1)
    error = group.std() / np.sqrt(len(group))
    assert abs(group.mean() - credit_world.returns(setting.world, policy)) < 4 * error
    if kind == "trees":
        same = sample.node_ids[:, 0] == sample.node_ids[:, 1]
        assert same[:, :2].all() and not (same & sample.mask[:, 0])[:, -2:].any()


def in_errors(setting, data, function):
    """How far the mean gradient is from the true one, in standard errors of the mean."""
    gradients = credit.sums(setting, data, function).gradients.reshape(len(data[0].rewards), -1)
    off = gradients.mean(0) - setting.exact.gradient.reshape(-1)
    return np.sqrt((off**2).sum() * len(gradients) / gradients.var(0).sum())


@for_each(
    "name",
    ["rloo", "trloo", "turn_gae, exact, lam 1", "turn_gae, exact, lam 0", "vineppo, 9 rollouts"],
)
def test_unbiased_rules_are_within_their_error(setting, episodes, name):
    assert in_errors(setting, episodes, BY_NAME[name].function) < 1.6


def test_a_wrong_rule_is_caught(setting, episodes):
    right = BY_NAME["turn_gae, exact, lam 0"].function
    # The credit of the turn that follows.
    wrong = credit_rules.Rule("wrong", lambda r: jnp.roll(right(r), -1, axis=-1))
    assert in_errors(setting, episodes, wrong.function) > 5
    # A mean of four that has the rollout in it shrinks the gradient by a quarter.
    assert in_errors(setting, episodes, BY_NAME["dr_grpo"].function) > 3
    reference = BY_NAME["REINFORCE"]
    table = credit.score(setting, {"episodes": episodes}, [reference, BY_NAME["rloo"], wrong])
    assert table["wrong"]["scale"][2] < 0.1 and table["wrong"]["correlation"][2] < 0.1
    assert table["REINFORCE"]["variance"] == [1.0, 1.0, 1.0]
    assert table["rloo"]["cosine"][0] > 0.97 and table["rloo"]["variance"][2] < 1.0
    assert table["rloo"]["scale"][1] < 1.0 < table["rloo"]["scale"][2]


def test_the_true_gradient_gains_what_it_gains(setting):
    np.testing.assert_allclose(credit.gains(setting, 3.0 * setting.exact.gradient[None]), 1.0)
    nothing = credit.gains(setting, np.zeros((1, *setting.theta.shape)))
    np.testing.assert_allclose(nothing, 0.0, atol=1e-9)


def test_every_rule_is_of_turns_or_tokens(setting):
    for kind in credit.KINDS:
        sample, _ = credit.record(setting, kind, 2, 4, seed=0, rollouts=1)
        shapes = {sample.rewards.shape, sample.turn_where.shape, sample.mask.shape}
        for rule in credit_rules.RULES:
            if rule.data == kind:
                assert jax.eval_shape(rule.function, sample).shape in shapes, rule.name


def test_a_tiny_run(capsys):
    credit.main(["--tiny", "--rules", "rloo"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["tasks"]) == list(credit.TASKS)
    for task in result["tasks"].values():
        assert "rloo" in task["rules"] and "grpo" not in task["rules"]


RESULTS = [json.loads(path.read_text()) for path in sorted(harness.RESULTS.glob("credit-*.json"))]
TABLES = [(name, task["rules"]) for result in RESULTS for name, task in result["tasks"].items()]


@for_each("name, rules", TABLES, ids=[name for name, _ in TABLES])
def test_what_the_page_states_holds(name, rules):
    listed = [rule for rule in credit_rules.RULES if name == "outcome" or not rule.outcome]
    assert list(rules) == [rule.name for rule in listed]

    def value(rule, measure):
        return rules[rule][measure][0]

    unbiased = (
        "rloo",
        "trloo",
        "vineppo, 9 rollouts",
        "turn_gae, noisy, lam 1",
        "rloo, stale, ratio of the episode",
        *(f"turn_gae, exact, lam {lam}" for lam in (0, 0.95, 1)),
    )
    for rule in unbiased:
        _, low, high = rules[rule]["scale"]
        assert value(rule, "bias") < 0.02 and low < 1.0 < high, rule
    biased = ("ui_s1", "gated_reward", "hgpo", "pdppo, exact", "hae, exact", "rloo, stale")
    for rule in (*biased, "turn_gae, noisy, lam 0", "vtrace, stale, exact"):
        assert rules[rule]["bias"][1] > 0.05, rule
    # Credit by values that are closer to the turn: less variance, more gain.
    order = ["trloo", "turn_gae, exact, lam 1", "vineppo, 9 rollouts", "turn_gae, exact, lam 0"]
    for worse, better in zip(order, order[1:], strict=False):
        assert value(worse, "variance") > value(better, "variance")
        assert value(worse, "gain") < value(better, "gain")
    assert value("turn_gae, exact, lam 0", "variance") < 1 / 3
    assert value("turn_gae, noisy, lam 0", "gain") > value("turn_gae, noisy, lam 1", "gain")
    for rule in ("dr_grpo", "grpo", "salt"):
        assert abs(value(rule, "gain") / value("rloo", "gain") - 1.0) < 0.01
    assert value("grpo", "bias") < np.tan(np.deg2rad(3.0))
    for rule in ("gigpo", "hgpo"):
        assert value(rule, "variance") < value("grpo", "variance")
        assert value(rule, "gain") < value("trloo", "gain") + 0.01
    trees = {rule.name for rule in listed if rule.data == "trees"}
    assert max(value(rule, "gain") for rule in trees) < value("grpo", "gain")
    assert value("spo_tree", "variance") == max(value(rule, "variance") for rule in rules)
    assert 0.47 < value("spo_tree", "scale") < 0.53
    assert value("shared_prefix_advantages (arpo)", "gain") == value("grpo on trees", "gain")
    stale = {rule.name for rule in listed if rule.data == "stale"}
    assert max(stale, key=lambda rule: value(rule, "gain")) == "retrace, stale, exact"
    assert max(stale, key=lambda rule: value(rule, "variance")) == unbiased[4]
