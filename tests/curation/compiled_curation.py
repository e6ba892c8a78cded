"""The functions of arrays of `jaxrl_llm.curation`, each of which runs as one program."""

from cheap import compiled

from jaxrl_llm import curation

# These make objects, or read numbers and texts on the host.
PLAIN = {
    "choose_arms",
    "prompt_gdro",
    "bin_advantage_weights",
    "best_allocate",
    "hashed_magnitudes",
    "hashed_words",
    "density_ratios",
    "latent_policy",
    "round_to_budget",
    "scheduled",
}


def __getattr__(name):
    value = getattr(curation, name)
    return value if name in PLAIN or isinstance(value, type) else compiled(value)
