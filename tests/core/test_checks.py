"""Checks: one sentence that names function, argument and shapes, also while tracing."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm.core import checks, compose

X, NEGATIVE = jnp.zeros((2, 3)), jnp.float32(-1)


# What is wrong with an argument of the function F, as its error says it.
F = "f"
WRONG = bad_calls(r"""
ValueError:
    check_rank(F, 1, rewards=X)  # rewards must have 1 axis; got shape \(2, 3\)\.
    check_rank(F, 3, rewards=X)  # rewards must have 3 axes; got shape \(2, 3\)\.
    check_min_rank(F, 3, a=X)  # a must have at least 3 axes; got shape \(2, 3\)\.
    check_same_shape(F, a=X, skipped=None, b=X[:, :2])  # .*same shape: a \(2, 3\), b \(2, 2\)\.
    check_shape(F, "mask", X, (2, 4))  # mask must have shape \(2, 4\); got \(2, 3\)\.
    check_option(F, "scale", "groop", ("group", "batch"))
    # scale must be one of 'group', 'batch'; got 'groop'. Did you mean 'group'\?
    check_option(F, "scale", "none", ("std", None))
    # scale must be one of 'std', None; got 'none'. Did you mean None\?
    check_option(F, "ddof", 3, (0, 1))  # ddof must be one of 0, 1; got 3\.(\n|$)
    check_positive(F, eps=0)  # eps must be above 0; got 0\.
    check_positive(F, eps=float("nan"))  # eps must be above 0; got nan
    check_positive(F, eps=NEGATIVE)  # eps must be above 0; got -1
    check_non_negative(F, coef=-0.5)  # coef must not be negative; got -0\.5\.
    check_non_negative(F, coef=float("nan"))  # coef must not be negative; got nan
    check_share(F, share=np.float32(1.5))  # share must be in \[0, 1\]; got 1\.5\.
    check_share(F, share=NEGATIVE)  # share must be in \[0, 1\]; got -1\.
    check_share(F, share=float("nan"))  # share must be in \[0, 1\]; got nan
    check_share(F, one=False, rho=np.int64(1))  # rho must be in \[0, 1\); got 1\.
    check_share(F, zero=False, rate=0)  # rate must be in \(0, 1\]; got 0\.
    check_no_effect(F, "with scale='none'", ddof=None, eps=0.1)
    # eps=0\.1 has no effect with scale='none'; leave it out\.(\n|$)
TypeError:
    check_bool(F, mask=X)  # mask must be bool, True = keep; got float32 of shape \(2, 3\)\.
    check_float(F, logp=X > 0)  # logp must be floating point; got bool of shape \(2, 3\)\.
    check_integer(F, tokens=X)  # tokens must hold integers; got float32 of shape \(2, 3\)\.
    check_mask(F, None, name="keep")  # keep must be a bool array, True = keep; got None
    check_positive(F, eps="small")  # eps must be a number; got 'small'
    check_share(F, share="half")  # share must be a number; got 'half'
    check_float(F, logp=[1.0, 2.0])  # logp must be an array; got list
    check_rank(F, 1, rewards=[1.0, 2.0])  # rewards must be an array; got list
    check_bool(F, mask="yes")  # mask must be an array; got str
""")


@for_each(("error", "call", "message"), WRONG)
def test_messages(error, call, message):
    raises(error, call, f"!f: {message}", vars(checks) | globals())


def test_what_is_right_passes():
    checks.check_rank("f", 2, a=X, b=np.zeros((5, 5)))
    checks.check_rank("f", 0, a=jnp.float32(1), b=2.0)
    checks.check_min_rank("f", 1, a=X)
    checks.check_same_shape("f", a=X, b=np.zeros((2, 3)), c=None)
    checks.check_same_shape("f", a=None)
    checks.check_shape("f", "a", X, (2, 3))
    checks.check_bool("f", mask=X > 0, where=None, one=True)
    checks.check_float("f", a=X, b=X.astype(jnp.bfloat16), c=np.zeros(2), d=None)
    checks.check_integer("f", a=jnp.arange(3), b=np.arange(3, dtype=np.uint8), c=None)
    checks.check_option("f", "scale", "group", ("group", "batch"))
    checks.check_positive("f", eps=1e-8, length=16, missing=None)
    checks.check_positive("f", bound=float("inf"))
    checks.check_non_negative("f", bound=float("inf"))
    checks.check_non_negative("f", coef=0, other=0.0, missing=None)
    checks.check_share("f", a=0, b=np.float32(1), c=jnp.float32(0.5), d=None, e=jnp.full(2, 3.0))
    checks.check_share("f", zero=False, one=False, level=0.5)
    checks.check_no_effect("f", "with scale='none'", ddof=None, eps=None)


def test_work_while_tracing_and_let_traced_numbers_through():
    @jax.jit
    def run(x, eps):
        checks.check_rank("run", 2, x=x)
        checks.check_float("run", x=x)
        checks.check_same_shape("run", x=x, y=x + 1)
        checks.check_positive("run", eps=eps)
        checks.check_non_negative("run", eps=eps)
        checks.check_share("run", eps=eps)
        return x + eps

    assert run(X, -1.0).shape == (2, 3)
    assert jax.vmap(run, in_axes=(None, 0))(X, jnp.zeros(4)).shape == (4, 2, 3)
    assert jax.grad(lambda eps: run(X, eps).sum())(1.0) == 6.0
    with pytest.raises(ValueError, match=r"run: x must have 2 axes; got shape \(3,\)"):
        run(X[0], 1.0)


@for_each("check", [checks.check_positive, checks.check_non_negative])
@for_each(
    ("value", "error", "message"),
    [
        (True, TypeError, "f: eps must be a number; got True"),
        (np.True_, TypeError, "f: eps must be a number"),
        (jnp.array(True), TypeError, "f: eps must be a number"),
        (1e30, ValueError, r"f: eps must be at most 1e\+18; got 1e\+30"),
        (10**40, ValueError, r"f: eps must be at most 1e\+18"),
        (float("inf"), ValueError, "f: eps must be finite; got inf"),
        (np.float32("inf"), ValueError, "f: eps must be finite; got inf"),
        ([1.0], TypeError, r"f: eps must be a number; got \[1\.0\]"),
        (1j, TypeError, "f: eps must be a number; got 1j"),
    ],
)
def test_options_that_are_no_sensible_number(check, value, error, message):
    with pytest.raises(error, match=message):
        check("f", finite=True, eps=value)


@for_each("value", [0, -3, 5, True, 2.0, "2", None])
def test_a_count_is_an_integer_within_its_bounds(value):
    checks.check_count("f", n=1, m=np.int64(7))
    checks.check_count("f", most=4, n=4)
    words = re.escape(f"f: n must be an integer from 1 to 4; got {value!r}.")
    with pytest.raises(ValueError, match=words):
        checks.check_count("f", most=4, n=value)
    with pytest.raises(ValueError, match="f: n must be an integer above 0; got 0"):
        checks.check_count("f", n=0)


@for_each("value", [True, np.True_, jnp.ones(2)])
def test_a_truth_value_or_an_array_is_no_option_and_no_share(value):
    with pytest.raises(ValueError, match="f: ddof must be one of 0, 1"):
        checks.check_option("f", "ddof", value, (0, 1))
    if np.ndim(value) == 0:
        with pytest.raises(TypeError, match="f: share must be a number"):
            checks.check_share("f", share=value)


@for_each(
    "array",
    [np.array([1.0, None]), np.array(["a", "b"]), np.array([b"a"]), np.array(["2020"], "M8[D]")],
)
@for_each(
    "check",
    [
        lambda x: checks.check_float("f", rewards=x),
        lambda x: checks.check_bool("f", rewards=x),
        lambda x: checks.check_rank("f", 1, rewards=x),
        lambda x: checks.check_min_rank("f", 1, rewards=x),
        lambda x: checks.check_same_shape("f", rewards=x),
        lambda x: checks.check_shape("f", "rewards", x, x.shape),
    ],
)
def test_arrays_without_numbers(check, array):
    with pytest.raises(TypeError, match="f: rewards must hold numbers; got an array of"):
        check(array)


@for_each(
    ("ids", "error", "message"),
    [
        ((5, -1), ValueError, "f: eos_ids must be from 0 to 2**31 - 1; got -1."),
        ([2**31], ValueError, "f: eos_ids must be from 0 to 2**31 - 1; got 2147483648."),
        ((2, True), TypeError, "f: eos_ids must hold integers of 32 bits; got True."),
        ((2.0,), TypeError, "f: eos_ids must hold integers of 32 bits; got 2.0."),
        (("2",), TypeError, "f: eos_ids must hold integers of 32 bits; got '2'."),
        (([1, 2],), TypeError, "f: eos_ids must hold integers of 32 bits; got [1, 2]."),
    ],
)
def test_token_ids(ids, error, message):
    checks.check_token_ids("f", a=(0, 2**31 - 1), b=np.arange(3), c=jnp.arange(3), d=range(2))
    with pytest.raises(error, match=re.escape(message)):
        checks.check_token_ids("f", eos_ids=ids)


@for_each("seed", [-1, 2**64, 10**40, True, 1.0, "1", None])
def test_seeds(seed):
    checks.check_seed("f", a=0, b=2**64 - 1, c=np.int64(3))
    with pytest.raises((TypeError, ValueError), match="f: seed must be .*; got"):
        checks.check_seed("f", seed=seed)


def test_a_wait_is_one_that_a_system_can_make():
    checks.check_seconds("f", deadline=1e6, patience=1, silence=None)
    with pytest.raises(ValueError, match="f: deadline must be at most 1,000,000 seconds; got 1e"):
        checks.check_seconds("f", deadline=1e9)
    with pytest.raises(TypeError, match="f: deadline must be a number; got True"):
        checks.check_seconds("f", deadline=True)


@dataclasses.dataclass(frozen=True)
class Listed:
    steps: tuple[int, ...] = ()
    weights: tuple[float, ...] | None = None
    names: tuple[str, ...] = ("a",)


@for_each(
    ("options", "message"),
    [
        ({"steps": (1, True)}, "f: steps must be an integer; got True"),
        ({"steps": (1, 2**40)}, "f: steps must be finite"),
        ({"weights": (1, float("nan"))}, "f: weights must be finite .*; got nan"),
        ({"weights": ("1",)}, "f: weights must be a number; got '1'"),
    ],
)
def test_each_number_of_a_tuple_is_checked(options, message):
    checks.check_numbers("f", Listed(steps=(1, 2), weights=(0.5, 1)))
    with pytest.raises((TypeError, ValueError), match=message):
        checks.check_numbers("f", Listed(**options))


@for_each(
    ("value", "error", "message"),
    [
        (True, TypeError, "must be a number; got True"),
        (float("nan"), ValueError, "must be a number; got nan"),
        (1e39, ValueError, r"must be at most 1e\+18; got 1e\+39"),
        (-1e39, ValueError, r"must be at most 1e\+18; got -1e\+39"),
    ],
)
def test_a_function_is_bound_to_sensible_numbers(value, error, message):
    def f(x, *, eps: float = 0.2, cap: float | None = None, n: int = 1, fast: bool = False):
        return x

    compose.bind(f, eps=float("inf"), cap=None, n=3, fast=True)
    for option in ("eps", "cap", "n"):
        with pytest.raises(error, match=f"f: {option} {message}"):
            compose.bind(f, **{option: value})
    checks.check_real("f", x=-3, y=float("inf"), z=None)
    with pytest.raises(ValueError, match="f: x must be finite; got -inf"):
        checks.check_real("f", finite=True, x=float("-inf"))
