"""Collectors of trees on real slots: what is recorded, and the nodes of a batch."""

import jax
import numpy as np
import pytest
from rollout.collecting import collected

import jaxrl_llm as jr
from jaxrl_llm.curation.collectors.protocol import sized
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout.backends import EngineBackend
from jaxrl_llm.rollout.collect import Limits

P, G, T = 2, 4, 8
TOKENIZER = jr.testing.ByteTokenizer()
ENCODER = TextEncoder(tokenizer=TOKENIZER, chat=False, room=40)
QUESTIONS = [Question(Prompt(f"prompt {i}"), list(f"prompt {i}".encode())) for i in range(4)]
KEY = jax.random.key(5)
GREEDY = {"min_prob": 0.0, "max_gap": 1.0, "ages": (2,), "limit": 4, "segment": 2}
COLLECTORS = {
    "lookahead": jr.curation.lookahead(**GREEDY, max_distance=0.01),
    "branched": jr.curation.branched(splits=2),
}


@pytest.fixture(scope="module")
def run():
    model, params = jr.testing.tiny_model(num_layers=1)
    made = {}

    def grade(questions, texts):
        n = sum(map(len, texts))
        return Scores(np.zeros(n, np.float32), {}, np.zeros(n, bool))

    def run(name, rows):
        collector = sized(COLLECTORS[name], group_size=G, max_new_tokens=T)
        if rows not in made:
            made[rows] = jr.rollout.make_engine(
                model,
                rows=rows,
                width=2,
                prompt_length=16,
                max_new_tokens=T,
                stop_ids=(257,),
                vary=("temperature",),
                runner_up=True,
            )
        backend = EngineBackend(
            made[rows],
            params,
            KEY,
            QUESTIONS,
            version=3,
            decode=TOKENIZER.decode,
            grade=grade,
            max_new_tokens=T,
            pad_id=258,
        )
        outcomes = []

        class Noted:
            def __getattr__(self, name):
                return getattr(collector, name)

            def observe(self, state, collection):
                outcomes[:] = [x for x in collection.outcomes if x is not None]
                return collector.observe(state, collection)

        options = {"state": (), "version": 3, "limits": Limits(ENCODER, T, 259), "pad_id": 258}
        batch = collected(Noted(), backend, questions=QUESTIONS, groups=(P, G), key=KEY, **options)
        return batch, outcomes

    return run


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_node_is_one_stretch_of_tokens_that_rows_share(run, name):
    batch, outcomes = run(name, 2)
    nodes, rollout = batch.nodes, batch.rollout
    assert nodes.shape == rollout.tokens.shape
    mask = np.asarray(rollout.mask)
    assert (nodes[~mask] == -1).all()
    if name == "branched":
        # Two stretches a row, the first of which two rows have in common.
        assert (nodes[mask] >= 0).all() and batch.known is None
        for p in range(P):
            stretches = [
                list(dict.fromkeys(row[m])) for row, m in zip(nodes[p], mask[p], strict=True)
            ]
            firsts = [x[0] for x in stretches]
            assert len(set(firsts)) == 2 and all(len(x) <= 2 for x in stretches)
    else:
        # Greedy tokens and second ones have no log-probability of the sampler.
        assert not batch.known[mask & (nodes == -1)].any()
        assert not batch.known[..., :2][mask[..., :2]].any()
        assert batch.known[..., T - 1][mask[..., T - 1]].all()
        greedy = [y for x in outcomes for y in x.responses if y.finish == 4]
        assert greedy
        for y in greedy:
            assert (y.runner_up[-2:] != y.tokens[-2:]).all()
            assert (y.runner_up_logp[-2:] <= y.model_logp[-2:]).all()
    for p in range(P):
        for a, b in np.argwhere(np.ones((G, G), bool)):
            same = (nodes[p, a] == nodes[p, b]) & (nodes[p, a] >= 0)
            shared = np.flatnonzero(same)
            if a != b and shared.size:
                # What is shared is a beginning, and its tokens are equal.
                end = shared.max() + 1
                tokens, logp = rollout.tokens[p, :, :end], rollout.model_logp[p, :, :end]
                np.testing.assert_array_equal(tokens[a], tokens[b])
                np.testing.assert_array_equal(logp[a], logp[b])


@pytest.mark.of_many
@pytest.mark.parametrize("name", COLLECTORS)
def test_a_batch_does_not_depend_on_the_slots(run, name):
    (one, _), (two, _) = run(name, 2), run(name, 3)
    for field in ("tokens", "mask", "finish", "version"):
        x, y = getattr(one.rollout, field), getattr(two.rollout, field)
        np.testing.assert_array_equal(x, y, err_msg=field)
    np.testing.assert_array_equal(one.nodes, two.nodes)
