"""The torch loop with weights, gradients and the optimizer's state in bfloat16."""

import functools

import torch

from benchmarks.peers import transformers_train_step
from benchmarks.worker import serve

if __name__ == "__main__":
    serve(functools.partial(transformers_train_step.setup, dtype=torch.bfloat16))
