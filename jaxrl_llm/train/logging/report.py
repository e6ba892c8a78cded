"""``report.html``: a run on one page without other files, to read and to pass on."""

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.core.runtime.files import write_whole
from jaxrl_llm.train.logging.charts import Series, chart, number, text
from jaxrl_llm.train.logging.results import damage_of, read_jsonl, training_reward

Rows = Sequence[Mapping[str, Any]]
Points = Sequence[tuple[int, float | None]]

# The first curves of the page: a title, and the names in metrics.jsonl that it shows.
_CURVES = (
    ("Spread of rewards within a group", ("reward_std",)),
    ("Groups whose rewards differ, share", ("informative",)),
    ("Groups sampled for a batch", ("groups_sampled",)),
    ("Length of a response, tokens", ("length",)),
    ("Cut off at their longest, share", ("truncated",)),
    ("Entropy, nats a token", ("entropy",)),
    ("Loss", ("loss",)),
    ("Gradient norm", ("grad_norm",)),
    ("Update norm", ("update_norm",)),
    ("Learning rate", ("learning_rate",)),
    ("KL from the old policy, nats a token", ("approx_kl",)),
    ("KL from the reference, nats a token", ("ref_kl",)),
    ("Clipped tokens or sequences, share", ("clip_fraction", "dual_clip_fraction")),
    ("Rejected by the correction, share", ("rejected_tokens", "rejected_sequences")),
    ("Sampler against trainer, mean |log ratio|", ("sampler_gap",)),
    ("Age of the weights that sampled, updates", ("staleness", "staleness_max")),
    ("Loss of the critic", ("critic_loss",)),
    ("Tokens a second", ("tokens_per_second", "unique_tokens_per_second")),
    ("Model FLOP utilization of the step", ("mfu",)),
    ("Seconds from step to step", ("seconds_total",)),
)

_MAX_COMPONENTS = 6  # of a reward in one chart

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


def write_report(folder: str | Path, path: str | Path | None = None) -> Path:
    """Writes the report of a run: its curves, completions, settings, and where its time went.

    The run may be in progress, interrupted or without any step. The page loads nothing. Output of
    models and data sets is shown as plain text. ``path``, which is returned, is by default
    report.html in the folder of the run.

    Example:
      >>> import tempfile
      >>> import jaxrl_llm as jr
      >>> jr.train.write_report(tempfile.mkdtemp()).name
      'report.html'
    """
    folder = Path(folder)
    path = folder / "report.html" if path is None else Path(path)
    files = [folder / f"{name}.jsonl" for name in ("metrics", "samples", "sessions")]
    metrics, samples, sessions = (read_jsonl(x) if x.is_file() else [] for x in files)
    damage = [told for told in map(damage_of, files) if told]
    write_whole(path, render(folder.absolute().name, metrics, samples, sessions, damage=damage))
    return path


def render(
    name: str, metrics: Rows, samples: Rows, sessions: Rows, *, damage: Sequence[str] = ()
) -> str:
    """The page of a run of this name as text, from the lines of its three JSONL files.

    ``damage`` describes errors in these files, in sentences.
    """
    steps = [row for row in metrics if "held_out" not in row]
    held_out = [row for row in metrics if isinstance(row.get("held_out"), Mapping)]
    starts = [row for row in sessions if row.get("event") == "start"]
    settings = starts[-1].get("settings", {}) if starts else {}
    sections = [
        f"<h1>{text(name)}</h1>",
        progress(steps, sessions, settings),
        *(f'<p class="bad">{text(told)}</p>' for told in damage),
        tiles(steps, held_out, settings),
        curves(steps, held_out),
        times(steps, sessions),
        completions(samples),
        about(settings, starts, sessions),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # With this a browser loads and runs nothing, whatever got into the page.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{text(name)}</title><style>{CSS}</style></head>\n<body>"
        f"{chr(10).join(section for section in sections if section)}</body></html>\n"
    )


def progress(steps: Rows, sessions: Rows, settings: Mapping[str, Any]) -> str:
    """How far the run is, and whether it is still running."""
    done, wanted = max((row["step"] for row in steps), default=0), settings.get("steps")
    progress = text(f"{done} of {wanted} steps" if wanted else f"{done} steps")
    ends = [row for row in sessions if row.get("event") in ("start", "end")]
    if not ends:
        state = f"{progress}; how it ended is not known."
    elif ends[-1]["event"] == "start":
        state = f"{progress}. No end is recorded: it is under way, or it was killed."
    elif (outcome := str(ends[-1].get("outcome"))) == "done":
        state = f"Finished: {progress}."
    elif outcome.startswith("SIG"):
        state = f"Stopped by {text(outcome)} after {progress}."
    else:
        state = f'<span class="bad">Failed after {progress}: {text(outcome)}</span>'
    written = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return f'<p>{state}</p><p class="soft">Written {written}.</p>'


def tiles(steps: Rows, held_out: Rows, settings: Mapping[str, Any]) -> str:
    """The main numbers of the run."""
    shown = []
    if rewards := numbers_of(({"reward": training_reward(row)} for row in steps), "reward"):
        count = max(1, len(rewards) // 10)
        first, last = statistics.fmean(rewards[:count]), statistics.fmean(rewards[-count:])
        which = "step" if count == 1 else f"{count} steps"
        change = (f"reward, first and last {which}", f"{number(first)} → {number(last)}")
        shown.append(change if len(rewards) > 1 else ("reward", number(first)))
    for kind in _kinds(held_out):
        means = numbers_of((row["held_out"].get(kind, {}) for row in held_out), "mean")
        ends = [number(x) for x in (means[:1] if len(means) == 1 else [means[0], means[-1]])]
        shown.append((f"held out, {kind}", " → ".join(ends)))
    if seconds := numbers_of(steps, "seconds_total"):
        shown.append(("time of all steps", duration(sum(seconds))))
    for name, label in (("tokens_per_second", "tokens/s, median"), ("mfu", "model FLOP util.")):
        if values := numbers_of(steps, name):
            value = statistics.median(values)
            shown.append((label, f"{100 * value:.3g}%" if name == "mfu" else number(value)))
    if model := settings.get("model"):
        shown.append(("model", str(model)))
    cards = (f'<div class="card"><small>{text(k)}</small><b>{text(v)}</b></div>' for k, v in shown)
    return f'<div class="tiles">{"".join(cards)}</div>' if shown else ""


def _kinds(held_out) -> list[str]:
    """The kinds of held-out evaluation, such as "greedy", that have a number."""
    names = dict.fromkeys(name for row in held_out for name in row["held_out"])
    return [n for n in names if numbers_of((r["held_out"].get(n, {}) for r in held_out), "mean")]


def curves(steps: Rows, held_out: Rows) -> str:
    """All metrics over the steps, the most important first."""
    if not steps and not held_out:
        return "<h2>Curves</h2><p>No step is finished yet.</p>"
    columns: dict[str, list[tuple[int, float | None]]] = {}  # by metric; None is non-finite
    for row in steps:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float | None):
                columns.setdefault(name, []).append((row["step"], value))
    batch, sampled = columns.get("reward"), columns.pop("sampled_reward", None)
    differs = sampled and not (batch and _equal(sampled, batch))
    rewards = [Series("sampled rollouts", sampled)] if differs else []
    rewards += [Series("training batch", batch)] if batch else []
    for kind in _kinds(held_out):
        rows = [(r["step"], r["held_out"].get(kind, {})) for r in held_out]
        rows = [(step, row) for step, row in rows if numbers_of([row], "mean")]
        points = [(step, row["mean"]) for step, row in rows]
        ends = [(row.get("low"), row.get("high")) for _, row in rows]
        rewards.append(Series(f"held out, {kind}, 95% interval", points, ends))
    first = [_card("Mean reward", rewards, "reward")] if rewards else []
    shown = {"reward"}
    components = [name for name in columns if name.startswith("reward/")][:_MAX_COMPONENTS]
    if len(components) > 1:
        series = [Series(name.partition("/")[2], columns[name]) for name in components]
        first.append(_card("Components of the reward", series, "reward/..."))
        shown |= set(components)
    for title, names in _CURVES:
        nonzero = [n for n in names if any(y != 0 for _, y in columns.get(n, ()))]
        if nonzero:
            series = [Series(name.replace("_", " "), columns[name]) for name in nonzero]
            first.append(_card(title, series, ", ".join(nonzero)))
            shown |= set(nonzero)
    rest = [
        _card(name.replace("_", " "), [Series(name, points)], name)
        for name, points in columns.items()
        if name not in shown
    ]
    more = f'<details><summary>{len(rest)} more curves</summary><div class="grid">' if rest else ""
    more += "".join(rest) + ("</div></details>" if rest else "")
    return f'<h2>Curves</h2><div class="grid">{"".join(first)}</div>{more}'


def _card(title: str, series: Sequence[Series], names: str) -> str:
    key = "".join(
        f'<span class="key"><i class="b{i % 6}"></i>{text(s.name)}</span>'
        for i, s in enumerate(series)
    )
    svg = chart(series, title=f"{title} over the steps")
    legend = key if len(series) > 1 else ""
    return f'<div class="card"><h3>{text(title)}</h3><code>{text(names)}</code>{svg}{legend}</div>'


def _equal(first: Points, second: Points) -> bool:
    """Whether two curves are the same but for rounding."""
    return len(first) == len(second) and all(
        x == y
        or (x is not None and y is not None and math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-6))
        for (_, x), (_, y) in zip(first, second, strict=True)
    )


def numbers_of(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The numbers of a name, in the rows that have one."""
    values = (row.get(name) for row in rows)
    return [x for x in values if isinstance(x, int | float) and abs(x) < 1e300]


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
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
        html = (f"<{tag}{k}>{c}</{tag}>" for k, c in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(html)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table>{line("th", header)}{body}</table></div>'


def times(steps: Rows, sessions: Rows) -> str:
    """How the time was spent, as a bar and a table."""
    spent = {name: numbers_of(steps, f"seconds_{name}") for name in (*PHASES, "total")}
    if not spent["total"]:
        return ""
    ends = [row for row in sessions if row.get("event") == "end"]
    for name in ("save", "evaluate", "total"):
        spent[name] = spent[name] + numbers_of(ends, f"seconds_{name}")
    sums = {name: sum(values) for name, values in spent.items()}
    made = sums["sample"] + sums["reward"]
    # In turns the loop waits as long as a batch takes; otherwise batches are made during the steps.
    in_turns = made <= 1.05 * sums["wait"] + 1e-3
    if in_turns:
        sums["wait"] = max(sums["wait"] - made, 0.0)
    counted = [name for name in PHASES if in_turns or name not in ("sample", "reward")]
    sums["other"] = max(sums["total"] - sum(sums[name] for name in counted), 0.0)
    total = max(sum(sums[name] for name in counted), 1e-9)
    bar, rows = [], []
    for i, name in enumerate(PHASES):
        share = sums[name] / total
        if name in counted and share < 0.001 and name in ("wait", "other", "score"):
            continue
        color = f"b{i}"
        middle = duration(statistics.median(spent[name])) if spent[name] else ""
        within = f"{100 * share:.1f}%" if name in counted else "in parallel"
        label = f'<i class="{color}"></i>{PHASES[name]}' if name in counted else PHASES[name]
        first = "".join(map(duration, numbers_of(steps[:1], f"seconds_{name}")))
        rows.append((label, duration(sums[name]), within, first, middle))
        if name in counted:
            bar.append(f'<span class="{color}" style="width:{100 * share:.2f}%"></span>')
    header = ("", "in all", "share", "first step", "median step")
    note = "" if in_turns else "<p>Sampling and rewards went on during the training steps.</p>"
    note += '<p class="soft">A first step compiles its programs.</p>'
    shown = f'<div class="bar">{"".join(bar)}</div>{table(header, rows, numbers=4)}'
    return f'<h2>Time</h2><div class="card">{shown}{note}</div>'


def completions(samples: Rows) -> str:
    """The completions of the first and of the last step that have any."""
    steps = sorted({row["step"] for row in samples})
    if not steps:
        return ""

    def entry(value: Any) -> str:
        return number(value) if isinstance(value, int | float | None) else str(value)

    def card(row: Mapping[str, Any]) -> str:
        reward = row.get("reward")
        value = number(reward) if isinstance(reward, int | float | None) else text(reward)
        names = [name for name in row if name.startswith("reward/")]
        entries = (f"{name.partition('/')[2]} {entry(row[name])}" for name in names)
        components = f'<p class="soft">{text(", ".join(entries))}</p>' if names else ""
        name = f" <code>{text(row['id'])}</code>" if row.get("id") is not None else ""
        return (
            f'<div class="card"><h3>reward {value}{name}</h3>{components}<small>prompt</small>'
            f"<pre>{text(row.get('prompt', ''))}</pre><small>completion</small>"
            f"<pre>{text(row.get('completion', ''))}</pre></div>"
        )

    html = []
    for step in dict.fromkeys((steps[0], steps[-1])):
        cards = "".join(card(row) for row in samples if row["step"] == step)
        html.append(f'<h2>Completions of step {step}</h2><div class="grid">{cards}</div>')
    return "".join(html)


def about(settings: Mapping[str, Any], starts: Rows, sessions: Rows) -> str:
    """Settings, sessions, versions and devices."""
    html = []
    if settings:
        rows = ((text(name), text(value)) for name, value in settings.items())
        html.append(f'<h2>Settings</h2><div class="card">{table(("option", "value"), rows)}</div>')
    if starts:
        versions = starts[-1].get("about") or {}
        rows = ((text(name), text(value)) for name, value in versions.items())
        shown = table(("", "last session"), rows)
        html.append(f'<h2>Versions and devices</h2><div class="card">{shown}</div>')
    if sessions:
        rows = [
            (
                text(str(row.get("time", "")).replace("T", " ")),
                text("started" if not row["step"] else "resumed")
                if row.get("event") == "start"
                else text(row.get("outcome", "")),
                f"step {row['step']}",
                text(_changes(row)),
            )
            for row in sessions
        ]
        shown = table(("time", "", "", "changed settings"), rows)
        html.append(f'<h2>Sessions</h2><div class="card">{shown}</div>')
    return "".join(html)


def _changes(row: Mapping[str, Any]) -> str:
    """The settings that a resumed session changed, in words."""
    changed = row.get("changed")
    if not isinstance(changed, Mapping):
        return ""
    pairs = {k: v for k, v in changed.items() if isinstance(v, Sequence) and len(v) == 2}
    return "; ".join(f"{name}: {old} \u2192 {new}" for name, (old, new) in pairs.items())


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
