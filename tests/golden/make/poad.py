"""Writes estimators/poad.*: morning9393/ADRL's credit of the tokens of actions."""

import numpy as np
from paper_code import peer, take

PATH = "mappo/utils/language_buffer.py"
ROLLOUTS, TURNS, TOKENS, PAD = 3, 4, 5, -1


def actions():
    cases = {}
    for seed, name in enumerate(("ragged", "one_token")):
        rng = np.random.default_rng((13, seed))
        lengths = rng.integers(1, TOKENS + 1, (ROLLOUTS, TURNS)) if name == "ragged" else 1
        lengths = np.broadcast_to(lengths, (ROLLOUTS, TURNS))
        cases[name] = {
            "rewards": rng.normal(size=(ROLLOUTS, TURNS)).astype(np.float32),
            "values": rng.normal(size=(ROLLOUTS, TURNS, TOKENS)).astype(np.float32),
            "mask": np.arange(TOKENS) < lengths[..., None],
        }
    return cases


@peer("poad", "ADRL", "morning9393/ADRL")
def main(root, writer):
    writer.inputs("actions", actions())
    (Buffer,) = take(root / PATH, "LanguageBuffer")

    def compute(algorithm):
        def run(case, a):
            buffer = object.__new__(Buffer)
            buffer.episode_length, buffer.n_rollout_threads = TURNS, ROLLOUTS
            buffer.gamma, buffer.gae_lambda, buffer.algo = 0.9, 0.95, algorithm
            buffer.pad_token_id, buffer.max_batch = PAD, 1
            buffer.cur_batch_index = buffer.cur_num_batch = 0
            values = np.zeros((1, TURNS + 1, ROLLOUTS, 1, TOKENS), np.float32)
            values[0, :TURNS, :, 0] = np.swapaxes(a["values"], 0, 1)
            buffer.tppo_values = values
            buffer.rewards = np.swapaxes(a["rewards"], 0, 1)[None, ..., None]
            buffer.action_tokens = np.where(np.swapaxes(a["mask"], 0, 1), 1, PAD)[None, :, :, None]
            buffer.masks = np.ones((1, TURNS + 1, ROLLOUTS, 1), np.float32)
            buffer.masks[0, -1] = 0.0
            buffer.tppo_returns = np.zeros_like(values[:, :TURNS])
            buffer.tppo_advantages = np.zeros_like(values[:, :TURNS])
            buffer.batch_process_tppo(np.zeros((ROLLOUTS, 1), np.float32))
            out = {"advantages": buffer.tppo_advantages, "returns": buffer.tppo_returns}
            return {name: np.swapaxes(x[0, :, :, 0], 0, 1) for name, x in out.items()}

        return run

    for algorithm in ("POAD", "NTPO"):
        writer.add(algorithm.lower(), compute(algorithm))
