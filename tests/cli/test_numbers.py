"""Numbers out of sense on the command line: one sentence before anything is loaded."""

from rows import for_each
from test_cli import config_file, one_sentence, refused, run

HUGE = str(2**64)
CASES = [
    (["sample", "m", "p"], ["temperature", "top-p", "min-p", "repetition-penalty"], ["n"]),
    (["sample", "m", "p"], [], ["seed", "top-k", "slots", "max-new-tokens", "step"]),
    (["evaluate", "CONFIG", "--k", "1"], ["success"], ["seed", "limit", "step"]),
    (["pairs", "CONFIG", "--out", "o.jsonl"], ["success"], ["seed", "samples", "limit"]),
    (["serve", "m"], [], ["seed", "slots", "top-k", "max-waiting", "prompt-length"]),
    (["merge", "a", "b", "--out", "o", "--method", "slerp"], ["t"], []),
    (["merge", "a", "b", "--out", "o", "--method", "dare", "--base", "c"], ["drop"], ["seed"]),
    (["train", "CONFIG", "--plan"], ["plan-memory"], []),
    (["export", "r", "f"], [], ["step"]),
]
BAD = [
    (words, f"--{option}", value)
    for words, reals, integers in CASES
    for options, values in ((reals, ("nan", "inf", "1e39")), (integers, (HUGE, "-" + HUGE)))
    for option in options
    for value in values
]


@for_each(("words", "option", "value"), BAD)
def test_a_number_out_of_sense_is_refused(capsys, tmp_path, words, option, value):
    path = config_file(tmp_path)
    words = [path if word == "CONFIG" else word for word in words]
    code, out, err = run(capsys, *words, f"{option}={value}")
    assert (code, out) == (2, "") and "Traceback" not in err
    text = " ".join(err.replace("_", "-").split())  # tyro draws a box around some
    assert f"{option[2:]} must" in text and "got" in text


def test_each_number_of_a_list_is_checked(capsys, tmp_path):
    code, _, err = run(capsys, "evaluate", config_file(tmp_path), "--k", "1", HUGE)
    assert code == 2
    one_sentence(err, "evaluate: k must be finite and at most 4294967295")
    refused(capsys, "merge a b --out o --weights nan 1", "merge: weights must be finite")


def test_more_samples_than_pass_at_k_counts_are_refused(capsys, tmp_path):
    words = ("evaluate", config_file(tmp_path), "--samples", "1024", "--k", "1", "1024")
    refused(capsys, [*words], "a question has at most 1000 completions; got 1024")
