"""The functions of arrays of `jaxrl_llm.curation`, each of which runs as one program."""

import numpy as np
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
    value = value if name in PLAIN or isinstance(value, type) else compiled(value)
    return globals().setdefault(name, value)  # one program for all its calls


OPERATORS = {"+": 0.9, "-": 0.7, "*": 0.25, "/": 0.1}
TOPICS = {"triangle angle": 0.9, "polynomial root": 0.6, "prime divisor": 0.3, "dice urn": 0.1}


def questions(kind):
    """400 prompts and their success rates, by the size of two numbers or by what the words say."""
    rng = np.random.default_rng(0)
    for n in range(400):
        a, b = rng.integers(1, 1000, 2)
        operator, topic = list(OPERATORS)[n % 4], list(TOPICS)[n % 4]
        if kind == "sums":
            yield f"What is {a} + {b}?", 1 / (1 + np.exp(3 * (np.log10(a * b) - 4)))
        elif kind == "operators":
            yield f"Compute {a} {operator} {b} and give the number.", OPERATORS[operator]
        else:
            yield f"A problem of {topic}: case {a} with {b}.", TOPICS[topic]
