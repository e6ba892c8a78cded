"""`--template-options`: what a command line says reaches the chat template, or is refused."""

import dataclasses

import pytest
from rows import for_each
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxrl_llm.cli import UsageError, main, options
from jaxrl_llm.cli.evaluate import Evaluate
from jaxrl_llm.cli.sample import Sample
from jaxrl_llm.cli.serve import Serve
from jaxrl_llm.cli.train import Train
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.tokenizer import PretrainedTokenizer
from jaxrl_llm.rewards import last_integer
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import DataConfig, TrainConfig
from jaxrl_llm.train.experiment.run_models import open_model

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    "{% if effort %}{{ effort }}{% endif %}"
)
ASK = [{"role": "user", "content": "2+2?"}]


def templated():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PretrainedTokenizer(backend, eos_ids=[0], template=TEMPLATE)


def model():
    return *tiny_model(num_layers=1), templated()


CONFIG = TrainConfig(
    model=model,
    recipe="grpo",
    reward=last_integer,
    data=DataConfig(prompts=lambda: [Prompt("2+2?", "4")]),
    steps=1,
)
FLAG = ["--data.template-options", "enable_thinking=false", "effort=low"]


def test_a_run_has_its_options_and_a_command_replaces_them_by_name():
    default = Train(config="c.py", run=CONFIG)
    run = options.parse(Train, ["c.py", *FLAG, "--seed", "3"], command="train", default=default).run
    assert run.seed == 3 and run.data.template_options == {
        "enable_thinking": False,
        "effort": "low",
    }
    assert open_model(CONFIG, None).tokenizer.chat(ASK) == "2+2?<think>"
    assert open_model(run, None).tokenizer.chat(ASK) == "2+2?low"
    again = options.add_template_options(run, {"enable_thinking": True})
    assert open_model(again, None).tokenizer.chat(ASK) == "2+2?<think>low"
    assert options.add_template_options(run, {}) is run


@for_each("kind", [Sample, Serve, Evaluate])
def test_commands_take_options_of_the_template(kind):
    words = ["m", "--template-options", "enable_thinking=false", "n=[1]", "--seed", "1"]
    args = options.parse(kind, words, command=kind.__name__.lower())
    assert args.template_options == {"enable_thinking": False, "n": [1]} and args.seed == 1
    assert options.parse(kind, ["m"], command=kind.__name__.lower()).template_options == {}


def test_a_named_model_takes_them(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.models.load_model", lambda name, *, dtype: tiny_model())
    monkeypatch.setattr("jaxrl_llm.data.load_tokenizer", lambda name: templated())
    load, choice = options.load_policy, options.CheckpointChoice("tiny", None, False)
    policy = load(choice, template_options={"enable_thinking": False})
    assert policy.tokenizer.chat(ASK) == "2+2?" and load(choice).tokenizer.template_options == {}
    with pytest.raises(UsageError, match="names thinking, .* it reads effort, enable_thinking"):
        load(choice, template_options={"thinking": False})


def test_options_without_effect_are_refused(capsys):
    with pytest.raises(ValueError, match="names thinking, .* it reads effort, enable_thinking"):
        data = dataclasses.replace(CONFIG.data, template_options={"thinking": False})
        open_model(dataclasses.replace(CONFIG, data=data), None)
    with pytest.raises(ValueError, match="template_options has no effect without the chat temp"):
        dataclasses.replace(CONFIG.data, chat=False, template_options={"enable_thinking": False})
    for words, part in (
        (["--raw", "--template-options", "a=1"], "--template-options has no effect with --raw"),
        (["--template-options", "a"], "expected name=value, as in enable_thinking=false; got 'a'"),
    ):
        assert main(["sample", "tiny", "x", *words]) == 2
        assert part in " ".join(capsys.readouterr().err.replace("│", " ").split())
