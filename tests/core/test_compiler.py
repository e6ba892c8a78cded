"""Options of the compiler: what a process sets, and that it changes no result."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.core.kernels.barriers import keep_calls
from jaxrl_llm.core.runtime.compiler import copy_functions_late
from jaxrl_llm.models.protocol import AttentionContext, empty_cache

OPTION = "--xla_backend_extra_options=xla_cpu_flatten_after_fusion"


@for_each(
    ("before", "after"),
    [
        (None, OPTION),
        ("--xla_dump_to=x", f"--xla_dump_to=x {OPTION}"),
        ("--xla_backend_extra_options=y", "--xla_backend_extra_options=y"),
        ("flags.txt", "flags.txt"),  # a file
    ],
)
def test_the_option_is_added_to_those_of_the_user(before, after, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", before or "")
    if before is None:
        monkeypatch.delenv("XLA_FLAGS")
    assert copy_functions_late() == (before != after) and os.environ["XLA_FLAGS"] == after
    assert not copy_functions_late()


def _layer(w, x):
    return jnp.where(x > 0, jnp.tanh(x @ w), x)


def _program(run):
    def loss(ws, x):
        for w in ws:
            x = run(w, x)
        return jnp.sum(x)

    ws = [jnp.eye(8) * scale for scale in (0.5, 0.25, 0.125)]
    return jax.jit(jax.grad(loss)), ws, jnp.linspace(-1.0, 1.0, 16).reshape(2, 8)


def test_calls_and_those_of_derivatives_stay_calls():
    found = {}
    for name, run in (("kept", keep_calls(_layer)), ("inlined", jax.jit(_layer))):
        function, ws, x = _program(run)
        lowered = function.lower(ws, x)
        kept = lowered.as_text().count('inlineable = "false"')
        found[name] = kept, lowered.compile().as_text().count(" call(") > 0
        plain = jax.grad(lambda ws, x: jnp.sum(_layer(ws[2], _layer(ws[1], _layer(ws[0], x)))))
        for a, b in zip(function(ws, x), plain(ws, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    # Three calls and three of the backward pass.
    assert found == {"kept": (6, True), "inlined": (0, False)}


@for_each(("reads", "kept"), [(False, 2), (True, 0)])
def test_layers_stay_calls_unless_they_read_keys_of_earlier_calls(reads, kept):
    model, params = jr.testing.tiny_model(num_layers=2)
    tokens, mask = jnp.ones((1, 1, 4), int), jnp.ones((1, 1, 4), bool)
    context = AttentionContext(mask)
    if reads:
        cache = empty_cache(model, (1, 1), 8)
        context = context._replace(cache=cache, index=jnp.int32(0))
    places = jnp.arange(4)[None, None]
    text = jax.jit(model.apply).lower(params, tokens, places, context).as_text()
    assert sum('inlineable = "false"' in line for line in text.splitlines()) == kept


def test_what_is_inside_of_a_kept_function_is_inlined():
    function, ws, x = _program(keep_calls(_layer))
    text = function.lower(ws, x).as_text()
    calls = [line for line in text.splitlines() if "call @_where" in line]
    assert calls and not any('inlineable = "false"' in line for line in calls)


def test_programs_of_a_mesh_are_inlined():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    function, ws, x = _program(keep_calls(_layer))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert 'inlineable = "false"' not in function.lower(ws, x).as_text()


_STEP = """
import sys
import jax
import jax.numpy as jnp
from jaxrl_llm.core.runtime.compiler import copy_functions_late
if sys.argv[1] == "late":
    assert copy_functions_late()
import jaxrl_llm as jr

def loss(params, tokens):
    mask = jnp.ones(tokens.shape, bool)
    prompts = tokens[:, 0], mask[:, 0]
    logp, _ = jr.train.score(model, params, *prompts, tokens, mask, remat=sys.argv[3])
    return logp.mean()

model, params = jr.testing.tiny_model(num_layers=3, dtype=sys.argv[2])
tokens = jnp.arange(16).reshape(1, 2, 8)
program = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()
value, grads = program(params, tokens)
print(program.as_text().count(" call("), hash(program.as_text()))
print(value, [float(jnp.sum(jnp.abs(x))) for x in jax.tree.leaves(grads)])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "remat"), [("float32", "none"), ("bfloat16", "dots")])
def test_results_are_the_same_however_late_functions_are_copied(dtype, remat):
    """Forward and backward calls of three layers remain, with the compiler's settings of users."""
    left_out = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PYTHONHASHSEED"] = "0"
    (program, values), (other, same) = (
        subprocess.run(
            [sys.executable, "-c", _STEP, which, dtype, remat],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        for which in ("late", "early")
    )
    assert values == same and program != other  # XLA took the option
    assert program.split()[0] == other.split()[0] and int(program.split()[0]) >= 6
