r"""SmolLM2-135M-Instruct prefers short right sums over wrong ones.

Commands: jaxrl-llm pairs configs/quickstart.py --out runs/pairs.jsonl --samples 32 --pairs 8 \
              --temperature 0.7
          jaxrl-llm train configs/preferences.py
Hardware: two CPU cores, 10 GB of memory, 4 GB of disk; the model, 98 MB, is downloaded once.
Method: DPO with the likelihood of the preferred answer (RPO), on pairs of the model's answers to
the sums of configs/quickstart.py: the shortest right one over wrong ones. The first command samples
and grades them; the sums that the quickstart holds out are not among them. A fifth of the questions
is held out again.
Expected: over 0.9 of the held-out pairs in the right order, and greedy accuracy up by 0.3, within
ten minutes for both commands (`python -m benchmarks.preferences`; docs/preferences.md).

Other losses on the same file: jaxrl-llm train configs/preferences.py:dpo, and :simpo, :kto, :sppo,
:ipo. They differ in the recipe alone, so any preset does as well: --recipe orpo.
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

config = rpo = TrainConfig(
    model="smollm2-135m-instruct",
    data=DataConfig(prompts="runs/pairs.jsonl", held_out=0.2),
    reward=jr.rewards.last_integer,  # of the evaluation; the data have what is preferred
    # DPO alone may make the preferred answers less likely as well, and its greedy ones gain less.
    recipe=jr.recipes.dpo(likelihood=1.0),
    sampling=SamplingConfig(group_size=8, max_new_tokens=16),
    optimizer=OptimizerConfig(learning_rate=2e-5, b2=0.99, decay_steps=45),
    checkpoint=CheckpointConfig(every=0),
    steps=45,
    prompts_per_step=16,
    remat="none",
    run_dir="runs/preferences",
)
dpo = dataclasses.replace(config, recipe="dpo", run_dir="runs/preferences_dpo")
simpo = dataclasses.replace(config, recipe="simpo", run_dir="runs/preferences_simpo")
# Both sides of a pair, each by itself.
kto = dataclasses.replace(config, recipe="kto", run_dir="runs/preferences_kto")
# One iteration of SPPO: the file is what the policy sampled, and a verifier's verdict is a win.
sppo = dataclasses.replace(
    config,
    recipe=jr.recipes.pairwise(jr.bind(jr.preferences.sppo, beta=0.1), paper="arXiv:2405.00675"),
    run_dir="runs/preferences_sppo",
)
ipo = dataclasses.replace(config, recipe="ipo", run_dir="runs/preferences_ipo")
