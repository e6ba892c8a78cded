"""Writes estimators/lightllm.*: which requests LightLLM's scheduler admits."""

from types import SimpleNamespace

import numpy as np
from paper_code import peer, take

PATH = "lightllm/server/router/req_queue/chunked_prefill/impl.py"
RUNNING, WAITING, SLOTS = 6, 5, 8


def request(used, remaining):
    return SimpleNamespace(
        get_tuple_tokens=lambda busy, limit: (used, remaining),
        get_first_router_need_tokens=lambda: 0,
        is_paused=False,
    )


def admitted(function):
    """Requests in order until one is refused, and the peak with the first of them."""

    def compute(case, a):
        counts, peaks = [], []
        for used, remaining, queue, rest, capacity in zip(*a.values(), strict=True):
            found = []
            load = SimpleNamespace(
                get_frozened_token_count=lambda index: 0,
                set_estimated_peak_token_count=lambda peak, index, found=found: found.append(peak),
                set_dynamic_max_load=lambda *_: None,
            )
            scheduler = SimpleNamespace(
                cache_len_list=list(zip(used.tolist(), remaining.tolist(), strict=True)),
                router=SimpleNamespace(shared_token_load=load),
                router_max_new_token_len=0,
                dp_index=0,
                max_total_tokens=int(capacity),
                pause_req_dict={},
                running_max_req_size=SLOTS,
                batch_max_tokens=1,
            )
            for each in zip(queue.tolist(), rest.tolist(), strict=True):
                if not function(scheduler, request(*each), False, 0)[0]:
                    break
            counts.append(len(found))
            peaks.append(found[0] if found else -1)
        return {"admitted": np.array(counts), "peak": np.array(peaks)}

    return compute


@peer("lightllm", "LightLLM", "ModelTC/lightllm")
def main(root, writer):
    (function,) = take(root / PATH, "_can_add_new_req")
    rng = np.random.default_rng(64)
    rows = 40
    cases = {
        "used": rng.integers(1, 60, (rows, RUNNING)),
        "remaining": rng.integers(0, 40, (rows, RUNNING)),
        "queue_used": rng.integers(1, 30, (rows, WAITING)),
        "queue_remaining": rng.integers(1, 60, (rows, WAITING)),
        "capacity": rng.integers(200, 500, rows),
    }
    writer.inputs("queues", {"random": {name: x.astype(np.int32) for name, x in cases.items()}})
    writer.add("admitted", admitted(function))
