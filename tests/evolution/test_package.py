"""What the functions of the package share is described once."""

import inspect
import re

from rows import for_each

from jaxrl_llm import evolution

ENTRY = r"\n  (\w+(?:, \w+)*):\s+See the\s+package\."


@for_each("name", evolution.__all__)
def test_the_package_describes_the_arguments_that_refer_to_it(name):
    text = inspect.getdoc(getattr(evolution, name))
    for entry in re.findall(ENTRY, text):
        for argument in entry.split(", "):
            assert f"``{argument}``" in evolution.__doc__


def test_most_functions_refer_to_it():
    texts = [inspect.getdoc(getattr(evolution, name)) for name in evolution.__all__]
    assert sum(bool(re.search(ENTRY, text)) for text in texts) > 20
