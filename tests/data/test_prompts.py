"""The prompts.jsonl contract: what is read, what is refused and in which words, what is written."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.config import DatasetConfig
from dspark.data.prompts import (
    Prompt,
    prompts_digest,
    read_prompts,
    split_prompts,
    write_prompts,
)
from dspark.errors import UserError

GOOD = '{"id": "a", "turns": ["hi"]}'

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
prompt_lists = st.lists(
    st.builds(Prompt, words, st.lists(words, min_size=1, max_size=4)),
    min_size=1,
    max_size=8,
    unique_by=lambda prompt: prompt.id,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "p.jsonl"


@given(prompts=prompt_lists)
def test_what_is_written_is_read_back(
    prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("round") / "p.jsonl"
    write_prompts(path, prompts)
    assert read_prompts(path) == prompts


def test_a_line_is_an_object_of_id_and_turns(file: Path) -> None:
    write_prompts(file, [Prompt("x/0", ["é {a}\n", "\u2028 b"])])
    assert file.read_bytes().endswith(b"}\n")
    assert json.loads(file.read_text("utf-8")) == {"id": "x/0", "turns": ["é {a}\n", "\u2028 b"]}
    assert "é" in file.read_text("utf-8")


@pytest.mark.parametrize("text", [GOOD, f"{GOOD}\n", f"\ufeff{GOOD}\r\n"])
def test_final_newline_windows_newline_and_byte_order_mark_are_fine(file: Path, text: str) -> None:
    file.write_bytes(text.encode())
    assert read_prompts(file) == [Prompt("a", ["hi"])]


def test_an_id_is_a_name_and_no_path(file: Path) -> None:
    """Nothing is opened or written under it."""
    name = "../../$(touch x);`y`/\x00"
    write_prompts(file, [Prompt(name, [name])])
    assert read_prompts(file) == [Prompt(name, [name])]
    assert os.listdir(file.parent) == [file.name]


def test_other_fields_are_dropped(file: Path) -> None:
    file.write_text('{"id": "a", "turns": ["hi"], "category": "x"}\n')
    assert read_prompts(file) == [Prompt("a", ["hi"])]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('{"id": "b", "turns": ["x"]', "line 2: not JSON"),
        ("[" * 100_000, "line 2: JSON nested too deeply"),
        ('{"id": ' + "1" * 5000 + "}", "line 2: not JSON that can be read (Exceeds the limit"),
        ("", "line 2: the line is blank: remove it"),
        ("  ", "line 2: the line is blank: remove it"),
        ('["b"]', "line 2: the line is a list, not an object"),
        ("null", "line 2: the line is null, not an object"),
        ('{"turns": ["x"]}', "line 2: 'id' is missing"),
        ('{"id": "b"}', "line 2: 'turns' is missing"),
        ('{"id": 7, "turns": ["x"]}', "line 2: 'id' is a number: it must be text"),
        ('{"id": true, "turns": ["x"]}', "line 2: 'id' is true or false: it must be text"),
        ('{"id": " ", "turns": ["x"]}', "line 2: 'id' is blank"),
        ('{"id": "b", "turns": "x"}', "line 2: 'turns' is text: it must be a list"),
        ('{"id": "b", "turns": null}', "line 2: 'turns' is null: it must be a list"),
        ('{"id": "b", "turns": []}', "line 2: 'turns' is empty"),
        ('{"id": "b", "turns": ["x", 3]}', "line 2: turn 2 is a number: it must be text"),
        ('{"id": "b", "turns": [{"role": "user"}]}', "line 2: turn 1 is an object"),
        ('{"id": "b", "turns": ["x", ""]}', "line 2: turn 2 is blank"),
        ('{"id": "b", "turns": [" \\n"]}', "line 2: turn 1 is blank"),
        ('{"id": "b", "turns": ["\\ud800"]}', "line 2: turn 1 holds half a surrogate pair"),
        (GOOD, "line 2: id 'a' is taken by line 1"),
    ],
)
def test_a_bad_line_is_named(file: Path, bad: str, words: str) -> None:
    file.write_text(f'{GOOD}\n{bad}\n{{"id": "c", "turns": ["hi"]}}\n')
    with pytest.raises(UserError) as caught:
        read_prompts(file)
    assert f"{file}, {words}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no prompts"),
        (b"\n", "line 1: the line is blank"),
        (GOOD.encode() + b"\n\xff\xfe", "line 2: byte 0xff is not UTF-8: save the file as UTF-8"),
    ],
)
def test_a_bad_file_is_named(file: Path, content: bytes, words: str) -> None:
    file.write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_prompts(file)


def test_an_absent_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl does not exist: check the path"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"can't read .*: Is a directory"):
        read_prompts(tmp_path)


def test_a_failed_write_leaves_the_old_file_alone(file: Path) -> None:
    write_prompts(file, [Prompt("old", ["x"])])

    def failing():
        yield Prompt("new", ["y"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_prompts(file, failing())
    assert read_prompts(file) == [Prompt("old", ["x"])]
    assert os.listdir(file.parent) == [file.name]


def test_a_write_makes_folders_and_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "p.jsonl"
    write_prompts(path, [Prompt("x", ["y"])])
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_write_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*taken/p\.jsonl"):
        write_prompts(tmp_path / "taken" / "p.jsonl", [Prompt("x", ["y"])])


def test_the_digest_depends_on_ids_turns_and_order() -> None:
    one, two = Prompt("1", ["a", "b"]), Prompt("2", ["c"])
    digests = [
        prompts_digest(prompts)
        for prompts in (
            [one, two],
            [two, one],
            [one],
            [Prompt("1", ["ab"]), two],
            [Prompt("1", ["a"]), two],
            [Prompt("3", ["a", "b"]), two],
        )
    ]
    assert len(set(digests)) == len(digests)
    assert prompts_digest(iter([Prompt("1", ["a", "b"]), two])) == digests[0]
    # Fixed: a digest recorded with one run must be comparable with a later run's.
    assert prompts_digest([Prompt("é", ["x"])]).startswith("667908d226c4be32")


# ---------------------------------------------------------------------------- shards


@given(count=st.integers(1, 40), shards=st.integers(1, 40))
def test_shards_deal_the_prompts_out_in_turn(count: int, shards: int) -> None:
    prompts = [Prompt(f"p{index}", ["hi"]) for index in range(count)]
    dataset = DatasetConfig(name="set", shards=shards)
    if shards > count:
        with pytest.raises(UserError) as error:
            split_prompts(dataset, prompts)
        assert str(error.value) == (
            f"dataset 'set' has {count} prompts but shards asks for {shards} parts: "
            f"set shards to {count} or less"
        )
        return
    parts = split_prompts(dataset, prompts)
    assert len(parts) == shards
    dealt = [part[turn] for turn in range(len(parts[0])) for part in parts if turn < len(part)]
    assert dealt == prompts
    assert len(parts[0]) - len(parts[-1]) in (0, 1)
