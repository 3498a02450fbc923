"""Training text that a tiny target writes itself: resumable, without doubles."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dspark.decode.engine import Engine, Request
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


def write(
    target: Target, tokenizer: ChatTokenizer, out: Path, prompts: int, seed: int = 0, **more: Any
) -> list[Conversation]:
    synthesize(target, tokenizer, out, prompts=prompts, max_new_tokens=12, seed=seed, **more)
    return read_conversations(out)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "conversations.jsonl"


def normalised(conversations: Iterable[Conversation]) -> list[str]:
    return [normalise(item.user) for item in conversations]


def test_conversations_are_the_targets_own_and_unique(
    target: Target, tokenizer: ChatTokenizer, out: Path
) -> None:
    conversations = write(target, tokenizer, out, prompts=5)
    assert len(conversations) >= 5
    assert len({item.id for item in conversations}) == len(conversations)
    assert len(set(normalised(conversations))) == len(conversations)
    for item in conversations:
        assert any(
            item.user.startswith(begin.strip()) and item.user.endswith(end.strip())
            for begin, end in openers()
        )
        assert acceptable(item.user)
        assert item.prompt_ids == tokenizer.encode_turn([item.user], [], chat=True)
        assert 8 <= len(item.response_ids) <= 12
        assert not ENDS & set(item.response_ids[:-1])


# --------------------------------------------------------------------------- going on


def test_a_killed_run_goes_on_where_it_stopped(
    target: Target, tokenizer: ChatTokenizer, out: Path
) -> None:
    """What was written stays, the line that the kill cut short is written over, nothing doubles."""
    part = out.with_name("conversations.jsonl.part")
    kept = len(write(target, tokenizer, out, prompts=3))
    whole = out.read_text()
    cut = json.dumps(asdict(read_conversations(out)[-1]))[:-20]
    out.unlink()
    part.write_text(whole + cut)
    conversations = write(target, tokenizer, out, prompts=kept + 3)
    text = out.read_text()
    assert not part.exists()
    assert text.startswith(whole) and cut not in text[len(whole) :]
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(conversations) == len(lines) >= kept + 3
    assert len({item.id for item in conversations}) == len(lines)
    assert len(set(normalised(conversations))) == len(lines)


def test_the_final_name_is_for_the_whole_file(
    target: Target, tokenizer: ChatTokenizer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in its second chunk, a run leaves the first under .part; the next one needs it."""
    write_users = module._write_users

    def stopped(engine: Engine, tokenizer: ChatTokenizer, chunk: int, seed: int) -> Iterator[str]:
        if chunk == 1:
            raise KeyboardInterrupt
        return write_users(engine, tokenizer, chunk, seed)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_users", stopped)
        with pytest.raises(KeyboardInterrupt):
            write(target, tokenizer, out, prompts=30)
    part = out.with_name("conversations.jsonl.part")
    first = part.read_text()
    assert first and not out.exists()
    conversations = write(target, tokenizer, out, prompts=len(first.splitlines()) + 1)
    assert out.read_text().startswith(first) and not part.exists()
    assert {item.id.split("/")[0] for item in conversations} == {"0", "1"}


def test_more_prompts_are_added_to_a_finished_file(
    target: Target, tokenizer: ChatTokenizer, out: Path
) -> None:
    before = write(target, tokenizer, out, prompts=3)
    after = write(target, tokenizer, out, prompts=len(before) + 1)
    assert after[: len(before)] == before and len(after) > len(before)


def test_enough_is_enough(target: Target, tokenizer: ChatTokenizer, out: Path) -> None:
    write(target, tokenizer, out, prompts=3)
    before, stamp = out.read_bytes(), out.stat().st_mtime_ns
    write(target, tokenizer, out, prompts=3)
    assert out.read_bytes() == before and out.stat().st_mtime_ns == stamp


# --------------------------------------------------------------------------- own and forbidden

OWN = ["How do whales sleep?", "Name three rivers,\nand where they end.", "Why is the sky blue?"]


def test_own_prompts_come_first_and_are_answered(
    target: Target, tokenizer: ChatTokenizer, out: Path
) -> None:
    endless = ChatTokenizer(tokenizer.tokenizer, frozenset())
    conversations = write(target, endless, out, prompts=2, own=OWN)
    assert [item.id for item in conversations] == ["own/0", "own/1", "own/2"]
    for item, user in zip(conversations, OWN, strict=True):
        assert item.user == user
        assert item.prompt_ids == tokenizer.encode_turn([user], [], chat=True)
        assert len(item.response_ids) == 12
        engine = Engine(target, capacity=len(item.prompt_ids) + 12)
        row = engine.admit(Request("p", 0, item.prompt_ids, 12), 0.0)
        while row.finish_reason is None:
            engine.step()
        assert row.output == item.response_ids
    more = write(target, tokenizer, out, prompts=4, own=OWN)
    assert more[:3] == conversations and len(more) >= 4
    assert not any(item.id.startswith("own/") for item in more[3:])


def test_own_prompts_are_not_asked_twice(
    target: Target, tokenizer: ChatTokenizer, out: Path
) -> None:
    """Neither by a second run, nor when the target writes one of them itself."""
    endless = ChatTokenizer(tokenizer.tokenizer, frozenset())
    write(target, endless, out, prompts=1, own=OWN[:2])
    conversations = write(target, endless, out, prompts=3, own=OWN)
    assert [item.user for item in conversations] == OWN
    written = write(target, tokenizer, out.with_name("free"), prompts=3)
    own = [f"  {written[0].user.upper()} "]
    again = write(target, tokenizer, out.with_name("owned"), prompts=3, own=own)
    assert normalised(again).count(normalise(own[0])) <= 1
    assert written[0].user not in [item.user for item in again]


def test_forbidden_prompts_never_appear(
    target: Target, tokenizer: ChatTokenizer, out: Path
) -> None:
    free = write(target, tokenizer, out.with_name("free"), prompts=4)
    forbidden = {item.user for item in free[::2]}
    spelled = [f"- {user.swapcase()} !" for user in forbidden]
    kept = write(target, tokenizer, out, prompts=4, forbidden=spelled)
    assert not {normalise(user) for user in forbidden} & set(normalised(kept))
    assert {item.user for item in free} - forbidden <= {item.user for item in kept}


def test_a_forbidden_own_prompt_is_refused(
    target: Target, tokenizer: ChatTokenizer, out: Path
) -> None:
    with pytest.raises(
        UserError, match=r"prompt 'How do whales sleep\?' is one of an evaluation set"
    ):
        write(target, tokenizer, out, prompts=3, own=OWN, forbidden=["how do Whales sleep"])
    assert not out.exists()


# --------------------------------------------------------------------------- what is written


def test_the_seed_decides_the_text(
    target: Target, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    users = {
        name: {item.user for item in write(target, tokenizer, tmp_path / name, 3, seed)}
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
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


@pytest.mark.parametrize("said", ["", " END\nof it.", " END\nof it. \n"], ids=repr)
def test_a_prompt_ends_with_its_closer_once(
    target: Target, tokenizer: ChatTokenizer, out: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """Whether the target wrote it or not, and with blanks after it."""

    class Closing(ChatTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            return super().decode(ids) + said

    monkeypatch.setattr(module, "openers", lambda: [("Please tell me", " END\nof it.")])
    conversations = write(target, Closing(tokenizer.tokenizer, ENDS), out, prompts=1)
    assert conversations
    for item in conversations:
        assert item.user.startswith("Please tell me")
        assert item.user.endswith(" END\nof it.") and item.user.count("END") == 1


def test_openers_are_unique_and_ready_to_write_on() -> None:
    pairs = openers()
    assert len(pairs) > 50 and len(pairs) == len(set(pairs))
    for begin, end in pairs:
        assert begin.strip() and not begin.endswith(" ") and not end.startswith(" ")
        assert "\\n" not in begin + end and "…" not in begin + end
    assert any("\n" in begin for begin, _ in pairs)
    assert any(end.endswith("\\boxed{}.") for _, end in pairs)
    assert any(end == "\n```" for _, end in pairs) and any(end == "" for _, end in pairs)


def test_a_line_of_openers_is_what_comes_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "assets" / "train"
    folder.mkdir(parents=True)
    lines = ["Write a", "", "def is_… \\n```", "A shop … \\nAnswer in \\boxed{}.", "Fix:\\n"]
    (folder / "openers.txt").write_text("\n".join(lines), "utf-8")
    monkeypatch.setattr(module, "files", lambda _package: tmp_path)
    assert openers() == [
        ("Write a", ""),
        ("def is_", "\n```"),
        ("A shop", "\nAnswer in \\boxed{}."),
        ("Fix:\n", ""),
    ]
