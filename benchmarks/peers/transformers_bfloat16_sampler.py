"""transformers' `generate` with the weights in bfloat16."""

import functools

import torch

from benchmarks.peers import transformers_sampler
from benchmarks.worker import serve

if __name__ == "__main__":
    serve(functools.partial(transformers_sampler.setup, dtype=torch.bfloat16))
