"""Conversations to token ids: raw and through the chat template, and what ends an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from dspark.errors import UserError
from dspark.models.tokenizer import ChatTokenizer, load_tokenizer
from tiny_models import EOS, save_tiny_target, tiny_tokenizer

OPEN = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(tiny_tokenizer(), frozenset([EOS]))


def text_of(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    """The text of ids with its special tokens."""
    return tokenizer.tokenizer.decode(ids)


def test_raw_text_is_sent_as_it_is(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_turn(["What is 2+2?"], [], chat=False)
    assert text_of(tokenizer, ids) == "What is 2+2?"


def test_raw_turns_and_answers_are_joined_by_blank_lines(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_turn(["one", "two"], ["answer"], chat=False)
    assert text_of(tokenizer, ids) == "one\n\nanswer\n\ntwo"


def test_a_chat_turn_goes_through_the_template_and_opens_the_answer(
    tokenizer: ChatTokenizer,
) -> None:
    ids = tokenizer.encode_turn(["Hello"], [], chat=True)
    assert text_of(tokenizer, ids) == f"<|im_start|>user\nHello<|im_end|>\n{OPEN}"
    assert ids[0] == 1 and EOS in ids  # markup becomes special tokens, not letters


def test_a_later_chat_turn_has_the_earlier_answers_before_it(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_turn(["one", "two"], ["answer"], chat=True)
    assert text_of(tokenizer, ids) == (
        "<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\nanswer<|im_end|>\n"
        f"<|im_start|>user\ntwo<|im_end|>\n{OPEN}"
    )


def test_a_chat_turn_without_the_earlier_answers_is_a_bug_of_the_caller(
    tokenizer: ChatTokenizer,
) -> None:
    with pytest.raises(ValueError):
        tokenizer.encode_turn(["one", "two"], [], chat=True)


def test_a_template_that_writes_the_start_token_is_not_given_another() -> None:
    """Ids of a chat are those of the laid out text alone: no second BOS before it."""
    backend = tiny_tokenizer()
    start = (backend.bos_token, backend.bos_token_id)
    backend.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start[0]} $A", special_tokens=[start]
    )
    backend.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    mine = ChatTokenizer(backend, frozenset())
    for chat in (True, False):  # raw text gets the one that the tokenizer itself writes
        assert mine.encode_turn(["hi"], [], chat=chat).count(start[1]) == 1
    assert mine.open_user_turn("hi").count(start[1]) == 1


def test_an_open_user_turn_is_the_closed_one_cut_after_the_opener(
    tokenizer: ChatTokenizer,
) -> None:
    ids = tokenizer.open_user_turn("Write a")
    assert text_of(tokenizer, ids) == "<|im_start|>user\nWrite a"


def test_decoded_text_has_no_special_tokens(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_turn(["Hello"], [], chat=True)
    assert tokenizer.decode([*ids, EOS]) == "user\nHello\nassistant\n"


@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: "<|" not in text))
def test_any_text_survives_the_round_trip(text: str) -> None:
    tokenizer = ChatTokenizer(tiny_tokenizer(), frozenset())
    assert tokenizer.decode(tokenizer.encode_turn([text], [], chat=False)) == text


@pytest.mark.parametrize("ask", ["encode_turn", "open_user_turn"])
def test_a_tokenizer_without_a_template_says_what_to_set(ask: str) -> None:
    tokenizer = ChatTokenizer(tiny_tokenizer(chat=False), frozenset())
    arguments: tuple[Any, ...] = (["Hello"], [], True) if ask == "encode_turn" else ("Write",)
    with pytest.raises(UserError, match="no chat template: set chat=false"):
        getattr(tokenizer, ask)(*arguments)
    assert tokenizer.encode_turn(["Hello"], [], chat=False)


ESCAPES = [
    "{{ cycler.__init__.__globals__.os.system('touch ' ~ messages[0].content) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(messages[0]) }}",
    "{% include '/etc/hostname' %}",
    "{% import 'os' as os %}{{ os }}",
]


@pytest.mark.parametrize("template", [*ESCAPES, "{{ raise_exception('no roles') }}", "{% for %}"])
def test_a_template_reaches_nothing_and_its_failure_is_one_line(
    tmp_path: Path, template: str
) -> None:
    backend = tiny_tokenizer()
    backend.chat_template = template
    tokenizer = ChatTokenizer(backend, frozenset())
    with pytest.raises(UserError) as caught:
        tokenizer.encode_turn([str(tmp_path / "x")], [], chat=True)
    message = str(caught.value)
    assert "the target's chat template fails (" in message and "set chat=false" in message
    assert "\n" not in message
    assert not (tmp_path / "x").exists()


def set_eos(folder: Path, name: str, value: Any) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": value}))


@pytest.mark.parametrize(("value", "ids"), [(2, {2}), ([2, 0], {0, 2}), (0, {0})])
def test_answers_end_where_the_generation_config_says(
    target_copy: Path, value: Any, ids: set[int]
) -> None:
    set_eos(target_copy, "generation_config.json", value)
    assert load_tokenizer(target_copy).eos_ids == ids


def test_without_generation_config_the_model_config_says_it(target_copy: Path) -> None:
    (target_copy / "generation_config.json").unlink()
    set_eos(target_copy, "config.json", [5, 2])
    assert load_tokenizer(target_copy).eos_ids == {2, 5}


def test_without_either_the_tokenizer_says_it(target_copy: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        set_eos(target_copy, name, None)
    assert load_tokenizer(target_copy).eos_ids == {EOS}


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000], ids=["open", "list", "nested"])
def test_a_broken_generation_config_is_named(target_copy: Path, text: str) -> None:
    (target_copy / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json' is not a JSON object"):
        load_tokenizer(target_copy)


def test_the_saved_template_is_loaded(tmp_path: Path) -> None:
    with_chat = load_tokenizer(save_tiny_target(tmp_path / "a", layers=1))
    without = load_tokenizer(save_tiny_target(tmp_path / "b", layers=1, chat=False))
    assert with_chat.tokenizer.chat_template and without.tokenizer.chat_template is None


@pytest.mark.parametrize("damage", ["missing", "broken"])
def test_a_directory_without_a_usable_tokenizer_is_refused(target_copy: Path, damage: str) -> None:
    file = target_copy / "tokenizer.json"
    file.write_text("{") if damage == "broken" else file.unlink()
    with pytest.raises(UserError, match="has no usable tokenizer") as caught:
        load_tokenizer(target_copy)
    assert "\n" not in str(caught.value)
