"""Checkpoints: saved whole, read back, the last few and the best, with a record of their files."""

import dataclasses
import functools
import itertools
import json
import logging
import os
import shutil
import threading
import time
import types
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fresh import fresh
from helpers import refuses
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
from jaxrl_llm.train.checkpoint.record import check_record, read_notes, replace_notes, write_record
from jaxrl_llm.train.checkpoint.serialization import Extras, orbax, shapes_of
from jaxrl_llm.train.checkpoint.start import find_start
from jaxrl_llm.train.logging.run_folder import RunFolder

NAN = float("nan")
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


def of_folder(folder, **options):
    return Checkpoints(folder, model=make_state()[0], **options)


def save_steps(folder, *steps, **options):
    checkpoints, states = of_folder(folder, **options), {}
    for step in steps:
        states[step] = make_state(seed=step, step=step)[1]
        checkpoints.set_score(step, {"reward": -step})  # which counts where a metric has the best
        checkpoints.save(states[step])
    checkpoints.wait()
    return checkpoints, states


def other_state():
    """What a checkpoint is read into."""
    return make_state(seed=9)[1]


def rated(folder, values, **options):
    """Checkpoints of these ratings, in steps of one."""
    checkpoints, state = of_folder(folder, **options), make_state()[1]
    for step, value in enumerate(values, start=1):
        checkpoints.set_score(step, {"reward": value, "other": -value})
        save(checkpoints, state._replace(step=state.step + step))
    return checkpoints


def save(checkpoints, state, **beside):
    checkpoints.save(state, **beside)
    checkpoints.wait()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def truncate(path):
    """Cuts the largest file of a checkpoint in half."""
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def test_round_trip_is_exact_and_keeps_the_last(tmp_path):
    checkpoints, states = save_steps(tmp_path, 1, 2, 10)
    assert checkpoints.steps() == [2, 10]
    like = other_state()
    assert_same(checkpoints.restore(like), states[10])
    assert_same(checkpoints.restore(like, step=2), states[2])
    assert_same(checkpoints.restore_params(like.params), states[10].params)


def test_the_state_may_be_donated_while_it_is_saved(tmp_path):
    state = jax.tree.map(jnp.copy, make_state(step=3)[1])
    expected = jax.tree.map(np.array, state.params)
    checkpoints = of_folder(tmp_path)
    checkpoints.save(state)
    overwrite = jax.jit(lambda p: jax.tree.map(lambda x: x * 0 - 5, p), donate_argnums=0)
    jax.block_until_ready(overwrite(state.params))
    checkpoints.wait()
    restored = checkpoints.restore(other_state())
    jax.tree.map(np.testing.assert_array_equal, restored.params, expected)


def test_restores_on_another_mesh_and_into_shapes(tmp_path):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    _, state = make_state(seed=3, step=4, mesh=mesh)
    save(checkpoints := of_folder(tmp_path), state)
    shapes = shapes_of(make_state(mesh=mesh)[1])
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(shapes.params))
    others = (None, make_mesh(fsdp=8), make_mesh(fsdp=2, devices=jax.devices()[4:6]))
    for like in (shapes, *(make_state(mesh=other)[1] for other in others)):
        restored = checkpoints.restore(like)
        assert_same(jax.device_get(restored.params), jax.device_get(state.params))
        jax.tree.map(lambda x, y: x.sharding == y.sharding or pytest.fail(), restored[:2], like[:2])


def test_what_stands_beside_a_state_comes_back_without_its_shapes(tmp_path):
    checkpoints, _ = save_steps(tmp_path, 1)
    assert checkpoints.restore_extras() is None
    arrays = [{"a": np.int32([[0, 1, 2]]), "none": {}}, {"b": np.ones(2, bool)}]
    beside = Extras(arrays, {"texts": ["\n\u00e9"], "size": 0.1})
    _, state = make_state(step=2)
    save(checkpoints, state, extras=beside)
    again = Checkpoints(tmp_path, model=checkpoints.model)
    assert again.restore_extras() is None  # nothing has been restored
    assert_same(again.restore(other_state()), state)
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
    refuses(r"step_00000001' belongs to another model: .*width=32", checkpoints.restore, state)
    refuses("belongs to another model", checkpoints.restore_params, state.params)
    assert checkpoints.steps() == [1]
    _, state = make_state()
    state = state._replace(opt_state=optax.sgd(0.1, momentum=0.9).init(state.params))
    refuses("was made with another optimizer or recipe", same.restore, state)


def test_a_model_of_another_precision_reads_the_same_parameters(tmp_path):
    _, states = save_steps(tmp_path, 1)
    model, params = tiny_model(num_layers=1, dtype="bfloat16")
    found = Checkpoints(tmp_path, model=model).restore_policy(params)
    assert_same(found, states[1].params)
    rounded = model._replace(config=dataclasses.replace(model.config, quantization="int8"))
    assert_same(Checkpoints(tmp_path, model=rounded).restore_policy(params), states[1].params)
    found = Checkpoints(tmp_path, model=rounded)
    like = make_state()[1]
    refuses("another model: .*'float32'.* not .*'bfloat16'.*int8", found.restore, like)
    assert_same(found.restore(like, any_precision=True), states[1])


class _Plain:
    """Without a ``repr``, as a user may write one, with a field that is a function."""

    vocab_size, max_length, num_layers, num_kv_heads, head_dim = 259, 64, 1, 2, 8
    dtype = "float32"

    def __init__(self, activation):
        self.activation = activation


@dataclasses.dataclass(frozen=True)
class _Config:
    activation: Any
    inner: Any
    vocab_size: int = 259
    dtype: Any = "float32"


@dataclasses.dataclass(frozen=True)
class _WithSecret:
    dtype: Any = "float32"
    hf_token: str = "abcd1234efgh"


class _Slotted:
    """As attrs makes one."""

    __slots__ = ("f", "layers")

    def __init__(self, layers, f):
        self.layers, self.f = layers, f

    def __repr__(self):
        return f"Cfg({self.layers}, {self.f})"


class _Tuple(NamedTuple):
    inner: Any


TEXT = "_Plain(vocab_size=259, max_length=64, num_layers=1, num_kv_heads=2, head_dim=8, "
TEXT += "dtype='float32', activation="


def lambdas():
    return _Config(lambda x: x, _Plain(lambda x: x))


@for_each(
    "config, text",
    [
        (tiny_model(num_layers=1)[0].config, None),  # as in checkpoints of earlier versions
        *((_Config("gelu", x), None) for x in ((), (1,), [1, 2.5], {"a": {}}, set(), {17, 5, 11})),
        (_Tuple(frozenset({9})), None),
        (_Tuple(frozenset({"b", "c", "a"})), "_Tuple(inner=frozenset({'a', 'b', 'c'}))"),
        (_Plain(jax.nn.gelu), f"{TEXT}gelu)"),
        (
            lambdas(),
            f"_Config(activation=<lambda>, inner={TEXT}<lambda>), vocab_size=259, dtype='float32')",
        ),
        (_WithSecret(), "_WithSecret(dtype='float32', hf_token='***')"),
    ],
)
def test_the_text_of_a_config_is_its_repr_without_addresses_modules_and_secrets(config, text):
    assert config_text(config) == (repr(config) if text is None else text)


def both(make):
    return [make(_Plain(f)) for f in (jax.nn.gelu, jax.nn.silu)]


@for_each(
    "first, second",
    [
        (_Slotted((1, 2), lambda x: x), _Slotted((2, 1), lambda x: x)),
        both(lambda inner: _Config(jnp.sin, ({"mlp": [inner]},))),
        both(_Tuple),
        both(_Plain),
    ],
)
def test_the_texts_of_configs_of_different_models_differ(first, second):
    texts = [config_text(x) for x in (first, second)]
    assert texts[0] != texts[1] and " at 0x" not in "".join(texts)


@for_each("kind", [str, lambda x: getattr(jnp, x), lambda x: jnp.dtype(x).type, jnp.dtype])
def test_the_precision_of_a_model_may_be_written_in_any_way(kind):
    texts = []
    for dtype in map(kind, ("float32", "bfloat16")):
        texts += [config_text(_WithSecret(dtype)), config_text(_Config("gelu", 8, dtype=dtype))]
    assert len(set(texts)) == 4
    first, last, other_first, other_last = map(without_precision, texts)
    assert (first, last) == (other_first, other_last) and "8" in last


def test_a_config_that_shows_memory_addresses_is_the_same_in_every_process(tmp_path):
    model, state = make_state(step=1)
    models = [model._replace(config=lambdas()) for _ in range(2)]
    assert repr(models[0].config) != repr(models[1].config)  # as in two processes
    jr.train.save(tmp_path, state, model=models[0])
    assert_same(jr.train.restore(tmp_path, other_state(), model=models[1]), state)
    policies = [Policy(each, (), None) for each in models]
    assert policies[0].function() == policies[1].function()


def test_a_class_in_a_config_may_come_from_a_copy_of_its_file(tmp_path):
    """As of a run, whose own copy of the configuration ``evaluate`` and ``serve`` load."""
    first, again, other = (
        _Config(type(name, (), {"__module__": module}), ())
        for name, module in (("Norm", "config"), ("Norm", "jaxrl_llm_run_1"), ("Other", "config"))
    )
    assert config_text(first) == config_text(again)
    wanted = {"model": config_text(again)}
    serialization.check_same_run(tmp_path, {"model": repr(first)}, wanted)  # of earlier versions
    with pytest.raises(serialization.OtherRun, match="Norm.*Other"):
        wanted = {"model": config_text(other)}
        serialization.check_same_run(tmp_path, {"model": repr(first)}, wanted)


def test_a_secret_in_a_config_is_not_in_a_message(tmp_path):
    earlier = {"model": repr(_WithSecret())}
    other = {"model": config_text(_WithSecret(hf_token="ijkl5678mnop"))}
    serialization.check_same_run(tmp_path, earlier, other)
    with pytest.raises(serialization.OtherRun) as told:
        serialization.check_same_run(tmp_path, earlier, {"model": "Other()"})
    assert "abcd1234efgh" not in str(told.value)
    slotted = _Slotted(_WithSecret(), "hf_token=abcd1234efgh")
    assert "abcd1234efgh" not in config_text(slotted)


def test_a_checkpoint_of_an_older_format_is_refused_with_one_sentence(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("jaxrl_llm.train.checkpoint.serialization.FORMAT", 4)
        save_steps(tmp_path, 1)
    sentence = r"^The checkpoint '.*00001' was written by another version: it has format 4, this "
    with pytest.raises(ValueError, match=sentence + r"one reads 5\.$"):
        of_folder(tmp_path).restore(other_state())


def test_a_truncated_one_is_passed_over_and_kept(tmp_path):
    for left in ("step_00000001.unfinished", "step_00000001.unfinished.orbax-checkpoint-tmp-17"):
        (tmp_path / left).mkdir()  # of a save that was killed
    checkpoints, states = save_steps(tmp_path, 2, 4)
    assert names(tmp_path) == ["step_00000002", "step_00000004"]
    truncate(checkpoints.path(4))
    told = r"step_00000004.* is passed over: its file .* bytes of \d+"
    with pytest.warns(UserWarning, match=told):
        assert_same(checkpoints.restore(other_state()), states[2])
    # The run goes on from step 2 and reaches step 4 again: the damaged folder is set aside.
    save(checkpoints, states[4])
    assert_same(checkpoints.restore(other_state()), states[4])
    assert names(tmp_path) == ["step_00000002", "step_00000004", "step_00000004.damaged"]


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
            checkpoints.restore(other_state())


def test_one_of_the_same_step_is_replaced_and_kept_if_it_is_damaged(tmp_path):
    checkpoints, _ = save_steps(tmp_path, 1)
    _, state = make_state(seed=9, step=1)
    for left in (["step_00000001"], ["step_00000001", "step_00000001.damaged"]):
        save(checkpoints, state)  # which no restore has passed over
        assert names(tmp_path) == left
        assert_same(checkpoints.restore(other_state()), state)
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


def test_damage_that_orbax_finds_while_it_reads_is_passed_over(tmp_path, monkeypatch):
    # Only its error: really reading such a file leaves tasks of Orbax behind.
    checkpoints, states = save_steps(tmp_path, 1, 2)
    load = v1.load

    def fails(path, *arguments):
        if path == checkpoints.path(2):
            raise RuntimeError("while reading array") from ValueError("OUT_OF_RANGE: of 96 bytes")
        return load(path, *arguments)

    monkeypatch.setattr(v1, "load", fails)
    with pytest.warns(UserWarning, match="cannot be read and is passed over: while reading array"):
        assert_same(checkpoints.restore(other_state()), states[1])


def test_a_damaged_newer_one_does_not_cost_the_one_that_was_saved(tmp_path):
    checkpoints, states = save_steps(tmp_path, 2, 4)
    truncate(checkpoints.path(4))
    checkpoints.keep = 1
    save(checkpoints, states[2]._replace(step=states[2].step + 1))
    assert checkpoints.steps() == [3, 4]
    with pytest.warns(UserWarning, match="step_00000004.* is passed over"):
        assert int(checkpoints.restore(other_state()).step) == 3


def test_what_was_passed_over_costs_no_readable_one(tmp_path):
    options = {"keep": 2, "best": "reward"}
    checkpoints = rated(tmp_path, [0.5, 0.0, 0.75], **options)
    truncate(checkpoints.path(3))
    again, state = of_folder(tmp_path, **options), make_state()[1]
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
    checkpoints, _ = save_steps(tmp_path, 1, best="reward")

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
        checkpoints.restore(other_state())
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        of_folder(tmp_path / "none").restore(other_state())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="of step 1 cannot be written to '.*file/new'"):
        of_folder(tmp_path / "file" / "new").save(make_state(step=1)[1])


def test_a_full_disk_leaves_the_previous_one(tmp_path, monkeypatch):
    checkpoints, _ = save_steps(tmp_path, 1, keep=1)
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)  # bytes; the state has more
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    told = "step 3 cannot be written .*: no space is left on the device; the one of step 1 stands"
    with pytest.raises(CheckpointError, match=told):
        checkpoints.save(make_state(step=3)[1])
    assert names(tmp_path) == ["step_00000001"]

    def gone(path):
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "iterdir", gone)  # while it is read, which hides no error
    with pytest.raises(CheckpointError, match="step 3 cannot be written .*: no space is left on"):
        checkpoints.save(make_state(step=3)[1])


def hang(timeout):
    time.sleep(timeout)
    raise TimeoutError


def full(timeout):
    raise ValueError("RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']")


@for_each(
    "result, there, why",
    [
        (hang, True, "nothing was written for 0.1 s"),
        (hang, False, "no such file or directory"),
        (full, True, "no space is left on the device"),
        (None, True, "permission denied"),  # where the written folder gets its name
    ],
)
def test_a_write_that_fails_leaves_the_previous_one(tmp_path, result, there, why):
    checkpoints, states = save_steps(fresh(tmp_path), 1)

    def write(path, *args, **kwargs):
        if there:
            path.with_name(path.name + ".orbax-checkpoint-tmp").mkdir(parents=True)
        return types.SimpleNamespace(result=result)

    def fails(path, target):
        raise PermissionError(13, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        if result is None:
            patch.setattr(Path, "rename", fails)
        else:
            patch.setattr(v1, "save_checkpointables_async", write)
        for name, seconds in (("_TURN_SECONDS", 0.01), ("_STALL_SECONDS", 0.1), ("_SLOWEST", 1.0)):
            patch.setattr(saving, name, seconds)
        checkpoints.save(make_state(step=2)[1])
        with pytest.raises(CheckpointError, match=f"step 2 .*: {why}; the one of step 1 stands"):
            checkpoints.wait()
    assert checkpoints.steps() == [1]
    assert_same(checkpoints.restore(other_state()), states[1])


def test_a_disk_that_does_not_answer_any_more_fails_the_save(tmp_path, monkeypatch):
    checkpoints, states = save_steps(tmp_path, 1)
    answers = threading.Event()
    monkeypatch.setattr("jaxrl_llm.core.runtime.files.sync_all", lambda folder: answers.wait(60))
    monkeypatch.setattr("jaxrl_llm.train.checkpoint.checkpoints._STALL_SECONDS", 1.0)
    checkpoints.save(make_state(step=2)[1])
    told = "step 2 cannot be written .*: it was not complete after 1.* s; the one of step 1 stands"
    refuses(told, checkpoints.wait, error=CheckpointError)
    answers.set()
    assert checkpoints.last == 1
    assert_same(checkpoints.restore(other_state()), states[1])


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


@given(
    ratings=st.dictionaries(st.integers(0, 50), st.sampled_from([None, NAN, -1.0, 0.5, 0.75])),
    keep=st.integers(1, 5),
)
def test_what_stays_is_the_last_and_the_best(ratings, keep):
    steps = sorted(ratings)
    known = {step: value for step, value in ratings.items() if value is not None}
    numbers = {step: value for step, value in known.items() if value == value}
    # The best is the latest of the highest.
    best = max(numbers, key=lambda step: (numbers[step], step), default=None)
    assert best_of(known) == best
    gone = superseded(steps, known, keep=keep)
    stays = [step for step in steps if step not in gone]
    assert stays[-keep:] == steps[-keep:] and len(stays) <= keep + 1
    assert best is None or best in stays
    assert set(gone) <= set(steps)


def test_the_best_stays_beside_the_last(tmp_path):
    checkpoints = rated(tmp_path, [0.5, 0.75, 0.25, NAN, 0.0], keep=1, best="reward")
    assert checkpoints.steps() == [2, 5] and checkpoints.best_step() == 2
    again = of_folder(tmp_path, best="reward")  # after a resume
    assert again.best_step() == 2 and again.restore(other_state()).step == 5
    with pytest.raises(ValueError, match="made without best=METRIC"):
        of_folder(tmp_path).best_step()
    assert of_folder(tmp_path, best="greedy").best_step() is None


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
    assert checkpoints.restore(other_state()).step == 3  # the checksums stay right


@pytest.mark.slow
def test_a_run_keeps_its_best_of_evaluations_alike(tmp_path):
    def five(prompt, completion, metadata):
        return 5.0 + len(completion) % 2

    def one(prompt, completion, metadata):
        return 1.0 + len(completion) % 2

    options = {
        "checkpoint": CheckpointConfig(every=1, keep=1, best="greedy"),
        "evaluation": EvaluationConfig(every=1),
    }
    done = train(tiny_run(tmp_path, reward=five, steps=3, **options))
    means = {r["step"]: r["held_out"]["greedy"]["mean"] for r in done.history if "held_out" in r}
    del means[0]
    folder = Checkpoints(tmp_path / "checkpoints", model=None, best="greedy")
    # A step is rated after it is saved, so the best of the two before the last stands beside it.
    assert folder.steps() == sorted({best_of({s: means[s] for s in (1, 2)}), 3})
    assert folder.best_step() == best_of({s: m for s, m in means.items() if s in folder.steps()})
    lines: list[str] = []
    config = tiny_run(tmp_path, reward=one, steps=5, **options)
    train(config, resume=True, allow_changed=True, log=lines.append)
    assert "The best checkpoint is found anew, by other settings: reward." in lines
    # That of the step from which the run resumed was evaluated again.
    scores = {k: folder._read_scores([k])[k] for k in folder.steps()}
    assert 5 in scores and folder.best_step() == best_of(scores) and max(scores.values()) < 5


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
    refuses("its file sub/digits was changed", check_record, folder)


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


def test_orbax_keeps_its_log_to_itself(tmp_path, caplog):
    save_steps(tmp_path, 1)
    logging.getLogger("absl").error("from elsewhere")
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == ["from elsewhere"]


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


def test_a_write_that_nothing_awaits_any_more_is_not_logged():
    """Its event loop tells of it without naming Orbax, after another write of the save failed."""

    def logged(path):
        error = FileNotFoundError(2, "No such file or directory", path)
        values = {"name": "asyncio", "exc_info": (type(error), error, None)}
        return serialization._not_orbax(logging.makeLogRecord(values | {"msg": "never retrieved"}))

    assert not logged("/run/checkpoints/step_00000001.unfinished/state/d")
    assert logged("/run/metrics.jsonl")
