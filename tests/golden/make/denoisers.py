"""A trainer of a masked-diffusion model in the place of its class, and a model of known numbers.

Every token is id 0 and the model's log-probability of it is an input, so that a loss can be
differentiated in it. What a trainer masks, the model notes down.
"""

import random
from types import SimpleNamespace

import numpy as np
import torch

MASK_ID = 2
VOCABULARY = 3


def set_seed(seed):
    random.seed(int(seed))
    np.random.seed(int(seed))
    torch.manual_seed(int(seed))


class Model:
    """Forwards `[B, S]` or `[B, J, S]` in turn, with log-probabilities `[N, B, T]` of responses."""

    def __init__(self, logp):
        self.logp, self.seen = logp, []

    def __call__(self, batch, *_, **__):
        shape, size = batch.shape, self.logp.shape[1]
        # [J, B, S]: draws are an axis of their own, or stand one after another.
        draws = batch.transpose(0, 1) if batch.ndim == 3 else batch.reshape(-1, size, shape[-1])
        first = len(self.seen)
        self.seen += [x == MASK_ID for x in draws]
        logp = self.logp[first : first + len(draws)]
        other, never = torch.log1p(-torch.exp(logp)), torch.full_like(logp, -1e9)
        logits = torch.stack([logp, other, never], -1)
        prompt = logits.new_zeros(*draws.shape[:2], shape[-1] - logp.shape[-1], VOCABULARY)
        logits = torch.cat([prompt, logits], dim=2)
        return logits.transpose(0, 1) if batch.ndim == 3 else logits.reshape(*shape, VOCABULARY)

    def masked(self):
        """What each forward hid of the responses, `[N, B, T]`."""
        return torch.stack(self.seen)[..., -self.logp.shape[-1] :].numpy()


def trainer(methods, **fields):
    """An object with the methods of a trainer, taken out of its file."""
    gathered = SimpleNamespace(gather_for_metrics=lambda x: x)
    self = SimpleNamespace(
        accelerator=gathered,
        control=SimpleNamespace(should_evaluate=False),
        processing_class=SimpleNamespace(mask_token_id=MASK_ID),
        _metrics={"train": _Metrics()},
        **fields,
    )
    for method in methods:
        setattr(self, method.__name__, method.__get__(self))
    return self


class _Metrics(dict):
    def __missing__(self, name):
        return self.setdefault(name, [])


def rows(rng, draws, batch, length, *, full=False):
    """Log-probabilities of policy, old policy and reference, advantages, and what is valid."""
    logp = np.log(rng.uniform(0.1, 0.9, (draws, batch, length)))
    near = np.clip(logp + 0.2 * rng.normal(size=(2, *logp.shape)), -4.0, -0.05)
    lengths = np.full(batch, length) if full else rng.integers(2, length + 1, batch)
    arrays = {
        "logp": logp,
        "old_draws": near[0],
        "ref_draws": near[1],
        "advantages": rng.normal(size=batch),
    }
    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
    return arrays | {"valid": np.arange(length) < lengths[:, None]}


def batch_of(a, prompt=3):
    """The inputs of a loss: ids of prompts and responses, and their masks."""
    size, length = a["valid"].shape
    return {
        "prompt_ids": torch.zeros(size, prompt, dtype=torch.long),
        "prompt_mask": torch.ones(size, prompt, dtype=torch.long),
        "completion_ids": torch.zeros(size, length, dtype=torch.long),
        "completion_mask": torch.from_numpy(a["valid"].astype(np.int64)),
        "advantages": torch.from_numpy(a["advantages"]),
    }


def differentiated(function, a):
    """`function(model) -> loss`, its value and its gradient in the log-probabilities."""
    logp = torch.from_numpy(a["logp"]).requires_grad_()
    loss = function(Model(logp))
    (gradient,) = torch.autograd.grad(loss.sum(), [logp])
    return {"loss": loss.detach().reshape(()).numpy(), "gradient": gradient.numpy()}
