"""Writes estimators/cgpo.*: rewards and losses of gaetanlop/trl's CGPO trainer.

python tests/golden/make/cgpo.py CHECKOUT COMMIT    (branch cgpo_trainer)
"""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch
from paper_code import passage, start, take

PATH = "trl/trainer/cgpo_trainer.py"
GROUPS, SAMPLED, TOKENS = 6, 4, 5
BUDGET = 3.0


def groups(seed, rewards):
    """Four rollouts a group and, last, the answer of the data; some groups have nothing to train.

    The rollouts of group 0 are all satisfied. Those of group 1 are not and its answer is; in group
    2 the answer is not either, and in group 3 all are far from the reference.
    """
    rng = np.random.default_rng(seed)
    shape = (GROUPS, SAMPLED + 1, TOKENS)
    satisfied = rng.random(shape[:2]) < 0.6
    satisfied[0] = True
    satisfied[1:3, :SAMPLED], satisfied[1, SAMPLED], satisfied[2, SAMPLED] = False, True, False
    satisfied[3, SAMPLED] = True
    satisfied[4:, 0], satisfied[4:, 1] = True, False
    old = rng.uniform(-3.0, -0.5, shape)
    ref = old + rng.normal(0.0, 0.6, shape)
    ref[1, SAMPLED] = old[1, SAMPLED] - 0.1
    ref[3] = old[3] - 4.0
    logp = old + 0.1 * rng.normal(size=shape)
    logp[:, SAMPLED] = old[:, SAMPLED]  # of answers the code reads the policy that trains
    return {
        "logp": np.float32(logp),
        "old_logp": np.float32(old),
        "ref_logp": np.float32(ref),
        "mask": np.arange(TOKENS) < rng.integers(1, TOKENS + 1, (*shape[:2], 1)),
        "rewards": np.float32(rewards(rng, shape[:2])),
        "satisfied": satisfied,
        "imitated": np.broadcast_to(np.arange(SAMPLED + 1) == SAMPLED, shape[:2]).copy(),
    }


def loss_of(method, a):
    """The loss of an optimizer of the trainer, and its gradient in the log-probabilities.

    The model and the reference are stubs that know a response by its only prompt token, its row.
    """
    logp = torch.tensor(a["logp"], requires_grad=True)
    mask = torch.from_numpy(a["mask"].astype(np.int64))
    old, ref = (torch.from_numpy(a[name]) for name in ("old_logp", "ref_logp"))
    rows = torch.arange(mask[..., 0].numel()).reshape(mask.shape[:2])

    def laid_out(part):
        """Ids and mask of some responses, after a prompt of one token."""
        ids, there = rows[:, part].reshape(-1, 1), mask[:, part].reshape(-1, TOKENS)
        ids = torch.cat([ids, torch.zeros(len(ids), TOKENS, dtype=torch.int64)], 1)
        return ids, torch.cat([torch.ones(len(ids), 1, dtype=torch.int64), there], 1)

    def log_likelihood(ids, attention_mask, context_length, use_ref_model=False):
        tokens = (ref if use_ref_model else logp).reshape(-1, TOKENS)[ids[:, 0]]
        return (tokens * attention_mask[:, context_length:]).sum(1)

    sampled, answers = laid_out(slice(SAMPLED)), laid_out(slice(SAMPLED, None))
    rewards = torch.from_numpy(a["rewards"])
    verdicts = a["satisfied"][:, SAMPLED]
    trainer = SimpleNamespace(
        k=SAMPLED,
        beta=0.1,
        lamb=5.0,
        kl_threshold=BUDGET,
        epsilon=1e-9,
        local_genscore_mini_batch_size=GROUPS,
        reward_model=None,
        processing_class=SimpleNamespace(pad_token_id=0),
        args=SimpleNamespace(missing_eos_penalty=None),
        model=SimpleNamespace(device="cpu"),
        use_apex=False,
        accelerator=SimpleNamespace(backward=lambda loss: loss.backward(), gather=lambda x: x),
        stats=defaultdict(list),
        moj=SimpleNamespace(judge=lambda _, texts, gold: [int(verdicts[int(x)]) for x in texts]),
        _get_batch_logprobs=log_likelihood,
    )
    inputs = {
        "bs": GROUPS,
        "context_length": 1,
        "input_ids": answers[0],
        "attention_mask": answers[1],
        "prompt_completion_ids": sampled[0],
        "prompt_completion_mask": sampled[1],
        "completion_logprobs": (old * mask).sum(-1)[:, :SAMPLED].reshape(-1),
        "rewards": rewards[:, :SAMPLED].reshape(-1),
        "judgements": torch.from_numpy(a["satisfied"][:, :SAMPLED]).float().reshape(-1),
        "prompts_text": [""] * GROUPS,
        "baseline_completions_text": [str(i) for i in range(GROUPS)],
    }
    loss = method(trainer, inputs)
    return {"loss": loss.detach().numpy(), "gradient": logp.grad.numpy()}


def main():
    root, writer = start("cgpo", "CGPO (trl fork)", "gaetanlop/trl", license="Apache-2.0")
    rng = np.random.default_rng(13)
    rows = {
        "rewards": rng.normal(size=(3, 4)).astype(np.float32),
        "baseline": rng.normal(size=3).astype(np.float32),
        "satisfied": rng.random((3, 4)) < 0.7,
        "log_ratio": rng.uniform(-1, 7, (3, 4)).astype(np.float32),
    }
    writer.inputs("rollouts", {"random": rows})
    writer.inputs(
        "groups",
        {
            "positive": groups(1, lambda rng, shape: rng.uniform(0.2, 3.0, shape)),
            "signed": groups(2, lambda rng, shape: rng.normal(-1.0, 1.0, shape)),
            "ties": groups(3, lambda rng, shape: rng.integers(1, 3, shape)),
        },
    )

    def run(case, a):
        made = passage(
            root / PATH,
            "kl_div = completion_logprobs - ref_logprobs",
            "mean_regularized_rewards = regularized_rewards.mean()",
            self=SimpleNamespace(kl_threshold=5.0),
            completion_logprobs=torch.from_numpy(a["log_ratio"]),
            ref_logprobs=torch.zeros(3, 4),
            judgements=torch.from_numpy(a["satisfied"]),
            rewards=torch.from_numpy(a["rewards"]),
            baseline_rewards=torch.from_numpy(a["baseline"])[:, None],
        )
        return {"rewards": made["regularized_rewards"].numpy()}

    writer.add("crpg", run)

    for optimizer in ("crpg", "codpo", "crraft"):
        function = f"{optimizer}_optimization"

        def compute(case, a, function=function):
            def get_reward(*_):
                return None, torch.from_numpy(a["rewards"][:, SAMPLED]), None

            (method,) = take(root / PATH, function, get_reward=get_reward)
            return loss_of(method, a)

        writer.add(f"{optimizer}_loss", compute)
    writer.save()


if __name__ == "__main__":
    main()
