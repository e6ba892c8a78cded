"""Options of XLA's compiler for a process that runs large programs on CPUs."""

import os

# XLA's name for them, and what goes before the name of each.
_FLAGS, _EXTRA = "XLA_FLAGS", "--xla_backend_extra_options="


def copy_functions_late() -> bool:
    """From now on, XLA for CPUs copies a function for each of its calls after it has optimized it.

    A layer that a model calls once for each of its layers is then optimized once (see
    ``core.kernels.barriers.keep_calls``). Results stay the same. The option is a variable of the
    environment that XLA reads once, so this is for a process that has not used jax yet. Options for
    backends that a user has set take precedence, and so does a file of options.

    Returns:
      Whether this call has set the option.
    """
    flags = os.environ.get(_FLAGS, "").strip()
    if _EXTRA in flags or (flags and not flags.startswith("-")):
        return False
    os.environ[_FLAGS] = f"{flags} {_EXTRA}xla_cpu_flatten_after_fusion".strip()
    return True
