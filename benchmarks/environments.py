"""Episodes of three turns beside responses of one turn, on SmolLM2-135M in float32.

python -m benchmarks.environments --save
python -m benchmarks.environments --textworld --episodes 128 --slots 16 --save

The same engine samples as many tokens in three ways, in turns whose order alternates: ``single``,
responses of one turn; ``fast``, episodes whose environment answers at once; ``slow``, episodes
whose environment takes 0.2 s a step. With ``--textworld`` there are two: ``single``, and
``textworld``, games of TextWorld that are as many at a time as there are slots. Rates count sampled
tokens alone; reading the observations is in the time, and so is making the games' first
observations, but not the games.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

import jaxrl_llm as jr
from benchmarks import harness
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm.data import make_renderer
from jaxrl_llm.environments import Observation, TextWorld
from jaxrl_llm.rollout.episodes import EpisodeOptions, Episodes

TURNS = 3


@dataclasses.dataclass(frozen=True)
class Hints:
    """Answers every turn with one word, after some seconds."""

    tools = ()
    seconds: float = 0.0

    def reset(self, task, seed):
        return 0, Observation([{"role": "user", "content": task["text"]}])

    def step(self, state, action):
        time.sleep(self.seconds)
        message = {"role": "user", "content": "Higher."}
        return state + 1, Observation([message], done=state + 1 == TURNS)


@dataclasses.dataclass(frozen=True)
class Commands:
    """Games that go on by one of their commands, whatever is said: so all have as many turns."""

    games: Any
    tools = ()

    def reset(self, task, seed):
        state, seen = self.games.reset(task, seed)
        return (state, seen), seen

    def step(self, state, action):
        state, seen = state
        shown = seen.messages[-1]["content"].rpartition("Commands: ")[2].split(", ")
        command = shown[len(action.text) % len(shown)]
        state, seen = self.games.step(state, action._replace(text=command))
        return (state, seen), seen


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--turn-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=harness.MIN_ROUNDS)
    parser.add_argument("--textworld", action="store_true", help="games of TextWorld instead")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, for tests")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(argv)
    if options.runs < harness.MIN_ROUNDS:
        least = harness.MIN_ROUNDS
        parser.error(f"a median needs at least {least} runs, not {options.runs}")
    if options.tiny:
        model, params = jr.testing.tiny_model(num_layers=1, max_length=1024)
        tokenizer = jr.testing.ByteTokenizer()
    else:
        model, params = jr.models.load_model("smollm2-135m-instruct")
        tokenizer = jr.data.load_tokenizer("smollm2-135m-instruct")
    renderer = make_renderer(tokenizer)
    between = renderer.follow([{"role": "user", "content": "Higher."}], stopped=False)
    sampled, prompt_length, room = TURNS * options.turn_tokens, 64, len(between)
    ways: dict[str, Any] = {"single": Hints(), "fast": Hints(), "slow": Hints(0.2)}
    if options.textworld:
        # At this level no game is won before the last turn. In bytes, texts are longer.
        games = Commands(TextWorld("coin_collector", {"level": TURNS}, brief=True))
        ways = {"single": games, "textworld": games}
        prompt_length, room = (512, 128) if options.tiny else (256, 96)
    engine = jr.rollout.make_engine(
        model,
        rows=options.slots,
        width=1,
        prompt_length=prompt_length,
        max_new_tokens=sampled + (TURNS - 1) * room + 1,
    )
    size, count = options.group_size, options.episodes // options.group_size
    reads: list[str] = []
    for name in ("fill_prompts", "fill_responses"):
        function = engine.functions[name]
        engine.functions[name] = lambda *a, f=function, n=name: reads.append(n) or f(*a)

    def play(env: Any, single: bool) -> float:
        """Seconds that all episodes take, or their prompts with responses of one turn."""
        generation = jr.rollout.Generation(engine, params, key=jax.random.key(0))
        episodes = Episodes(
            env,
            renderer,
            decode=tokenizer.decode,
            seed=(0,),
            max_new_tokens=engine.spec.max_new_tokens,
            options=EpisodeOptions(
                max_turns=TURNS, turn_tokens=options.turn_tokens, workers=options.slots
            ),
        )
        begin = time.perf_counter()
        for i in range(count):
            task = {"text": f"Guess my number, game {i}.", "seed": i}
            start = episodes.start(i, task, str(i))
            group = jr.rollout.Group(i, start.prompt, tuple(range(i * size, (i + 1) * size)))
            if single:
                group = group._replace(max_new_tokens=sampled)
            else:
                follow = episodes.follow(i)
                group = group._replace(follow=follow, turn_limit=options.turn_tokens)
            generation.submit(group)
        tokens = 0
        for done in generation:
            tokens += sum(int((c.out.version >= 0).sum()) for c in done.completions)
        taken = time.perf_counter() - begin
        episodes.close()
        if tokens != count * size * sampled:
            raise SystemExit(f"benchmarks.environments: {tokens} tokens were sampled")
        return taken

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    engine.warm_up(params, turns=True)
    if options.textworld:
        for i in range(count):
            ways["textworld"].reset({"seed": i}, 0)  # makes the game
    for run in range(options.runs):
        # The order alternates, so that a machine that slows down favors none.
        for name in list(ways)[:: -1 if run % 2 else 1]:
            reads.clear()
            seconds[name].append(play(ways[name], name == "single"))
            print(f"{name}: {seconds[name][-1]:.4g} s", file=sys.stderr, flush=True)
            if "fill_responses" in reads:
                raise SystemExit(f"benchmarks.environments: {name} read responses again")
    tokens = count * size * sampled
    rates = {name: [tokens / x for x in each] for name, each in seconds.items()}
    ratios = {
        f"{name}/{other}": round(
            statistics.median(np.divide(rates[name], rates[other]).tolist()), 3
        )
        for name, other in (("fast", "single"), ("slow", "fast"), ("textworld", "single"))
        if name in rates
    }
    work: dict[str, Any] = {"games": "coin_collector", "level": TURNS}
    if not options.textworld:
        work = {"observation_tokens": len(between), "slow_seconds": ways["slow"].seconds}
    result: dict[str, Any] = {
        "name": "environments_textworld" if options.textworld else "environments",
        "workload": {
            "model": "tiny" if options.tiny else "SmolLM2-135M-Instruct",
            "episodes": count * size,
            "turns": TURNS,
            "turn_tokens": options.turn_tokens,
            "slots": options.slots,
            **work,
            "runs": options.runs,
        },
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib"))},
        "commit": harness.commit(),
        "tokens_per_s": {name: harness.summary(each) for name, each in rates.items()},
        "ratios": ratios,
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
