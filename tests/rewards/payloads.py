"""Replies that do harm where a program evaluates them: `texts(marker)` names a file to write."""

from pathlib import Path

_WRITE = "open({marker!r}, 'w').write('1')"
_TEXTS = {
    "call": "__import__('os').system('touch {marker}')",
    "open": _WRITE,
    "statement": "import os; os.system('touch {marker}')",
    "eval": 'eval("{write}")',
    "exec": 'exec("{write}")',
    "compile": "eval(compile(\"{write}\", 'x', 'eval'))",
    "setattr": "setattr(__import__('builtins'), 'sum', len)",
    "scorer": (
        "setattr(__import__('reasoning_gym').factory.DATASETS['countdown'][0], 'score_answer',"
        "eval('lambda self, a, e: 1.0'))"
    ),
    "dunder": "().__class__.__base__.__subclasses__()[0]",
    "globals": "Symbol('x').func.__init__.__globals__['sys'].exit(3)",
    "sympify": 'sympify("{write}")',
    "sin": 'sin("{write}")',
    "lambdify": "lambdify(Symbol('x'), \"{write}\")(1)",
    "fstring": "f'{{{write}}}'",
    "format": "'{{0.__class__.__init__.__globals__}}'.format(print)",
    "percent": "%(x)s %n %1000000000d {{0.__class__}} {{}}",
    "lambda": "(lambda: {write})()",
    "walrus": "[x := {write}, x]",
    "comprehension": "[{write} for _ in (1,)]",
    "list": '[*map(eval, ["{write}"])]',
    "exit": "exit(3)",
    "power": "9**9**9",
    "factorial": "factorial(9**9)",
    "digits": "9" * 6000,
    "deep": "(" * 3000 + "1" + ")" * 3000,
    "json": '{{"__reduce__": ["os.system", "touch {marker}"], "__class__": 1, "a": 1e999}}',
    "deep json": "[" * 5000 + "]" * 5000,
    "call of a tool": (
        '<tool_call>{{"name": "__init__", "arguments": {{"self": 1, "x": "{marker}"}}}}</tool_call>'
    ),
    "pickle": "cos\nsystem\n(S'touch {marker}'\ntR.",
    "yaml": "!!python/object/apply:os.system ['touch {marker}']",
    "jinja": "{{{{ cycler.__init__.__globals__.os.popen('touch {marker}') }}}}{{% for x in y %}}",
    "latex": r"\boxed{{\input{{|touch {marker}}}}} $\write18{{touch {marker}}}$ \def\x{{\x}}\x",
    "latex code": r"\boxed{{{write}}} $\mathrm{{{write}}}$",
    "shell": "$(touch {marker}) `touch {marker}` ; touch {marker} | sh",
    "nul": "4\x00{write}",
    "right to left": "\u202e{write}\u2066\ud800",
}


def texts(marker: Path) -> dict[str, str]:
    """The replies by name."""
    write = _WRITE.format(marker=str(marker))
    return {
        name: text.format(marker=marker, write=write) if "{" in text else text
        for name, text in _TEXTS.items()
    }
