"""Chat templates under bounds: what they refuse, and what they leave as it is."""

from pathlib import Path

import pytest
from capped import run_capped
from rows import for_each

from jaxrl_llm.data import templates
from jaxrl_llm.data.chat import render_chat

HERE = Path(__file__).parent

MESSAGES = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "[c]"}]


@pytest.mark.slow
def test_bombs_are_refused_in_one_sentence():
    results = dict(run_capped(HERE / "template_bombs.py"))
    assert len(results) > 60
    assert {name: x for name, x in results.items() if x != "refused"} == {}


@for_each(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }} {% endfor %}", "1/2 2/2 "),
        ("{% for m in messages if m.role == 'user' %}{{ loop.last }}{% endfor %}", "True"),
        ("{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }},{% endfor %}", "3,7,"),
        ("{% set a, b = 1, [2] %}{{ a }}{{ b[0] }}{{ {'x': a}.x }}", "121"),
        ("{% for x in nothing %}a{% else %}b{% endfor %}", "b"),
        ("{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}{{ loop(x) }}"
         "{% else %}{{ x }}{% endif %}{% endfor %}", "123"),
        ("{{ messages[0].content.split('\n')|join('+') ~ 1 ~ none }}", "a+b1None"),
        ("{{ messages|map(attribute='role')|join(', ') }}", "user, assistant"),
        ("{{ messages[1]|tojson }}", '{"role": "assistant", "content": "[c]"}'),
        ("{{ '%05d %s' % (42, 'x') }}{{ '{:>3}'.format(7) }}{{ 1700000000 % 7 }}", "00042 x  76"),
        ("{% macro f(x) %}<{{ x }}>{{ caller() }}{% endmacro %}"
         "{% call f(1) %}y{% endcall %}", "<1>y"),
        ("{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}"
         "{{ n.i }}", "2"),
        ("{% generation %}a{% endgeneration %}{% filter upper %}b{% endfilter %}", "aB"),
        ("{{ undefined_name }}{{ none|default('d', true) }}{{ 1700000000|default(2) }}",
         "d1700000000"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}"
         "{% endfor %}", "assistant"),
    ],
)  # fmt: skip
def test_what_templates_do_is_as_ever(template, text):
    assert render_chat(template, MESSAGES) == text


def test_bounds_are_of_one_rendering():
    long = [{"role": "user", "content": "x" * 2_000_000}] * 3
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for _ in range(2):
        assert len(render_chat(template, long)) == 6_000_000
    messages = [{"role": "user", "content": "hello"}] * 2_000
    text = "{% for m in messages %}<|im_start|>{{ m.role ~ ': ' ~ m.content|trim }}{% endfor %}"
    assert render_chat(text, messages).count("hello") == 2_000


def test_what_an_expression_raises_is_told(monkeypatch):
    with pytest.raises(ValueError, match="the chat template raised an error: TypeError"):
        render_chat("{{ 1 + 'a' }}", MESSAGES)
    monkeypatch.setattr(templates, "MAX_STEPS", 10)
    with pytest.raises(ValueError, match="it takes more than 10 steps"):
        render_chat("{% for i in range(11) %}{% endfor %}", MESSAGES)


def test_a_bound_itself_is_allowed():
    most = templates._MAX_INTEGER
    templates._check_growth("%", "%*d", (most, 1), {})
    with pytest.raises(templates.TemplateError, match="width above"):
        templates._check_growth("%", "%*d", (most + 1, 1), {})
    bits = templates._MAX_BITS
    assert templates._sized(2**bits - 1) == 2**bits - 1
    with pytest.raises(templates.TemplateError, match="bits"):
        templates._sized(2**bits)
