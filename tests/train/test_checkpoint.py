"""Checkpoints: saved whole, read back, the last few and the best, with a record of their files."""

import dataclasses
import errno
import functools
import itertools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import v1
from rows import for_each
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.cli.options import Policy
from jaxrl_llm.core.runtime import files as runtime_files
from jaxrl_llm.data import Cursor
from jaxrl_llm.models.sharding import param_shardings, shard
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import (
    CheckpointConfig,
    CheckpointError,
    Checkpoints,
    EvaluationConfig,
    init_state,
    make_mesh,
    train,
)
from jaxrl_llm.train.checkpoint import checkpoints as saving
from jaxrl_llm.train.checkpoint import serialization
from jaxrl_llm.train.checkpoint.checkpoints import best_of, saved_on_error, superseded
from jaxrl_llm.train.checkpoint.config_text import config_text, without_precision
from jaxrl_llm.train.checkpoint.record import (
    check_record,
    read_notes,
    replace_notes,
    write_record,
)
from jaxrl_llm.train.checkpoint.serialization import Extras, orbax, shapes_of
from jaxrl_llm.train.logging.run_folder import RunFolder
from jaxrl_llm.train.start import find_start

RECIPE, OPTIMIZER = jr.recipes.dapo(), optax.adamw(1e-3)


@functools.cache
def make_state(seed=0, *, step=0, mesh=None, **overrides):
    model, params = tiny_model(seed=seed, num_layers=1, **overrides)
    if mesh is not None:
        params = shard(params, param_shardings(params, mesh))
    key = jax.random.key(seed + 7)
    cursor = Cursor(1, seed)
    state = init_state(params, OPTIMIZER, RECIPE, key=key, data_cursor=cursor, mesh=mesh)
    return model, state._replace(step=state.step + step)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y) and getattr(x, "dtype", None) == getattr(y, "dtype", None)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(x) == jax.random.key_impl(y)
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def save_steps(folder, *steps, keep=2):
    model, _ = make_state()
    checkpoints = Checkpoints(folder, model=model, keep=keep)
    states = {}
    for step in steps:
        states[step] = make_state(seed=step, step=step)[1]
        checkpoints.set_score(step, {"reward": -step})  # which counts where a metric has the best
        checkpoints.save(states[step])
    checkpoints.wait()
    return checkpoints, states


def save(checkpoints, state, **beside):
    checkpoints.save(state, **beside)
    checkpoints.wait()


def truncate(path):
    """Cuts the largest file of a checkpoint in half."""
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def test_round_trip_is_exact_and_keeps_the_last(tmp_path):
    checkpoints, states = save_steps(tmp_path, 1, 2, 10)
    assert checkpoints.steps() == [2, 10]
    _, like = make_state(seed=99)
    assert_same(checkpoints.restore(like), states[10])
    assert_same(checkpoints.restore(like, step=2), states[2])
    assert_same(checkpoints.restore_params(like.params), states[10].params)


def test_the_state_may_be_donated_while_it_is_saved(tmp_path):
    model, state = make_state(step=3)
    state = jax.tree.map(jnp.copy, state)
    expected = jax.tree.map(np.array, state.params)
    checkpoints = Checkpoints(tmp_path, model=model)
    checkpoints.save(state)
    overwrite = jax.jit(lambda p: jax.tree.map(lambda x: x * 0 - 5, p), donate_argnums=0)
    jax.block_until_ready(overwrite(state.params))
    checkpoints.wait()
    restored = checkpoints.restore(make_state(seed=1)[1])
    jax.tree.map(np.testing.assert_array_equal, restored.params, expected)


def test_restores_on_another_mesh_and_into_shapes(tmp_path):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    model, state = make_state(seed=3, step=4, mesh=mesh)
    checkpoints = Checkpoints(tmp_path, model=model)
    save(checkpoints, state)
    _, one = make_state()
    restored = checkpoints.restore(one)
    assert_same(jax.device_get(restored.params), jax.device_get(state.params))
    assert len(restored.params["norm"]["scale"].sharding.device_set) == 1
    _, other = make_state(mesh=make_mesh(fsdp=8))
    kernel = checkpoints.restore(other).params["layers"]["0"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (4, 64)
    saved = state.params["layers"]["0"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(kernel, saved)
    like = shapes_of(make_state(mesh=mesh)[1])
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(like.params))
    restored = checkpoints.restore(like)
    assert_same(jax.device_get(restored.params), jax.device_get(state.params))
    jax.tree.map(lambda x, y: x.sharding == y.sharding or pytest.fail(), restored[:2], state[:2])


def test_what_stands_beside_a_state_comes_back_without_its_shapes(tmp_path):
    checkpoints, _ = save_steps(tmp_path, 1)
    assert checkpoints.restore_extras() is None
    arrays = [
        {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "none": {}},
        {"b": np.ones(2, bool)},
    ]
    beside = Extras(arrays, {"texts": ["\n\u00e9"], "size": 0.1})
    _, state = make_state(step=2)
    save(checkpoints, state, extras=beside)
    again = Checkpoints(tmp_path, model=checkpoints.model)
    assert again.restore_extras() is None  # nothing has been restored
    assert_same(again.restore(make_state(seed=9)[1]), state)
    found = again.restore_extras()
    assert found.notes == beside.notes
    assert_same(found.arrays, arrays)
    assert_same(again.restore_params(state.params), state.params)
    shutil.rmtree(again.path(2) / "extras")  # after it was checked
    with pytest.warns(UserWarning, match="rollouts in the checkpoint '.*00002' cannot be read and"):
        assert again.restore_extras() is None


def test_another_model_or_optimizer_is_refused_by_name(tmp_path):
    same, _ = save_steps(tmp_path, 1)
    model, state = make_state(width=16)
    checkpoints = Checkpoints(tmp_path, model=model)
    with pytest.raises(ValueError, match=r"step_00000001' belongs to another model: .*width=32"):
        checkpoints.restore(state)
    with pytest.raises(ValueError, match="belongs to another model"):
        checkpoints.restore_params(state.params)
    assert checkpoints.steps() == [1]
    _, state = make_state()
    state = state._replace(opt_state=optax.sgd(0.1, momentum=0.9).init(state.params))
    with pytest.raises(ValueError, match="was made with another optimizer or recipe"):
        same.restore(state)


def test_a_model_of_another_precision_reads_the_same_parameters(tmp_path):
    _, states = save_steps(tmp_path, 1)
    model, params = tiny_model(num_layers=1, dtype="bfloat16")
    found = Checkpoints(tmp_path, model=model).restore_policy(params)
    assert_same(found, states[1].params)
    rounded = model._replace(config=dataclasses.replace(model.config, quantization="int8"))
    assert_same(Checkpoints(tmp_path, model=rounded).restore_policy(params), states[1].params)
    found = Checkpoints(tmp_path, model=rounded)
    like = make_state()[1]
    with pytest.raises(ValueError, match="another model: .*'float32'.* not .*'bfloat16'.*int8"):
        found.restore(like)
    assert_same(found.restore(like, any_precision=True), states[1])


class _PlainConfig:
    """Without a ``repr``, as a user may write one, with a field that is a function."""

    vocab_size, max_length, num_layers, num_kv_heads, head_dim = 259, 64, 1, 2, 8
    dtype = "float32"

    def __init__(self, activation):
        self.activation = activation


@dataclasses.dataclass(frozen=True)
class _ConfigWithFunctions:
    activation: Callable
    inner: Any
    vocab_size: int = 259
    dtype: str = "float32"


def plain_config():
    return _PlainConfig(jax.nn.gelu)


def config_with_functions():
    return _ConfigWithFunctions(lambda x: x, _PlainConfig(lambda x: x))


@for_each("make", [plain_config, config_with_functions])
def test_a_config_that_shows_memory_addresses_is_the_same_in_every_process(tmp_path, make):
    folder = tmp_path / make.__name__
    model, state = make_state(step=1)
    first, again = make(), make()
    assert repr(first) != repr(again)  # as in two processes
    jr.train.save(folder, state, model=model._replace(config=first))
    model = model._replace(config=again)
    assert_same(jr.train.restore(folder, make_state(seed=9)[1], model=model), state)
    checkpoints = Checkpoints(folder, model=model)
    assert_same(checkpoints.restore(make_state(seed=9)[1], any_precision=True), state)
    assert_same(checkpoints.restore_policy(make_state(seed=9)[1].params), state.params)
    policies = [Policy(model._replace(config=x), (), None) for x in (first, again)]
    assert policies[0].function() == policies[1].function()


def test_the_text_of_a_config_names_no_address_and_no_module_but_what_differs():
    text = config_text
    config = tiny_model(num_layers=1)[0].config
    assert text(config) == repr(config)  # as in checkpoints of earlier versions
    plain = "_PlainConfig(vocab_size=259, max_length=64, num_layers=1, num_kv_heads=2, head_dim=8, "
    plain += "dtype='float32', activation="
    assert text(plain_config()) == f"{plain}gelu)"
    assert text(_PlainConfig(jax.nn.silu)) == f"{plain}silu)"
    with_functions = config_with_functions()
    start = f"_ConfigWithFunctions(activation=<lambda>, inner={plain}<lambda>), "
    assert text(with_functions) == f"{start}vocab_size=259, dtype='float32')"
    other = dataclasses.replace(with_functions, dtype="bfloat16")
    assert text(with_functions) != text(other)
    assert without_precision(text(with_functions)) == (without_precision(text(other)))


@for_each("kind", [str, lambda x: getattr(jnp, x), lambda x: jnp.dtype(x).type, jnp.dtype])
def test_the_precision_of_a_model_may_be_written_in_any_way(kind):
    texts = []
    for dtype in map(kind, ("float32", "bfloat16")):
        texts += [config_text(_DtypeFirst(dtype)), config_text(_DtypeLast(8, dtype))]
    assert len(set(texts)) == 4
    first, last, other_first, other_last = map(without_precision, texts)
    assert (first, last) == (other_first, other_last) and "8" in first


@dataclasses.dataclass(frozen=True)
class _DtypeFirst:
    dtype: Any
    width: int = 8


@dataclasses.dataclass(frozen=True)
class _DtypeLast:
    width: int
    dtype: Any


class _SlottedConfig:
    """As attrs makes one."""

    __slots__ = ("f", "layers")

    def __init__(self, layers, f):
        self.layers, self.f = layers, f

    def __repr__(self):
        return f"Cfg({self.layers}, {self.f})"


class _TupleConfig(NamedTuple):
    inner: Any


@for_each(
    ("first", "second"),
    [
        (_SlottedConfig((1, 2), lambda x: x), _SlottedConfig((2, 1), lambda x: x)),
        *(
            [make(_PlainConfig(f)) for f in (jax.nn.gelu, jax.nn.silu)]
            for make in (
                functools.partial(_ConfigWithFunctions, jnp.sin),
                lambda inner: _ConfigWithFunctions(jnp.sin, ({"mlp": [inner]},)),
                _TupleConfig,
                _PlainConfig,
            )
        ),
    ],
)
def test_the_texts_of_configs_of_different_models_differ(first, second):
    texts = [config_text(x) for x in (first, second)]
    assert texts[0] != texts[1] and " at 0x" not in "".join(texts)


@for_each(
    "inner",
    [(), (1,), [1, 2.5], {"a": {}}, set(), {17, 5, 11}, frozenset({9}), _TupleConfig((None,))],
)
def test_the_text_of_a_config_without_functions_is_its_repr(inner):
    for config in (_ConfigWithFunctions("gelu", inner), _TupleConfig(inner)):
        assert config_text(config) == repr(config)


def test_texts_in_a_set_are_in_one_order():
    config = _TupleConfig(frozenset({"b", "c", "a"}))
    assert config_text(config) == "_TupleConfig(inner=frozenset({'a', 'b', 'c'}))"


def test_a_class_in_a_config_may_come_from_a_copy_of_its_file(tmp_path):
    """As of a run, whose own copy of the configuration ``evaluate`` and ``serve`` load."""
    first, again = (
        _ConfigWithFunctions(type("Norm", (), {"__module__": name}), ())
        for name in ("config", "jaxrl_llm_run_1")
    )
    model, state = make_state(step=1)
    jr.train.save(tmp_path, state, model=model._replace(config=first))
    model = model._replace(config=again)
    assert_same(jr.train.restore(tmp_path, make_state(seed=9)[1], model=model), state)
    policies = [Policy(model._replace(config=x), (), None) for x in (first, again)]
    assert policies[0].function() == policies[1].function()
    wanted = {"model": config_text(again)}
    serialization.check_same_run(tmp_path, {"model": repr(first)}, wanted)  # of earlier versions
    other = _ConfigWithFunctions(type("Other", (), {"__module__": "config"}), ())
    with pytest.raises(serialization.OtherRun, match="Norm.*Other"):
        wanted = {"model": config_text(other)}
        serialization.check_same_run(tmp_path, {"model": repr(first)}, wanted)


@dataclasses.dataclass(frozen=True)
class _ConfigWithSecret:
    hf_token: str
    dtype: str = "float32"


def test_a_secret_in_a_config_is_not_in_its_text(tmp_path):
    configs = [_ConfigWithSecret(hf_token=x) for x in ("abcd1234efgh", "ijkl5678mnop")]
    first, second = (config_text(x) for x in configs)
    assert first == second == "_ConfigWithSecret(hf_token='***', dtype='float32')"
    earlier = {"model": repr(configs[0])}
    serialization.check_same_run(tmp_path, earlier, {"model": second})
    with pytest.raises(serialization.OtherRun) as told:
        serialization.check_same_run(tmp_path, earlier, {"model": "Other()"})
    assert "abcd1234efgh" not in str(told.value)
    slotted = _SlottedConfig(_ConfigWithSecret("qrst9012uvwx"), "hf_token=qrst9012uvwx")
    assert "qrst9012uvwx" not in config_text(slotted)


def test_a_checkpoint_of_an_older_format_is_refused_with_one_sentence(tmp_path, monkeypatch):
    model, state = make_state()
    with monkeypatch.context() as patch:
        patch.setattr("jaxrl_llm.train.checkpoint.serialization.FORMAT", 4)
        checkpoints = Checkpoints(tmp_path, model=model)
        save(checkpoints, state._replace(step=state.step + 1))
    sentence = r"^The checkpoint '.*00001' was written by another version: it has format 4, this "
    with pytest.raises(ValueError, match=sentence + r"one reads 5\.$"):
        Checkpoints(tmp_path, model=model).restore(state)


def test_a_truncated_one_is_passed_over_and_kept(tmp_path):
    checkpoints, states = save_steps(tmp_path, 1, 2)
    truncate(checkpoints.path(2))
    _, like = make_state(seed=5)
    with pytest.warns(
        UserWarning, match=r"step_00000002.* is passed over: its file .* bytes of \d+"
    ):
        restored = checkpoints.restore(like)
    assert_same(restored, states[1])
    assert checkpoints.path(2).is_dir()
    # The run goes on from step 1 and reaches step 2 again: the damaged folder is set aside.
    save(checkpoints, states[2])
    assert_same(checkpoints.restore(like), states[2])
    assert (tmp_path / "step_00000002.damaged").is_dir()


def test_a_damaged_newer_one_does_not_cost_the_one_that_was_saved(tmp_path):
    checkpoints, states = save_steps(tmp_path, 2, 4)
    truncate(checkpoints.path(4))
    checkpoints.keep = 1
    save(checkpoints, states[2]._replace(step=states[2].step + 1))
    assert checkpoints.steps() == [3, 4]
    with pytest.warns(UserWarning, match="step_00000004.* is passed over"):
        assert int(checkpoints.restore(make_state()[1]).step) == 3
    assert checkpoints.last == 3


def test_what_is_not_damage_is_not_passed_over(tmp_path, monkeypatch):
    checkpoints, _ = save_steps(tmp_path, 1, 2)
    for error, reason in (
        (MemoryError(), "there is not enough memory"),
        (ValueError("RESOURCE_EXHAUSTED: Out of memory"), "there is not enough memory"),
        (PermissionError(13, "Permission denied"), "permission denied"),
        (OSError(5, "Input/output error"), "input/output error"),
        (RuntimeError("the device is lost"), "the device is lost"),
    ):

        def fails(*arguments, error=error):
            raise error

        monkeypatch.setattr(v1, "load", fails)
        with pytest.raises(CheckpointError, match=f"step_00000002' cannot be read: {reason}"):
            checkpoints.restore(make_state()[1])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_one_of_the_same_step_is_replaced_and_kept_if_it_is_damaged(tmp_path):
    checkpoints, _ = save_steps(tmp_path, 1)
    _, state = make_state(seed=9, step=1)
    for left in (["step_00000001"], ["step_00000001", "step_00000001.damaged"]):
        save(checkpoints, state)  # which no restore has passed over
        assert names(tmp_path) == left
        assert_same(checkpoints.restore(make_state()[1]), state)
        truncate(checkpoints.path(1))


def test_a_kill_while_one_is_replaced_costs_no_checkpoint(tmp_path, subtests):
    """The folders as each instant of a save of the same step leaves them."""
    model, state = make_state(step=1)
    saves, copies, rename = Checkpoints(tmp_path / "run", model=model), [], Path.rename

    def copied(path, target):
        copies.append(tmp_path / f"killed {len(copies)}")
        shutil.copytree(tmp_path / "run", copies[-1])
        return rename(path, target)

    states = [state, make_state(seed=9, step=1)[1]]
    save(saves, states[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", copied)
        save(saves, states[1])
    left = [names(folder) for folder in copies]
    one, old, new = (f"step_00000001{x}" for x in ("", ".replaced", ".unfinished"))
    assert left[-3:] == [[one, new], [old, new], [one, old]]
    cases = zip(copies[-3:], (states[0], states[0], states[1]), strict=True)
    ways = ("save", "sweep", "read")
    for (killed, expected), goes_on in itertools.product(cases, ways):
        folder = shutil.copytree(killed, killed.with_name(f"{killed.name} {goes_on}"))
        again = Checkpoints(folder, model=model)
        if goes_on == "save":
            save(again, make_state(step=2)[1])
            assert names(folder) == [one, "step_00000002"]
        elif goes_on == "sweep":
            again.sweep()
            assert names(folder) == [one]
        elif goes_on == "read":  # as evaluate, export, sample and init_from do
            before = names(folder)
            for read in (again.restore_params, find_start(str(folder / one), model)):
                assert_same(read(make_state()[1].params), expected.params)
            assert again.steps() == [1] and again.path(again.last).is_dir()
            assert names(folder) == before  # which may be under way in another process
        with subtests.test(folder.name):
            assert_same(again.restore(make_state()[1], step=1), expected)


def test_one_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    checkpoints, states = save_steps(tmp_path, 1)
    rename = Path.rename

    def fails(path, target):
        if path.name.endswith(".unfinished"):
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    checkpoints.save(make_state(seed=9, step=1)[1])
    with pytest.raises(CheckpointError, match="permission denied; the one of step 1 stands"):
        checkpoints.wait()
    assert names(tmp_path) == ["step_00000001"]
    assert_same(checkpoints.restore(make_state()[1]), states[1])


def test_what_a_killed_save_left_is_swept(tmp_path):
    for left in ("step_00000001.unfinished", "step_00000001.unfinished.orbax-checkpoint-tmp-17"):
        (tmp_path / left).mkdir()
    save_steps(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000002"]


def test_damage_that_orbax_finds_while_it_reads_is_passed_over(tmp_path, monkeypatch):
    # A file that changed after it was checked. Only its error: really reading such a file leaves
    # tasks of Orbax behind that complain much later.
    checkpoints, states = save_steps(tmp_path, 1, 2)
    load = v1.load

    def fails(path, *arguments):
        if path == checkpoints.path(2):
            raise RuntimeError("while reading array") from ValueError("OUT_OF_RANGE: of 96 bytes")
        return load(path, *arguments)

    monkeypatch.setattr(v1, "load", fails)
    with pytest.warns(UserWarning, match="cannot be read and is passed over: while reading array"):
        assert_same(checkpoints.restore(make_state()[1]), states[1])


def test_the_other_processes_follow_the_first(tmp_path, monkeypatch):
    """As process 1 of two, for which the newest checkpoint is whole and for process 0 it is not."""
    checkpoints, states = save_steps(tmp_path, 1, 2)

    def never(folder):
        raise AssertionError("only the first process reads everything")

    monkeypatch.setattr("jaxrl_llm.train.checkpoint.record.check_record", never)
    monkeypatch.setattr("jaxrl_llm.core.runtime.processes.is_first", lambda: False)
    monkeypatch.setattr("jaxrl_llm.core.runtime.processes.from_first", lambda function: [1, 2])
    first = iter([("damaged", "its file was changed")])  # what process 0 says, in its order
    monkeypatch.setattr(
        "jaxrl_llm.core.runtime.processes.any_of", lambda mine: next(first, None) or mine
    )
    with pytest.warns(UserWarning, match="passed over: its file was changed; the one of step 1"):
        assert_same(checkpoints.restore(make_state(seed=5)[1]), states[1])
    first = iter([None, None, None, ("hindered", "permission denied")])
    with pytest.raises(CheckpointError, match="00002' cannot be read: permission denied"):
        checkpoints.restore(make_state()[1])


def test_what_was_passed_over_costs_no_readable_one(tmp_path):
    model, state = make_state()
    options = {"model": model, "keep": 2, "best": "reward"}
    checkpoints = Checkpoints(tmp_path, **options)
    for step, reward in ((1, 0.5), (2, 0.0), (3, 0.75)):
        checkpoints.set_score(step, {"reward": reward})
        save(checkpoints, state._replace(step=state.step + step))
    truncate(checkpoints.path(3))
    again = Checkpoints(tmp_path, **options)
    with pytest.warns(UserWarning, match="step_00000003.* is passed over"):
        assert int(again.restore(state).step) == 2
    assert again.steps() == [2, 3] and again.best_step() == 2
    again.set_score(4, {"reward": 0.25})
    save(again, state._replace(step=state.step + 4))
    assert again.steps() == [2, 4] and again.best_step() == 4
    assert (tmp_path / "step_00000003.damaged").is_dir()


def test_an_old_one_that_cannot_be_deleted_is_told_as_that(tmp_path, monkeypatch):
    checkpoints, states = save_steps(tmp_path, 1, keep=1)
    rmtree = shutil.rmtree

    def fails(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", fails)
    checkpoints.save(make_state(step=2)[1])
    with pytest.warns(UserWarning, match="Old checkpoints in .* cannot be deleted: permission de"):
        checkpoints.wait()
    assert checkpoints.last == 2 and checkpoints.steps() == [2]
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    save(checkpoints, make_state(step=3)[1])
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_a_rating_that_cannot_be_noted_is_told_as_that(tmp_path, monkeypatch):
    model, state = make_state(step=1)
    checkpoints = Checkpoints(tmp_path, model=model, best="reward")
    checkpoints.save(state)

    def full(folder, notes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxrl_llm.train.checkpoint.record.replace_notes", full)
    told = "The score of the checkpoint '.*00001' cannot be written: no space is left on the device"
    with pytest.warns(UserWarning, match=told):
        checkpoints.set_score(1, {"reward": 1.0})
    assert checkpoints.last == 1 and checkpoints.steps() == [1]


def test_all_is_on_disk_before_it_has_its_name_and_before_old_ones_go(tmp_path, monkeypatch):
    checkpoints, _ = save_steps(tmp_path, 1, keep=1)
    seen, sync = [], runtime_files.sync

    def noted(path):
        seen.append((path, checkpoints.steps()))
        sync(path)

    monkeypatch.setattr(runtime_files, "sync", noted)
    save(checkpoints, make_state(step=2)[1])
    *files, last = seen
    unfinished = {path for path, steps in files if steps == [1]}
    assert len(unfinished) == len({path for path, _ in files})
    whole = checkpoints.path(2)
    found = {path.relative_to(whole) for path in (whole, *whole.rglob("*"))}
    assert {whole.with_suffix(".unfinished") / path for path in found} <= unfinished
    assert last == (tmp_path, [1, 2]) and checkpoints.steps() == [2]


def test_none_that_can_be_read(tmp_path):
    checkpoints, _ = save_steps(tmp_path, 1, 2)
    (checkpoints.path(2) / "_CHECKPOINT_METADATA").unlink()
    (damaged,) = checkpoints.path(1).rglob("_METADATA")  # whole by its size, but not what it was
    damaged.write_text("?" * damaged.stat().st_size)
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(CheckpointError, match="There is no checkpoint that can be read in"),
    ):
        checkpoints.restore(make_state()[1])
    empty = Checkpoints(tmp_path / "none", model=make_state()[0])
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        empty.restore(make_state()[1])


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    model, state = make_state(step=1)
    with pytest.raises(
        CheckpointError, match="of step 1 cannot be written to '.*file/checkpoints'"
    ):
        Checkpoints(tmp_path / "file" / "checkpoints", model=model).save(state)


def test_a_full_disk_leaves_the_previous_one(tmp_path, monkeypatch, caplog):
    checkpoints, states = save_steps(tmp_path, 1, keep=1)

    class Response:
        def result(self, timeout=None):
            raise ValueError("RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']")

    def full(path, *args, **kwargs):
        path.with_name(path.name + ".orbax-checkpoint-tmp").mkdir(parents=True)  # as Orbax does
        return Response()

    monkeypatch.setattr(v1, "save_checkpointables_async", full)
    checkpoints.save(make_state(step=2)[1])
    sentence = "of step 2 cannot be written .*: no space is left on the device; the one of step 1"
    with pytest.raises(CheckpointError, match=sentence):
        checkpoints.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    monkeypatch.undo()
    assert_same(checkpoints.restore(make_state()[1]), states[1])

    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)  # bytes; the state has more
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="step 3 .*no space .* the one of step 1 stands"):
        checkpoints.save(make_state(step=3)[1])
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_a_folder_that_goes_while_it_is_read_hides_no_error(tmp_path, monkeypatch):
    checkpoints, _ = save_steps(tmp_path, 1)

    def gone(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(Path, "iterdir", gone)
    with pytest.raises(CheckpointError, match="step 2 cannot be written .*: no space is left on"):
        checkpoints.save(make_state(step=2)[1])


@for_each("there", [True, False])
def test_a_write_that_stands_still_has_failed(tmp_path, monkeypatch, there):
    tmp_path = tmp_path / str(there)
    checkpoints, states = save_steps(tmp_path, 1)

    class Response:
        def result(self, timeout):
            time.sleep(timeout)
            raise TimeoutError

    def hang(path, *args, **kwargs):
        if there:
            path.with_name(path.name + ".orbax-checkpoint-tmp").mkdir()
        return Response()

    monkeypatch.setattr(v1, "save_checkpointables_async", hang)
    monkeypatch.setattr("jaxrl_llm.train.checkpoint.checkpoints._TURN_SECONDS", 0.01)
    monkeypatch.setattr("jaxrl_llm.train.checkpoint.checkpoints._STALL_SECONDS", 0.1)
    monkeypatch.setattr("jaxrl_llm.train.checkpoint.checkpoints._SLOWEST", 1.0)
    checkpoints.save(make_state(step=2)[1])
    why = "nothing was written for 0.1 s" if there else "no such file or directory"
    with pytest.raises(CheckpointError, match=f"step 2 cannot be written .*: {why}; the one of"):
        checkpoints.wait()
    monkeypatch.undo()
    assert_same(checkpoints.restore(make_state()[1]), states[1])


def test_a_disk_that_does_not_answer_any_more_fails_the_save(tmp_path, monkeypatch):
    checkpoints, states = save_steps(tmp_path, 1)
    answers = threading.Event()
    monkeypatch.setattr("jaxrl_llm.core.runtime.files.sync_all", lambda folder: answers.wait(60))
    monkeypatch.setattr("jaxrl_llm.train.checkpoint.checkpoints._STALL_SECONDS", 1.0)
    checkpoints.save(make_state(step=2)[1])
    told = "step 2 cannot be written .*: it was not complete after 1.* s; the one of step 1 stands"
    with pytest.raises(CheckpointError, match=told):
        checkpoints.wait()
    answers.set()
    assert checkpoints.last == 1
    assert_same(checkpoints.restore(make_state()[1]), states[1])


def test_a_second_ctrl_c_does_not_wait_for_a_save(tmp_path, monkeypatch):
    checkpoints, _ = save_steps(tmp_path / "steps", 1)
    answers = threading.Event()
    monkeypatch.setattr("jaxrl_llm.core.runtime.files.sync_all", lambda folder: answers.wait(60))
    state = make_state(step=2)[1]
    checkpoints.save(state)
    waits = saved_on_error(checkpoints, lambda: state, checkpoints.save, print)
    with pytest.raises(KeyboardInterrupt), waits:
        raise KeyboardInterrupt
    assert checkpoints.steps() == [1]
    threading.Timer(0.5, answers.set).start()
    with RunFolder(tmp_path / "run", resume=False):  # another run in this process waits for it
        assert checkpoints.steps() == [1, 2]


@for_each(("processes", "limit"), [(1, None), (2, 605)])
def test_a_save_of_several_processes_has_the_bound_of_one(monkeypatch, processes, limit):
    limits, options = [], v1.options.AsyncOptions

    def record(**settings):
        limits.append(settings["timeout_secs"])
        return options(**settings)

    monkeypatch.setattr(v1.options, "AsyncOptions", record)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    with orbax(seconds=saving._patience(5_000_000)):
        assert limits == [limit]


def test_orbax_keeps_its_log_to_itself(tmp_path, caplog):
    save_steps(tmp_path, 1)
    logging.getLogger("absl").error("from elsewhere")
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == ["from elsewhere"]


@pytest.mark.slow
def test_eight_devices_four_one_and_back(tmp_path):
    model, state = make_state(seed=3, step=4, mesh=make_mesh(data=2, fsdp=2, tensor=2))
    expected = jax.device_get(state._replace(key=jax.random.key_data(state.key)))
    devices, checkpoints = jax.devices(), Checkpoints(tmp_path, model=model, keep=9)
    meshes = [
        make_mesh(fsdp=2, tensor=2, devices=devices[:4]),
        None,
        make_mesh(data=2, tensor=2, devices=devices[4:]),
        make_mesh(fsdp=8),
    ]
    for number, mesh in enumerate(meshes, start=5):
        save(checkpoints, state)
        like = make_state(mesh=mesh)[1]
        state = checkpoints.restore(like, step=number - 1)
        jax.tree.map(lambda x, y: x.sharding == y.sharding or pytest.fail(), state[:2], like[:2])
        size = 1 if mesh is None else mesh.size
        assert len(state.params["norm"]["scale"].sharding.device_set) == size
        found = jax.device_get(state._replace(key=jax.random.key_data(state.key)))
        assert_same(found._replace(step=expected.step), expected)
        state = state._replace(step=state.step + 1)


NAN = float("nan")


@for_each(
    ("ratings", "best"),
    [({}, None), ({1: NAN}, None), ({1: 0.5, 2: 0.25}, 1), ({1: 0.5, 2: 0.5}, 2), ({1: -1.0}, 1)],
)
def test_the_best_is_the_latest_of_the_highest(ratings, best):
    assert best_of(ratings) == best


@given(
    ratings=st.dictionaries(st.integers(0, 50), st.one_of(st.none(), st.floats(-1, 1))),
    keep=st.integers(1, 5),
)
def test_what_stays_is_the_last_and_the_best(ratings, keep):
    steps = sorted(ratings)
    known = {step: value for step, value in ratings.items() if value is not None}
    gone = superseded(steps, known, keep=keep)
    stays = [step for step in steps if step not in gone]
    assert stays[-keep:] == steps[-keep:] and len(stays) <= keep + 1
    assert not known or best_of(known) in stays
    assert set(gone) <= set(steps)


def saved(tmp_path, values, **options):
    """Checkpoints of these ratings, in steps of one."""
    model, state = make_state()
    checkpoints = Checkpoints(tmp_path, model=model, **options)
    for step, value in enumerate(values, start=1):
        checkpoints.set_score(step, {"reward": value, "other": -value})
        checkpoints.save(state._replace(step=state.step + step))
    checkpoints.wait()
    return checkpoints


def test_the_best_stays_beside_the_last(tmp_path):
    checkpoints = saved(tmp_path, [0.5, 0.75, 0.25, NAN, 0.0], keep=1, best="reward")
    assert checkpoints.steps() == [2, 5] and checkpoints.best_step() == 2
    again = Checkpoints(tmp_path, model=checkpoints.model, best="reward")  # after a resume
    assert again.best_step() == 2
    assert again.restore(make_state(seed=4)[1]).step == 5
    with pytest.raises(ValueError, match="made without best=METRIC"):
        Checkpoints(tmp_path, model=checkpoints.model).best_step()
    assert Checkpoints(tmp_path, model=checkpoints.model, best="other").best_step() is None


def test_a_loop_that_goes_back_is_told_of_later_checkpoints(tmp_path):
    model, state = make_state()
    for step in (2, 10):
        jr.train.save(tmp_path, state._replace(step=jnp.int32(step)), model=model)
    with pytest.warns(UserWarning, match=r"checkpoints of later steps \(10\) than 3, which"):
        jr.train.save(tmp_path, state._replace(step=jnp.int32(3)), model=model)
    assert int(jr.train.restore(tmp_path, state, model=model).step) == 10


def test_a_step_may_be_rated_after_it_is_saved(tmp_path):
    model, state = make_state()
    checkpoints = Checkpoints(tmp_path, model=model, keep=1, best="greedy")
    for step, value in ((1, 0.75), (2, 0.5), (3, 0.25)):
        checkpoints.save(state._replace(step=state.step + step))
        checkpoints.set_score(step, {"greedy": value, "sampled": 1.0})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3] and checkpoints.best_step() == 1
    assert checkpoints.restore(make_state()[1]).step == 3  # the checksums stay right


@pytest.mark.slow
def test_a_run_keeps_its_best(tmp_path):
    checkpoint = CheckpointConfig(every=1, keep=1, best="reward")
    done = train(tiny_run(tmp_path, checkpoint=checkpoint))
    rewards = {row["step"]: row["reward"] for row in done.history}
    best = best_of(rewards)
    folder = Checkpoints(tmp_path / "checkpoints", model=None, best="reward")
    assert folder.steps() == sorted({best, 6}) and folder.best_step() == best
    other = tmp_path / "greedy"
    evaluation = EvaluationConfig(every=1)
    checkpoint = CheckpointConfig(every=1, keep=1, best="greedy")
    done = train(tiny_run(other, checkpoint=checkpoint, evaluation=evaluation, steps=3))
    means = {r["step"]: r["held_out"]["greedy"]["mean"] for r in done.history if "held_out" in r}
    folder = Checkpoints(other / "checkpoints", model=None, best="greedy")
    assert folder.best_step() == best_of({s: m for s, m in means.items() if s in folder.steps()})
    assert best_of({s: means[s] for s in (1, 2)}) in folder.steps()


@pytest.mark.slow
def test_the_best_of_an_evaluation_is_not_compared_with_that_of_another(tmp_path):
    def five(prompt, completion, metadata):
        return 5.0 + len(completion) % 2

    def one(prompt, completion, metadata):
        return 1.0 + len(completion) % 2

    options = {
        "checkpoint": CheckpointConfig(every=1, keep=1, best="greedy"),
        "evaluation": EvaluationConfig(every=1),
    }
    train(tiny_run(tmp_path, reward=five, steps=2, **options))
    folder = Checkpoints(tmp_path / "checkpoints", model=None, best="greedy")
    assert folder.best_step() in (1, 2)
    lines: list[str] = []
    config = tiny_run(tmp_path, reward=one, steps=4, **options)
    train(config, resume=True, allow_changed=True, log=lines.append)
    assert "The best checkpoint is found anew, by other settings: reward." in lines
    step = folder.best_step()
    # That of step 2, from which the run resumed, was evaluated again.
    scores = {k: folder._read_scores([k])[k] for k in folder.steps()}
    assert 4 in scores and step == best_of(scores) and max(scores.values()) < 5


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "digits").write_bytes(b"123456789")
    (tmp_path / "empty").write_bytes(b"")
    write_record(tmp_path, {"reward": 0.5})
    return tmp_path


def test_the_checksum_is_that_of_every_zip_file(folder):
    files = json.loads((folder / "record.json").read_text())["files"]
    assert files == {"empty": [0, 0], "sub/digits": [9, 0xCBF43926]}  # the check value of CRC-32
    (folder / "new").write_text("x")
    check_record(folder)  # other files do not matter
    (folder / "sub" / "digits").write_bytes(b"213456789")
    with pytest.raises(ValueError, match="its file sub/digits was changed"):
        check_record(folder)


def test_notes_change_without_the_checksums(folder):
    assert read_notes(folder) == {"reward": 0.5}
    replace_notes(folder, {"reward": 0.75})
    assert read_notes(folder) == {"reward": 0.75}
    check_record(folder)


@for_each("text", ["", "[]", "{}", '{"notes": 3}'])
def test_notes_that_cannot_be_read_are_none(folder, text):
    (folder / "record.json").write_text(text)
    assert read_notes(folder) == {}
    with pytest.raises((ValueError, LookupError, TypeError)):
        check_record(folder)


def test_a_write_that_nothing_awaits_any_more_is_not_logged():
    """Its event loop tells of it without naming Orbax, after another write of the save failed."""

    def logged(path):
        error = FileNotFoundError(2, "No such file or directory", path)
        values = {"name": "asyncio", "exc_info": (type(error), error, None)}
        return serialization._not_orbax(logging.makeLogRecord(values | {"msg": "never retrieved"}))

    assert not logged("/run/checkpoints/step_00000001.unfinished/state/d")
    assert logged("/run/metrics.jsonl")
