"""docs/training.md tells the truth: its names exist and its numbers are those of the results."""

import json
import re

import jaxrl_llm as jr
from benchmarks import late_steps, quickstart_step, training_page
from jaxrl_llm.core.runtime import heap
from jaxrl_llm.train.config import TrainConfig

TEXT = training_page.PAGE.read_text()


def test_options_of_the_page_exist():
    for name in ("packing", "remat", "microbatches", "dtype"):
        assert f"`{name}" in TEXT and name in TrainConfig.__dataclass_fields__
    for section, option in re.findall(r"`(optimizer|lora|mesh|report)\.(\w+)", TEXT):
        assert option in getattr(jr.train, NAMES[section]).__dataclass_fields__
    for name in ("make_step", "score"):
        assert hasattr(jr.train, name)


NAMES = {
    "optimizer": "OptimizerConfig",
    "lora": "LoRAConfig",
    "mesh": "MeshConfig",
    "report": "ReportConfig",
}


def test_settings_of_glibc_are_those_that_were_measured():
    """The variables that the benchmark sets and the options that `jaxrl-llm train` sets."""
    names = {"MALLOC_ARENA_MAX": -8, "MALLOC_MMAP_MAX_": -4, "MALLOC_TRIM_THRESHOLD_": -1}
    measured = {names[k]: int(x) for k, x in quickstart_step.KEEPS_MEMORY.items()}
    assert measured[-1] > 2**32 and measured | {-1: -1} == heap._KEEP  # -1 is the largest number


def test_measured_part_is_current():
    assert training_page.main(["--check"]) == 0


def test_every_result_has_its_table():
    text = training_page.measured()
    for command in ("train_step", "packing", "checkpoint", "start", "gpu --part train"):
        assert f"`python -m benchmarks.{command}`" in text


def test_a_gpu_has_a_table_once_it_has_trained(tmp_path):
    figure = {"median": 2.0, "min": 1.5, "max": 2.5}
    sampled = {"name": "gpu", "device": "D", "ours": {"64": {}}}
    (tmp_path / "gpu-D.json").write_text(json.dumps(sampled))
    assert training_page.measured(tmp_path) == "Nothing yet."
    sizes = {"prompts": 4, "rollouts": 8, "prompt_tokens": 512, "response_tokens": 448}
    work = {"model": "M", "dtype": "bfloat16", "master_dtype": "float32", **sizes}
    ours = {"seconds": figure, "tokens_per_s": figure, "peak_memory_bytes": 41.6e9}
    ours["mfu"] = {"measured": {**figure, "median": 0.552}}
    peak = {"measured": 747e12}
    train = {"workload": work, "peak_flops_per_s": peak, "ours": {"dots": ours}}
    (tmp_path / "gpu-D.json").write_text(json.dumps({**sampled, "train": train}))
    text = training_page.measured(tmp_path)
    assert "512 + 448 tokens, D, whose largest product is 747 Tflop/s" in text
    assert '| `remat="dots"` | 2 (1.5 to 2.5) | 2 (1.5 to 2.5) | 55% | 41.6 |' in text


def test_late_steps_are_a_row_a_figure_beside_those_before():
    def rows(sampling):
        step = {"tokens": 600.0, "seconds_sample": sampling, "seconds_train": 2.0, "length": 9.4}
        step |= {"seconds_wait": sampling, "seconds_score": 0.0, "seconds_total": 60.0}
        return [step | {"seconds_sample": 99.0}, step, step]

    ours = {"now": [rows(1.0)], "before": [rows(2.0)]}
    ours = {name: late_steps.measured(runs, 2) for name, runs in ours.items()}
    work = {"steps": 3, "last": 2, "seed": "3"}
    text = training_page._late_steps({"workload": work, "device": "D", "commit": "C", "ours": ours})
    assert "responses have 9.4 of 16 tokens" in text
    assert "| seconds of sampling | 2 (2 to 2) | 1 (1 to 1) | 0.50 |" in text
    assert "| sampled tokens per second | 300 (300 to 300) | 600 (600 to 600) | 2.00 |" in text
    work |= {"before": "abcdefghij"}
    text = training_page._late_steps({"workload": work, "device": "D", "commit": "C", "ours": ours})
    assert "9.4 of 16 tokens, 9.4 before, D" in text and "before: commit abcdefg, each" in text
