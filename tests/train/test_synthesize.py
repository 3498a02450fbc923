"""Training text that a tiny target writes itself: resumable, without doubles."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from dspark.errors import UserError
from dspark.models.target import Target
from dspark.models.tokenizer import ChatTokenizer, load_tokenizer
from dspark.train import synthesize as module
from dspark.train.synthesize import (
    Conversation,
    acceptable,
    normalise,
    openers,
    read_conversations,
    synthesize,
)
from tiny_models import EOS

# A random target seldom ends a turn: many tokens count as an end here.
ENDS = frozenset(range(EOS, 300, 9))


@pytest.fixture(scope="module")
def tokenizer(target_path: Path) -> ChatTokenizer:
    return ChatTokenizer(load_tokenizer(target_path).tokenizer, ENDS)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few prompts between two writes, of few tokens each."""
    monkeypatch.setattr(module, "CHUNK", 24)
    monkeypatch.setattr(module, "PROMPT_TOKENS", 48)


def write(target: Target, tokenizer: ChatTokenizer, out: Path, prompts: int, seed: int = 0) -> None:
    synthesize(target, tokenizer, out, prompts=prompts, max_new_tokens=12, seed=seed)


def test_conversations_are_the_targets_own_and_unique(
    target: Target, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "conversations.jsonl"
    write(target, tokenizer, out, prompts=5)
    conversations = read_conversations(out)
    assert len(conversations) >= 5
    assert len({item.id for item in conversations}) == len(conversations)
    assert len({normalise(item.user) for item in conversations}) == len(conversations)
    starts = tuple(text.strip() for text in openers())
    for item in conversations:
        assert item.user.startswith(starts) and acceptable(item.user)
        assert item.prompt_ids == tokenizer.encode_turn([item.user], [], chat=True)
        assert 8 <= len(item.response_ids) <= 12
        assert not ENDS & set(item.response_ids[:-1])


def test_a_killed_run_goes_on_where_it_stopped(
    target: Target, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    """What was written stays, the line that the kill cut short is written over, nothing doubles."""
    out = tmp_path / "conversations.jsonl"
    write(target, tokenizer, out, prompts=3)
    whole = out.read_text()
    cut = json.dumps(asdict(read_conversations(out)[-1]))[:-20]
    out.write_text(whole + cut)
    kept = len(read_conversations(out))
    write(target, tokenizer, out, prompts=kept + 3)
    text = out.read_text()
    assert text.startswith(whole) and cut not in text[len(whole) :]
    lines = [json.loads(line) for line in text.splitlines()]
    conversations = read_conversations(out)
    assert len(conversations) == len(lines) >= kept + 3
    assert len({item.id for item in conversations}) == len(lines)
    assert len({normalise(item.user) for item in conversations}) == len(lines)


def test_enough_is_enough(target: Target, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    out = tmp_path / "conversations.jsonl"
    write(target, tokenizer, out, prompts=3)
    before = out.read_bytes()
    write(target, tokenizer, out, prompts=3)
    assert out.read_bytes() == before


def test_the_seed_decides_the_text(
    target: Target, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        write(target, tokenizer, tmp_path / name, prompts=3, seed=seed)
    users = {
        name: {item.user for item in read_conversations(tmp_path / name)}
        for name in ("one", "same", "other")
    }
    assert users["one"] == users["same"]
    assert not users["one"] & users["other"]


def test_a_target_that_never_ends_a_turn_is_given_up(
    target: Target, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    endless = ChatTokenizer(tokenizer.tokenizer, frozenset())
    with pytest.raises(UserError, match=r"no new usable prompt in 72 tries .*holds 0 of 2"):
        write(target, endless, tmp_path / "conversations.jsonl", prompts=2)


def test_a_tokenizer_without_chat_template_is_refused(
    target: Target, tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer.tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="no chat template"):
        write(target, tokenizer, tmp_path / "conversations.jsonl", prompts=2)


CONVERSATION = Conversation("0/1", "Tell me a joke, please", [1, 2], [3, 4])


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "conversations.jsonl"
    line = json.dumps(asdict(CONVERSATION))
    for cut in range(len(line)):
        file.write_text(f"{line}\n{line[:cut]}")
        assert read_conversations(file) == [CONVERSATION]


def test_line_breaks_inside_a_text_do_not_split_it(tmp_path: Path) -> None:
    file = tmp_path / "conversations.jsonl"
    item = Conversation("0/1", "a\nb\u2028c\x85d", [1], [2])
    file.write_text(json.dumps(asdict(item)) + "\n")
    assert read_conversations(file) == [item]


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("Write a short poem", True),
        ("Write a\nshort poem", True),
        ("Too few words", False),
        ("word " * 120, True),
        ("word " * 121, False),
        ("What does <|im_end|> mean here?", False),
        ("A bell \x07 rings in here", False),
    ],
)
def test_only_what_reads_like_a_user_turn_is_acceptable(text: str, good: bool) -> None:
    assert bool(acceptable(text)) is good


def test_prompts_are_compared_by_letters_and_digits() -> None:
    assert normalise("  What's 2+2?\n") == normalise("what s 2 2")
    assert normalise("What is 2+2?") != normalise("What is 2+3?")


def test_openers_are_unique_and_not_blank() -> None:
    texts = openers()
    assert len(texts) > 50 and len(texts) == len(set(texts))
    assert all(text.strip() for text in texts)
    assert any("\n" in text for text in texts) or "\\n" not in "".join(texts)
