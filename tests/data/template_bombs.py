"""Renders templates that never end or fill the memory; prints a line for each that is not refused.

The limits of steps and seconds are small, so that what only a limit ends takes no time.
"""

import json
import sys

from jaxrl_llm.data import templates
from jaxrl_llm.data.chat import render_chat

templates.MAX_STEPS, templates.MAX_SECONDS = 2_000, 3.0
LOOP = "{% for i in range(99999) %}"
DOUBLED = "{% set n = namespace(x=START) %}{% for i in range(70) %}{% set n.x = STEP %}{% endfor %}"


def doubled(start, step, end="{{ n.x }}"):
    """A value that doubles seventy times."""
    return DOUBLED.replace("START", start).replace("STEP", step) + end


BOMBS = {
    "nested loops": LOOP * 6 + "x" + "{% endfor %}" * 6,
    "nested empty loops": LOOP * 6 + "{% endfor %}" * 6,
    "loops with a condition": "{% for i in range(99999) if i < 0 %}{% endfor %}" * 9,
    "a loop of loops": LOOP + "{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "a loop of lists": LOOP + "{% set x = range(99999)|list|sort|length %}{% endfor %}",
    "a loop within a filter": LOOP + "{{ range(99999)|map('string')|join }}{% endfor %}",
    "a macro of two macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for x in [[[]]] recursive %}{{ loop([x]) }}{% endfor %}",
    "a recursive tree": "{% set a = [1, 1] %}{% for x in a recursive %}{{ loop(a) }}{% endfor %}",
    "a text times": "{{ 'a' * 10**12 }}",
    "times a text": "{{ 10**12 * 'a' }}",
    "a constant text times": "{{ 'a' * 1000000000000 }}",
    "a list times": "{{ ([1] * 10**9)|length }}",
    "lists of lists": "{{ ([[1] * 99999] * 99999)|length }}",
    "a list in lists": "{% set x = [1] * 9999 %}{{ [x] * 9999 }}",
    "a power": "{{ 9**(9**9) }}",
    "a constant power": "{{ (9**999999999) is odd }}",
    "squares": doubled("9", "n.x * n.x"),
    "hexadecimal": "{{ ('f' * 9999999)|int(base=16) % ('e' * 4999999)|int(base=16) }}",
    "doubled text": doubled("'ab'", "n.x + n.x"),
    "doubled by a tilde": doubled("'ab'", "n.x ~ n.x"),
    "doubled by a filter": doubled("'ab'", "[n.x, n.x]|join"),
    "doubled by a method": doubled("'ab'", "''.join([n.x, n.x])"),
    "doubled by a format": doubled("'ab'", "'{0}{0}'.format(n.x)"),
    "doubled by a percent": doubled("'ab'", "'%s%s' % (n.x, n.x)"),
    "doubled by replacing": doubled("'ab'", "n.x|replace('b', n.x)"),
    "doubled by a replacing method": doubled("'ab'", "n.x.replace('b', n.x)"),
    "doubled in a block": DOUBLED.replace("START", "'ab'").replace(
        "{% set n.x = STEP %}", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"
    ),
    "laughs in lists": doubled("['ha']", "[n.x, n.x]"),
    "laughs in tuples": doubled("('ha',)", "(n.x, n.x)", "{{ {n.x: 1} }}"),
    "laughs in dicts": doubled("{}", "{'a': n.x, 'b': n.x}", "{{ n.x|tojson }}"),
    "laughs in calls": doubled("{}", "dict(a=n.x, b=n.x)", "{{ n.x|string|length }}"),
    "laughs that are compared": doubled("['a']", "[n.x, n.x]")
    + doubled("['a']", "[n.x, n.x]", "{% set m = n.x %}{{ m == n.x }}"),
    "laughs in namespaces": "{% set a = namespace() %}{% set n = namespace(l=[a]) %}"
    "{% for i in range(60) %}{% set b = namespace() %}{% set n.l = n.l + [b] %}{% endfor %}"
    "{% for i in range(59) %}{% set c = n.l[i] %}{% set c.x = [n.l[i + 1], n.l[i + 1]] %}"
    "{% endfor %}{{ n.l[0] }}",
    "itself": "{% set n = namespace() %}{% set n.x = [n, n] %}{{ n }}",
    "the width of a filter": "{{ 'a'|center(1000000000000) }}",
    "the width of a method": "{{ 'a'.ljust(10**12) }}",
    "zeros": "{{ 'a'.zfill(1000000000000) }}",
    "bytes": "{{ 'a'.encode().ljust(1000000000000) }}",
    "bytes of a number": "{{ (5).to_bytes(1000000000000, 'big') }}",
    "tabs": "{{ '\t'.expandtabs(1000000000000) }}",
    "many tabs": "{{ ('\t' * 99999).expandtabs(99999) }}",
    "an indent": "{{ ('\n' * 99999)|indent(99999, true) }}",
    "a long indent": "{{ ('\n' * 99999)|indent('a' * 99999, true) }}",
    "a JSON indent": "{{ [[1]]|tojson(indent=1000000000000) }}",
    "a format's width": "{{ '%1000000000000d' % 1 }}",
    "a format's width as a number": "{{ '%*d' % (1000000000000, 1) }}",
    "a formatter's width": "{{ '{:>1000000000000}'.format(1) }}",
    "a filter's format": "{{ '%1000000000000d'|format(1) }}",
    "a nested width": "{{ '{:{}}'.format(1, 10**12) }}",
    "a separator": "{{ range(99999)|join('a' * 99999) }}",
    "a separator of a method": "{{ ('a' * 99999).join(range(99999)|map('string')) }}",
    "a table": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "batches": "{{ [1]|batch(1000000000000, 0)|list }}",
    "slices": "{{ [1]|slice(1000000000000)|list }}",
    "rounding": "{{ 1.5|round(1000000000, 'ceil') }}",
    "a search from the right": "{{ ('a' * 4000000).rfind('b' ~ 'a' * 2000000) }}",
    "words of nothing": "{{ lipsum(n=1000000000) }}",
    "a date's width": "{{ strftime_now('%1000000000000d') }}",
    "a long range": "{{ range(10**12)|list }}",
    "escaping at compile time": "{% autoescape 'a'|center(1000000000000) %}a{% endautoescape %}",
    "another template": "{% include 'a' %}",
    "deep brackets": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "deep blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "a long template": "a" * 2**21,
}


def main():
    messages = [{"role": "user", "content": "a"}]
    for name, template in BOMBS.items():
        print(json.dumps([name, "died"]), flush=True)
        try:
            result = f"a text of {len(render_chat(template, messages))}"
        except ValueError as error:
            refused = str(error).startswith("render_chat: the chat template raised an error: ")
            result = "refused" if refused and len(str(error)) < 400 else repr(error)
        except BaseException as error:
            result = repr(error)[:200]
        print(json.dumps([name, result]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
