"""Replies of every family: their reasoning, their final part, and their form."""

from rows import for_each

from jaxrl_llm.core.reasoning import (
    TAGS,
    is_well_formed,
    reasoning_end,
    shown_tokens,
    split_reply,
    without_reasoning,
)

NEXT = "<|end|><|start|>assistant<|channel|>"
CASES = [
    # a reply, its reasoning, its final part, whether it is well formed
    *((f"{o}2?{c} 4", "2?", " 4", True) for o, c in TAGS),
    *((f"2?{c} 4", "2?", " 4", True) for _, c in TAGS),  # opened by the prompt
    *((f"\n{o}2?{c} 4", "2?", " 4", True) for o, c in TAGS),
    *((f"{o}2?", "2?", None, False) for o, _ in TAGS),
    *((f"{o}{c}", "", "", True) for o, c in TAGS),
    *((f"2?{c} 4{c}", f"2?{c} 4", "", False) for _, c in TAGS),
    ("4", None, "4", False),
    ("See <think> there", None, "See <think> there", False),
    ("<think>a<think>b</think>c", "a<think>b", "c", False),
    ("[THINK]the </think> tag[/THINK] 4", "the </think> tag", " 4", True),
    (f"<|channel|>analysis<|message|>2?{NEXT}final<|message|>4", "2?", "4", True),
    (f"<|channel|>analysis<|message|>2?{NEXT}final<|message|>4<|return|>", "2?", "4", True),
    (f"2?{NEXT}final<|message|>4", "2?", "4", True),  # the prompt has begun the first message
    ("<|channel|>analysis<|message|>2?", "2?", None, False),
    ("<|channel|>final<|message|>4", None, "4", False),
    (
        f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}{NEXT}final "
        "<|message|>4",
        "{}",
        "4",
        True,
    ),
    (" to=self<|message|>2?<|eom|><|start|>assistant to=user<|message|>4", "2?", "4", True),
    (" to=user<|message|>4", None, "4", False),
    ("A <|message|> of no channel", None, "A <|message|> of no channel", False),
]


@for_each(("text", "thinking", "final", "formed"), CASES)
def test_a_reply_is_split_by_the_markers_of_its_family(text, thinking, final, formed):
    assert split_reply(text) == (thinking, final)
    assert is_well_formed(text) == formed


@for_each(
    ("text", "opened", "parts"),
    [
        ("2?</think> 4", True, ("2?", " 4")),
        ("2?</think> 4", False, (None, "2?</think> 4")),
        ("2 and", True, ("2 and", None)),
        ("<think>2?</think> 4 </think>", False, ("2?", " 4 </think>")),
        ("2?</think> the [/THINK] tag", True, ("2?", " the [/THINK] tag")),
    ],
)
def test_a_known_prompt_decides_where_the_reasoning_ends(text, opened, parts):
    assert split_reply(text, opened=opened) == parts


def test_reasoning_is_left_out_of_a_text():
    for text, rest in (
        ("a <think>b</think>c<think>d</think> e", "a ce"),
        ("b</think> c", "c"),
        ("[THINK]b[/THINK]c", "c"),
        (f"<|channel|>analysis<|message|>b{NEXT}final<|message|>c", "c"),
        ("<think>b", "<think>b"),
        ("c", "c"),
    ):
        assert without_reasoning(text) == rest


def test_prompts_and_vocabularies():
    for tag, close in TAGS:
        assert reasoning_end(f"assistant\n{tag}\n") == close
        assert reasoning_end(f"assistant\n{tag}\n{close}\n") == ""
    harmony = {"<|start|>", "<|end|>", "<|message|>", "<|channel|>"}
    assert shown_tokens(harmony | {"<|return|>", "<|call|>"}) == harmony
    assert shown_tokens({"<|end|>", "<|user|>", "<think>"}) == {"<think>"}  # of Phi, <|end|> ends
