"""Run as a script by `patterns`: tries expressions on runs of characters, under resource limits.

Its arguments are seconds of the processor and bytes of memory, its input a JSON list of lists of an
expression and texts. It prints the numbers of each trial before it begins, and why one failed.
"""

import json
import sys


def main(seconds: int, memory: int) -> None:
    from tokenizers import Regex, pre_tokenizers

    if sys.platform != "win32":
        import resource

        for limit, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory)):
            there = resource.getrlimit(limit)[1]  # which only root may raise
            most = most if there == resource.RLIM_INFINITY else min(most, there)
            resource.setrlimit(limit, (most, most))
    for number, (pattern, texts) in enumerate(json.load(sys.stdin)):
        try:
            expression = Regex(pattern)
        except Exception:  # one that is no expression: who loads the file says so
            continue
        split = pre_tokenizers.Split(expression, "removed")
        for place, text in enumerate(texts):
            _say(f"{number} {place}")
            try:
                split.pre_tokenize_str(text)
            except BaseException as error:  # a panic of the package is no Exception
                _say(str(error))
                return
    _say("done")


def _say(line: str) -> None:
    """A line for the process that waits for it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
