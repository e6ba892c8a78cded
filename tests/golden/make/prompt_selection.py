"""Writes data of what chooses prompts and replays: mopps, dots, gdro, symphony, trl_replay.

python tests/golden/make/prompt_selection.py MOPPS COMMIT DOTS COMMIT GDRO COMMIT SYMPHONY COMMIT
    TRL COMMIT

Checkouts of thu-rllab/MoPPS, ASTRAL-Group/data-efficient-llm-rl, kishanpb/verl-gdro,
timurgepard/Simphony and huggingface/trl.
"""

import heapq
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import source_tree
import torch
from estimator_cases import Writer
from paper_code import loss_of, spread, take, tensor, token_inputs

ROLLOUTS = 8
PROMPTS = 12


def writer(name, package, commit, repository):
    facts = {"version": commit[:7], "repository": repository, "commit": commit}
    return Writer(name, package, ["torch", "numpy"], "prompt_selection.py", **facts)


def mopps(root, commit):
    """The sampler's counts over three batches, and which candidates it takes at given rates."""
    out = writer("mopps", "MoPPS", commit, "thu-rllab/MoPPS")
    (sampler,) = take(root / "recipe/ours/mopps.py", "PosteriorSampler")
    rng = np.random.default_rng(41)
    ids = np.stack([rng.permutation(PROMPTS)[:5] for _ in range(3)]).astype(np.int32)
    rewards = rng.integers(0, 2, (3, 5, ROLLOUTS)).astype(np.float32)
    out.inputs("visits", {"random": {"ids": ids, "rewards": rewards}})
    rates = rng.random(PROMPTS).astype(np.float32)
    out.inputs("rates", {"random": {"rates": rates}})

    def made(strategy, decay=0.5, batch=4):
        options = SimpleNamespace(
            bandit_decay_ratio=decay,
            bandit_target_mean=0.4,
            bandit_lower_bound=0.1,
            bandit_upper_bound=0.2,
            bandit_sample_strategy=strategy,
            bandit_no_update=False,
        )
        rollout = SimpleNamespace(n=ROLLOUTS)
        return sampler(
            SimpleNamespace(
                tasksampler=options,
                data=SimpleNamespace(train_batch_size=batch),
                actor_rollout_ref=SimpleNamespace(rollout=rollout),
            ),
            PROMPTS,
        )

    def counts(case, a, decay):
        one = made("topk", decay)
        for i in range(PROMPTS):
            one.alpha[str(i)], one.beta[str(i)] = one.prior_alpha, one.prior_beta
        for row, values in zip(a["ids"], a["rewards"], strict=True):
            one.train({"index": row}, values.mean(-1))
        order = [str(i) for i in range(PROMPTS)]
        return {
            "alpha": np.array([one.alpha[i] for i in order]),
            "beta": np.array([one.beta[i] for i in order]),
        }

    for name, decay in (("counts_half", 0.5), ("counts_one", 1.0)):
        out.add(name, lambda case, a, d=decay: counts(case, a, d))

    def chosen(case, a, strategy):
        one, drawn = made(strategy), np.random.beta
        np.random.beta = lambda alpha, beta: a["rates"]
        try:
            rows, _ = one.sample_batch({"index": np.arange(PROMPTS)})
        finally:
            np.random.beta = drawn
        return {"ids": rows["index"]}

    # Of the threshold's band there are fewer than are taken, so that nothing is left to chance.
    for strategy in ("topk", "threshold"):
        out.add(f"sample_{strategy}", lambda case, a, s=strategy: chosen(case, a, s))
    out.save()


def dots(root, commit):
    """Attention to the references, the calibration, and the objective on replayed rollouts."""
    out = writer("dots", "DOTS", commit, "ASTRAL-Group/data-efficient-llm-rl")
    base = root / "rl_training/verl/verl/trainer/ppo"
    head, residual = take(
        base / "teacher_utils.py",
        "RegressionHead",
        "ResidualHead",
        build_projection=lambda *a, **k: torch.nn.Identity(),
    )
    residual.forward.__globals__["RegressionHead"] = head
    rng = np.random.default_rng(42)

    def case(rates):
        sizes = {"hidden": (2, 10), "hidden_bias": (10,), "out": (10, 2), "out_bias": (2,)}
        arrays = {name: rng.normal(size=size) for name, size in sizes.items()}
        arrays |= {"queries": rng.normal(size=(5, 4)), "references": rng.normal(size=(6, 4))}
        arrays["reference_rates"] = rates
        return {name: np.asarray(x, np.float32) for name, x in arrays.items()}

    cases = {
        "random": case(rng.random(6)),
        "hard": case(rng.random(6) * 0.1),
        "equal": case(np.full(6, 0.5)),
    }
    out.inputs("references", cases)

    def predict(case, a, scaling, top):
        model = residual(4, 4, scaling=scaling, top_k=top)
        if scaling == "group_logit_temp":
            first, last = model.mlp[0], model.mlp[2]
            weights = {first: ("hidden", "hidden_bias"), last: ("out", "out_bias")}
            for layer, (weight, bias) in weights.items():
                layer.weight.data = torch.from_numpy(a[weight].T.copy())
                layer.bias.data = torch.from_numpy(a[bias].copy())
        queries = torch.from_numpy(a["queries"])
        references = torch.from_numpy(a["references"]).expand(len(queries), -1, -1)
        rates = torch.from_numpy(a["reference_rates"])[None]
        return {"rates": model(queries, references, rates).detach().numpy()}

    for name, scaling, top in (
        ("attention", "plain", None),
        ("attention_top3", "plain", 3),
        ("calibrated", "group_logit_temp", None),
    ):
        out.add(name, lambda case, a, s=scaling, k=top: predict(case, a, s, k))
    (clip,) = take(
        base / "core_algos.py",
        "compute_policy_loss_temp",
        verl_F=SimpleNamespace(masked_mean=lambda x, mask: (x * mask).sum() / mask.sum()),
    )

    # The released names: "old" is what sampled, "temp" the policy before the update.
    def loss(case, a):
        def total(case, a, logp):
            rest = (tensor(case, a[name]) for name in ("behavior_logp", "old_logp", "mask"))
            behavior, old, mask = rest
            return clip(behavior, logp, spread(case, a), mask, 0.2, old)[0]

        return loss_of(total)(case, a)

    cases = ("ragged", "on_policy", "holes", "zero_advantage")
    names = ("logp", "old_logp", "behavior_logp", "advantages", "mask")
    out.inputs("replayed", token_inputs(names, cases))
    out.add("replay_clip", loss)
    _adapter(out, root / "adaptive_difficulty_prediction/model.py")
    out.save()


def _adapter(out, path):
    """The model that the script of the adapter trains, with weights drawn at random."""
    *_, model = take(path, "build_projection", "RegressionHead", "ResidualHead")
    torch.manual_seed(42)
    released = model(5, 4, num_layers=3, scaling="group_logit_temp").eval()
    rng = np.random.default_rng(44)
    weights = {
        name: np.asarray(x + rng.normal(0, 0.3, x.shape), np.float32)
        for name, x in released.state_dict().items()
    }

    def case(rates):
        arrays = {"queries": rng.normal(size=(7, 5)), "references": rng.normal(size=(6, 5))}
        arrays = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
        return arrays | weights | {"reference_rates": np.asarray(rates, np.float32)}

    out.inputs("adapter", {"random": case(rng.random(6)), "hard": case(rng.random(6) * 0.1)})

    def predict(case, a):
        released.load_state_dict({name: torch.from_numpy(a[name]) for name in weights})
        queries, references, rates = (
            torch.from_numpy(a[x]) for x in ("queries", "references", "reference_rates")
        )
        references = references.expand(len(queries), -1, -1)
        rates = released(queries, references, rates.expand(len(queries), -1), 1.0)
        return {"rates": rates.detach().numpy()}

    out.add("adapter", predict)


def gdro(root, commit):
    """Bins, scores and weights of the adversary, and the choice of rollouts."""
    out = writer("gdro", "verl-gdro", commit, "kishanpb/verl-gdro")
    (module,) = source_tree.load(root, "verl", ["verl.trainer.group_dro_grpo"])
    config, allocator = module.Exp3pConfig, module.ClassDroExp3p
    rng = np.random.default_rng(43)
    bins = 4

    def case(spread):
        return {
            "bins": rng.integers(0, bins - 1, (3, 16)).astype(np.int32),
            "losses": (spread * rng.normal(size=(3, 16))).astype(np.float32),
            "last": np.array([0, 1, 2, 3, 0, 1], np.int32),
            "passes": rng.integers(0, 2, (20, 6)).astype(np.float32),
            "counts": rng.integers(1, 9, bins).astype(np.int32),
            "arm_scores": rng.normal(size=(bins, 5)).astype(np.float32),
        }

    out.inputs("batches", {"small": case(0.1), "large": case(3.0)})

    def weights(case, a, **options):
        made = allocator(config(debias_scores_ema=True, **options))
        for labels, losses in zip(a["bins"], a["losses"], strict=True):
            made.update_with_losses(labels.tolist(), torch.from_numpy(losses))
        found = made.compute_weights(a["bins"][-1].tolist())
        scores = made.class_ema_scores
        return {
            "scores": np.array([scores.get(b, 0.0) for b in range(bins)]),
            "weights": np.array([found.get(b, 0.0) for b in range(bins)]),
        }

    script = {"eta_q": 0.65, "gamma": 0.01, "ema_beta": 0.12, "max_class_weight": 15.0}
    for name, options in (
        ("weights", script),
        ("weights_by_share", script | {"loss_norm_by_class": True}),
        ("weights_standardized", script | {"use_zscore": True, "eta_q": 2.0, "gamma": 0.2}),
    ):
        out.add(name, lambda case, a, o=options: weights(case, a, **o))

    def classes(case, a):
        made = allocator(
            config(
                prompt_classifier="passk_online",
                passk_edges="0.4,0.75",
                passk_history_len=5,
                passk_hysteresis=0.05,
            )
        )
        uids, rows = [str(i) for i in range(6)], []
        for passes in a["passes"]:
            made.update_with_passk(uids, passes.tolist())
            labels = made.classify_batch([""] * 6, [{"uid": uid} for uid in uids])
            rows.append([int(label.removeprefix("accbin_")) for label in labels])
        return {"bins": np.array(rows)}

    out.add("bins", classes)

    def arms(case, a, total):
        made = allocator(config(eta_q=0.65, gamma=0.01))
        made.set_rollout_arms([2, 3, 4, 6, 8])
        made._rollout_arm_scores = {b: x for b, x in enumerate(a["arm_scores"].astype(float))}
        made._rollout_arm_counts = {b: np.zeros(5) for b in range(bins)}
        counts = dict(enumerate(a["counts"].tolist()))
        probs = np.stack([made.rollout_arm_probs([b])[b] for b in range(bins)])
        chosen, spent = made.rollout_choose_arms(counts, total * sum(counts.values()), 2)
        before = np.stack([made._rollout_arm_scores[b] for b in range(bins)])
        losses = torch.from_numpy(a["losses"][0])
        made.update_rollout_arm_losses(chosen, list(a["bins"][0]), losses, 4.0, 0.25)
        after = np.stack([made._rollout_arm_scores[b] for b in range(bins)])
        return {
            "probs": probs,
            "rollouts": np.array([chosen[b] for b in range(bins)]),
            "spent": np.array(spent),
            "before": before,
            "after": after,
        }

    for total in (3, 5):
        out.add(f"arms_{total}", lambda case, a, t=total: arms(case, a, t))
    out.save()


def symphony(root, commit):
    """Probabilities by age alone, of both versions."""
    out = writer("symphony", "Symphony", commit, "timurgepard/Simphony")
    (smooth,) = take(root / "2_1/symphony_op_2_1.py", "generate_probs")
    (sharp,) = take(root / "1_0/symphony.py", "fade")
    cases = {"nine": {"order": np.arange(9, dtype=np.int32) + 5}}
    out.inputs("orders", cases)

    def smooth_probs(case, a):
        length = len(a["order"])
        made = SimpleNamespace(
            step=0, capacity=100, length=length, indexes=np.arange(length), fade_factor=7
        )
        return {"probs": smooth(made)}

    def sharp_probs(case, a):
        length = len(a["order"])
        return {"probs": sharp(np.arange(length) / length)}

    out.add("smooth", smooth_probs)
    out.add("sharp", sharp_probs)
    out.save()


def trl_replay(root, commit):
    """The heap of groups, the probabilities of its draw, and the scores of groups."""
    out = writer("trl_replay", "trl", commit, "huggingface/trl")
    path = "trl/experimental/grpo_with_replay_buffer/grpo_with_replay_buffer_trainer.py"
    (buffer,) = take(root / path, "ReplayBuffer", heapq=heapq)
    (update,) = take(root / path, "update_replay_buffer")
    rng = np.random.default_rng(44)
    scores = rng.permutation(15).reshape(3, 5).astype(np.float32) + 1
    out.inputs("scores", {"random": {"scores": scores}})
    rewards = rng.integers(0, 2, (6, 4)).astype(np.float32)
    rewards[2], rewards[4] = 1.0, 0.5
    advantages = rng.normal(size=(6, 4)).astype(np.float32)
    out.inputs("groups", {"random": {"rewards": rewards, "advantages": advantages}})

    def heap(case, a):
        made = buffer(4)
        for batch, row in enumerate(a["scores"].tolist()):
            made.add(row, [5 * batch + i for i in range(5)])
        probs, drawn = [], torch.multinomial
        torch.multinomial = lambda p, *rest, **options: (probs.append(p), torch.tensor([0]))[1]
        try:
            made.sample(2)
        finally:
            torch.multinomial = drawn
        order = sorted(range(4), key=lambda i: made.heap[i][1])
        return {
            "items": np.array([made.heap[i][1] for i in order]),
            "probs": probs[0].numpy()[order],
        }

    def group_scores(case, a):
        stored = []
        rewards, advantages = (torch.from_numpy(a[name]) for name in ("rewards", "advantages"))
        std = rewards.std(dim=1, keepdim=True).expand(-1, 4)
        varied = std.max(dim=1).values > 0
        made = SimpleNamespace(
            replay_buffer=SimpleNamespace(add=lambda scores, data: stored.extend(scores)),
            slice_group_data=lambda *rest: (None, None),
            use_vllm=False,
        )
        update(made, varied, advantages, std, *[None] * 4, {}, [])
        scores = torch.zeros(6)
        scores[varied] = torch.tensor(stored)
        return {"scores": scores.numpy()}

    out.add("heap", heap)
    out.add("group_scores", group_scores)
    out.save()


def main():
    places = iter(sys.argv[1:])
    for make in (mopps, dots, gdro, symphony, trl_replay):
        make(Path(next(places)), next(places))


if __name__ == "__main__":
    main()
