"""Commands of pages that start a config on several hosts parse, and their meshes fit."""

import dataclasses
import math
import re
import shlex
from pathlib import Path

import pytest

from jaxrl_llm.cli import options
from jaxrl_llm.cli.train import config_words
from jaxrl_llm.train.mesh import check_batch

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r'jaxrl-llm train (configs/\S+\.py)([^\n"]*)')
# By page: a command's config, and the devices of all hosts.
DEVICES = {"pods": [64, 64, 8, 32, 32], "scaling": [128]}


@pytest.mark.parametrize("page", DEVICES)
def test_commands_lay_out_all_devices(page):
    text = re.sub(r"\\\n\s*", "", (ROOT / "docs" / f"{page}.md").read_text())
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    found = COMMAND.findall(blocks)
    assert len(found) == len(DEVICES[page])
    for (path, rest), devices in zip(found, DEVICES[page], strict=True):
        words = ["0" if word == "I" else word for word in shlex.split(rest)]
        config = options.load_config(ROOT / path)
        config = options.parse_config(config, config_words(words, path))
        mesh = config.mesh
        assert math.prod(dataclasses.astuple(mesh)) == devices
        check_batch(path, config.prompts_per_step, config.microbatches, mesh.shards)
