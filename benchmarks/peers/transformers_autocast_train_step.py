"""The torch loop with products in bfloat16, and weights and the optimizer's state in float32."""

import functools

from benchmarks.peers import transformers_train_step
from benchmarks.worker import serve

if __name__ == "__main__":
    serve(functools.partial(transformers_train_step.setup, autocast=True))
