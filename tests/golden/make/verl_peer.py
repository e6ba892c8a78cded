"""What the scripts for verl's golden data share: the import of verl, and its kinds of arrays.

verl imports ray for its workers, of which nothing is used here, so an empty module stands for it.
"""

import sys
from unittest import mock

from torch_arrays import array, tensor, tokens

sys.modules.setdefault("ray", mock.MagicMock())
from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: E402
from verl.utils import torch_functional  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

__all__ = [
    "array",
    "core_algos",
    "rollout_corr_helper",
    "tensor",
    "tokens",
    "torch_functional",
]

VERSIONS = ["verl", "torch", "numpy"]


def config(**options):
    policy_loss = options.pop("policy_loss", {})
    made = ActorConfig(strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, **options)
    for name, value in policy_loss.items():
        object.__setattr__(made.policy_loss, name, value)
    return made
