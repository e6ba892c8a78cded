"""docs/engine.md tells the truth: its example runs, its numbers are those of their formulas."""

import jax
from rows import for_each

import jaxrl_llm as jr
from benchmarks import engine_page

TEXT = engine_page.PAGE.read_text()


def bytes_of_slots(R, W, L, T, k, o=20):
    """The formula of the page, for prompts and responses."""
    return R * L * (k + 4), R * W * T * (k + o)


@for_each("options", [{}, {"entropy": True}, {"top_k": 5}, {"top_p": 0.9}])
def test_memory_is_that_of_the_formula(options):
    model, _ = jr.testing.tiny_model()
    config, sizes = model.config, {"rows": 3, "width": 2, "prompt_length": 40, "max_new_tokens": 60}
    engine = jr.rollout.make_engine(model, **sizes, **options)
    k = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    o = 20 + 4 * ("entropy" in options) + 4 * options.get("top_k", 0)
    if "top_p" in options:
        o += 4 * -(-config.vocab_size // 32)
    exact = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(engine.init)))
    few = exact - sum(bytes_of_slots(3, 2, 40, 60, k, o))
    assert 0 < few <= 6 * 40, few


def test_worked_numbers_of_the_page():
    k = 2 * 30 * 3 * 64 * 4
    prompts, responses = bytes_of_slots(8, 8, 256, 256, k)
    copied = 8 * 8 * 256 * k
    assert f"`k` is {k:,} bytes" in TEXT
    words = " ".join(TEXT.split())
    assert f"take {prompts / 1e6:.0f} MB for prompts and {responses / 1e6:.0f} MB for" in words
    assert f"it would be {copied / 1e6:.0f} MB for each of the two" in words
