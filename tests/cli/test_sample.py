"""``jaxrl-llm sample`` with the tiny model: what goes in, what comes out, and what goes wrong."""

import functools
import io
import json
import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.cli import UsageError, completions, main, options, sample
from jaxrl_llm.cli.completions import Live, OutFile, Printer
from jaxrl_llm.core.runtime.terminal import visible
from jaxrl_llm.train import DataConfig

TOKENIZER = jr.testing.ByteTokenizer()
PROMPTS = ["one", "a longer prompt than the first", "three", "4", "five", "the sixth"]
TOKENS = 12
_make_engine, _engines = sample.make_engine, {}


def _same_engine(model, **options):
    """Engines are kept for the next test of the same sizes."""
    name = (model.config, json.dumps(options, default=str))
    if name not in _engines:
        _engines[name] = _make_engine(model, **options)
    return _engines[name]


@functools.cache
def tiny(dtype="float32"):
    return jr.testing.tiny_model(num_layers=1, dtype=dtype)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder of its own, and a model that needs no file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxrl_llm.models.load_model", lambda name, *, dtype: tiny(dtype))
    monkeypatch.setattr("jaxrl_llm.data.load_tokenizer", lambda name: TOKENIZER)
    monkeypatch.setattr(sample, "make_engine", _same_engine)
    Path("prompts.txt").write_text("\n".join(PROMPTS) + "\n")


def run(capsys, *arguments, tokens=TOKENS, code=0):
    found = main(["sample", "tiny", *map(str, arguments), "--max-new-tokens", str(tokens)])
    out, err = capsys.readouterr()
    assert found == code, err
    assert "Traceback" not in err
    return out, err


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def by_place(rows):
    rows = list(rows)
    found = {(row["index"], row["sample"]): row for row in rows}
    assert len(found) == len(rows), "a completion is there twice"
    return found


def test_a_file_streams_through_slots_into_jsonl(capsys):
    out, err = run(capsys, "--file", "prompts.txt", "--n", 2, "--slots", 4, "--out", "out.jsonl")
    assert out == "" and "12 completions" in err and "tokens/s" in err
    rows = by_place(rows_of("out.jsonl"))
    assert set(rows) == {(i, k) for i in range(len(PROMPTS)) for k in range(2)}
    assert all(row["prompt"] == PROMPTS[i] for (i, _), row in rows.items())
    assert rows[0, 0]["completion"] != rows[0, 1]["completion"]
    # The same requests through the whole-batch sampler.
    model, params = tiny()
    sampler = jr.rollout.make_sampler(
        model, max_new_tokens=TOKENS, group_size=2, stop_ids=TOKENIZER.eos_ids
    )
    chats = [TOKENIZER.chat([{"role": "user", "content": text}]) for text in PROMPTS]
    requests = [[i, sample.MOST_PROMPTS + i] for i in range(len(PROMPTS))]
    ids = [TOKENIZER.encode(chat) for chat in chats]
    rollout = jax.device_get(sampler(params, jax.random.key(0), ids, request_ids=requests))
    for (i, k), row in rows.items():
        mask = rollout.mask[i, k]
        assert row["completion"] == TOKENIZER.decode(rollout.tokens[i, k][mask])
        assert row["num_tokens"] == mask.sum()
        assert row["finish"] == ("stop" if rollout.finish[i, k] else "length")
        for name in ("behavior_logp", "model_logp"):
            np.testing.assert_allclose(row[name], getattr(rollout, name)[i, k][mask].sum(), 1e-4)


def test_text_and_json_come_in_the_order_of_the_prompts(capsys):
    out, _ = run(capsys, *PROMPTS[:3], "--temperature", 0)
    assert [line for line in out.splitlines() if line in {f"# {p}" for p in PROMPTS}] == [
        f"# {p}" for p in PROMPTS[:3]
    ]
    out, _ = run(capsys, "one", "--n", 2)
    assert out.startswith("1. ") and "\n2. " in out and "#" not in out.split("\n")[0][:2]
    out, _ = run(capsys, *PROMPTS, "--json", "--slots", 2)
    assert [json.loads(line)["index"] for line in out.splitlines()] == list(range(6))


def test_printer_holds_back_what_came_too_early(capsys):
    printer = Printer([0, 1, 2], as_json=False)

    def row(index):
        return [{"index": index, "sample": 0, "prompt": f"p{index}", "completion": f"c{index}"}]

    printer.write(row(2))
    assert capsys.readouterr().out == ""
    printer.write(row(0))
    assert capsys.readouterr().out == "# p0\nc0\n"
    printer.flush()
    assert capsys.readouterr().out == "# p2\nc2\n"


def test_other_fields_of_a_row_are_kept(capsys):
    rows = [{"prompt": "one\ntwo\u2028three", "answer": [4], "id": "x"}, {"prompt": "é"}]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    Path("in.jsonl").write_text(text, encoding="utf-8")
    run(capsys, "--file", "in.jsonl", "--out", "out.jsonl", "--temperature", 0)
    found = by_place([json.loads(x) for x in Path("out.jsonl").read_bytes().split(b"\n") if x])
    assert rows[0].items() <= found[0, 0].items() and rows[1].items() <= found[1, 0].items()
    assert set(found[1, 0]) == {"prompt", *completions.FIELDS}
    assert "id" not in found[1, 0]


def test_a_pipe_is_read_whole(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\nthree\n"))
    out, err = run(capsys, "--temperature", 0)
    assert out.startswith("# one\n") and "\n# three\n" in out and err.count("tokens/s") == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    _, err = run(capsys, code=2)
    assert "Standard input holds no prompt" in err


def test_a_mark_of_byte_order_is_no_part_of_a_prompt(monkeypatch):
    """As editors of Windows write it."""
    Path("a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    Path("a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "one"}')
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffone\n"))
    for file in ("a.txt", "a.jsonl", None):
        assert completions.read_prompts((), file and Path(file))[0].text == "one"


@for_each("errors", ["strict", "surrogateescape"])
def test_a_pipe_that_is_not_utf8_is_named(errors, monkeypatch):
    pipe = io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", pipe)
    with pytest.raises(UsageError, match="Standard input cannot be read: it is not UTF-8."):
        completions.read_prompts((), None)


def interrupted_after(monkeypatch, groups):
    """Ctrl-C while the given number of groups has been written."""
    write, count = OutFile.write, []

    def counting(self, rows):
        write(self, rows)
        count.append(1)
        if len(count) == groups:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(OutFile, "write", counting)


def test_ctrl_c_keeps_what_is_finished_and_the_same_command_does_the_rest(capsys, monkeypatch):
    options = ("--file", "prompts.txt", "--n", 2, "--slots", 4)
    run(capsys, *options, "--out", "whole.jsonl")
    with monkeypatch.context() as patch:
        interrupted_after(patch, 2)
        _, err = run(capsys, *options, "--out", "out.jsonl", code=130)
    kept = by_place(rows_of("out.jsonl"))
    whole = sum((i, 0) in kept and (i, 1) in kept for i in range(6))
    assert 4 <= len(kept) < 12 and f"Stopped: {whole} of 6 prompts are done" in err
    # As if the process had died in the middle of a line.
    with Path("out.jsonl").open("a") as file:
        file.write('{"index": 5, "sam')
    _, err = run(capsys, *options, "--out", "out.jsonl")
    assert f"holds {len(kept)} of 12 completions; {12 - len(kept)} are left" in err
    assert by_place(rows_of("out.jsonl")) == by_place(rows_of("whole.jsonl"))
    before = Path("out.jsonl").read_bytes()
    _, err = run(capsys, *options, "--out", "out.jsonl")
    assert "nothing is left to do" in err and Path("out.jsonl").read_bytes() == before


def test_siblings_that_ended_before_ctrl_c_are_kept(capsys, monkeypatch):
    # One slot: the group is open while its first completion has ended.
    step, seen = sample.Timed.step, []

    def stepping(self):
        step(self)
        seen.append(1)
        if len(seen) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(sample.Timed, "step", stepping)
    options = ("one", "--n", 3, "--slots", 1, "--out", "out.jsonl")
    _, err = run(capsys, *options, code=130)
    assert "Stopped: 0 of 1 prompts are done" in err
    assert [(row["index"], row["sample"]) for row in rows_of("out.jsonl")] == [(0, 0)]
    run(capsys, *options)
    assert set(by_place(rows_of("out.jsonl"))) == {(0, 0), (0, 1), (0, 2)}


def test_ctrl_c_without_a_file_says_what_is_lost(capsys, monkeypatch):
    fails_at(monkeypatch, sample.Timed, "step", 1, KeyboardInterrupt)
    _, err = run(capsys, "one", "three", code=130)
    assert "Stopped: 0 of 2 prompts are done; --out FILE would keep them." in err


def test_more_samples_and_other_options_are_appended(capsys):
    options = ("one", "three", "--out", "out.jsonl")
    run(capsys, *options)
    first = rows_of("out.jsonl")
    _, err = run(capsys, *options, "--n", 2)
    assert "holds 2 of 4 completions; 2 are left" in err
    rows = rows_of("out.jsonl")
    assert rows[:2] == first and set(by_place(rows)) == {(i, k) for i in (0, 1) for k in (0, 1)}
    _, err = run(capsys, *options, "--seed", 1)
    assert "holds 4 of other prompts or options, or beyond --n; they stay" in err
    assert len(rows_of("out.jsonl")) == 6
    assert len({row["run"] for row in rows_of("out.jsonl")}) == 2
    # Another prompt in the same place is sampled, with what came after the file's last line.
    Path("out.jsonl").write_text(Path("out.jsonl").read_text().rstrip("\n"))
    run(capsys, "other", "three", "--out", "out.jsonl")
    assert [row["prompt"] for row in rows_of("out.jsonl")[6:]] == ["other"]


def test_a_stop_string_ends_a_completion_and_is_left_out(capsys):
    out, _ = run(capsys, "one", "--json")
    whole = json.loads(out)
    assert whole["finish"] == "length"
    text = whole["completion"]
    stop = text[5:7]
    out, _ = run(capsys, "one", "--json", "--stop", stop, "--stop", "never there")
    row = json.loads(out)
    assert row["completion"] == text[: text.find(stop)] and row["finish"] == "stop"
    assert row["num_tokens"] < whole["num_tokens"]


def test_options_of_the_draw_reach_it(capsys, monkeypatch):
    (greedy,) = map(json.loads, run(capsys, "one", "--json", "--temperature", 0)[0].splitlines())
    assert greedy["behavior_logp"] == 0 and greedy["model_logp"] < 0
    (likely,) = map(json.loads, run(capsys, "one", "--json", "--top-k", 1)[0].splitlines())
    assert likely["completion"] == greedy["completion"]
    asked = {"temperature": 0.8, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 2.0}
    asked |= {"top_k": 3, "min_new_tokens": 5}

    def refusing(model, **options):
        assert {name: options[name] for name in asked} == asked
        raise ValueError("make_engine: all of them came.")

    monkeypatch.setattr(sample, "make_engine", refusing)
    options = [x for name, value in asked.items() for x in (f"--{name.replace('_', '-')}", value)]
    _, err = run(capsys, "one", *options, code=2)
    assert "error: all of them came." in err


def test_a_model_of_another_dtype_is_another_run(capsys):
    exact, coarse = (
        json.loads(run(capsys, "one", "--json", *options)[0])
        for options in ((), ("--dtype", "bfloat16"))
    )
    assert exact["run"] != coarse["run"] and exact["model_logp"] != coarse["model_logp"]


def break_numbers(patch):
    """The model of a name has NaN in all its parameters."""
    model, params = tiny()
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    patch.setattr("jaxrl_llm.models.load_model", lambda name, *, dtype: (model, broken))


def test_numbers_that_are_none_fail_with_their_prompt(capsys, monkeypatch):
    break_numbers(monkeypatch)
    out, err = run(capsys, "one", "three", "--json", code=1)
    assert [json.loads(line)["finish"] for line in out.splitlines()] == ["failed"] * 2
    assert "Failed with non-finite logits of the model: prompt 0, 1 (from 0)." in err


def test_failed_completions_are_sampled_again(capsys, monkeypatch):
    options = ("one", "three", "--out", "out.jsonl")
    run(capsys, *options, "--seed", 9)
    with monkeypatch.context() as patch:
        break_numbers(patch)
        run(capsys, *options, code=1)
        _, err = run(capsys, *options, code=1)
    assert "Sampling failed completions again: 2." in err
    others, failed = rows_of("out.jsonl")[:2], rows_of("out.jsonl")[2:]
    assert [row["finish"] for row in failed] == ["failed"] * 2
    Path("out.jsonl").chmod(0o600)
    _, err = run(capsys, *options)
    assert "'out.jsonl' holds 2 of other prompts or options, or beyond --n; they stay" in err
    rows = rows_of("out.jsonl")
    assert rows[:2] == others and len(by_place(rows[2:])) == 2
    assert {row["finish"] for row in rows} <= {"stop", "length"}
    assert Path("out.jsonl").stat().st_mode & 0o777 == 0o600
    # Only those that are asked for.
    lines = [json.dumps(row | {"sample": 1, "finish": "failed"}) for row in rows[2:]]
    Path("out.jsonl").write_text("\n".join([*map(json.dumps, rows), *lines, ""]))
    _, err = run(capsys, *options)
    assert len(rows_of("out.jsonl")) == 6 and "again" not in err
    run(capsys, *options, "--n", 2)
    assert len(rows_of("out.jsonl")) == 6
    assert (
        len(by_place(row for row in rows_of("out.jsonl")[2:] if row["run"] == rows[2]["run"])) == 4
    )


@pytest.mark.parametrize("name", ["folder", "model.gguf"])
def test_a_model_whose_files_were_replaced_is_another_run(capsys, name):
    folder = Path(name)
    file = folder
    if name == "folder":
        folder.mkdir()
        file = folder / "model.safetensors"
    file.write_bytes(b"weights")

    def sampled():
        words = ["sample", name, "one", "--out", "folder/out.jsonl", "--max-new-tokens", "4"]
        assert main(words) == 0
        return capsys.readouterr().err

    Path("folder").mkdir(exist_ok=True)
    sampled()
    assert "nothing is left to do" in sampled()
    file.write_bytes(b"w3ights")
    os.utime(file, ns=(1, 10**18))
    assert "they stay" in sampled()
    os.utime(file, ns=(1, 10**18 + 1))
    sampled()
    assert len(rows_of("folder/out.jsonl")) == 3
    if name == "folder":
        Path("folder/tokenizer.json").write_text("{}")
        sampled()
        assert len(rows_of("folder/out.jsonl")) == 4


def test_the_page_of_the_engine_names_every_field():
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    assert all(f"`{field}`" in page for field in ("prompt", *completions.FIELDS))


def test_commands_of_the_quickstart_have_options_that_exist():
    text = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
    lines = [shlex.split(x) for x in text.splitlines() if x.startswith("jaxrl-llm sample ")]
    found = [options.parse(sample.Sample, line[2:], command="sample") for line in lines]
    assert found[0].prompts and found[-1].out == Path("completions.jsonl")


@for_each(
    ("arguments", "part"),
    [
        (["--n", "0"], "--n must be at least 1; got 0"),
        (["--n", "5000"], "--n must be at most 2048"),
        (["--slots", "0"], "--slots must be at least 1"),
        (["--seed", "-1"], "--seed must not be negative; got -1"),
        (["--min-new-tokens", "99"], "--min-new-tokens 99 is more than --max-new-tokens 12"),
        (["--min-new-tokens", "0"], "--min-new-tokens must be at least 1; got 0"),
        (["--json", "--out", "x.jsonl"], "--json has no effect with --out"),
        (["--stop", ""], "--stop must not be empty"),
        (["--file", "prompts.txt"], "Give prompts or --file, not both"),
        (["--raw", "--system", "s"], "--system has no effect with --raw"),
        (["--temperature", "0", "--n", "2"], "--n has no effect at temperature 0"),
        (["--temperature", "0", "--seed", "1"], "--seed has no effect at temperature 0"),
        (["--temperature", "0", "--top-k", "4"], "top_k has no effect at temperature 0"),
        (["--temperature", "-1"], "temperature must not be negative"),
        (["--top-p", "2"], "top_p must be below 1"),
        (["--out", "nowhere/x.jsonl"], "'nowhere/x.jsonl' cannot be written"),
        (["--out", "prompts.txt"], "Line 1 of 'prompts.txt' is not JSON"),
    ],
)
def test_wrong_usage(capsys, arguments, part):
    _, err = run(capsys, "hello", *arguments, code=2)
    assert part in " ".join(err.replace("│", " ").split())


@for_each(
    ("name", "content", "part"),
    [
        ("a.txt", b"\n\n", "The file 'a.txt' holds no prompt"),
        ("a.txt", b"\xff\xfe", "'a.txt' cannot be read: it is not UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt"', "Line 2 of 'a.jsonl' is not JSON"),
        ("a.jsonl", b'\n"x"', "Line 2 of 'a.jsonl' must be a JSON object whose field 'prompt'"),
        ("a.jsonl", b'{"text": "x"}', "must be a JSON object whose field 'prompt' is a text"),
        ("a.jsonl", b'{"prompt": "x", "sample": 1}', "has a field 'sample', which its completions"),
        ("nowhere.txt", None, "'nowhere.txt' cannot be read: No such file"),
    ],
)
def test_files_that_cannot_be_used(capsys, name, content, part):
    if content is not None:
        Path(name).write_bytes(content)
    _, err = run(capsys, "--file", name, code=2)
    assert part in err and err.count("\n") == 1


def test_what_does_not_fit_is_told_before_anything_is_sampled(capsys, monkeypatch):
    Path("long.txt").write_text("short\n" + "x" * 300)
    _, err = run(capsys, "--file", "long.txt", "--out", "out.jsonl", code=2)
    assert "has 318 tokens, but the model's context leaves room for 244" in err
    assert rows_of("out.jsonl") == []
    _, err = run(capsys, "one", tokens=256, code=2)
    assert "--max-new-tokens 256 leaves no room for a prompt in the model's context of 256" in err
    monkeypatch.setattr("jaxrl_llm.rollout.engine.memory.has_room", lambda *sizes, **options: False)
    _, err = run(capsys, "one", code=2)
    assert "slots" in err and "Give fewer --slots or --max-new-tokens." in err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_of_a_terminal_are_answered_one_by_one(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal(f"one\n\n{'x' * 300}\n{'y' * 60}\nfive\n"))
    out, err = run(capsys, "--temperature", 0, "--out", "out.jsonl")
    assert err.count("tokens/s") == 3 and err.count(">>> ") == 6
    assert "has 318 tokens" in err
    rows = rows_of("out.jsonl")
    assert [row["prompt"] for row in rows] == ["one", "y" * 60, "five"]
    assert [row["index"] for row in rows] == [0, 2, 3]
    assert out == "".join(f"{row['completion']}\n" for row in rows)


def test_a_line_that_the_file_holds_is_not_answered_again(capsys, monkeypatch):
    for answers in (1, 0):
        monkeypatch.setattr(sys, "stdin", Terminal("one\n"))
        _, err = run(capsys, "--out", "out.jsonl")
        assert err.count("tokens/s") == answers
    assert "'out.jsonl' has the completions of this line" in err
    assert len(rows_of("out.jsonl")) == 1


def fails_at(monkeypatch, kind, name, number, error):
    """A call of a method fails before it does anything; returns the list of its calls."""
    method, calls = getattr(kind, name), []

    def failing(self, *arguments, **options):
        calls.append(options)
        if len(calls) == number:
            raise error
        return method(self, *arguments, **options)

    monkeypatch.setattr(kind, name, failing)
    return calls


def test_a_line_that_needs_too_many_slots_does_not_end_the_others(capsys, monkeypatch):
    made = fails_at(monkeypatch, sample.Job, "generation", 2, UsageError("there is no room"))
    monkeypatch.setattr(sys, "stdin", Terminal(f"one\n{'y' * 90}\nthree\n"))
    out, err = run(capsys, "--json")
    assert "there is no room" in err and len(made) == 3
    assert [row["prompt"] for row in map(json.loads, out.splitlines())] == ["one", "three"]


def test_a_completion_ends_where_the_template_ends_a_turn(capsys, monkeypatch):
    class Template(jr.testing.ByteTokenizer):
        """Ends turns with a token that is not among those that end a text."""

        eos_ids = (258,)

    monkeypatch.setattr("jaxrl_llm.data.load_tokenizer", lambda name: Template())
    seen = []

    def make(model, **options):
        seen.append(options["stop_ids"])
        raise ValueError("make_engine: it is asked, and need not be made.")

    monkeypatch.setattr(sample, "make_engine", make)
    run(capsys, "one", code=2)
    run(capsys, "one", "--raw", code=2)
    assert seen == [(258, 257), (258,)]
    data = DataConfig(prompts="questions.jsonl")
    for environment in (None, object()):  # as the run sampled, with an environment or without
        config = SimpleNamespace(data=data, environment=environment)
        policy = options.Policy(*tiny(), Template(), config)
        monkeypatch.setattr(options, "load_policy", lambda *args, policy=policy, **kwargs: policy)
        run(capsys, "one", code=2)
        assert seen.pop() == (258, 257)


def test_ctrl_c_at_a_terminal_ends_the_answer_only(capsys, monkeypatch):
    fails_at(monkeypatch, sample.Timed, "step", 1, KeyboardInterrupt)
    monkeypatch.setattr(sys, "stdin", Terminal("one\nthree\n"))
    run(capsys, "--temperature", 0, "--out", "out.jsonl")
    assert [row["prompt"] for row in rows_of("out.jsonl")] == ["three"]


class Shown:
    """Tokens as ``on_tokens`` hands them over."""

    def __init__(self, ids):
        self.tokens = np.array(ids)


@for_each(
    ("text", "stops", "pieces"),
    [
        ("aé€b", (), ["a", "", "é", "", "", "€", "b"]),
        ("xyENDz", ("END",), ["x", "y", "", "", "", ""]),
        ("xENx", ("END",), ["x", "", "", "ENx"]),
    ],
)
def test_text_is_shown_as_far_as_it_is_sure(capsys, text, stops, pieces):
    live, shown = Live(TOKENIZER, stops), []
    for token in text.encode():
        live("group", 0, 0, Shown([token]))
        shown.append(capsys.readouterr().out)
    assert shown == pieces
    whole = text.split("END")[0] if stops else text
    live.write([{"completion": whole}])
    assert "".join(shown) + capsys.readouterr().out == whole + "\n"
    live.flush()
    assert capsys.readouterr().out == ""


def test_one_completion_is_streamed_to_a_terminal(capsys, monkeypatch):
    written = []
    show = Live._print

    def recording(self, text):
        written.append(text)
        show(self, text)

    plain, _ = run(capsys, "one", "--temperature", 0)
    monkeypatch.setattr(Live, "_print", recording)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    out, _ = run(capsys, "one", "--temperature", 0)
    assert out == visible(plain) and len(written) > TOKENS // 2
    # And to one who types; the sign is not part of what is compared.
    lines = iter(["one", "three"])

    def typed(sign):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", Terminal())
    out, _ = run(capsys, "--temperature", 0)
    assert out.startswith(plain) and len(out.splitlines()) >= 2


def test_completions_go_through_links_and_into_pipes_and_devices(capsys, tmp_path):
    options = ("one", "two", "--slots", 2)
    Path("link.jsonl").symlink_to("rows.jsonl")
    run(capsys, *options, "--out", "link.jsonl")
    assert Path("link.jsonl").is_symlink() and len(rows_of("rows.jsonl")) == 2
    _, err = run(capsys, *options, "--out", "link.jsonl")
    assert "nothing is left to do" in err
    os.mkfifo("pipe")
    texts = []
    reader = threading.Thread(target=lambda: texts.append(Path("pipe").read_text()))
    reader.start()
    out = OutFile(Path("pipe"))
    for group in ([{"index": 0}], [{"index": 1}]):
        out.write(group)
    del out
    reader.join()
    assert texts == ['{"index": 0}\n{"index": 1}\n']
    Path("full").symlink_to("/dev/full")
    _, err = run(capsys, *options, "--out", "full", code=1)
    assert "'full' cannot be written: no space is left on the device" in err
    assert Path("full").is_symlink() and Path("full").is_char_device()
