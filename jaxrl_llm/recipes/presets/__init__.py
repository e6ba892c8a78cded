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

from jaxrl_llm.recipes.presets.agents import arpo, m_grpo, oprl, portool, seeupo
from jaxrl_llm.recipes.presets.allocators import rollout_gdro, v0_budget, v05_baseline, xrpo
from jaxrl_llm.recipes.presets.clipping import (
    cispo,
    clip_cov,
    dispo,
    dppo_kl,
    dppo_tv,
    drpo_len,
    gbpo,
    gmpo,
    gspo,
    gvpo,
    hapo,
    kl_cov,
    luspo,
    minpro,
    rover,
    sapo,
)
from jaxrl_llm.recipes.presets.constrained import cgpo
from jaxrl_llm.recipes.presets.critics import (
    adaptive_kl,
    ppo,
    ppo_max,
    safe,
    t_ppo,
    vapo,
    vc_ppo,
    vtrace,
)
from jaxrl_llm.recipes.presets.curation import (
    capo,
    d3s,
    dars,
    fapo,
    hbpo,
    llds,
    prompt_gdro,
    ps_grpo,
)
from jaxrl_llm.recipes.presets.curricula import insight, learnability, mopps, vade
from jaxrl_llm.recipes.presets.diffusion import (
    bgpo,
    coupled_grpo,
    diffu_grpo,
    elbo_grpo,
    espo,
    gdpo_elbo,
    igpo_inpainting,
    spg,
    wd1,
)
from jaxrl_llm.recipes.presets.distillation import (
    gkd,
    iw_opd,
    minillm,
    on_policy_distillation,
    span_distillation,
)
from jaxrl_llm.recipes.presets.experiences import training_free_grpo
from jaxrl_llm.recipes.presets.exploration import epo, verl_erank
from jaxrl_llm.recipes.presets.flows import (
    branch_grpo_flow,
    diffusion_nft,
    flow_grpo,
    sol_rl_flow,
    unigrpo,
)
from jaxrl_llm.recipes.presets.grpo_family import (
    ace,
    dapo,
    dr_grpo,
    gdpo,
    grpo,
    jspo,
    mc_grpo,
    opo,
    otb,
    ttrl_majority,
)
from jaxrl_llm.recipes.presets.guided import (
    adhint,
    cog_rethinker,
    ghpo,
    nurl,
    prefix_rl,
    sage,
    scaf_grpo,
    scope,
)
from jaxrl_llm.recipes.presets.off_policy import (
    april,
    areal,
    asymre,
    brorl,
    icepop,
    m2po,
    remix,
    rollout_correction,
    topr,
    ulorl,
    vcpo,
    vespo,
)
from jaxrl_llm.recipes.presets.passk import grpo_passk, maxrl, passk_training, pkpo
from jaxrl_llm.recipes.presets.preferences import (
    aot,
    apo,
    bco,
    brain,
    cpo,
    discopop,
    dpo,
    exo_pair,
    fspo,
    ipo,
    kto,
    ld_dpo,
    lipo_lambda,
    mpo,
    nca,
    online_dpo,
    orpo,
    p3o,
    plackett_luce,
    simpo,
    slic,
    spo_degree,
    tpo,
    wpo,
)
from jaxrl_llm.recipes.presets.prefixes import (
    pav,
    spo_chain,
    vineppo,
)
from jaxrl_llm.recipes.presets.reinforce_family import (
    gpg,
    prime,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    trloo,
    verpo,
)
from jaxrl_llm.recipes.presets.replayed import (
    dart,
    dots,
    fading_replay,
    grpo_roc,
    llm_replay,
    masa,
    pf_ppo,
    rollout_replay,
    sapo_swarm,
    sol_rl,
    spark,
    ssb,
)
from jaxrl_llm.recipes.presets.reward_models import (
    process_reward_model,
    reward_model,
    reward_model_listwise,
)
from jaxrl_llm.recipes.presets.self_play import (
    accelerated_po,
    inpo,
    lspo,
    mnpo,
    nash_md,
    seppo,
    spin,
    sppo,
    vlm_spo,
    xpo,
)
from jaxrl_llm.recipes.presets.sets import polychromic, srpo_vla
from jaxrl_llm.recipes.presets.teachers import (
    ampo,
    chord,
    dft,
    icpo,
    luffy_shaping,
    otr,
    rlsd,
    sdpo,
    sft,
    srpo,
)
from jaxrl_llm.recipes.presets.tracked import (
    dcpo_distribution,
    dcpo_dynamic_clip,
    mssr,
    spo_tracker,
)
from jaxrl_llm.recipes.presets.trees import arrol, branch_grpo, ettrl, latr, spo_tree
from jaxrl_llm.recipes.presets.turn_critics import (
    gae_token,
    gae_turn,
    hiper_hae,
    pdppo,
    poad,
)
from jaxrl_llm.recipes.presets.turns import (
    eapo,
    gated_reward,
    gigpo,
    hgpo,
    igpo,
    mc_return,
    mua_rl,
    practitioner_recipe,
    salt,
    ui_s1,
)

__all__ = [
    "accelerated_po",
    "ace",
    "adaptive_kl",
    "adhint",
    "ampo",
    "aot",
    "apo",
    "april",
    "areal",
    "arpo",
    "arrol",
    "asymre",
    "bco",
    "bgpo",
    "brain",
    "branch_grpo",
    "branch_grpo_flow",
    "brorl",
    "capo",
    "cgpo",
    "chord",
    "cispo",
    "clip_cov",
    "cog_rethinker",
    "coupled_grpo",
    "cpo",
    "d3s",
    "dapo",
    "dars",
    "dart",
    "dcpo_distribution",
    "dcpo_dynamic_clip",
    "dft",
    "diffu_grpo",
    "diffusion_nft",
    "discopop",
    "dispo",
    "dots",
    "dpo",
    "dppo_kl",
    "dppo_tv",
    "dr_grpo",
    "drpo_len",
    "eapo",
    "elbo_grpo",
    "epo",
    "espo",
    "ettrl",
    "exo_pair",
    "fading_replay",
    "fapo",
    "flow_grpo",
    "fspo",
    "gae_token",
    "gae_turn",
    "gated_reward",
    "gbpo",
    "gdpo",
    "gdpo_elbo",
    "ghpo",
    "gigpo",
    "gkd",
    "gmpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_roc",
    "gspo",
    "gvpo",
    "hapo",
    "hbpo",
    "hgpo",
    "hiper_hae",
    "icepop",
    "icpo",
    "igpo",
    "igpo_inpainting",
    "inpo",
    "mnpo",
    "insight",
    "ipo",
    "iw_opd",
    "jspo",
    "kl_cov",
    "kto",
    "latr",
    "ld_dpo",
    "learnability",
    "lipo_lambda",
    "llds",
    "llm_replay",
    "lspo",
    "luffy_shaping",
    "luspo",
    "m2po",
    "m_grpo",
    "masa",
    "maxrl",
    "mc_grpo",
    "mc_return",
    "minillm",
    "minpro",
    "mopps",
    "mpo",
    "mssr",
    "mua_rl",
    "nash_md",
    "nca",
    "nurl",
    "on_policy_distillation",
    "online_dpo",
    "opo",
    "oprl",
    "orpo",
    "otb",
    "otr",
    "p3o",
    "passk_training",
    "pav",
    "pdppo",
    "pf_ppo",
    "pkpo",
    "plackett_luce",
    "poad",
    "polychromic",
    "portool",
    "ppo",
    "ppo_max",
    "practitioner_recipe",
    "prefix_rl",
    "prime",
    "process_reward_model",
    "prompt_gdro",
    "ps_grpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "remix",
    "reward_model",
    "reward_model_listwise",
    "rloo",
    "rlsd",
    "rollout_correction",
    "rollout_gdro",
    "rollout_replay",
    "rover",
    "safe",
    "sage",
    "salt",
    "sapo",
    "sapo_swarm",
    "scaf_grpo",
    "scope",
    "sdpo",
    "seeupo",
    "seppo",
    "sft",
    "simpo",
    "slic",
    "spo_degree",
    "sol_rl",
    "sol_rl_flow",
    "span_distillation",
    "spark",
    "spg",
    "spin",
    "spo_chain",
    "spo_tracker",
    "spo_tree",
    "sppo",
    "srpo",
    "srpo_vla",
    "ssb",
    "t_ppo",
    "topr",
    "tpo",
    "training_free_grpo",
    "trloo",
    "ttrl_majority",
    "ui_s1",
    "ulorl",
    "unigrpo",
    "v05_baseline",
    "v0_budget",
    "vade",
    "vapo",
    "vc_ppo",
    "vcpo",
    "verl_erank",
    "verpo",
    "vespo",
    "vineppo",
    "vlm_spo",
    "vtrace",
    "wd1",
    "wpo",
    "xpo",
    "xrpo",
]
