"""What each preset asks of a batch and of a run, and the options that it refuses."""

import contextlib
import inspect
import re
import types
import typing

import pytest
from bad_calls import bad_calls, raises
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import PRESETS, catalog

CORRECTION = jr.corrections.rollout_correction

# The masks of a likelihood.
DRAWN = "masked masked_prompt noise written"
# The terms of each draw, where several passes over a batch have masks of their own.
OF_PASSES = "old_draw_logp ref_draw_logp"
# What recipes require beyond rewards, tokens and masks, and the presets that do.
REQUIRED = {
    "behavior_logp": "dots dppo_kl dppo_tv fading_replay llm_replay minpro rollout_replay "
    "sppo ssb topr vespo",
    "budgets": "hbpo",
    "embeddings": "srpo_vla",
    "entropy": "mopps",
    "flawed": "fapo",
    "hint_mask": "scope",
    "imitated": "cog_rethinker",
    "node_ids": "branch_grpo",
    "old_entropy": "d3s hapo",
    "old_logp": "clip_cov kl_cov xrpo",
    "old_mean_log_probs": "rover",
    "prior": "v05_baseline",
    "prompt_ids": "dcpo_dynamic_clip",
    "ref_logp": "accelerated_po apo discopop dpo exo_pair fspo grpo ipo latr ld_dpo "
    "lipo_lambda llds mc_grpo mua_rl nca online_dpo p3o plackett_luce rollout_gdro spark "
    "spo_degree ttrl_majority",
    "reward_components": "gdpo",
    "similarity": "ps_grpo",
    "steered": "chord",
    "step_effects": "capo",
    f"{DRAWN}": "elbo_grpo spg wd1",
    "answer_ids ref_logp": "polychromic",
    "behavior_logp old_logp": "areal icepop m2po rollout_correction sol_rl",
    "behavior_logp ref_logp": "brain inpo remix",
    "earlier_logp ref_logp": "mnpo",
    "entropy steered": "luffy_shaping",
    "latents node_ids": "branch_grpo_flow",
    "latents ref_step_mean": "flow_grpo",
    "old_entropy old_logp": "ulorl",
    "old_logp ref_logp": "ace aot bco mpo nash_md",
    "old_logp sum_pi_sq": "otb",
    "old_logp teacher_token_logp": "iw_opd on_policy_distillation",
    "old_values values": "ppo vapo vc_ppo",
    "prompt_ids ref_logp": "prompt_gdro",
    "ref_logp reward_components": "vlm_spo",
    "ref_logp steered": "icpo seppo spin xpo",
    "turn_ids turn_where": "eapo",
    f"{DRAWN} old_draw_logp": "bgpo gdpo_elbo",
    "answer_ids old_entropy ref_logp": "ettrl",
    "behavior_logp grad_sq_norms old_logp": "vcpo",
    "behavior_logp old_logp ref_logp": "brorl",
    "cold_logp hot_logp old_logp": "dcpo_distribution",
    "embeddings prompt_ids ref_logp": "lspo",
    "entropy hidden_rank ref_logp": "verl_erank",
    "greedy_rewards old_logp ref_logp": "remax",
    "has_teacher old_logp teacher_token_logp": "rlsd",
    "has_teacher teacher_logp top_ids": "sdpo",
    "hint_mask old_entropy steered": "adhint",
    "kl_logp kl_ref_logp ref_logp": "kto",
    "node_ids old_logp ref_logp": "spo_tree",
    "node_ids turn_ids turn_where": "portool",
    "old_logp prompt_ids ref_logp": "mssr",
    "old_logp ref_logp sum_pi_sq": "wpo",
    "old_logp span_ids teacher_span_logp": "span_distillation",
    "prefix_values segment_ids segment_where": "pav",
    "ref_logp turn_ids turn_where": "seeupo",
    "turn_ids turn_rewards turn_where": "mc_return process_reward_model trloo",
    f"{DRAWN} {OF_PASSES} ref_logp": "coupled_grpo diffu_grpo espo",
    "anchor_velocity forward_noise latents ref_velocity": "diffusion_nft sol_rl_flow",
    "answer_logp ref_logp turn_ids turn_where": "igpo",
    "behavior_logp old_logp old_values values": "vtrace",
    "behavior_logp old_logp teacher_token_logp texts": "minillm",
    "entropy old_entropy ref_logp turn_ids": "epo",
    "entropy old_logp prm_logp ref_logp": "prime",
    "entropy old_logp roles steered": "ampo",
    "greedy_rewards old_logp ref_logp satisfied": "cgpo",
    "has_teacher teacher_entropy teacher_logp top_ids": "srpo",
    "latents old_step_mean ref_velocity written": "unigrpo",
    "old_logp old_values ref_logp values": "adaptive_kl pf_ppo ppo_max",
    "old_logp prm_logp turn_ids turn_where": "oprl",
    "policy_shift prefix_values prompt_ids segment_where": "spo_tracker",
    "prefix_values ref_logp segment_ids segment_where": "vineppo",
    "step_rewards turn_ids turn_rewards turn_where": "gated_reward",
    "test_passes test_where turn_ids turn_where": "verpo",
    f"{DRAWN} hint_mask old_entropy ref_logp": "igpo_inpainting",
    "action_ids next_state_ids state_ids turn_ids turn_where": "salt",
    "behavior_logp old_entropy old_logp ref_logp turn_ids": "dart",
    "current_version old_values unfinished values versions": "t_ppo",
    "expert_match ref_logp turn_ids turn_rewards turn_where": "ui_s1",
    "old_logp prefix_values ref_logp segment_ids segment_where": "spo_chain",
    "old_values turn_ids turn_rewards turn_where values": "gae_token gae_turn pdppo",
    "ref_logp state_ids turn_ids turn_rewards turn_where": "gigpo hgpo",
    "entropy old_entropy old_logp old_values ref_logp values": "safe",
    "entropy old_values turn_ids turn_rewards turn_where values": "poad",
    "old_logp ref_logp turn_ids turn_rewards turn_where won": "practitioner_recipe",
    "old_values ref_logp subgoal_ids switches token_roles truncated "
    "turn_ids turn_rewards turn_where values": "hiper_hae",
}
# Those that come with the data, the sampler or the rewards; the train step computes the others.
WITH_THE_BATCH = """
    answer_ids behavior_logp budgets current_version embeddings flawed greedy_rewards
    has_teacher hint_mask imitated
    node_ids prefix_values prior prompt_ids reward_components roles satisfied
    segment_ids segment_where similarity span_ids steered teacher_span_logp test_passes test_where
    turn_ids turn_rewards turn_where unfinished versions
    action_ids expert_match next_state_ids state_ids step_rewards won
    subgoal_ids switches texts token_roles truncated
    masked masked_prompt noise written latents forward_noise
"""


@for_each("name", PRESETS)
def test_what_a_preset_requires(name):
    recipe = catalog.preset(name, length=8, num_prompts=4)
    found = [each for each, names in REQUIRED.items() if name in names.split()]
    required = set(" ".join(found).split())
    assert len(found) <= 1
    assert recipe.required_fields == required
    assert recipe.required_fields - recipe.step_fields == required & set(WITH_THE_BATCH.split())


@for_each(
    ("trait", "value", "names"),
    [
        (
            "group_relative",
            False,
            "adaptive_kl bco cgpo dft gae_token gae_turn gkd hiper_hae iw_opd kto minillm mssr "
            "on_policy_distillation otr pav pdppo pf_ppo poad ppo ppo_max process_reward_model "
            "reinforce_pp remax safe sdpo sft span_distillation spo_chain spo_tracker t_ppo "
            "topr v05_baseline vapo vc_ppo vineppo vtrace",
        ),
        (
            "uses_ratio",
            False,
            "asymre cgpo dft gpg nash_md opo otr prefix_rl remax rloo sft spg vcpo vtrace wd1",
        ),
        ("draws", True, "clip_cov icpo lspo mc_grpo"),
    ],
)
def test_presets_without_a_group_or_a_ratio_and_those_that_draw(trait, value, names):
    made = [catalog.preset(name, length=8, num_prompts=4) for name in PRESETS]
    assert [r.name for r in made if getattr(r, trait) is value] == names.split()


# Calls that are refused, by the words of the reason; the last option is the one that it names.
REFUSED = {
    "{name}: {option} must be one of": """
        salt(base='ppo'); mc_grpo(scale='mean'); gdpo(batch_norm='group'); maxrl(scale='std');
        topr(level='batch'); mssr(num_prompts=1, entropy='both'); oprl(base='mean');
        prime(reference='old'); trloo(singleton='keep')
    """,
    "{option} must not be negative": """
        gigpo(omega=-1.0); reward_model(margin=-1.0); reinforce_pp(kl_coef=-0.1); otb(eps_low=-0.1);
        vapo(imitation_coef=-0.1); cog_rethinker(imitation=-0.1); jspo(eps_low=-0.1);
        drpo_len(length=8, beta=-1.0); fapo(lam=-1.0); dars(eps_low=-0.1); grpo(kl_coef=-1.0);
        dr_grpo(length=8, eps_low=-0.1); gspo(eps_high=-1.0); dcpo_distribution(max_gap=-1.0);
        ulorl(sigma=-1.0); srpo(beta=-1.0); safe(scale=-1.0)
    """,
    "{name}: {option} must not be negative": """
        remax(kl_coef=-1.0); rloo(kl_coef=-1.0); ppo(kl_coef=-1.0); mc_grpo(kl_coef=-1.0);
        brorl(kl_coef=-1.0); luspo(eps_low=-0.1); gmpo(eps_high=-0.1); dppo_tv(delta_low=-1.0);
        kl_cov(coef=-1.0); gbpo(eps_low=-0.1); ace(alpha=-1.0); mssr(num_prompts=1, kl_coef=-1.0);
        prime(alpha=-1.0)
    """,
    r"{option} must be in \[0, 1\]": """
        reinforce_pp(gamma=1.5); ppo_max(lam=2.0); d3s(rollouts=(0.5, 1.5)); portool(gamma=2.0);
        trloo(gamma=2.0); rlsd(lam=1.5); chord(phi=False, valley=2.0)
    """,
    "{option} must be one of": """
        reinforce_pp_baseline(norm='tokens'); gpg(mode='all'); v05_baseline(var='none');
        grpo_passk(scale='batch'); d3s(scope='prompt'); rollout_correction(level='batch');
        llds(level='turn')
    """,
    "{name}: {option} must be above 0": """
        ppo_max(value_eps=0.0); grpo(scale_eps=-1.0); mc_grpo(scale_eps=0.0); gvpo(beta=0.0);
        real(tau=0.0); fipo(half_life=0.0); dppo_kl(w_max=0.0); remix(reset_at=0); poad(max_kl=0.0)
    """,
    "{option} must be at least 1": """
        passk_training(k=0); pkpo(k=0); dcpo_dynamic_clip(num_prompts=4, r_max=0.5)
    """,
    "{option} must be above 0": """
        drpo_len(length=0); drpo_len(length=8, tau=0.0); d3s(steps=0); capo(tau_h=0.0);
        brorl(reset_every=0); rollout_correction(cap=0.0); on_policy_distillation(coef=0.0);
        iw_opd(gamma=0.0); span_distillation(coef=0.0); vespo(lambda_pos=0.0); vcpo(rho_base=0.0);
        dr_grpo(length=0); cispo(length=0); sapo(tau_pos=0.0); dppo_kl(length=0); epo(steps=0);
        srpo_vla(radius=-1.0); rover(rho=0.0); otr(tau=0.0); otr(samples=0); ampo(length=0);
        icpo(anneal=0); safe(alpha=0.0); adaptive_kl(target=0.0)
    """,
    "must have 1 between them": """
        icepop(lower=1.5); areal(cap=0.5)
    """,
    "{name}: {option} has no effect": """
        fipo(overlong_factor=2.0); hapo(overlong_factor=2.0)
    """,
    "{name}: {option} has no effect without": """
        cispo(buffer_share=0.5); fapo(buffer_share=0.2)
    """,
    r"{option} must be in \(0, 1\]": """
        cispo(length=8, buffer_share=0.0); hapo(length=8, buffer_share=2.0); spo_tree(max_prob=1.5);
        dapo(length=8, buffer_share=1.5); ulorl(tau=0.0)
    """,
    r"rate must be in \[0, 1\]": """
        sdpo(teacher_rate=2.0); srpo(teacher_rate=-1.0)
    """,
}


@for_each(
    "words, call",
    [(words, x.strip()) for words, calls in REFUSED.items() for x in calls.split(";")],
)
def test_an_option_out_of_its_range_is_refused(words, call):
    name, option = call.partition("(")[0], re.findall(r"(\w+)=", call)[-1]
    with pytest.raises(ValueError, match=words.format(name=name, option=option)):
        eval(f"jr.recipes.{call}")


BAD = r"""
ValueError:
eapo(multiple=0)  # multiple must be an integer above 0
practitioner_recipe(lam=0.9)  # lam=0.9 has no effect
practitioner_recipe(dense=False, max_total=2.0)  # max_total=2.0 has no effect without dense
reward_model_listwise(size=1)  # !.*size must be at least 2
process_reward_model(separator="")  # !.*separator must not be empty
ppo(kl_estimator="k3")  # kl_estimator='k3' has no effect with kl_coef
grpo(kl_coef=0.0, kl_estimator="k2")  # kl_estimator has no effect with kl_coef=0
vapo(imitation_coef=0.0, above=0.5)  # above=0.5 has no effect with imitation_coef 0
ppo_max(critic_warmup=-1)  # critic_warmup must not be neg
mc_grpo(scale="none", scale_eps=0.1)  # scale_eps=0.1 has no effect
ettrl(bound=0.1)  # bound=0.1 has no effect with reshape=True
v0_budget(prior="data", retain=0.5)  # !.*retain=0.5 has no effect
ulorl(segments=None, oversample=5.0)  # oversample=5.0 has no effect
ulorl(old="pois")  # old must be one of 'recomputed', 'sampled'
capo(hidden_sq=30.0)  # !.*no effect with direction "adam"
capo(direction="ascent")  # !.*direction "ascent" takes learning_rate
rollout_correction(keep_denominator=True)  # !.*has no effect
asymre(shift=float("nan"))  # shift must be a number
gkd(top=1, rest="renormalize")  # with top=1, rest='renormalize'
gkd(top=4, rest="none")  # rest must be one of 'tail', 'renorm
gkd(column="answer")  # column has no effect
minillm(coef=0.0, single_step=0.0)  # nothing learns from
minillm(text_coef=0.0, text_share=0.25)  # !.*text_share and column have no effect with text_coef 0
ppo_max(text_share=0.25)  # text_share and column have no effect with text_coef 0
ppo_max(text_coef=1.0, text_share=1.0)  # text_share must be
ppo_max(text_coef=float("nan"))  # !.*text_coef must not be negative; got nan
fipo(w_min=1.1)  # w_min and w_max must have 1 between them
fipo(dual_clip=None)  # max_clipped has no effect without
fipo(safe_ratio=0.5)  # safe_ratio must be above 1
topr(baseline=float("nan"))  # baseline must be
vcpo(norms="last")  # norms must be one of 'exact', 'length'
cispo(w_min=2.0, w_max=1.0)  # !.*w_min
dispo(eps_pos=(0.1, -0.1))  # eps_pos
minpro(w_min=6.0)  # w_min must not be above w_max
dcpo_distribution(hot=0.5)  # cold must be below hot
arpo(credit="mean")  # credit must be one of 'soft', 'hard'
spo_tree(branches=(4, 5))  # !.*one number for each of 3 levels
dapo(metric="accuracy", dynamic_sampling=False)  # !.*'accuracy' has no effect without dynamic_samp
dapo(max_rounds=2, dynamic_sampling=False)  # !.*max_rounds=2 has no effect without dynamic_samp
dapo(buffer_share=0.5)  # buffer_share has no effect without len
dapo(overlong_factor=2.0)  # overlong_factor has no effect without len
dapo(length=float("inf"))  # length must be finite; got inf
dapo(length=8, overlong_factor=-1.0)  # overlong_factor must not be negative; got -1
sage(light=True, attempts=2)  # !.*attempts=2 has no effect with light=True
chord(valley=0.5)  # !.*peak 0.1 has no effect without warmup and decay
aot(excess=2.0)  # excess must be in
mnpo(weights=(1.0, 0.0))  # !.*weights must be above 0; got 0
reward_model(margin=0.5, margins=True)  # !.*margin has no effect where the data have margins
unigrpo(steps=None, flow_coef=0.5)  # !.*text_eps and flow_coef have no effect without steps
coupled_grpo(sync_every=0)  # sync_every must be above 0
elbo_grpo(masks="all")  # !.*masks
gae_turn(value_eps=0.0)  # value_eps must be above 0
hiper_hae(value_eps=0.0)  # value_eps must be above 0
pairwise(jr.bind(jr.preferences.aot, beta=0.3))  # aot ranks all pairs .*; use recipes.aot
pairwise(jr.preferences.aot_unpaired, offline=False)  # aot_unpaired ranks all pairs of a batch
vespo().replace(correction=CORRECTION)  # !.*count the same mismatch twice
remax().check_passes(2, 1)  # !.*surrogate without a ratio
opo().check_group_size(1)  # !.*compares the rollouts of one prompt
ulorl().replace(surrogate=jr.surrogates.gspo, weights=jr.aggregate.sequence_mean)  # !.*average away
TypeError:
dr_grpo()  # !.*length
drpo_len()  # !.*length
"""


@for_each("error, call, message", bad_calls(BAD))
def test_what_is_refused(error, call, message):
    raises(error, call, message, vars(jr.recipes) | {"jr": jr, "CORRECTION": CORRECTION})


# What an option needs beside it.
BESIDE = {
    ("branch_grpo", "interval"): {"prune": "depth"},
    ("branch_grpo", "stop"): {"prune": "depth", "interval": 2},
    ("capo", "direction"): {"learning_rate": 0.1},
    ("capo", "hidden_sq"): {"direction": "ascent", "learning_rate": 0.1},
    ("cgpo", "beta"): {"optimizer": "codpo"},
    ("cgpo", "likelihood"): {"optimizer": "codpo"},
    ("cgpo", "column"): {"tasks": {"math": jr.recipes.CgpoTask()}},
    ("chord", "valley"): {"decay": 10},
    ("cispo", "buffer_share"): {"length": 8},
    ("cispo", "overlong_factor"): {"length": 8},
    ("dapo", "buffer_share"): {"length": 8},
    ("dapo", "overlong_factor"): {"length": 8},
    ("ettrl", "bound"): {"reshape": False},
    ("grpo", "kl_estimator"): {"kl_coef": 0.1},
    ("fapo", "buffer_share"): {"length": 8},
    ("fapo", "overlong_factor"): {"length": 8},
    ("fipo", "buffer_share"): {"length": 8},
    ("fipo", "overlong_factor"): {"length": 8},
    ("gkd", "rest"): {"top": 4},
    ("hapo", "buffer_share"): {"length": 8},
    ("hapo", "overlong_factor"): {"length": 8},
    ("ppo_max", "text_share"): {"text_coef": 27.8},
    ("ppo_max", "column"): {"text_coef": 27.8},
    ("ppo", "kl_estimator"): {"kl_coef": 0.1},
    ("practitioner_recipe", "lam"): {"estimator": "ppo"},
    ("practitioner_recipe", "value_eps"): {"estimator": "ppo"},
    ("rollout_correction", "keep_denominator"): {"reject": (jr.corrections.veto_mask,)},
    "spo_tracker": {"length": 8},
    ("spo_tracker", "rho"): {"length": None, "rho": 0.9},
}
# Its transform is a function made anew, which prints by its name alone.
UNPRINTED = {("verl_erank", name) for name in ("gain", "weight", "cap", "rate")}
NO_DEFAULT = inspect.Parameter.empty
SIMPLE = {int: (2, 5), float: (0.5, 2.0, 3.0, 0.05), bool: (True,), str: ("other",)}


def other_values(value, hint) -> list:
    """Other values of an option, of which its checks may refuse some; none for a function."""
    return [x for x in _values_like(value, hint) if x != value]


def _values_like(value, hint) -> list:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    choices = [
        x
        for kind in kinds
        if typing.get_origin(kind) is typing.Literal
        for x in typing.get_args(kind)
    ]
    if choices:
        return choices
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, max(value - 1, 0)]
    if isinstance(value, float):
        return [0.5 * value, 2.0 * value, 0.5 * (1.0 + value), 0.1]
    if isinstance(value, str):
        return [f"{value} too"]
    if isinstance(value, tuple) and value and all(type(x) in (int, float) for x in value):
        return [tuple(type(x)(0.5 * x) for x in value), tuple(x + 1 for x in value)]
    return [x for kind in kinds for x in SIMPLE.get(kind, ())] if value is None else []


@pytest.fixture(scope="module")
def unchecked():
    """Presets without the dry run that each of them ends with: of these here are a thousand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl_llm.recipes.presets.base.validate", lambda recipe: recipe)
        yield


def slots_of(recipe) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(recipe))


@for_each("name", PRESETS)
def test_every_option_changes_the_recipe(name, unchecked):
    make = PRESETS[name]
    options, hints = inspect.signature(make).parameters, typing.get_type_hints(make)
    sizes = {"length": 8, "num_prompts": 4}
    needed = {k: v for k, v in sizes.items() if k in options and options[k].default is NO_DEFAULT}
    twice: dict = {}
    for option, parameter in options.items():
        if parameter.default is NO_DEFAULT or (name, option) in UNPRINTED:
            continue
        beside = needed | BESIDE.get(name, {}) | BESIDE.get((name, option), {})
        if (key := repr(beside)) not in twice:
            twice[key] = make(**beside), make(**beside)
        default, again = twice[key]
        values = other_values(beside.get(option, parameter.default), hints[option])
        changed = []
        for value in values:
            with contextlib.suppress(TypeError, ValueError):
                other = make(**{**beside, option: value})
                # Functions made anew are never equal; then the text must differ.
                a, b = (other, default) if default == again else map(slots_of, (other, default))
                changed.append(a != b)
            if any(changed):
                break
        # A name may be any text; of a choice that no type names, none is tried.
        assert any(changed) or not changed and all(isinstance(x, str) for x in values), option
