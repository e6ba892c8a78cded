"""What a terminal shows of texts of strangers."""

import io

from jaxrl_llm.core.runtime.terminal import for_stream, str_or_type, visible


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_control_characters_are_written_out():
    text = "a\tb\n\x1b]0;title\x07\r\x9b2J\u202eright\x7f"
    shown = "a\tb\n\\x1b]0;title\\x07\\r\\x9b2J\\u202eright\\x7f"
    assert visible(text) == shown
    assert for_stream(text, Terminal()) == shown and for_stream(text, io.StringIO()) == text


def test_what_cannot_be_printed_has_a_type():
    class BrokenError(Exception):
        def __str__(self):
            raise RuntimeError

    assert str_or_type(BrokenError()) == "BrokenError that cannot be printed"
    assert str_or_type(ValueError("a")) == "a"
