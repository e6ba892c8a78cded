"""Writes estimators/igpo.*: GuoqingWang1/IGPO's gains of information."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import passage, peer

PATH = "scrl/llm_agent/generation.py"
ROLLOUTS, TURNS, TOKENS = 3, 4, 5


def gains(path):
    def compute(_, a):
        rewards = [[] for _ in range(ROLLOUTS)]
        known = {}
        for step in range(TURNS):
            logp = torch.from_numpy(a["token_logp"][:, step])
            made = passage(
                path,
                "if step == 0:",
                "gen_output = self._generate_with_gpu_padding",
                after="pseudo_gen_output_log_probs = self.actor_rollout_wg",
                step=step,
                activate_list=range(ROLLOUTS),
                gt_idx={i: (1, 1 + int(n)) for i, n in enumerate(a["answer_tokens"])},
                gt_probs=known,
                info_gain_rewards=rewards,
                gt_log_probs_per_turn=[[] for _ in range(ROLLOUTS)],
                gt_entropys_per_turn=[[] for _ in range(ROLLOUTS)],
                pseudo_gen_output_log_probs=SimpleNamespace(
                    batch={"old_log_probs": logp, "entropys": logp}
                ),
            )
            known = made["gt_probs"]
        return {"gains": np.array(rewards)}

    return compute


@peer("igpo", "IGPO", "GuoqingWang1/IGPO")
def main(root, writer):
    rng = np.random.default_rng(51)
    logp = -rng.gamma(2.0, 0.4, (ROLLOUTS, TURNS, TOKENS))
    case = {"token_logp": logp.astype(np.float32), "answer_tokens": np.array([3, 1, 4])}
    writer.inputs("answers", {"random": case})
    writer.add("info_gain", gains(root / PATH))
