"""What `benchmarks.estimators` times: every estimator, with the arrays that it names."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jaxrl_llm as jr

A, S, C, R, W = jr.advantages, jr.surrogates, jr.corrections, jr.regularizers, jr.aggregate


@dataclasses.dataclass(frozen=True)
class Case:
    """A function and where its arguments come from.

    Attributes:
      name: Of the row.
      function: Options bound.
      names: Arrays under other names than the parameter, and optional parameters that are given.
      differentiate: Whether the gradient in ``logp`` is timed too.
    """

    name: str
    function: Callable
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    differentiate: bool = False

    def call(self, inputs: Mapping[str, Any]):
        """The function of its inputs."""
        return self.function(**inputs)


def inputs_of(case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays a case needs: what its function requires, and what the case names."""
    parameters = inspect.signature(case.function).parameters.values()
    required = {p.name: p.name for p in parameters if p.default is p.empty}
    return {name: arrays[source] for name, source in {**required, **case.names}.items()}


def _advantage(name: str, function: Callable, **names: str) -> Case:
    known = inspect.signature(function).parameters
    return Case(name, function, {**({"where": "where"} if "where" in known else {}), **names})


def _surrogate(name: str, function: Callable, **names: str) -> Case:
    return Case(name, function, names, differentiate=True)


_FREE = {"old_logp": None, "ref_logp": None}

ADVANTAGES = (
    _advantage("grpo", A.grpo),
    _advantage("grpo, batch scale", jr.bind(A.grpo, scale="batch")),
    _advantage("dr_grpo", A.dr_grpo),
    _advantage("asymre", A.asymre),
    _advantage("rloo", A.rloo),
    _advantage("remax", A.remax),
    _advantage("opo", A.opo),
    _advantage("gpg", A.gpg),
    _advantage("mc_grpo", A.mc_grpo),
    _advantage("gdpo", A.gdpo, rewards="columns"),
    _advantage("grpo_passk", A.grpo_passk),
    _advantage("passk_training", A.passk_training),
    _advantage("pkpo", A.pkpo),
    _advantage("maxrl", A.maxrl),
    _advantage("maclaurin", jr.bind(A.maclaurin, order=8)),
    _advantage("v05_baseline", A.v05_baseline),
    _advantage("jspo", A.jspo),
    _advantage("hbpo", jr.bind(A.hbpo, max_length=4096)),
    _advantage("vcpo_advantage", jr.bind(A.vcpo_advantage, grad_sq_norms=None)),
    _advantage("informative_groups", jr.curation.informative_groups),
    _advantage("max_variance_subset", jr.bind(jr.curation.max_variance_subset, n=8), x="rewards"),
)

TERMS = (
    _surrogate("reinforce", jr.bind(S.reinforce)),
    _surrogate("ppo_clip", S.ppo_clip),
    _surrogate("ppo_clip, dual", jr.bind(S.ppo_clip, dual_clip=3.0)),
    _surrogate("dapo_clip", S.dapo_clip),
    _surrogate("gspo", S.gspo),
    _surrogate("gspo_token", S.gspo_token),
    _surrogate("gspo_turns", S.gspo_turns, turn_ids="turn_ids"),
    _surrogate("luspo", S.luspo),
    _surrogate("gmpo", S.gmpo),
    _surrogate("sapo", S.sapo),
    _surrogate("sapo_sequence", S.sapo_sequence),
    _surrogate("dppo_tv", S.dppo_tv),
    _surrogate("dppo_kl", S.dppo_kl),
    _surrogate("hapo", S.hapo, signal="entropy"),
    _surrogate("fipo", S.fipo),
    Case("fipo_weights", S.fipo_weights),
    _surrogate("cispo", S.cispo),
    _surrogate("dispo", S.dispo),
    _surrogate("topr", S.topr),
    _surrogate("minpro", S.minpro),
    _surrogate("clip_cov", S.clip_cov, selected="selected"),
    _surrogate("kl_cov", S.kl_cov, selected="selected"),
    _surrogate("gbpo", S.gbpo),
    _surrogate("decoupled_ppo", S.decoupled_ppo),
    _surrogate("mix_ppg", S.mix_ppg),
    _surrogate("vespo", S.vespo, behavior_logp="behavior_logp"),
    _surrogate("dcpo_dynamic_clip", S.dcpo_dynamic_clip),
    _surrogate("rover", S.rover),
    _surrogate("otr", S.otr),
    _surrogate("dft", S.dft),
    _surrogate("minillm", S.minillm),
    _surrogate("sdpo_sampled", S.sdpo_sampled, has_teacher="has_teacher"),
    _surrogate("luffy_shaping", S.luffy_shaping),
    _surrogate("chord", S.chord),
    _surrogate("ampo", S.ampo),
    _surrogate("icpo", S.icpo),
    _surrogate("gvpo", S.gvpo),
    _surrogate("real", S.real),
    _surrogate("drpo_len", jr.bind(S.drpo_len, length=1024)),
    _surrogate("kl_to_reference", R.kl_to_reference),
    _surrogate("kl_unbiased", R.kl_unbiased),
    _surrogate("kl_convex", R.kl_convex),
    _surrogate("llds", R.llds),
    Case("entropy_bonus", R.entropy_bonus),
    Case("value_loss", S.value_loss),
    Case("token_mean", W.token_mean),
    Case("sequence_mean", W.sequence_mean),
    Case("importance_weights", C.importance_weights),
    Case("importance_weights, sequence", jr.bind(C.importance_weights, level="sequence")),
    Case("masked_importance_weights", C.masked_importance_weights),
    Case("veto_mask", C.veto_mask),
    Case("m2_mask", C.m2_mask),
    _advantage("reinforce_pp", jr.bind(A.reinforce_pp, **_FREE)),
    _advantage("reinforce_pp_baseline", A.reinforce_pp_baseline),
    _advantage("otb", A.otb),
    _advantage("gae", jr.pipe(A.terminal_rewards, A.gae, A.whiten)),
    _advantage("entropy_shaping", A.entropy_shaping),
    _advantage("xrpo", A.novelty_sharpening),
    _advantage("ace", A.ace),
    Case("clip_cov_selection", S.clip_cov_selection),
    Case("kl_cov_selection", S.kl_cov_selection),
    Case("d3s_selection", jr.curation.d3s_selection),
)
