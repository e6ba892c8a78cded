"""Writes tests/golden/trl_environment.json: what TRL's trainer makes of an environment class.

The code of the trainer resets the environment and makes the calls of each turn; the turns of the
model are those of tests/golden/trl_class.py. The reward is the method that the trainer calls.
"""

import asyncio
import contextlib
import json
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from transformers.utils import get_json_schema
from trl.trainer import grpo_trainer
from trl_peer import trainer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from trl_class import EPISODES, ROW, Shop  # noqa: E402


def turn(calls):
    message = {"role": "assistant", "content": "" if calls else "That is it."}
    if calls:
        message["tool_calls"] = [{"type": "function", "function": one} for one in calls]
    return message


def episode(turns, most, loop):
    shop = Shop()
    methods = [shop.buy, shop.prices]
    made = trainer(
        environment_factories={None: Shop},
        tools=methods,
        max_tool_calling_iterations=most or sys.maxsize,
        max_completion_length=10**6,
        async_loop=loop,
        vllm_mode="server",
        _environment_pool={None: [shop]},
        _env_tools={None: methods},
        _standalone_tools=[],
        _multi_environment=False,
        _is_vlm=False,
        _tokenizer=None,
        _get_tool_suffix_ids=lambda messages: [0],
    )
    made.model.config = SimpleNamespace(max_position_embeddings=10**9)
    turns_left = iter(map(turn, turns))
    made._generate_single_turn = lambda *args, **options: ([[1]], None)
    grpo_trainer.parse_response = lambda *args, **options: next(turns_left)
    seen = {}

    def generate(prompts):
        # The trainer puts each message behind the prompt, too.
        seen["prompt"] = json.loads(json.dumps(prompts[0]))
        completions = [[next(turns_left)]]
        made._tool_call_loop(prompts, [[1]], [[1]], completions, None, None, {})
        seen["completion"] = completions[0]
        raise StopIteration

    made._generate = generate
    row = {"prompt": [{"role": "user", "content": ROW["text"]}], "budget": ROW["budget"]}
    with contextlib.suppress(StopIteration):
        made._generate_and_score_completions([row])
    return {
        "prompt": seen["prompt"],
        "answers": [m for m in seen["completion"] if m["role"] == "tool"],
        "turns": sum(m["role"] == "assistant" for m in seen["completion"]),
        "reward": shop.get_reward(),
    }


def main():
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    data = {
        "made_by": Path(__file__).name,
        "packages": {name: version(name) for name in ("trl", "transformers", "torch")},
        "tools": [get_json_schema(method)["function"] for method in (Shop().buy, Shop().prices)],
        "episodes": [episode(turns, most, loop) for turns, most in EPISODES],
    }
    (ROOT / "trl_environment.json").write_text(json.dumps(data, indent=1) + "\n")


main()
