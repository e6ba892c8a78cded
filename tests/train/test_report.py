"""The page of a run: whole, of text alone, and with nothing from elsewhere."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

from rows import for_each

from jaxrl_llm.train.logging.report import render, write_report

STEP = {
    "reward": 0.5,
    "loss": 0.1,
    "entropy": 1.5,
    "mfu": 0.25,
    "tokens_per_second": 1000.0,
    "seconds_sample": 2.0,
    "seconds_reward": 0.5,
    "seconds_wait": 2.5,
    "seconds_score": 0.5,
    "seconds_train": 4.0,
    "seconds_save": 0.25,
    "seconds_evaluate": 0.0,
    "seconds_total": 7.5,
}
START = {
    "step": 0,
    "event": "start",
    "time": "2026-01-02T03:04:05+0000",
    "settings": {"model": "some-model", "steps": 3, "data.system": "<b>"},
    "about": {"jax": "0.10.2", "devices": "8 x tpu"},
}


def row(step, **changes):
    return {"step": step, **STEP, **changes}


def evaluated(step, mean):
    found = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "questions": 4, "samples": 1}
    return {"step": step, "held_out": {"greedy": found}}


def sample(step, completion="four", **changes):
    return {
        "step": step,
        "id": "q1",
        "prompt": "2 + 2",
        "completion": completion,
        "reward": 1.0,
    } | (changes)


class Page(HTMLParser):
    """A page as its tags and its text; a tag that is not closed fails."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.words, self.links = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "srcset", "action")]
        self.links += [k for k, _ in attrs if k.startswith("on")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def page_of(metrics=(), samples=(), sessions=(), name="my_run"):
    return Page(render(name, metrics, samples, sessions))


def pictures(page):
    return [ElementTree.fromstring(x) for x in re.findall(r"<svg.*?</svg>", page, re.S)]


def test_a_run_on_one_page():
    # A run on one page.
    metrics = [evaluated(0, 0.25), *(row(n, reward=n / 4) for n in (1, 2, 3)), evaluated(3, 0.75)]
    samples = [sample(1, "five", reward=0.0), sample(2, "never shown"), sample(3)]
    end = {"step": 3, "event": "end", "outcome": "done", "seconds_save": 1.0, "seconds_total": 1.0}
    found = page_of(metrics, samples, [START, end])
    for words in (
        "Finished: 3 of 3 steps.",
        "reward, first and last step 0.25 → 0.75",
        "held out, greedy 0.25 → 0.75",
        "time of all steps 22.5 s",
        "tokens/s, median 1000",
        "model FLOP util. 25%",
        "model some-model",
        "Completions of step 1 reward 0 q1 prompt 2 + 2 completion five",
        "Completions of step 3 reward 1 q1 prompt 2 + 2 completion four",
        "data.system <b>",
        "devices 8 x tpu",
        "2026-01-02 03:04:05",
        "held out, greedy, 95% interval, step 3: 0.75 [0.65, 0.85]",
    ):
        assert words in found.text, words
    assert "never shown" not in found.text and found.tags.count("h1") == 1

    # The reward of a step is that of all sampled rollouts. A collector that drops groups whose
    # rollouts agree leaves a batch whose mean cannot rise.
    metrics = [row(n, reward=0.5, sampled_reward=n / 4) for n in (1, 2, 3)]
    page = page_of(metrics)
    assert "reward, first and last step 0.25 → 0.75" in page.text
    assert "sampled rollouts" in page.text and "training batch" in page.text
    same = page_of([row(n, sampled_reward=0.5 + 1e-7) for n in (1, 2)]).text
    assert "sampled rollouts" not in same and "training batch" in same


def test_time_is_split_and_adds_up():
    metrics = [row(1, seconds_train=7.0, seconds_total=10.5), row(2), row(3)]
    end = {"step": 3, "event": "end", "outcome": "done"}
    end |= {"seconds_save": 1.0, "seconds_evaluate": 2.0, "seconds_total": 3.5}
    found = page_of(metrics, sessions=[START, end]).text
    table = found[found.index("in all share first step median step") :]
    # 29 s in all: 10.5, 7.5 and 7.5 s of steps, and 3.5 s after the last.
    for line in (
        "sampling 6 s 20.7% 2 s 2 s",
        "rewards 1.5 s 5.2% 0.5 s 0.5 s",
        "reference log-probabilities 1.5 s 5.2% 0.5 s 0.5 s",
        "training step 15 s 51.7% 7 s 4 s",
        "checkpoints 1.75 s 6.0% 0.25 s 0.25 s",
        "evaluation 2 s 6.9% 0 s 0 s",
        "the rest 1.25 s 4.3%",
    ):
        assert line in table, (line, table)
    assert "waiting" not in table
    # Ahead of the steps: sampling takes longer than anybody waits for it.
    ahead = [row(n, seconds_wait=0.5, seconds_total=5.5) for n in (1, 2)]
    found = page_of(ahead).text
    assert "sampling 4 s in parallel 2 s 2 s" in found and "waiting for rollouts 1 s 9.1%" in found
    assert "Sampling and rewards went on during the training steps." in found


@for_each(
    "events, state",
    [
        ([], "2 steps; how it ended is not known."),
        ([START], "2 of 3 steps. No end is recorded: it is under way, or it was killed."),
        ([START, {"event": "end", "outcome": "SIGTERM"}], "Stopped by SIGTERM after 2 of 3 steps."),
        (
            [START, {"event": "end", "outcome": "RewardError: <no> judge"}],
            "Failed after 2 of 3 steps: RewardError: <no> judge",
        ),
        ([START, {"event": "end", "outcome": "SIGINT"}, START | {"step": 2}], "under way"),
    ],
)
def test_how_a_run_stands(events, state):
    found = page_of([row(1), row(2)], sessions=[{"step": 0, **event} for event in events])
    assert state in found.text


def test_what_a_model_or_a_reward_writes_stays_text():
    # What a model writes stays text.
    hostile = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x00\ud800"
    names = {"id": hostile, "prompt": hostile, "reward": hostile}
    metrics = [row(1, **{"reward/<i>": 1.0, "reward/<u>": 2.0, hostile: 1.0})]
    start = START | {"settings": {hostile: hostile, "steps": hostile, "model": hostile}}
    start |= {"about": {hostile: hostile}, "time": hostile}
    end = {"step": 1, "event": "end", "outcome": hostile, "time": hostile}
    given = (metrics, [sample(1, hostile, **names)], [start, end])
    page = render(hostile, *given)
    found = Page(page)
    assert not {"script", "img", "i", "u"} & (set(found.tags) - {"i"}) and found.links == []
    assert "<img src=x onerror=alert(1)>\\u202e\\x00\\ud800" in found.text
    assert page.encode()  # no half characters
    assert "<i>" in found.text and page.count("<i>") == 0

    # Texts and lists of a reward stand with its numbers.
    said = {"reward/feedback": "<u>too long</u>", "reward/turn_rewards": [0.5, 1.0]}
    found = page_of([row(1)], [sample(1, **said, **{"reward/short": 0.25})])
    assert "feedback <u>too long</u>" in found.text and "turn_rewards [0.5, 1.0]" in found.text
    assert "short 0.25" in found.text and "u" not in found.tags


def test_nothing_is_loaded_from_anywhere():
    page = render("r", [row(1), evaluated(1, 0.5)], [sample(1)], [START])
    assert not re.search(r"https?:|url\(|@import|<link|<script|<img|<iframe", page)
    assert "default-src 'none'" in page and "width=device-width" in page
    assert "prefers-color-scheme:dark" in page
    # Every color of a curve is there in light and in dark.
    for color in re.findall(r"var\((--\w+)\)", page):
        assert len(re.findall(rf"{color}:", page)) == 2, color


def test_every_number_has_a_picture_and_what_diverged_comes_first():
    # Every picture is whole and every number has one.
    metrics = [row(n, only_sometimes=1.0 if n == 2 else None, words="x") for n in (1, 2, 3)]
    page = render("r", metrics, [], [])
    shown = {e.get("aria-label") for e in pictures(page)}
    assert len(pictures(page)) == page.count("<svg") == len(shown)
    names = {name for x in re.findall(r"<code>(.*?)</code>", page) for name in x.split(", ")}
    assert names == {*STEP, "only_sometimes"}

    # What diverged is looked at first and what never moved last.
    metrics = [row(n, loss=None, staleness=0.0, entropy=0.0) for n in (1, 2)]
    first, _, rest = render("r", metrics, [], []).partition("more curves")
    assert "<code>loss</code>" in first
    assert "<code>staleness</code>" in rest and "<code>entropy</code>" in rest


@for_each(
    "metrics",
    [
        [],
        [{"step": 0}],
        [evaluated(0, 0.5)],
        [row(1)],
        [row(1, **dict.fromkeys(STEP))],
        [row(n, reward=float("nan"), loss=float("inf")) for n in (1, 2)],
        [{"step": 1, "held_out": {}}, {"step": 2, "held_out": {"greedy": {"mean": None}}}],
        [{"step": 1, "reward": "high"}, {"step": 1, "held_out": "none"}],
    ],
    ids=["empty", "no numbers", "evaluated", "one step", "nulls", "nan", "lost", "nonsense"],
)
def test_any_run_has_a_page(metrics):
    page = render("r", metrics, [], [])
    assert "Curves" in Page(page).text
    assert all(e.tag == "svg" for e in pictures(page))
    assert ("No step is finished yet" in page) == (not metrics)


def test_files_of_a_run_are_read_and_a_long_run_is_a_small_page(tmp_path):
    # Files of a run.
    folder = tmp_path / "try_7"
    folder.mkdir()
    page = Page(write_report(folder).read_text())
    assert "try_7" in page.text and "No step is finished yet." in page.text
    lines = [json.dumps(row(n)) for n in (1, 2)] + ["12", "[]", '{"reward": 1}', '{"step": 3, "rew']
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "samples.jsonl").write_bytes(json.dumps(sample(2)).encode() + b'\n{"step": 2\xff')
    assert write_report(folder) == folder / "report.html"
    page = Page((folder / "report.html").read_text())
    assert "2 steps; how it ended is not known." in page.text and "four" in page.text
    path = write_report(folder, tmp_path / "elsewhere.html")
    assert path == tmp_path / "elsewhere.html" and path.is_file()

    # A long run is a small page.
    metrics = [row(n) for n in range(1, 3001)]
    page = render("r", metrics, [sample(n) for n in range(1, 3001)], [START])
    assert len(page) < 1_000_000
