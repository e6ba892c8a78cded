"""One preset per paper: a function of the method's options that returns a Recipe.

A preset's docstring describes how the method differs from GRPO without a KL term, which is:

    A = (r - mean_group r) / (std_group r + 1e-6)
    token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
    dual clip, if there is one, where A < 0:  token loss = min(token loss, -dual_clip A)
    loss = mean over tokens of token loss

Options that several presets share:

    eps_low: The ratio is clipped at ``1 - eps_low``.
    eps_high: The ratio is clipped at ``1 + eps_high``.
    dual_clip: Upper bound of the loss where A < 0, as a multiple of ``-A``; None for none.
    kl_coef: Weight of the KL to the reference model (k3), which is added to the token loss;
      0 disables both.
    entropy_coef: Weight of an entropy bonus; 0 disables it.
    length: The generation budget in tokens (the sampler's ``max_new_tokens``). A run by the
      preset's name sets it. In Python it is required, or None leaves out what needs it, since the
      width of a batch changes with its padding.
    buffer_share: Share of the budget, its last tokens, over which a penalty of long responses
      increases, in (0, 1]. Only with ``length``.
    overlong_factor: The largest penalty of a long response. Only with ``length``.
    dynamic_sampling: Whether each group of equal rewards is replaced by another, up to 10 times the
      batch (``curation.refill``); in a training loop of your own, the loop must do this.
    num_prompts: Number of prompts of the data set; the method remembers each.

Every preset raises ValueError if an option is unknown, out of its range or without effect.
``required_fields`` are the fields that a batch must hold; ``step_fields`` are those of them that
the train step computes. A recipe sets ``epochs`` and ``minibatches`` only if a paper or its code
states them. PAPER, NOTES and ABSTRACT name the source that we read if it was not released code.

Example:
  >>> import jaxrl_llm as jr
  >>> recipe = jr.recipes.fapo(eps_high=0.3)
  >>> recipe.surrogate
  ppo_clip(dual_clip=10.0, eps_high=0.3, eps_low=0.2)
  >>> sorted(recipe.required_fields - recipe.step_fields)
  ['flawed']
"""

import inspect

from jaxrl_llm.recipes.presets.agents import *
from jaxrl_llm.recipes.presets.allocators import *
from jaxrl_llm.recipes.presets.clipping import *
from jaxrl_llm.recipes.presets.constrained import *
from jaxrl_llm.recipes.presets.critics import *
from jaxrl_llm.recipes.presets.curation import *
from jaxrl_llm.recipes.presets.curricula import *
from jaxrl_llm.recipes.presets.diffusion import *
from jaxrl_llm.recipes.presets.distillation import *
from jaxrl_llm.recipes.presets.experiences import *
from jaxrl_llm.recipes.presets.exploration import *
from jaxrl_llm.recipes.presets.flows import *
from jaxrl_llm.recipes.presets.grpo_family import *
from jaxrl_llm.recipes.presets.guided import *
from jaxrl_llm.recipes.presets.off_policy import *
from jaxrl_llm.recipes.presets.passk import *
from jaxrl_llm.recipes.presets.preferences import *
from jaxrl_llm.recipes.presets.prefixes import *
from jaxrl_llm.recipes.presets.reinforce_family import *
from jaxrl_llm.recipes.presets.replayed import *
from jaxrl_llm.recipes.presets.reward_models import *
from jaxrl_llm.recipes.presets.self_play import *
from jaxrl_llm.recipes.presets.sets import *
from jaxrl_llm.recipes.presets.teachers import *
from jaxrl_llm.recipes.presets.tracked import *
from jaxrl_llm.recipes.presets.trees import *
from jaxrl_llm.recipes.presets.turn_critics import *
from jaxrl_llm.recipes.presets.turns import *

__all__ = sorted(
    name for name, value in globals().items() if name[0] != "_" and not inspect.ismodule(value)
)
