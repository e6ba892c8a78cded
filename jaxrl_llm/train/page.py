"""Pieces of the report of a run: its look, where the time went, completions, settings."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm.train.charts import number, text

Rows = Sequence[Mapping[str, Any]]

CSS = """
:root{color-scheme:light dark;--bg:#fff;--card:#f6f7f9;--ink:#1b1f24;--soft:#5b6472;--rule:#d9dee5;
--c0:#2563eb;--c1:#c2410c;--c2:#15803d;--c3:#7e22ce;--c4:#0891b2;--c5:#a16207;--c6:#be185d;
--bad:#b91c1c}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1d2127;--ink:#e6e9ee;--soft:#9aa4b2;
--rule:#343b45;--c0:#6ea8fe;--c1:#fb923c;--c2:#4ade80;--c3:#c59bff;--c4:#67e8f9;--c5:#facc15;
--c6:#f472b6;--bad:#f87171}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:16px;background:var(--bg);color:var(--ink);
font:15px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5em;margin:.2em 0}h2{font-size:1.15em;margin:1.8em 0 .6em}h3{font-size:1em;margin:0}
p{margin:.3em 0}.soft,small{color:var(--soft)}.bad{color:var(--bad)}
.grid{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(min(100%,310px),1fr))}
.tiles{display:grid;gap:8px;grid-template-columns:repeat(auto-fill,minmax(min(100%,165px),1fr))}
.card{background:var(--card);border-radius:8px;padding:10px 12px;min-width:0}
.tiles b{display:block;font-size:1.1em;font-weight:600}
svg{display:block;width:100%;height:auto;margin-top:4px}
svg text{font-size:11px;fill:var(--soft)}.end{text-anchor:end}.mid{text-anchor:middle}
svg .grid{stroke:var(--rule);stroke-width:1}.line{fill:none;stroke-width:1.6;stroke-linejoin:round}
.band{opacity:.18}.hit{fill:transparent}.hit:hover{fill:var(--ink);opacity:.35}
.lost{stroke:var(--bad);stroke-width:1.3;fill:none}.whisker{stroke-width:1.4;fill:none}
.sc0{stroke:var(--c0)}.sc1{stroke:var(--c1)}.sc2{stroke:var(--c2)}.sc3{stroke:var(--c3)}
.sc4{stroke:var(--c4)}.sc5{stroke:var(--c5)}
.fc0{fill:var(--c0)}.fc1{fill:var(--c1)}.fc2{fill:var(--c2)}.fc3{fill:var(--c3)}
.fc4{fill:var(--c4)}.fc5{fill:var(--c5)}
.key{display:inline-block;margin-right:12px;font-size:.85em;color:var(--soft)}
.key i,td i{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:5px}
.b0{background:var(--c0)}.b1{background:var(--c1)}.b2{background:var(--c2)}.b3{background:var(--c3)}
.b4{background:var(--c4)}.b5{background:var(--c5)}.b6{background:var(--c6)}.b7{background:var(--soft)}
.bar{display:flex;height:22px;border-radius:6px;overflow:hidden;margin-bottom:8px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:4px 12px 4px 0;border-bottom:1px solid var(--rule)}
th{font-weight:600;color:var(--soft)}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
td.name{min-width:9em}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0 10px;max-height:22em;overflow:auto;
font:13px/1.4 ui-monospace,monospace}
summary{cursor:pointer;margin:.8em 0;color:var(--soft)}code{font-size:.8em;color:var(--soft)}
"""

PHASES = {
    "sample": "sampling",
    "reward": "rewards",
    "wait": "waiting for rollouts",
    "score": "reference log-probabilities",
    "train": "training step",
    "save": "checkpoints",
    "evaluate": "evaluation",
    "other": "the rest",
}


def numbers_of(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The numbers of a name, in the rows that have one."""
    found = (row.get(name) for row in rows)
    return [x for x in found if isinstance(x, int | float) and abs(x) < 1e300]


def last_step(rows: Rows) -> int:
    """The greatest step; 0 without any."""
    return max((row["step"] for row in rows), default=0)


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.3g} min" if minutes < 120 else f"{minutes / 60:.3g} h"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0) -> str:
    """A table of cells that are HTML already; the last ``numbers`` columns hold numbers."""

    def line(tag: str, cells: Sequence[str]) -> str:
        first = len(cells) - numbers
        kinds = [' class="n"' if i >= first else "" for i in range(len(cells))]
        kinds[0] = ' class="name"'
        found = (f"<{tag}{k}>{c}</{tag}>" for k, c in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(found)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table>{line("th", header)}{body}</table></div>'


def times(steps: Rows, sessions: Rows) -> str:
    """Where the time went, as a bar and a table."""
    spent = {name: numbers_of(steps, f"seconds_{name}") for name in (*PHASES, "total")}
    if not spent["total"]:
        return ""
    ends = [row for row in sessions if row.get("event") == "end"]
    for name in ("save", "evaluate", "total"):
        spent[name] = spent[name] + numbers_of(ends, f"seconds_{name}")
    sums = {name: sum(values) for name, values in spent.items()}
    made = sums["sample"] + sums["reward"]
    # In turns the loop waits just as long as a batch takes; ahead of it, both happen beside a step.
    in_turns = made <= 1.05 * sums["wait"] + 1e-3
    if in_turns:
        sums["wait"] = max(sums["wait"] - made, 0.0)
    parts = [name for name in PHASES if in_turns or name not in ("sample", "reward")]
    sums["other"] = max(sums["total"] - sum(sums[name] for name in parts), 0.0)
    whole = max(sum(sums[name] for name in parts), 1e-9)
    bar, rows = [], []
    for i, name in enumerate(PHASES):
        share = sums[name] / whole
        if name in parts and share < 0.001 and name in ("wait", "other", "score"):
            continue
        color = f"b{i}"
        middle = duration(statistics.median(spent[name])) if spent[name] else ""
        within = f"{100 * share:.1f}%" if name in parts else "beside it"
        label = f'<i class="{color}"></i>{PHASES[name]}' if name in parts else PHASES[name]
        first = "".join(map(duration, numbers_of(steps[:1], f"seconds_{name}")))
        rows.append((label, duration(sums[name]), within, first, middle))
        if name in parts:
            bar.append(f'<span class="{color}" style="width:{100 * share:.2f}%"></span>')
    header = ("", "in all", "share", "first step", "median step")
    note = "" if in_turns else "<p>Sampling and rewards went on beside the training steps.</p>"
    note += '<p class="soft">A first step compiles its programs.</p>'
    shown = f'<div class="bar">{"".join(bar)}</div>{table(header, rows, numbers=4)}'
    return f'<h2>Time</h2><div class="card">{shown}{note}</div>'


def completions(samples: Rows) -> str:
    """The completions of the first and of the last step that were kept."""
    found = sorted({row["step"] for row in samples})
    if not found:
        return ""
    parts = []
    for step in dict.fromkeys((found[0], found[-1])):
        cards = "".join(_completion(row) for row in samples if row["step"] == step)
        parts.append(f'<h2>Completions of step {step}</h2><div class="grid">{cards}</div>')
    return "".join(parts)


def _completion(row: Mapping[str, Any]) -> str:
    reward = row.get("reward")
    given = number(reward) if isinstance(reward, int | float | None) else text(reward)
    name = f" <code>{text(row['id'])}</code>" if row.get("id") is not None else ""
    return (
        f'<div class="card"><h3>reward {given}{name}</h3><small>prompt</small>'
        f"<pre>{text(row.get('prompt', ''))}</pre><small>completion</small>"
        f"<pre>{text(row.get('completion', ''))}</pre></div>"
    )


def about(settings: Mapping[str, Any], starts: Rows, sessions: Rows) -> str:
    """Settings, sessions, versions and devices."""
    parts = []
    if settings:
        rows = ((text(name), text(value)) for name, value in settings.items())
        parts.append(f'<h2>Settings</h2><div class="card">{table(("option", "value"), rows)}</div>')
    if starts:
        found = starts[-1].get("about") or {}
        rows = ((text(name), text(value)) for name, value in found.items())
        shown = table(("", "last session"), rows)
        parts.append(f'<h2>Versions and devices</h2><div class="card">{shown}</div>')
    if sessions:
        rows = [
            (
                text(str(row.get("time", "")).replace("T", " ")),
                text("started" if not row["step"] else "resumed")
                if row.get("event") == "start"
                else text(row.get("outcome", "")),
                f"step {row['step']}",
            )
            for row in sessions
        ]
        shown = table(("time", "", ""), rows)
        parts.append(f'<h2>Sessions</h2><div class="card">{shown}</div>')
    return "".join(parts)
