"""Writes estimators/verl_minibatch.*: minibatches of one batch, as verl trains them.

GRPO's advantages come from the whole batch. Its groups are then taken in `order` and divided into
minibatches; the policy loss of each is the mean over the tokens of its own mask. Stored are the
loss of every minibatch and its gradient in log_prob, both at the same `logp`.
"""

import numpy as np
import torch
from estimator_cases import written
from verl_peer import VERSIONS, array, config, core_algos, tensor

PROMPTS, ROLLOUTS, TOKENS, MINIBATCHES = 4, 4, 6, 2
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e9}


def cases():
    """Token counts of the two minibatches are uneven in every case, most of all in `uneven`."""

    def case(seed, order, short=()):
        rng = np.random.default_rng((4, seed))
        shape = (PROMPTS, ROLLOUTS, TOKENS)
        old = -rng.gamma(2.0, 0.5, shape) - 0.02
        lengths = rng.integers(1, TOKENS + 1, shape[:2])
        lengths[list(short)] = 1
        arrays = {
            "logp": np.minimum(old + 0.35 * rng.normal(size=shape), -0.01),
            "old_logp": old,
            "rewards": rng.normal(size=shape[:2]),
        }
        return {name: np.asarray(x, np.float32) for name, x in arrays.items()} | {
            "mask": np.arange(TOKENS) < lengths[..., None],
            "where": np.ones(shape[:2], bool),
            "order": np.asarray(order, np.int32),
        }

    binary = case(2, [3, 1, 0, 2])
    # The second group is all equal: its advantages are 0.
    binary["rewards"] = np.float32([[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], [1, 1, 0, 1]])
    return {
        "ragged": case(0, [0, 1, 2, 3]),
        "reordered": case(1, [2, 0, 3, 1]),
        "binary": binary,
        "uneven": case(3, [1, 3, 0, 2], short=[1, 3]),
    }


def whole_batch(a):
    mask = tensor("", a["mask"])
    rewards = torch.zeros(mask.shape)
    rewards[:, 0] = tensor("", a["rewards"], flat=False).reshape(-1)
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=rewards,
        response_mask=mask,
        index=np.repeat(np.arange(PROMPTS), ROLLOUTS),
    )
    return advantages


def minibatches(case, a):
    advantages = whole_batch(a)
    rows = np.arange(PROMPTS * ROLLOUTS).reshape(PROMPTS, ROLLOUTS)[a["order"]]
    losses, gradients = [], []
    for part in rows.reshape(MINIBATCHES, -1):
        logp = tensor(case, a["logp"])[part].requires_grad_()
        loss, _ = core_algos.compute_policy_loss_vanilla(
            old_log_prob=tensor(case, a["old_logp"])[part],
            log_prob=logp,
            advantages=advantages[part],
            response_mask=tensor(case, a["mask"])[part],
            loss_agg_mode="token-mean",
            config=config(**CLIP),
        )
        (gradient,) = torch.autograd.grad(loss, [logp])
        losses.append(array(loss))
        gradients.append(array(gradient).reshape(-1, ROLLOUTS, TOKENS))
    return {
        "advantages": array(advantages).reshape(PROMPTS, ROLLOUTS, TOKENS),
        "loss": np.stack(losses),
        "gradient": np.stack(gradients),
    }


@written("verl_minibatch", "verl", VERSIONS)
def main(writer):
    writer.inputs("minibatch", cases())
    writer.add("grpo_token_mean", minibatches)
