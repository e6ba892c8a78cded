"""How rollouts are made: which start when, which are cut short, and what of them trains."""

from jaxrl_llm.recipes.catalog.method import NUMPY, Method

ROWS = (
    Method(
        key="april",
        title="APRIL, rounds that end early and groups that go on in the next",
        arxiv="2509.18521",
        kind="rollout",
        functions=(
            "rollout.off_policy_fraction",
            "rollout.resume_budget",
            "rollout.sample_round",
        ),
        verified_against="own simulation of rounds, worked numbers",
    ),
    Method(
        key="ulorl",
        title="UloRL, responses in segments; mastered tokens do not train",
        arxiv="2507.19766",
        kind="curation",
        functions=(
            "curation.mpt_advantages",
            "curation.mpt_mask",
            "rollout.resume_budget",
        ),
        preset="ulorl",
        verified_against=NUMPY,
        confidence="PAPER",
    ),
    Method(
        key="roll_async",
        title="ROLL, a bounded lead of sampling over training, redundant rollouts",
        arxiv="2512.22560",
        kind="rollout",
        functions=("rollout.first_g_finished", "rollout.roll_budget", "rollout.usable"),
        verified_against="own simulation of its buffer, worked numbers",
    ),
    Method(
        # The peak is read in code; how lengths are predicted is not, and is ours.
        key="past_future",
        title="Past-Future scheduler, admission by the expected peak of the cache",
        arxiv="2507.10150",
        kind="rollout",
        functions=("rollout.admit", "rollout.future_peak", "rollout.predict_remaining"),
        verified_against="a count of tokens at every step, worked numbers",
        confidence="ABSTRACT",
    ),
    Method(
        key="slot_sampler",
        title="Continuous batching of groups in a grid of slots",
        arxiv="",
        kind="rollout",
        functions=("rollout.longest_first", "rollout.make_engine", "rollout.pick_next"),
        verified_against="decoding one by one, own simulation of the slots",
    ),
    Method(
        key="sampling_reference",
        title="Temperature, top-k, top-p and min-p in the order of transformers or vLLM",
        arxiv="",
        kind="rollout",
        functions=("rollout.draw_tokens", "rollout.filter_logits"),
        verified_against=NUMPY,
    ),
    Method(
        key="prefix_shared_attention",
        title="Attention to a shared prompt; speculative sampling that keeps the distribution",
        arxiv="2302.01318",
        kind="rollout",
        functions=("models.merge_attention", "rollout.spec_accept"),
        verified_against="attention to all keys at once; enumeration over drafts",
    ),
    Method(
        key="jet_rl",
        title="Jet-RL, one 8-bit precision where a policy samples and where it trains",
        arxiv="2601.14243",
        kind="rollout",
        functions=(
            "diagnostics.mismatch",
            "models.quantize_block",
            "models.quantized_matmul",
        ),
        verified_against=NUMPY,
        confidence="PAPER",
    ),
)
