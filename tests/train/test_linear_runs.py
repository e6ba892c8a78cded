"""Runs of a model most of whose layers are linear attention."""

import numpy as np
import pytest
from exact_resume import assert_resumes
from tiny_run import tiny_run

from jaxrl_llm.models import LayerKind, LinearAttentionConfig, LoRAConfig
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import CheckpointConfig, MeshConfig, SamplingConfig, train

SIZES = LinearAttentionConfig(key_heads=2, value_heads=4, key_dim=6, value_dim=10, conv_size=3)
SLOTS = SamplingConfig(group_size=2, max_new_tokens=4, slots=4)


def hybrid():
    layers = (LayerKind(linear=True), LayerKind())
    model = tiny_model(layers=layers, linear_attention=SIZES, output_gate=True, rotary_dim=4)
    return *model, ByteTokenizer()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"remat": "full", "sampling": SLOTS},
        {"mesh": MeshConfig(fsdp=2, tensor=2, data=2)},
        {"lora": LoRAConfig(rank=2)},
    ],
    ids=["slots", "mesh", "lora"],
)
def test_a_run_updates_the_policy_and_resumes_exactly(tmp_path, changes):
    checkpoint = CheckpointConfig(every=1)
    config = tiny_run(tmp_path / "whole", model=hybrid, steps=2, checkpoint=checkpoint, **changes)
    again = assert_resumes(config, train(config), tmp_path / "again")
    norms = [row["grad_norm"] for row in again.history]
    assert len(norms) == 2 and np.isfinite(norms).all() and max(norms) > 0
