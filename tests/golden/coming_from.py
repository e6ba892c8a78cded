"""The generated tables of the pages docs/coming_from/*.md: names of a peer, and its numbers.

`python tests/golden/coming_from.py` writes them into the pages; a test compares them. The names are
those of the catalog. The numbers are what the peer's own code gave on the arrays of
`estimators/inputs.npz`, each with a line of ours that a test runs on the same arrays.
"""

import sys
from pathlib import Path

import golden_data
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxrl_llm as jr
from benchmarks import pages
from benchmarks.readme import fill
from jaxrl_llm.recipes import catalog
from jaxrl_llm.recipes.catalog.peers import NONE

FOLDER = Path(__file__).parents[2] / "docs" / "coming_from"
PAGES = {"trl": "TRL", "verl": "verl", "tunix": "tunix", "openrlhf": "OpenRLHF", "rlax": "rlax"}
CASES = ("full", "ragged")
# Of the arguments of an entry: what the script chose, and not the peer's options.
OWN = ("advantages", "weighted", "temperature", "vpreds", "old_values", "returns")
PPO, MEAN, SEQ = "jr.surrogates.ppo_clip", "jr.aggregate.token_mean", "jr.aggregate.sequence_mean"
GROUP, TOKENS = "jr.advantages", "rewards, mask"
KL = "jr.regularizers.kl_token(logp, ref_logp, mask, estimator='k3'"
PAIR = "chosen_logp, rejected_logp"
WITH_REF = f"{PAIR}, chosen_ref_logp, rejected_ref_logp"
SHAPED = "jr.advantages.terminal_rewards(rewards, mask)"

# Manifest, entry, output, ours.
NUMBERS = {
    "trl": (
        ("trl_advantages", "advantages_group", "advantages", f"{GROUP}.grpo(rewards, eps=1e-4)"),
        ("trl_advantages", "rloo", "advantages", f"{GROUP}.rloo(rewards)"),
        ("trl_losses", "grpo", "loss", f"loss({PPO}, {SEQ})"),
        ("trl_losses", "dapo", "loss", f"loss({PPO}, {MEAN}, eps_high=0.28)"),
        (
            "trl_losses",
            "gspo",
            "loss",
            f"loss(jr.surrogates.gspo, {SEQ}, eps_low=0.03, eps_high=0.04)",
        ),
        ("trl_losses", "cispo", "loss", f"loss(jr.surrogates.cispo, {MEAN}, w_max=1.2)"),
        ("trl_losses", "sapo", "loss", f"loss(jr.surrogates.sapo, {SEQ})"),
        (
            "trl_preferences",
            "sigmoid",
            "loss",
            f"jr.preferences.dpo({WITH_REF}, beta=0.3).mean()",
        ),
    ),
    "verl": (
        ("verl_advantages", "grpo", "advantages", f"{GROUP}.grpo(rewards)"),
        ("verl_advantages", "opo", "advantages", f"{GROUP}.opo({TOKENS})"),
        ("verl_advantages", "reinforce_pp", "advantages", f"{GROUP}.reinforce_pp({TOKENS})"),
        ("verl_losses", "vanilla_dual", "loss", f"loss({PPO}, {MEAN}, dual_clip=1.2)"),
        ("verl_losses", "dapo", "loss", f"loss(jr.surrogates.dapo_clip, {MEAN})"),
        (
            "verl_losses",
            "cispo",
            "loss",
            f"loss(jr.surrogates.cispo, {MEAN}, "
            "**jr.surrogates.cispo_bounds(eps_low=0.2, eps_high=0.2))",
        ),
        ("verl_losses", "geo_mean", "loss", f"loss(jr.surrogates.gmpo, {SEQ})"),
        ("verl_losses", "kl_k3", "kl", f"{KL}, cap=10.0)"),
    ),
    "tunix": (
        ("tunix_algorithms", "grpo", "advantages", f"{GROUP}.grpo(rewards)"),
        ("tunix_algorithms", "grpo_loss", "loss", f"loss({PPO}, {SEQ})"),
        ("tunix_algorithms", "grpo_loss_dual", "loss", f"loss({PPO}, {MEAN}, dual_clip=1.5)"),
        ("tunix_algorithms", "dapo_loss", "loss", f"loss(jr.surrogates.dapo_clip, {MEAN})"),
        (
            "tunix_algorithms",
            "gspo_token_loss",
            "loss",
            f"loss(jr.surrogates.gspo_token, {SEQ}, values=token_advantages, "
            "eps_low=0.03, eps_high=0.04)",
        ),
        ("tunix_algorithms", "kl_low_var_kl", "kl", f"{KL})"),
    ),
    "openrlhf": (
        ("openrlhf_trainer", "rloo", "advantages", f"{GROUP}.rloo(rewards)"),
        ("openrlhf_trainer", "group_norm", "advantages", f"{GROUP}.grpo(rewards, eps=1e-9)"),
        ("openrlhf_trainer", "ppo", "loss", f"loss({PPO}, {MEAN})"),
        ("openrlhf_trainer", "ppo_sequence_mean", "loss", f"loss({PPO}, {SEQ})"),
        ("openrlhf_trainer", "dual", "loss", f"loss({PPO}, {MEAN}, dual_clip=1.5)"),
        (
            "openrlhf_trainer",
            "gspo",
            "loss",
            f"loss(jr.surrogates.gspo, {SEQ}, eps_low=0.03, eps_high=0.04)",
        ),
        ("openrlhf_trainer", "kl_k3", "kl", f"{KL}, cap=10.0)"),
        ("openrlhf_trainer", "dpo", "loss", f"jr.preferences.dpo({WITH_REF}, beta=0.3).mean()"),
    ),
    "rlax": (
        ("rlax_pieces", "ppo", "loss", f"loss({PPO}, {MEAN}, values=token_advantages)"),
        (
            "rlax_pieces",
            "gae",
            "advantages",
            f"{GROUP}.gae({SHAPED}, values, mask, gamma=0.97, lam=0.9)",
        ),
        (
            "rlax_pieces",
            "gae",
            "returns",
            f"{GROUP}.gae_returns({SHAPED}, values, mask, gamma=0.97, lam=0.9)",
        ),
        ("rlax_pieces", "to_go", "returns", f"{GROUP}.reward_to_go({SHAPED}, mask, gamma=0.9)"),
        (
            "rlax_returns",
            "steps_3",
            "returns",
            f"{GROUP}.n_step_returns({SHAPED}, values, mask, n=3, gamma=0.97, "
            "bootstrap_value=jnp.full((3, 4), 0.4))",
        ),
    ),
}


# An entry that holds the outputs of two functions.
CALLED = {("rlax_pieces", "gae", "returns"): "lambda_returns(0.9)"}


def case_of(manifest, entry):
    return next(
        case for case in CASES if case in golden_data.load(manifest).entries[entry]["cases"]
    )


def theirs(manifest, entry, output):
    """The peer's number: a scalar, or the first one of an array."""
    outputs = golden_data.load(manifest).outputs(entry, case_of(manifest, entry))
    return float(np.asarray(outputs[output]).reshape(-1)[0])


def ours(manifest, entry, code):
    """Our number: the code of a row on the arrays of the entry's case."""
    data = golden_data.load(manifest)
    arrays = data.inputs[data.entries[entry]["inputs"]][case_of(manifest, entry)]
    return float(np.ravel(jax.jit(lambda a: _evaluated(code, a))(arrays))[0])


def _evaluated(code, arrays):
    names = {"jr": jr, "jnp": jnp} | arrays
    if "chosen_logp" in code:  # [2, pairs, tokens], the chosen responses first
        sums = {n: jnp.where(names["mask"], names[n], 0.0).sum(-1) for n in ("logp", "ref_logp")}
        names |= {"chosen_logp": sums["logp"][0], "rejected_logp": sums["logp"][1]}
        names |= {"chosen_ref_logp": sums["ref_logp"][0], "rejected_ref_logp": sums["ref_logp"][1]}

    def loss(surrogate, weights, values=None, **options):
        values = names["advantages"] if values is None else values
        each = surrogate(names["logp"], names["old_logp"], values, names["mask"], **options)
        return jr.aggregate.weighted_sum(each, weights(names["mask"]))

    return eval(code, names | {"loss": loss})


def called(manifest, entry, output):
    """What the script called, such as ``compute_kl_divergence(method='low_var_kl')``."""
    if (manifest, entry, output) in CALLED:
        return CALLED[manifest, entry, output]
    row = golden_data.load(manifest).entries[entry]
    arguments = {k: v for k, v in row["arguments"].items() if k not in OWN and v is not None}
    words = [repr(x) for x in arguments.pop("positional", ())]
    words += [f"{name}={value!r}" for name, value in arguments.items()]
    return f"{row['function'].rpartition('.')[2]}({', '.join(words)})"


def names_table(page):
    """A peer's names, in the order of the catalog."""
    peer = PAGES[page]
    rows = [
        (f"`{row}`", row.ours if row.ours == NONE else f"`{row.ours}`", row.differs)
        for row in catalog.PEER_NAMES
        if row.peer == peer
    ]
    title = f"{len(rows)} names (`python tests/golden/coming_from.py`):"
    return pages.table(title, (peer, "here", "what differs"), rows)


def numbers_table(page):
    """Its numbers on our arrays."""
    rows = [
        (
            f"`{called(manifest, entry, output)}`",
            f"`{code}`",
            f"{theirs(manifest, entry, output):.5g}",
        )
        for manifest, entry, output, code in NUMBERS[page]
    ]
    label = golden_data.load(NUMBERS[page][0][0]).label
    return pages.table("", (f"{label}'s own code", "here", "both give"), rows).lstrip()


def write(text, page):
    """The page with its two tables."""
    text = fill(text, "names", names_table(page))
    return fill(text, "numbers", numbers_table(page))


def main():
    for page in PAGES:
        path = FOLDER / f"{page}.md"
        path.write_text(write(path.read_text(encoding="utf-8"), page), encoding="utf-8")


if __name__ == "__main__":
    main()
