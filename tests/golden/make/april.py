"""Writes estimators/april.*: rounds of RLsys-Foundation/APRIL's rollout loop.

Its loop runs whole, with a server that adds a token to every request at each tick. The tokenizer
sees a letter as a token.

python tests/golden/make/april.py CHECKOUT COMMIT
"""

import asyncio
import copy
import importlib.util
import time
from types import SimpleNamespace

import numpy as np
from paper_code import start, take

PATH = "slime/rollout/sglang_example.py"
NAMES = (
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "abort",
    "generate_rollout_async",
    "SingletonMeta",
    "GenerateState",
)
ROUNDS, MOST = 4, 12


def lengths():
    """Tokens of each response; groups of a round end at different ticks."""
    return {
        "pairs": np.array(
            [
                [2, 9],
                [3, 3],
                [6, 1],
                [5, 12],
                [4, 8],
                [3, 11],
                [5, 7],
                [1, 10],
                [8, 2],
                [10, 3],
                [1, 4],
                [6, 9],
            ],
            np.int32,
        ),
        # Two responses are longer than the limit.
        "cut": np.array(
            [
                [2, 4],
                [30, 5],
                [7, 3],
                [1, 6],
                [9, 8],
                [2, 13],
                [3, 5],
                [10, 4],
                [10, 1],
                [6, 2],
                [8, 8],
                [4, 1],
            ],
            np.int32,
        ),
    }


class Server:
    """A request gets a token a tick."""

    def __init__(self, lengths):
        self.lengths, self.running, self.budgets = lengths, [], {}

    async def post(self, url, payload, use_http2=None):
        if url.endswith("abort_request"):
            for request in self.running:
                request.done.set_result(("abort", request.tokens))
            self.running = []
            return None
        prompt, _, so_far = payload["text"].partition(":")
        budget = payload["sampling_params"]["max_new_tokens"]
        self.budgets[int(prompt)] = budget
        left = self.lengths[int(prompt)] - len(so_far)
        request = SimpleNamespace(tokens=0, left=left, budget=budget)
        request.done = asyncio.get_running_loop().create_future()
        self.running.append(request)
        reason, tokens = await request.done
        info = {"completion_tokens": tokens, "finish_reason": {"type": reason}}
        return {"text": "a" * tokens, "meta_info": info}

    async def tick(self):
        while True:
            for _ in range(40):  # all that follows from the tick before
                await asyncio.sleep(0)
            for request in list(self.running):
                request.tokens += 1
                if request.tokens in (request.left, request.budget):
                    reason = "stop" if request.tokens == request.left else "length"
                    request.done.set_result((reason, request.tokens))
                    self.running.remove(request)


class Data:
    """The oldest buffered groups first, then new ones."""

    def __init__(self, groups):
        self.new, self.buffer = list(groups), []

    def get_samples(self, count):
        old, self.buffer = self.buffer[:count], self.buffer[count:]
        new, self.new = self.new[: count - len(old)], self.new[count - len(old) :]
        return old + new

    def add_samples(self, groups):
        self.buffer += [groups]


def main():
    facts = {"license": "Apache-2.0"}
    root, writer = start("april", "APRIL", "RLsys-Foundation/APRIL", **facts)
    writer.inputs("lengths", {case: {"lengths": x} for case, x in lengths().items()})
    spec = importlib.util.spec_from_file_location("slime_types", root / "slime/utils/types.py")
    types = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(types)

    async def graded(args, sample):
        return 1.0

    def loop(server):
        (meta,) = take(root / "slime/utils/misc.py", "SingletonMeta")
        tokenizer = SimpleNamespace(
            from_pretrained=lambda *_, **__: lambda text, **__: {"input_ids": list(text)}
        )

        async def get(url, use_http2=None):
            return {"urls": ["http://worker"]}

        silent = lambda **_: SimpleNamespace(update=lambda n: None, close=lambda: None)  # noqa: E731
        names = [name for name in NAMES if name != "SingletonMeta"]
        return take(
            root / PATH,
            *names,
            asyncio=asyncio,
            copy=copy,
            time=time,
            tqdm=silent,
            get=get,
            post=server.post,
            async_rm=graded,
            AutoTokenizer=tokenizer,
            SingletonMeta=meta,
            Sample=types.Sample,
            print=lambda *_, **__: None,
        )[-2]

    def run(n, target):
        def compute(case, a):
            groups = [
                [types.Sample(index=2 * i + j, prompt=f"{2 * i + j}:") for j in range(2)]
                for i in range(len(a["lengths"]))
            ]
            server, data = Server(a["lengths"].reshape(-1)), Data(groups)
            args = SimpleNamespace(
                hf_checkpoint="",
                sglang_server_concurrency=99,
                rollout_num_gpus=1,
                rollout_num_gpus_per_engine=1,
                rollout_temperature=1.0,
                rollout_top_p=1.0,
                rollout_top_k=-1,
                rollout_max_response_len=MOST,
                rollout_stop=None,
                rollout_stop_token_ids=None,
                rollout_skip_special_tokens=True,
                sglang_router_ip="",
                sglang_router_port=0,
                use_http2=False,
                group_rm=False,
                custom_generate_function_path=None,
                dynamic_sampling_filter_path=None,
                over_sampling_filter_path=None,
                rollout_global_dataset=True,
                partial_rollout=True,
                rollout_batch_size=n,
                over_sampling_batch_size=target,
                n_samples_per_prompt=2,
            )
            rollout = loop(server)
            trained, tokens, budgets = [], [], []

            async def rounds():
                clock = asyncio.create_task(server.tick())
                for step in range(ROUNDS):
                    server.budgets.clear()
                    batch = await rollout(args, step, data)
                    trained.append([group[0].index // 2 for group in batch])
                    tokens.append([len(s.response) for group in groups for s in group])
                    asked = [server.budgets.get(i, 0) for i in range(a["lengths"].size)]
                    budgets.append(asked)
                clock.cancel()

            asyncio.run(rounds())
            return {"trained": trained, "tokens": tokens, "budgets": budgets}

        return compute

    for n, target in ((1, 3), (2, 4)):
        writer.add(f"rounds_{n}_{target}", run(n, target))
    writer.save()


if __name__ == "__main__":
    main()
