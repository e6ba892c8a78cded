"""The functions of arrays of `jaxrl_llm.regularizers`, each of which runs as one program."""

from cheap import compiled

from jaxrl_llm import regularizers

# These make objects, or read numbers and texts on the host.
PLAIN = {
    "adaptive_kl",
    "remix_schedule",
    "anchored",
    "adaptive_entropy",
    "random_reference",
    "extrapolated",
    "fixed",
    "safe_controller",
    "asymmetric_kl",
}


def __getattr__(name):
    value = getattr(regularizers, name)
    return value if name in PLAIN or isinstance(value, type) else compiled(value)
