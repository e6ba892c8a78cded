"""Our choice of prompts and rollouts against the numbers of the papers' own released code."""

import jax
import jax.numpy as jnp
import numpy as np
from golden_data import Ours

from golden_ours import graded
from jaxrl_llm import aggregate, curation, surrogates


def mopps_counts(**options):
    def run(a):
        state = curation.belief_init(12)
        for ids, rewards in zip(a["ids"], a["rewards"], strict=True):
            state = curation.belief_update(state, ids, rewards, **options)
        return state._asdict()

    return Ours(run)


def mopps_nearest(a):
    scores = curation.nearest_target(a["rates"], target=0.4)
    return {"ids": curation.select_top(scores, count=4)}


def mopps_band(a):
    scores = curation.within_band(jax.random.key(0), a["rates"], low=0.1, high=0.2)
    return {"ids": curation.select_top(scores, count=4)}


def attention(**options):
    def run(a):
        arrays = (a[name] for name in ("queries", "references", "reference_rates"))
        return {"rates": curation.attention_rates(*arrays, **options)}

    return Ours(run)


def calibrated(a):
    rates = curation.attention_rates(a["queries"], a["references"], a["reference_rates"])
    params = curation.RateCalibration(*(a[x] for x in curation.RateCalibration._fields))
    return {"rates": curation.calibrate_rates(rates, a["reference_rates"], params)}


def adapter(a):
    def projection(name):
        each = {k.split(".", 2)[2]: v for k, v in a.items() if k.startswith(f"sim_head.{name}.")}
        layers = ("1", "4", "7")  # of: norm, (linear, GELU, dropout) twice, linear, norm
        weights = tuple(each[f"{i}.weight"].T for i in layers)
        biases = tuple(each[f"{i}.bias"] for i in layers)
        norms = (each[f"{i}.{kind}"] for i in ("0", "8") for kind in ("weight", "bias"))
        scale_in, shift_in, scale_out, shift_out = norms
        return curation.RateProjection(scale_in, shift_in, weights, biases, scale_out, shift_out)

    first, last = ((a[f"mlp.{i}.weight"].T, a[f"mlp.{i}.bias"]) for i in (0, 2))
    calibration = curation.RateCalibration(*first, *last)
    params = curation.RateAdapter(projection("query_proj"), projection("ref_proj"), calibration)
    arrays = (a[name] for name in ("queries", "references", "reference_rates"))
    return {"rates": curation.adapted_rates(*arrays, params)}


def replay_clip(a):
    def total(logp):
        rest = (a["old_logp"], a["advantages"], a["mask"])
        each = surrogates.decoupled_ppo(logp, *rest, behavior_logp=a["behavior_logp"])
        return aggregate.weighted_sum(each, aggregate.token_mean(a["mask"]))

    return graded(total, a["logp"])


def adversary(*, by_share=False, **options):
    def run(a):
        state = curation.BinScores(jnp.zeros(4), jnp.zeros(4, bool))
        for bins, losses in zip(a["bins"], a["losses"], strict=True):
            means, present = curation.bin_means(losses, bins, num_bins=4, by_share=by_share)
            state = curation.bin_scores_update(state, means, present, rate=0.12)
        seen = {"seen": state.seen} if options.get("standardize") else {}
        weights = curation.exponential_weights(state.scores, present=present, **seen, **options)
        return {"scores": state.scores, "weights": weights}

    return Ours(run)


def bins(a):
    history, last, rows = curation.pass_history_init(6, 5), jnp.full(6, -1), []
    for passes in a["passes"]:
        history = curation.pass_history_update(history, jnp.arange(6), passes > 0.5)
        rates = curation.pass_history_rate(history)
        last = curation.difficulty_bins(rates, edges=(0.4, 0.75), last=last, hysteresis=0.05)
        rows.append(last)
    return {"bins": jnp.stack(rows)}


def heap(a):
    buffer = curation.replay_init(jnp.zeros((), jnp.int32), capacity=4)
    for batch, scores in enumerate(a["scores"]):
        items = 5 * batch + jnp.arange(5)
        buffer = curation.replay_add(
            buffer, items, prompt_ids=items, version=batch, scores=scores, evict="lowest"
        )
    order = jnp.argsort(buffer.items)
    probs = curation.replay_priorities(buffer.scores)
    return {"items": buffer.items[order], "probs": probs[order]}


def group_scores(a):
    return {"scores": curation.replay_scores(a["advantages"], a["rewards"])}


ARMS = (2, 3, 4, 6, 8)


def arms(mean):
    def run(a):
        scores, counts = a["arm_scores"], a["counts"]
        probs = curation.exponential_weights(scores, eta=0.65, explore=0.01)
        chosen = jax.pure_callback(
            lambda p, c: curation.choose_arms(
                np.log(p), np.asarray(c), arms=ARMS, total=mean * int(np.sum(c))
            ),
            jax.ShapeDtypeStruct((4,), jnp.int32),
            probs,
            counts,
        )
        rollouts = jnp.array(ARMS)[chosen]
        means, present = curation.bin_means(a["losses"][0], a["bins"][0], num_bins=4)
        # A bin without a loss learns nothing.
        after = curation.arm_scores_update(
            scores, jnp.where(present, chosen, -1), means, arms=ARMS, price=0.25, mean_rollouts=4.0
        )
        return {
            "probs": probs,
            "rollouts": rollouts,
            "spent": jnp.sum(rollouts * counts),
            "before": scores,
            "after": after,
        }

    return Ours(run)


TABLES = {
    "mopps": {
        "counts_half": mopps_counts(retain=0.5),
        "counts_one": mopps_counts(),
        "sample_topk": Ours(mopps_nearest),
        "sample_threshold": Ours(mopps_band),
    },
    "dots": {
        "attention": attention(),
        "attention_top3": attention(top=3),
        "calibrated": Ours(calibrated),
        "adapter": Ours(adapter),
        "replay_clip": Ours(replay_clip),
    },
    "trl_replay": {"heap": Ours(heap), "group_scores": Ours(group_scores)},
    "symphony": {
        "smooth": Ours(lambda a: {"probs": curation.fading_probs(a["order"])}),
        "sharp": Ours(lambda a: {"probs": curation.fading_probs(a["order"], form="sharp")}),
    },
    "gdro": {
        "weights": adversary(),
        "weights_by_share": adversary(by_share=True),
        "weights_standardized": adversary(standardize=True, eta=2.0, explore=0.2),
        "bins": Ours(bins),
        "arms_3": arms(3),
        "arms_5": arms(5),
    },
}
