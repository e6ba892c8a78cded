"""Credit of turns and states, and the places of their rewards, against the authors' own code."""

import jax.numpy as jnp
from golden_data import Ours

from jaxrl_llm import advantages
from jaxrl_llm.core import masking

GAMMA = 0.95


def _of_states(advantage):
    def of(**options):
        def run(a):
            values = advantage(
                a["rewards"],
                turn_rewards=a["turn_rewards"],
                state_ids=a["state_ids"],
                turn_where=a["turn_where"],
                where=a["where"],
                gamma=GAMMA,
                **options,
            )
            return {"advantages": values}

        return Ours(run)

    return of


gigpo, hgpo = _of_states(advantages.gigpo), _of_states(advantages.hgpo)


def similar(a):
    texts = ["".join("abcdefgh"[i] for i in row) for row in a["codes"]]
    return {"ids": advantages.similar_states(texts, threshold=0.85)}


def ui_s1(**options):
    def run(a):
        x = {"turn_where": a["turn_where"], "matches": a["matches"]}
        return {
            "returns": advantages.turn_returns(a["rewards"], gamma=0.5, **x),
            "advantages": advantages.ui_s1(a["rewards"], singleton="raw", **x, **options),
        }

    return Ours(run)


def dense(a):
    values = advantages.place_turn_rewards(
        a["rewards"],
        a["mask"],
        turn_ids=a["turn_ids"],
        turn_rewards=a["turn_rewards"],
        turn_where=a["turn_where"],
        won=a["won"],
        max_total=a["max_total"],
    )
    return {"rewards": values}


def single(a):
    values = advantages.place_turn_rewards(
        a["rewards"],
        a["mask"],
        turn_ids=a["turn_ids"],
        turn_where=a["turn_where"],
        mode="single",
    )
    return {"rewards": values}


def info_gain(a):
    """The turn after the last context has the outcome, which is not theirs to say."""
    tokens = jnp.arange(a["token_logp"].shape[-1])
    answer = (tokens >= 1) & (tokens <= a["answer_tokens"][:, None])
    logp = masking.masked_mean(a["token_logp"], answer[:, None], axis=-1)
    logp = jnp.concatenate([logp, logp[:, -1:]], axis=-1)
    gains = advantages.info_gain_rewards(jnp.zeros(len(logp)), answer_logp=logp)
    return {"gains": gains[:, :-1]}


TABLES = {
    "igpo": {"info_gain": Ours(info_gain)},
    "verl_agent": {
        "gigpo_mean_norm": gigpo(episode="turns", singleton="raw"),
        "gigpo_mean_std_norm": gigpo(episode="turns", singleton="raw", scale="group"),
        "gigpo_rollouts": gigpo(singleton="raw", scale="group", omega=0.5),
        "similar": Ours(similar, host=True),
        "hgpo_mean_std": hgpo(),
        "hgpo_mean": hgpo(scale="none"),
        "hgpo_base": hgpo(history=1, alpha=0.5, episode="turns", singleton="raw"),
        "hgpo_short": hgpo(history=0, scale="none"),
    },
    "mobile_agent": {
        "mean_std": ui_s1(),
        "mean": ui_s1(scale="none", step_weight=0.5, episode_weight=2.0),
    },
    "meow_tea": {"dense": Ours(dense), "sparse": Ours(single)},
}
