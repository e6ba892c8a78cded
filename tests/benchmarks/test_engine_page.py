"""docs/engine.md tells the truth: its example runs, its numbers are those of their formulas."""

import json
import re

import jax
from rows import for_each

import jaxrl_llm as jr
from benchmarks import engine_page

TEXT = engine_page.PAGE.read_text()


def test_the_example_runs_as_pasted(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    exec(compile(code, "engine.md", "exec"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines) == ["one", "three", "two"]


def test_names_of_the_page_exist():
    for module, name in re.findall(r"`(rollout|corrections)\.(\w+)`", TEXT):
        assert hasattr(getattr(jr, module), name)
    for name in ("pick_next", "sample_round", "to_rollout", "off_policy_fraction", "spec_accept"):
        assert f"`{name}" in TEXT and hasattr(jr.rollout, name)
    for name in ("stop", "cancel", "fork", "update"):
        assert f"`generation.{name}(" in TEXT and hasattr(jr.rollout.Generation, name)


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


def test_measured_numbers_are_current():
    assert engine_page.main(["--check"]) == 0, "run python -m benchmarks.engine_page"


def test_results_become_tables(tmp_path, monkeypatch):
    assert engine_page.measured(tmp_path) == "Nothing yet."
    figure = {"median": 800.0, "min": 790.0, "max": 812.3}
    workload = {"model": "M", "dtype": "float32", "prompt_tokens": 64, "new_tokens": 32}
    common = {"device": "D", "workload": workload}
    sizes = {"slots": 64, "skewed_requests": 256, "long_prompt": 1024}
    engine = {
        "name": "engine",
        **common,
        "workload": {**workload, **sizes},
        "products": {"engine_tokens_per_s": figure, "share_of_products": 0.714},
        "skewed": {"mean": 31.5, "longest": 200, "slots_tokens_per_s": figure, "ratio": 2.04},
        "long_prompt": {"prompt_cache_ratio": 1.0, "prefill_ratio": 1.012},
        "startup": {"compile_seconds": 21.0, "warm_start_seconds": 4.5},
    }
    case = {name: {"tokens_per_s": figure} for name in ("sampler", "engine")}
    case |= {"step": {"bandwidth_share": 0.61}}
    alone = {name: x for name, x in case.items() if name != "engine"}
    gpu = {"name": "gpu", **common, "ours": {"64": case, "128": alone}, "tried": {"64": case}}
    each = {"seconds_per_informative_group": {"median": 2.0, "min": 1.5, "max": 2.5}, "tokens": 1.3}
    refill = {
        "name": "refill",
        "device": "D",
        "workload": {
            "groups": 32,
            "group_size": 4,
            "max_new_tokens": 128,
            "mean_length": 42.3,
            "informative": 0.528,
        },
        "ours": {"barrier": each, "slots": each},
        "ratios": {"slots/barrier": 0.67},
    }
    environments = {
        "name": "environments",
        "device": "D",
        "workload": {
            "model": "M",
            "episodes": 1024,
            "turns": 3,
            "turn_tokens": 64,
            "observation_tokens": 9,
            "slots": 64,
            "slow_seconds": 0.2,
        },
        "tokens_per_s": {"single": figure, "fast": figure, "slow": figure},
        "ratios": {"fast/single": 0.9, "slow/fast": 0.9},
    }
    for each in (engine, gpu, refill, environments):
        (tmp_path / f"{each['name']}-D.json").write_text(json.dumps(each))
    text = engine_page.measured(tmp_path)
    assert "| 64 slots, 64 + 32 tokens | 800 (790 to 812) tokens/s, 71% of what" in text
    assert "longest 200 | 800 (790 to 812) tokens/s, 2.04 times static" in text
    assert "1 times the prompt cache, 1.01 times the prefill" in text
    assert "| 64 | 800 (790 to 812) | 800 (790 to 812) | 61% |" in text
    assert "| 128 | 800 (790 to 812) |  | 61% |" in text
    assert "| 64, tried | 800 (790 to 812) | 800 (790 to 812) | 61% |" in text
    assert "32 groups whose rewards differ, where 47% of all groups agree" in text
    assert "| `refill` on the engine | 2 (1.5 to 2.5) | 0.67 | 1.30 |" in text
    assert "| episodes, the environment answers at once | 800 (790 to 812) | 0.90 |" in text
    assert "takes 0.2 s a step | 800 (790 to 812) | 0.81 |" in text
    # An old page is told, and written.
    page = tmp_path / "engine.md"
    page.write_text("<!-- measured:begin -->\nold\n<!-- measured:end -->\n")
    monkeypatch.setattr(engine_page, "PAGE", page)
    monkeypatch.setattr(engine_page, "measured", lambda: text)
    assert engine_page.main(["--check"]) == 1 and "old" in page.read_text()
    assert engine_page.main([]) == 0 and "61%" in page.read_text()
    assert engine_page.main(["--check"]) == 0
