"""Runs of a model most of whose layers are linear attention."""

import json

import jax
import numpy as np
import pytest
from tiny_run import tiny_run

from jaxrl_llm.models import LayerKind, LinearAttentionConfig, LoRAConfig
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import CheckpointConfig, MeshConfig, train

SIZES = LinearAttentionConfig(key_heads=2, value_heads=4, key_dim=6, value_dim=10, conv_size=3)


def hybrid():
    layers = (LayerKind(linear=True), LayerKind())
    model = tiny_model(layers=layers, linear_attention=SIZES, output_gate=True, rotary_dim=4)
    return *model, ByteTokenizer()


def updates(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "grad_norm" in row]


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"remat": "full", "recipe": "dapo"},
        {"mesh": MeshConfig(fsdp=2, tensor=2, data=2)},
        {"lora": LoRAConfig(rank=2)},
    ],
    ids=["plain", "slots", "mesh", "lora"],
)
def test_a_run_updates_the_policy(tmp_path, changes):
    train(tiny_run(tmp_path, model=hybrid, steps=2, **changes))
    rows = updates(tmp_path)
    assert len(rows) == 2 and all(np.isfinite(row["grad_norm"]) for row in rows)
    assert max(row["grad_norm"] for row in rows) > 0


@pytest.mark.slow
def test_a_run_resumes_as_if_it_had_not_ended(tmp_path):
    def run(folder, steps, **options):
        config = tiny_run(
            tmp_path / folder, model=hybrid, steps=steps, checkpoint=CheckpointConfig(every=1)
        )
        return train(config, **options)

    expected = run("whole", 2).state.params
    run("parts", 1)
    found = run("parts", 2, resume=True).state.params
    jax.tree.map(np.testing.assert_array_equal, found, expected)
