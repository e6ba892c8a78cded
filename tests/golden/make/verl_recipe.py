"""Writes estimators/verl_recipe.*: FAPO's rewards and SPO's tracker in verl-recipe.

It needs verl, whose parser of answers the rewards call.
"""

import asyncio
from types import SimpleNamespace

import numpy as np
import torch
import verl_peer
from estimator_cases import RAGGED, load_inputs
from paper_code import array, passage, peer, take
from verl.utils.reward_score import math_dapo

GENRM, REASONING = "fapo/reward_fn_genrm.py", "fapo/reward_fn_reasoning.py"
SPO, DAPO = "spo/spo_ray_trainer.py", "dapo/dapo_ray_trainer.py"
PARSERS = ("last_boxed_only_string", "remove_boxed", "normalize_final_answer")


def judged(root):
    given = {name: getattr(math_dapo, name) for name in PARSERS}
    _, function = take(root / GENRM, "parse_ans", "compute_score_fapo_genrm", **given)

    def compute(case, a):
        found = [
            function(f"so \\boxed{{{p}}}", int(t), {"total_steps": int(n)})["score"]
            for p, t, n in zip(a["predicted"], a["truth"], a["steps"], strict=True)
        ]
        return {"rewards": np.array(found)}

    return compute


def flawed(root):
    given = {name: getattr(math_dapo, name) for name in PARSERS}
    begin, end = "# FAPO Hyper-parameters", "async def generate_aiohttp"
    given |= {k: v for k, v in passage(root / REASONING, begin, end).items() if k.isupper()}

    async def generate(router_address, prompt_ids, sampling_params):
        return {"output_ids": router_address}

    given |= {"generate_aiohttp": generate, "get_event_loop": asyncio.get_running_loop}
    _, function = take(root / REASONING, "verify", "compute_score_fapo", **given)
    tokenizer = SimpleNamespace(
        apply_chat_template=lambda *_, **__: [], decode=lambda ids, **_: f"\\boxed{{{ids}}}"
    )

    async def each(right, flaw):
        result = await function(
            "math",
            f"\\boxed{{{7 if right else 8}}}",
            "7",
            {"question": "?", "split": "train"},
            2 if flaw else -1,
            tokenizer,
        )
        return result["score"]

    def compute(case, a):
        pairs = zip(a["rewards"].reshape(-1), a["flawed"].reshape(-1), strict=True)
        found = [asyncio.run(each(right > 0, flaw)) for right, flaw in pairs]
        return {"rewards": np.array(found).reshape(a["rewards"].shape)}

    return compute


def tracker_cases():
    rng = np.random.default_rng(18)
    token = {name: load_inputs("tokens")["ragged"][name] for name in ("logp", "old_logp")}
    near = (token["old_logp"] + (token["logp"] - token["old_logp"]) / 20).astype(np.float32)
    return {
        "random": {
            "successes": rng.integers(0, 9, 12).astype(np.float32),
            "rewards": rng.integers(0, 2, 12).astype(np.float32),
            "old_logp": token["old_logp"].reshape(12, 6),
            "logp": near.reshape(12, 6),
            "mask": RAGGED.reshape(12, 6),
        }
    }


def spo(path):
    """The passages of a step: start, weights of the prompts, advantages, rho, update."""
    prompts = [str(i) for i in range(12)]
    spo_config = SimpleNamespace(rho=SimpleNamespace(clip_lower=0.875))
    config = SimpleNamespace(trainer=SimpleNamespace(spo=spo_config))
    state = {"self": SimpleNamespace(config=config), "full_prompts": prompts, "Neff": 8}
    state |= {"micro_prompts": prompts, "print": lambda *_: None, "spo_metrics": {}}

    def compute(case, a):
        successes = zip(prompts, a["successes"], strict=True)
        scores = {p: [1.0] * int(s) + [0.0] * (8 - int(s)) for p, s in successes}
        names = state | {"prompt2scores": scores}
        names = passage(path, "N_init = 1 /", "prompt2protodata = {}", **names)
        names = passage(path, "EXPLORATION_EPSILON = ", "items = []", **names)
        names["weights"] = [names["prompt2weight"][p] for p in prompts]
        names = passage(path, "weights_np = ", "if wsum > 0.0:", **names)
        mask = torch.from_numpy(a["mask"].astype(np.int64))
        names |= {"batch": None, "compute_response_mask": lambda _: mask}
        names["reward_tensor"] = torch.from_numpy(a["rewards"])[:, None]
        names = passage(path, "alpha = [prompt2alpha[_]", "quantiles = torch", **names)
        outputs = {
            "values": array(names["p_hats"]),
            "draw": names["weights_np"] / names["wsum"],
            "advantages": array(names["advantages"]),
        }
        names |= {"rho_metrics": {}, "response_mask": mask}
        names["masked_mean"] = verl_peer.torch_functional.masked_mean
        names["old_log_probs"] = torch.from_numpy(a["old_logp"])
        names["cur_log_probs"] = torch.from_numpy(a["logp"])
        names = passage(path, "kl = (old_log_probs", 'rho_metrics["spo/rho_clipped"]', **names)
        names["rho"] = names["rho_clipped"]
        names = passage(path, "alpha = rho * alpha + r", "cur_sampled_numbers", **names)
        more = {"rho": names["rho"], "alpha": names["alpha"], "beta": names["beta"]}
        return outputs | {name: array(x) for name, x in more.items()}

    return compute


def informative(path):
    def compute(case, a):
        groups = zip(a["rewards"], a["where"], strict=True)
        values = {i: list(row[keep]) for i, (row, keep) in enumerate(groups)}
        names = passage(
            path,
            "prompt_uid2metric_std = {}",
            "num_prompt_in_batch += ",
            prompt_uid2metric_vals=values,
        )
        return {"keep": np.isin(np.arange(len(values)), names["kept_prompt_uids"])}

    return compute


@peer("verl_recipe", "verl-recipe", "verl-project/verl-recipe")
def main(root, writer):
    rng = np.random.default_rng(17)
    predicted, truth = np.meshgrid(np.arange(-2, 6), np.arange(-1, 5))
    steps = {"predicted": predicted, "truth": truth, "steps": np.full_like(truth, 5)}
    steps = {name: x.reshape(-1).astype(np.int32) for name, x in steps.items()}
    writer.inputs("steps", {"all": steps})
    writer.add("judge", judged(root))
    answers = {
        "rewards": rng.integers(0, 2, (3, 4)).astype(np.float32),
        "flawed": rng.uniform(size=(3, 4)) < 0.5,
    }
    writer.inputs("answers", {"random": answers})
    writer.add("reward", flawed(root))
    writer.inputs("tracker", tracker_cases())
    writer.add("spo", spo(root / SPO))
    writer.add("informative", informative(root / DAPO))
