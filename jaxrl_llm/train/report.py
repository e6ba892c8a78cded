"""``report.html``: a run on one page that needs nothing else, to look at and to pass on."""

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.train.charts import Series, chart, number, text
from jaxrl_llm.train.files import write_whole
from jaxrl_llm.train.metrics import read_jsonl
from jaxrl_llm.train.page import CSS, about, completions, duration, last_step, numbers_of, times

# Curves that are looked at first: a title, and the names in metrics.jsonl of what it shows.
_CURVES = (
    ("Spread of rewards within a group", ("reward_std",)),
    ("Groups whose rewards differ, share", ("informative",)),
    ("Length of a response, tokens", ("length",)),
    ("Cut off at their longest, share", ("truncated",)),
    ("Entropy, nats a token", ("entropy",)),
    ("Loss", ("loss",)),
    ("Gradient norm", ("grad_norm",)),
    ("Update norm", ("update_norm",)),
    ("KL from the old policy, nats a token", ("approx_kl",)),
    ("Clipped tokens, share", ("clip_fraction", "dual_clip_fraction")),
    ("Sampler against trainer, mean |log ratio|", ("sampler_gap",)),
    ("Age of the weights that sampled, updates", ("staleness", "staleness_max")),
    ("Loss of the critic", ("critic_loss",)),
    ("Tokens a second", ("tokens_per_second", "unique_tokens_per_second")),
    ("Model FLOP utilization of the step", ("mfu",)),
    ("Seconds from step to step", ("seconds_total",)),
)

_MOST_PARTS = 6  # of a reward in one picture


def write_report(folder: str | Path, path: str | Path | None = None) -> Path:
    """Writes the report of a run: its curves, completions, settings, and where its time went.

    The run may be under way, interrupted or without any step. The page loads nothing from
    anywhere; all that a model or a data set wrote stands there as text.

    Args:
      folder: Of the run.
      path: Where the page goes; by default report.html in the folder.

    Returns:
      The path.

    Example:
      >>> import tempfile
      >>> import jaxrl_llm as jr
      >>> jr.train.write_report(tempfile.mkdtemp()).name
      'report.html'
    """
    folder = Path(folder)
    path = folder / "report.html" if path is None else Path(path)
    write_whole(path, render(folder.absolute().name, *map(_rows, _files(folder))))
    return path


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(folder / f"{name}.jsonl" for name in ("metrics", "samples", "sessions"))


def _rows(path: Path) -> list[dict]:
    """The lines of a file that have a step."""
    rows = read_jsonl(path) if path.is_file() else []
    return [row for row in rows if isinstance(row.get("step"), int)]


def render(
    name: str,
    metrics: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
    sessions: Sequence[Mapping[str, Any]],
) -> str:
    """The page as text.

    Args:
      name: Of the run.
      metrics: Lines of metrics.jsonl.
      samples: Of samples.jsonl.
      sessions: Of sessions.jsonl.
    """
    steps = [row for row in metrics if "held_out" not in row]
    held_out = [row for row in metrics if isinstance(row.get("held_out"), Mapping)]
    starts = [row for row in sessions if row.get("event") == "start"]
    settings = starts[-1].get("settings", {}) if starts else {}
    parts = [
        f"<h1>{text(name)}</h1>",
        _state(steps, sessions, settings),
        _tiles(steps, held_out, settings),
        _curves(steps, held_out),
        times(steps, sessions),
        completions(samples),
        about(settings, starts, sessions),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # So that a browser would not load or run anything, whatever got into the page.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{text(name)}</title><style>{CSS}</style></head>\n<body>"
        f"{chr(10).join(part for part in parts if part)}</body></html>\n"
    )


def _state(steps, sessions, settings) -> str:
    """How far the run is, and whether it goes on."""
    done, wanted = last_step(steps), settings.get("steps")
    progress = text(f"{done} of {wanted} steps" if wanted else f"{done} steps")
    ends = [row for row in sessions if row.get("event") in ("start", "end")]
    if not ends:
        state = f"{progress}; how it ended is not known."
    elif ends[-1]["event"] == "start":
        state = f"{progress}. No end is noted: it is under way, or it was killed."
    elif (outcome := str(ends[-1].get("outcome"))) == "done":
        state = f"Finished: {progress}."
    elif outcome.startswith("SIG"):
        state = f"Stopped by {text(outcome)} after {progress}."
    else:
        state = f'<span class="bad">Failed after {progress}: {text(outcome)}</span>'
    written = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return f'<p>{state}</p><p class="soft">Written {written}.</p>'


def _tiles(steps, held_out, settings) -> str:
    """The figures that are asked for first."""
    tiles = []
    if rewards := numbers_of(steps, "reward"):
        part = max(1, len(rewards) // 10)
        first, last = statistics.fmean(rewards[:part]), statistics.fmean(rewards[-part:])
        which = "step" if part == 1 else f"{part} steps"
        change = (f"reward, first and last {which}", f"{number(first)} → {number(last)}")
        tiles.append(change if len(rewards) > 1 else ("reward", number(first)))
    for kind in _kinds(held_out):
        means = numbers_of((row["held_out"].get(kind, {}) for row in held_out), "mean")
        ends = [number(x) for x in (means[:1] if len(means) == 1 else [means[0], means[-1]])]
        tiles.append((f"held out, {kind}", " → ".join(ends)))
    if seconds := numbers_of(steps, "seconds_total"):
        tiles.append(("time of all steps", duration(sum(seconds))))
    for name, label in (("tokens_per_second", "tokens/s, median"), ("mfu", "model FLOP util.")):
        if values := numbers_of(steps, name):
            value = statistics.median(values)
            tiles.append((label, f"{100 * value:.3g}%" if name == "mfu" else number(value)))
    model = settings.get("model")
    if model:
        tiles.append(("model", str(model)))
    cards = (f'<div class="card"><small>{text(k)}</small><b>{text(v)}</b></div>' for k, v in tiles)
    return f'<div class="tiles">{"".join(cards)}</div>' if tiles else ""


def _kinds(held_out) -> list[str]:
    """The ways in which held-out questions were evaluated, that gave a number."""
    names = dict.fromkeys(name for row in held_out for name in row["held_out"])
    return [n for n in names if numbers_of((r["held_out"].get(n, {}) for r in held_out), "mean")]


def _curves(steps, held_out) -> str:
    """All numbers over the steps, those that are looked at first before the others."""
    if not steps and not held_out:
        return "<h2>Curves</h2><p>No step is finished yet.</p>"
    columns = _columns(steps)
    rewards = [Series("training batch", columns["reward"])] if "reward" in columns else []
    for kind in _kinds(held_out):
        rows = [(r["step"], r["held_out"].get(kind, {})) for r in held_out]
        rows = [(step, row) for step, row in rows if numbers_of([row], "mean")]
        points = [(step, row["mean"]) for step, row in rows]
        ends = [(row.get("low"), row.get("high")) for _, row in rows]
        rewards.append(Series(f"held out, {kind}, 95% interval", points, ends))
    first = [_card("Mean reward", rewards, "reward")] if rewards else []
    parts = [name for name in columns if name.startswith("reward/")][:_MOST_PARTS]
    if len(parts) > 1:
        series = [Series(name.partition("/")[2], columns[name]) for name in parts]
        first.append(_card("Parts of the reward", series, "reward/..."))
    shown = {"reward", *(parts if len(parts) > 1 else ())}
    for title, names in _CURVES:
        # What never was anything but zero is no news.
        found = [n for n in names if any(y != 0 for _, y in columns.get(n, ()))]
        if found:
            series = [Series(name.replace("_", " "), columns[name]) for name in found]
            first.append(_card(title, series, ", ".join(found)))
            shown |= set(found)
    rest = [
        _card(name.replace("_", " "), [Series(name, points)], name)
        for name, points in columns.items()
        if name not in shown
    ]
    more = f'<details><summary>{len(rest)} more curves</summary><div class="grid">' if rest else ""
    more += "".join(rest) + ("</div></details>" if rest else "")
    return f'<h2>Curves</h2><div class="grid">{"".join(first)}</div>{more}'


def _columns(steps) -> dict[str, list[tuple[int, float | None]]]:
    """The values of each name over the steps; None where one is no finite number."""
    columns: dict[str, list] = {}
    for row in steps:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float | None):
                columns.setdefault(name, []).append((row["step"], value))
    return columns


def _card(title: str, series: Sequence[Series], names: str) -> str:
    key = "".join(
        f'<span class="key"><i class="b{i % 6}"></i>{text(s.name)}</span>'
        for i, s in enumerate(series)
    )
    svg = chart(series, title=f"{title} over the steps")
    legend = key if len(series) > 1 else ""
    return f'<div class="card"><h3>{text(title)}</h3><code>{text(names)}</code>{svg}{legend}</div>'
