"""SmolLM2-135M-Instruct prefers short right sums over wrong ones.

Commands: jaxrl-llm pairs configs/quickstart.py --out runs/pairs.jsonl --pairs 4
          jaxrl-llm train configs/preferences.py
Hardware: two CPU cores, 10 GB of memory, 4 GB of disk; the model, 98 MB, is downloaded once.
Method: DPO on pairs of the model's answers to the sums of configs/quickstart.py, the shortest
right one over wrong ones. The first command samples and grades them before the training; the sums
that the quickstart holds out are not among them. A fifth of the questions is held out again.
Goal: accuracy on held-out pairs over 0.9, and of greedy answers up by at least 0.15, within ten
minutes of both commands. It is not reached yet: 40 steps on 274 pairs order 0.72 of those held out,
and sampled answers gain 0.26 while greedy ones do not.

Other losses on the same file: jaxrl-llm train configs/preferences.py:simpo, and :kto, :sppo, :ipo.
They differ in the recipe alone, so any preset does as well: --recipe orpo.
"""

import dataclasses

import jaxrl_llm as jr
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
)

config = dpo = TrainConfig(
    model="smollm2-135m-instruct",
    data=DataConfig(prompts="runs/pairs.jsonl", held_out=0.2),
    reward=jr.rewards.last_integer,  # of the evaluation; the data have what is preferred
    recipe="dpo",
    sampling=SamplingConfig(group_size=8, max_new_tokens=16),
    optimizer=OptimizerConfig(learning_rate=1e-5, b2=0.99, decay_steps=60),
    checkpoint=CheckpointConfig(every=0),
    steps=60,
    prompts_per_step=16,
    remat="none",
    run_dir="runs/preferences",
)
simpo = dataclasses.replace(dpo, recipe="simpo", run_dir="runs/preferences_simpo")
# Both sides of a pair, each by itself.
kto = dataclasses.replace(dpo, recipe="kto", run_dir="runs/preferences_kto")
# One iteration of SPPO: the file is what the policy sampled, and a verifier's verdict is a win.
sppo = dataclasses.replace(
    dpo,
    recipe=jr.recipes.pairwise(jr.bind(jr.preferences.sppo, beta=0.1), paper="arXiv:2405.00675"),
    run_dir="runs/preferences_sppo",
)
ipo = dataclasses.replace(dpo, recipe="ipo", run_dir="runs/preferences_ipo")
