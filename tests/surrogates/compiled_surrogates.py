"""The functions of arrays of `jaxrl_llm.surrogates`, each of which runs as one program."""

from cheap import compiled

from jaxrl_llm import surrogates


def __getattr__(name):
    return compiled(getattr(surrogates, name))
