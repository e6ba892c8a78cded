"""The first batch of a run, and files of rows that a run reads."""

import json

import jax

from jaxrl_llm.data import Cursor
from jaxrl_llm.train.experiment.rollouts import collect_rollouts
from jaxrl_llm.train.experiment.setup import load_experiment


def write_rows(path, rows) -> str:
    """Writes rows of JSON; returns the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def first_batch(experiment, params, *, number=0, version=0, **options):
    """What a run collects for its first step, or for another one."""
    start = jax.random.key(0), Cursor(), experiment.collector.init(len(experiment.train))
    return collect_rollouts(experiment, params, *start, number=number, version=version, **options)


def loaded_batch(config):
    """The experiment of a config, its parameters, and what its first step collects."""
    experiment, params = load_experiment(config)
    return experiment, params, first_batch(experiment, params)
