"""Secrets by name and look: found in objects, masked in texts, and other things left alone."""

import dataclasses
import functools
from typing import Any, NamedTuple

from rows import for_each

from jaxrl_llm.core import bind
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.core.secrets import MASK, find_secrets, is_secret, mask, mask_known, remember

KEY = "q7-planted/Value=="


SECRETS = """api_key apiKey OPENAI_API_KEY hf_token HF_TOKEN token password db_password
client_secret aws_secret_access_key credentials auth.token x-api-key hftoken new_api_key
passphrase"""
OTHERS = """max_new_tokens pad_token eos_token stop_tokens answer_key tokenizer keyboard api_key_env
token_path monkeys_count num_prompts sort_key model key"""


@for_each("name", SECRETS.split())
def test_names_of_secrets(name):
    assert is_secret(name, KEY) and is_secret(name, KEY.encode()) and is_secret(name, (KEY,))
    assert not is_secret(name, 7) and not is_secret(name, 0.5) and not is_secret(name, None)


@for_each("name", OTHERS.split())
def test_names_of_other_things(name):
    assert not is_secret(name, "answer")


@for_each("name", ["key", "token", "tokens", "my_token", "shared.key"])
def test_a_value_of_a_plain_name_is_one_if_it_reads_like_one(name):
    assert is_secret(name, KEY) and is_secret("api_key", "a")
    for word in ("final_answer", "sequence", "behavior_logp", "the first one of 2", "token-mean"):
        assert not is_secret(name, word)


@for_each(
    "text",
    [
        "Judge(api_key={!r}, model='m')",
        "{{'api_key': {!r}, 'model': 'm'}}",
        '{{"model": "m", "HF_TOKEN": "{}"}}',
        'api_key = "{}"  # model',
        "api_key: str | None = {!r}; model",
        'os.environ["OPENAI_API_KEY"] = "{}"; model',
        'os.environ.setdefault("OPENAI_API_KEY", "{}"), model',
        'token = """{}"""; model',
        '["--teacher.api-key", "{}", "model"]',
        '["--teacher.api-key={}", "model"]',
        "https://x.org/?model=m&api_key={}&n=1",
        "https://me:{}@model.org/",
        "HTTP 401: Authorization: Bearer {} for model",
    ],
)
def test_texts_without_the_secrets_in_them(text):
    value = "q7plantedValue" if "://" in text or "--" in text else KEY
    masked = mask(text.format(value))
    assert value not in masked and "planted" not in masked
    assert MASK in masked and "m" in masked.replace(MASK, "").replace("HTTP", "")


@for_each(
    "text",
    [
        "bind(from_file, answer_key='final', pad_token='<pad>')",
        "max_new_tokens=16, key=0, token: the first one",
        "Reward judge raised KeyError on prompt 0 (id 'q'): 'answer'.",
        "tokenizer = 'bytes'",
        'api_key=f"{os.environ[NAME]}"',
        '{"token": f"token_id:{token}"}',
        "raised KeyError: 'no-Such-Name9'",
        "LEVELS = ('token', 'Sequence9sum', 'geometric')",
        'def new_tokens(self) -> Tokens:\n    """The tokens since 2."""',
        "checks.check_option('level', level, ('token', 'sequence'))",
        "{'token': 'token ratio', 'tokens': 'unique_tokens'}",
    ],
)
def test_texts_without_secrets_stay(text):
    assert mask(text) == text


def test_a_long_text_is_masked_in_linear_time():
    text = "key" * 30_000 + " = " + "a-" * 30_000 + "\n" * 1000 + "token: " * 10_000
    assert mask(text) == text


@dataclasses.dataclass
class Judge:
    api_key: str
    model: str = "small"

    def __call__(self, prompt, completion, metadata):
        return 0.0


class Client:
    def __init__(self, secret, retries=3):
        self.secret, self.retries, self.session = secret, retries, object()

    def __repr__(self):
        return f"Client<{self.secret}>"


class Slotted:
    __slots__ = ("_other", "token")

    def __init__(self, token):
        self.token = token


class Pair(NamedTuple):
    password: str
    size: int = 2


API_KEY = KEY


def reads_a_global(prompt, completion, metadata):
    return len(API_KEY)


def closed_over(token):
    return lambda prompt, completion, metadata: len(token)


def asks(*, api_key):
    return api_key


HOLDERS: list[Any] = [
    Judge(KEY),
    Client(KEY),
    Slotted(KEY),
    Pair(KEY),
    Client(KEY).__repr__,
    reads_a_global,
    closed_over(KEY),
    bind(asks, api_key=KEY),
    functools.partial(asks, api_key=KEY),
    {"api_keys": (KEY, KEY)},
    [{"nested": {"password": KEY}}],
    {"password": KEY.encode()},
]


@for_each("holder", HOLDERS, ids=range(len(HOLDERS)))
def test_secrets_are_found_wherever_an_object_holds_them(holder):
    assert find_secrets({"reward": holder}) == {KEY}
    assert KEY not in mask(stable_repr(holder))


def test_objects_that_hold_each_other_are_searched_once():
    first: dict[str, Any] = {"token": KEY}
    first["again"] = [first]
    assert find_secrets(first) == {KEY}


def test_objects_are_shown_by_type_and_plain_options():
    assert stable_repr(Client(KEY)) == "Client(secret='***', retries=3)"
    assert stable_repr(Judge(KEY)) == "Judge(api_key='***', model='small')"
    assert stable_repr(Pair(KEY)) == "Pair(password='***', size=2)"
    assert stable_repr((Judge(KEY), 1)) == "(Judge(api_key='***', model='small'), 1)"
    assert repr(bind(asks, api_key=KEY)) == "asks(api_key='***')"
    assert stable_repr({"client": Client(KEY)}) == "{'client': Client(secret='***', retries=3)}"


def test_values_that_are_known_are_replaced_everywhere(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.core.secrets._known", set())
    monkeypatch.setenv("SOME_TOKEN", "q7variableValue")
    monkeypatch.setenv("OTHER_TOKEN", "sentence")  # a word of any text
    remember({KEY, "short"})
    text = f"The short sentence {KEY} of q7variableValue."
    assert mask_known(text) == "The short sentence *** of ***."
