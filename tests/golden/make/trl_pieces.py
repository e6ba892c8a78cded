"""Writes estimators/trl_pieces.*: overlong penalty, DFT loss, moving reference of TRL."""

from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import written
from trl import SFTTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.callbacks import SyncRefModelCallback
from trl_peer import ACCELERATOR, VERSIONS, array, tensor, trainer


def overlong(case, a):
    punish = get_soft_overlong_punishment(max_completion_len=5, soft_punish_cache=3)
    lengths = a["mask"].sum(-1).reshape(-1)
    return {"penalty": np.reshape(punish([[1] * int(n) for n in lengths]), (3, 4))}


def dft(case, a):
    logits = tensor(case, a["logits"], flat=False).requires_grad_()
    targets = torch.from_numpy(a["targets"]).long()[..., None]
    logp = torch.log_softmax(logits, -1).gather(-1, targets)[..., 0]
    ones = torch.ones_like(logp)
    outputs = SimpleNamespace(log_probs=logp, label_mask=ones, entropy=ones, is_top1=ones)
    made = trainer(SFTTrainer, compute_loss_func=None, label_smoother=None)
    made.args = SimpleNamespace(loss_type="dft", average_tokens_across_devices=False)
    made.accelerator = SimpleNamespace(**vars(ACCELERATOR), parallelism_config=None)
    made._total_train_tokens, made._tp_size = 0, 1
    made.maybe_activation_offload_context = None
    inputs = {"attention_mask": ones}
    loss = made.compute_loss(lambda **kwargs: outputs, inputs)
    made.model = SimpleNamespace(training=True)
    (gradient,) = torch.autograd.grad(loss, [logits])
    return {"loss": array(loss), "gradient": array(gradient)}


def moving(case, a):
    """Three steps of the reference toward three policies."""
    module = SimpleNamespace
    target = torch.nn.Parameter(tensor(case, a["ref_logp"]))
    for name in ("logp", "old_logp", "behavior_logp"):
        policy = torch.nn.Parameter(tensor(case, a[name]))
        SyncRefModelCallback._sync_target_model(
            module(parameters=lambda x=policy: [x]), module(parameters=lambda: [target]), 0.6
        )
    mask = torch.from_numpy(a["mask"].reshape(12, 6))
    return {"reference": array(target * mask).reshape(3, 4, 6)}


@written("trl_pieces", "trl", VERSIONS)
def main(writer):
    writer.add("overlong", overlong)
    writer.add("dft", dft)
    writer.add("moving_reference", moving)
