"""A run that is stopped and resumed is the uninterrupted one, whatever its collector remembers."""

import dataclasses

import numpy as np
import pytest
from exact_resume import assert_resumes
from tiny_run import CONFIG, tiny_run

import jaxrl_llm as jr
from jaxrl_llm import curation
from jaxrl_llm.curation import informative_groups, learnability
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.train import CheckpointConfig, SamplingConfig, train

pytestmark = pytest.mark.usefixtures("shared_programs")

TIERS = jr.bind(curation.tier_messages, template="{question}: {hint}")
LADDER = curation.hinted(curation.ladder(TIERS))
BY_RATE = curation.prioritized(learnability)
REFILL = curation.refill(informative_groups, max_rounds=3)


def more_where_failed(accuracy, counts, max_rollouts):
    return np.where(accuracy == 0, max_rollouts - counts, 0)


EXAMPLES = {
    "memory": curation.solved_examples(capacity=8, length=4),
    "text": curation.seeded_message(count=1, threshold=-1.0),
}
FORKS = curation.forked(curation.top_entropy_forks, forks=1, branches=2, source=BY_RATE)

# A collector of each way in which a row of a batch is made, the size of its groups, and a metric
# that is above 0 in a run where it acts. The laws of collectors resume all of them.
RUNS = {
    "mixed": (curation.mixed((REFILL, 1), (LADDER, 2), (BY_RATE, 1)), 2, "rollouts/hinted"),
    "judged": (curation.judged(), 2, "rollouts/judge"),
    "seeding": (
        curation.two_phase(more_where_failed, max_rollouts=4, **EXAMPLES),
        2,
        "rollouts/hinted",
    ),
    "forked": (FORKS, 3, None),
    "paraphrased": (curation.paraphrased(source=BY_RATE), 2, None),
}


def prompts():
    def prompt(n):
        columns = {
            "hints": ["low", "digits"],
            "demonstration": "0123"[: 2 + n % 3],
            "paraphrases": [f"Q{n:02}", f"{n:02}q"],
        }
        return Prompt(f"q{n:02}", metadata=columns, id=f"q{n:02}")

    return PromptSet(map(prompt, range(10)), source="tiny")


def first_is_low(prompt, completion, metadata):
    """0 or 1, so that half of all groups of two agree."""
    return float(completion[:1] < "@")


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_goes_on_is_the_same(tmp_path, name):
    collector, size, acts = RUNS[name]
    config = tiny_run(
        tmp_path / "run",
        recipe=jr.recipes.grpo().replace(name=name, collector=collector),
        data=dataclasses.replace(CONFIG.data, prompts=prompts),
        reward=first_is_low,
        sampling=SamplingConfig(group_size=size, max_new_tokens=4),
        steps=3,
        checkpoint=CheckpointConfig(every=1, keep=3),
    )
    whole = train(config)
    assert acts is None or sum(row.get(acts, 0) for row in whole.history) > 0
    again = assert_resumes(config, whole, tmp_path / "again")
    for name in ("loss", "reward", "groups_sampled", "rollouts_sampled", "length"):
        assert [row[name] for row in again.history] == [row[name] for row in whole.history]
