"""The cache of target states: the same as run alone, resumable to the byte, mapped not loaded."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch

from dspark.errors import UserError
from dspark.models.target import Target, load_target
from dspark.train import cache as module
from dspark.train.cache import StateCache, write_cache
from dspark.train.states import target_states
from dspark.train.synthesize import Conversation

LAYERS = [1, 2]
# (2 taps + 1 final state) of width 48 in float32, logz and a token id
BYTES_PER_TOKEN = 3 * 48 * 4 + 4 + 4


@pytest.fixture(scope="module")
def talks() -> list[Conversation]:
    """Conversations of 3 to 60 tokens, 12 of them, the longest in the middle."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(4, 300, (count,), generator=generator).tolist()

    lengths = [(1 + 7 * i % 11, 2 + 13 * i % 23) for i in range(12)]
    lengths[5] = (20, 40)
    return [
        Conversation(f"0/{index}", "hello", tokens(prompt), tokens(response))
        for index, (prompt, response) in enumerate(lengths)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


@pytest.fixture(autouse=True)
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several forward passes a shard, several chunks of logits a conversation."""
    monkeypatch.setattr(module, "PASS_TOKENS", 64)
    monkeypatch.setattr(module, "PASS_LOGITS", 300 * 7)


def write(
    target: Target,
    talks: list[Conversation],
    folder: Path,
    layers: list[int] = LAYERS,
    *,
    shard_tokens: int = 70,
    max_bytes: int = 10**9,
) -> None:
    write_cache(target, talks, layers, folder, shard_tokens=shard_tokens, max_bytes=max_bytes)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def stamps(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("shard-*")}


def length(item: Conversation) -> int:
    return len(item.prompt_ids) + len(item.response_ids)


def check_states(target: Target, talks: list[Conversation], cache: StateCache) -> None:
    """Every conversation of the cache is what the target says of it alone."""
    assert len(cache) == len(talks)
    for index, talk in enumerate(talks):
        item = cache[index]
        ids = torch.tensor(talk.prompt_ids + talk.response_ids)
        states, taps = target_states(target, ids[None], cache.layers)
        assert item.id == talk.id and item.response_start == len(talk.prompt_ids)
        assert item.ids.dtype == torch.int64 and torch.equal(item.ids, ids)
        torch.testing.assert_close(item.taps, taps[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(item.final, states[0], rtol=1e-5, atol=1e-5)
        logz = target.logits(states[0]).logsumexp(-1)
        logz[: len(talk.prompt_ids) - 1] = 0
        torch.testing.assert_close(item.logz, logz, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "shard_tokens"), [([1, 2], 70), ([-1, 0], 10**6), ([2], 1)], ids=str
)
def test_states_are_those_of_each_conversation_alone(
    target: Target,
    talks: list[Conversation],
    folder: Path,
    layers: list[int],
    shard_tokens: int,
) -> None:
    write(target, talks, folder, layers, shard_tokens=shard_tokens)
    cache = StateCache(folder)
    assert cache.layers == layers
    check_states(target, talks, cache)
    with pytest.raises(IndexError):
        cache[len(talks)]


def test_shards_hold_whole_conversations_in_order(
    target: Target, talks: list[Conversation], folder: Path
) -> None:
    write(target, talks, folder)
    index = json.loads((folder / "index.json").read_text())
    spans = [shard["conversations"] for shard in index["shards"]]
    assert [span[0] for shard in spans for span in shard] == [item.id for item in talks]
    for shard, following in zip(spans, [*spans[1:], None], strict=True):
        assert shard[0][1] == 0
        assert [span[3] for span in shard[:-1]] == [span[1] for span in shard[1:]]
        assert shard[-1][3] <= 70
        if following is not None:  # the next conversation would not have fitted
            assert shard[-1][3] + following[0][3] > 70
    for shard in index["shards"]:
        file = folder / shard["file"]
        assert file.stat().st_mode & 0o777 == 0o644
        assert file.stat().st_size == shard["bytes"]
    assert {file.name for file in folder.iterdir()} == {
        "index.json",
        *(shard["file"] for shard in index["shards"]),
    }


def test_states_keep_the_targets_dtype(
    target_path: Path, talks: list[Conversation], folder: Path
) -> None:
    target = load_target(target_path, "cpu", torch.bfloat16)
    write(target, talks, folder)
    cache = StateCache(folder)
    item = cache[3]
    states, taps = target_states(target, item.ids[None], LAYERS)
    assert item.taps.dtype == item.final.dtype == torch.bfloat16
    assert item.logz.dtype == torch.float32
    # A batch adds in another order; bfloat16 has 8 bits.
    assert (item.taps - taps[0]).float().norm() < 0.02 * taps.float().norm()
    assert (item.final - states[0]).float().norm() < 0.02 * states.float().norm()
    first = item.response_start - 1
    torch.testing.assert_close(
        item.logz[first:], target.logits(item.final[first:]).float().logsumexp(-1)
    )
    assert cache.bytes_per_token == 3 * 48 * 2 + 8


def test_bytes_per_token_is_what_the_shards_take(
    target: Target, talks: list[Conversation], folder: Path
) -> None:
    write(target, talks, folder, shard_tokens=10**6)
    assert StateCache(folder).bytes_per_token == BYTES_PER_TOKEN
    tensors = BYTES_PER_TOKEN * sum(map(length, talks))
    assert 0 < (folder / "shard-00000.safetensors").stat().st_size - tensors < 1024


def test_a_finished_cache_is_not_written_again(
    target: Target, talks: list[Conversation], folder: Path
) -> None:
    write(target, talks, folder)
    before = stamps(folder)
    write(target, talks, folder)
    assert stamps(folder) == before


def flip_a_byte(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


DAMAGES = {"flipped": flip_a_byte, "truncated": cut_short, "missing": Path.unlink}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
@pytest.mark.parametrize("shard", ["shard-00000.safetensors", "shard-00002.safetensors"])
def test_a_damaged_shard_alone_is_written_again(
    target: Target, talks: list[Conversation], folder: Path, damage: str, shard: str
) -> None:
    write(target, talks, folder)
    whole, before = contents(folder), stamps(folder)
    DAMAGES[damage](folder / shard)
    write(target, talks, folder)
    assert contents(folder) == whole
    after = stamps(folder)
    assert {name for name in before if after[name] != before[name]} == {shard}


def test_leftovers_of_a_killed_writer_are_removed(
    target: Target, talks: list[Conversation], folder: Path
) -> None:
    write(target, talks, folder)
    whole = contents(folder)
    for name in (
        "shard-00001.safetensors.77.part",
        "index.json.77.part",
        "shard-00099.safetensors",
    ):
        (folder / name).write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    write(target, talks, folder)
    assert (folder / "notes.txt").read_text() == "mine"
    (folder / "notes.txt").unlink()
    assert contents(folder) == whole


@pytest.mark.parametrize("change", ["tokens", "order", "more", "layers", "target", "dtype"])
def test_a_cache_of_something_else_is_replaced(
    target: Target,
    talks: list[Conversation],
    tmp_path: Path,
    target_path: Path,
    change: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(target, talks, tmp_path / "cache")
    assert "written anew" not in capsys.readouterr().err
    layers = LAYERS
    if change == "tokens":
        response = [*talks[-1].response_ids[:-1], 5]
        talks = [*talks[:-1], replace(talks[-1], response_ids=response)]
    if change == "order":
        talks = talks[::-1]
    if change == "more":
        talks = [*talks, replace(talks[0], id="1/0")]
    if change == "layers":
        layers = [2, 1]
    if change == "target":  # one layer's weights alone
        target = load_target(target_path, "cpu", torch.float32)
        target.decoder.layers[0].mlp.down_proj.weight.mul_(1.01)
    if change == "dtype":
        target = load_target(target_path, "cpu", torch.bfloat16)
    write(target, talks, tmp_path / "cache", layers)
    assert "written anew" in capsys.readouterr().err
    write(target, talks, tmp_path / "fresh", layers)
    assert contents(tmp_path / "cache") == contents(tmp_path / "fresh")


def test_a_target_moved_elsewhere_is_the_same(
    target: Target, talks: list[Conversation], folder: Path, tmp_path: Path
) -> None:
    write(target, talks, folder)
    before = stamps(folder)
    target.model.save_pretrained(tmp_path / "copy")
    write(load_target(tmp_path / "copy", "cpu", torch.float32), talks, folder)
    assert stamps(folder) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"shards": [1]}', '{"shards": []}'])
def test_a_broken_index_is_refused_by_the_reader_and_replaced_by_the_writer(
    target: Target,
    talks: list[Conversation],
    folder: Path,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(target, talks, folder)
    whole = contents(folder)
    (folder / "index.json").write_text(text)
    with pytest.raises(UserError, match=r"index.json' is broken"):
        StateCache(folder)
    write(target, talks, folder)
    assert "is broken" in capsys.readouterr().err
    assert contents(folder) == whole


def test_what_does_not_fit_is_left_out(
    target: Target, talks: list[Conversation], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = BYTES_PER_TOKEN * sum(map(length, talks[:9]))
    write(target, talks, folder, max_bytes=limit)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cache: ")]
    assert lines == [
        f"cache: the first 9 of 12 conversations fit ({BYTES_PER_TOKEN} bytes a token): raise "
        "drafter.train.cache_gb for the rest, or take fewer prompts"
    ]
    check_states(target, talks[:9], StateCache(folder))
    write(target, talks, folder, max_bytes=limit - 1)
    check_states(target, talks[:8], StateCache(folder))
    before = stamps(folder)
    write(target, talks, folder)
    check_states(target, talks, StateCache(folder))
    after = stamps(folder)
    assert all(after[name] == before[name] for name in sorted(before)[:-1])  # the last one grew


def test_room_for_no_conversation_is_refused(
    target: Target, talks: list[Conversation], folder: Path
) -> None:
    limit = BYTES_PER_TOKEN * length(talks[0]) - 1
    with pytest.raises(UserError, match=r"not one conversation fits .*drafter\.train\.cache_gb"):
        write(target, talks, folder, max_bytes=limit)
    with pytest.raises(UserError, match="no conversations"):
        write(target, [], folder)
    assert not folder.exists()


def test_an_absent_or_unfinished_or_damaged_cache_is_refused(
    target: Target, talks: list[Conversation], folder: Path
) -> None:
    with pytest.raises(UserError, match="holds no cache"):
        StateCache(folder)
    write(target, talks, folder)
    shard = folder / "shard-00001.safetensors"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1])
    with pytest.raises(UserError, match=r"shard-00001\.safetensors' is missing or cut short"):
        StateCache(folder)
    shard.write_bytes(b"\xff" * len(raw))
    cache = StateCache(folder)
    in_second = json.loads((folder / "index.json").read_text())["shards"][0]["conversations"]
    with pytest.raises(
        UserError, match=r"shard-00001\.safetensors' cannot be read .*write it again"
    ):
        cache[len(in_second)]
    shard.write_bytes(raw)
    index = json.loads((folder / "index.json").read_text())
    index["shards"].pop()
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"of 12 conversations: write the rest first"):
        StateCache(folder)


def test_what_a_caller_writes_into_a_conversation_stays_there(
    target: Target, talks: list[Conversation], folder: Path
) -> None:
    write(target, talks, folder)
    cache = StateCache(folder)
    for tensor in (cache[0].ids, cache[0].taps, cache[0].final, cache[0].logz):
        tensor.fill_(7)
    check_states(target, talks, cache)


def test_reading_one_conversation_does_not_read_the_shard(
    target: Target, talks: list[Conversation], folder: Path
) -> None:
    """With a hole of 1 GB in the largest tensor, memory grows by far less than that."""
    write(target, talks[:1], folder)
    file, index_file = folder / "shard-00000.safetensors", folder / "index.json"
    rows = 2**30 // (2 * 48 * 4)
    raw = file.read_bytes()
    header_end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:header_end])
    begin, end = header["taps"]["data_offsets"]
    header["taps"] = {**header["taps"], "shape": [rows, 96]}
    grown = rows * 96 * 4 - (end - begin)
    for name in ("ids", "taps", "final", "logz"):
        first, last = header[name]["data_offsets"]
        moved = first + grown if first >= end else first
        header[name]["data_offsets"] = [moved, last + grown if last >= end else last]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text + raw[header_end : header_end + end])
        handle.seek(grown, os.SEEK_CUR)
        handle.write(raw[header_end + end :])
    index = json.loads(index_file.read_text())
    index["shards"][0]["bytes"] = file.stat().st_size
    index_file.write_text(json.dumps(index))
    assert file.stat().st_size > 2**30
    before = psutil.Process().memory_info().rss
    check_states(target, talks[:1], StateCache(folder))
    assert psutil.Process().memory_info().rss - before < 2**28


PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import torch
from dspark.models.target import load_target
from dspark.train import cache as module
from dspark.train.synthesize import Conversation

torch.set_num_threads(1)
module.PASS_TOKENS, module.PASS_LOGITS = 64, 300 * 7
target_path, talks, out, moments = sys.argv[1:]
talks = [Conversation(**item) for item in json.loads(Path(talks).read_text())]
target = load_target(target_path, "cpu", torch.float32)
replace, save_file, count = os.replace, module.save_file, 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def killed_at(when, number):  # the number-th file; they are index, shard, index, shard, ...
    def replace_or_die(source, final):
        global count
        count += 1
        if count == number and when == "before":
            die()
        replace(source, final)
        if count == number and when == "after":
            die()

    def save_or_die(tensors, path, metadata):
        save_file(tensors, path, metadata)
        if count + 1 == number and when == "half":
            os.truncate(path, os.path.getsize(path) // 2)
            die()

    os.replace, module.save_file = replace_or_die, save_or_die

for moment in moments.split():
    child = os.fork()
    if child == 0:
        when, number = moment.split("-")
        killed_at(when, int(number))
        module.write_cache(
            target, talks, [1, 2], Path(out) / moment, shard_tokens=70, max_bytes=10**9
        )
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""
MOMENTS = ("before-1", "after-1", "half-2", "before-2", "after-2", "before-3", "after-5", "half-6")


def test_killed_and_run_again_gives_the_same_bytes(
    target: Target, target_path: Path, talks: list[Conversation], tmp_path: Path
) -> None:
    """kill -9 with a file half written, before and after its renaming, early and late."""
    write(target, talks, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    (tmp_path / "talks.json").write_text(json.dumps([asdict(item) for item in talks]))
    arguments = [target_path, tmp_path / "talks.json", tmp_path, " ".join(MOMENTS)]
    subprocess.run([sys.executable, "-c", PROGRAM, *map(str, arguments)], check=True)
    for moment in MOMENTS:
        killed = tmp_path / moment
        assert contents(killed) != whole
        listed = killed / "index.json"
        shards = json.loads(listed.read_text())["shards"] if listed.exists() else []
        finished = {shard["file"] for shard in shards}
        before = stamps(killed)
        write(target, talks, killed)
        assert contents(killed) == whole, moment
        after = stamps(killed)
        assert {name for name in before if after.get(name) == before[name]} == finished


def test_a_full_disk_is_one_line_and_loses_no_finished_shard(
    target: Target, talks: list[Conversation], folder: Path
) -> None:
    write(target, talks, folder)
    whole = contents(folder)
    sizes = [file.stat().st_size for file in sorted(folder.glob("shard-*"))]
    largest = sizes.index(max(sizes))
    assert largest > 0
    shutil.rmtree(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) - 1, limits[1]))
    try:
        with pytest.raises(UserError, match=rf"cannot write .*shard-0000{largest}.*too large") as e:
            write(target, talks, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(e.value)
    assert len(list(folder.iterdir())) == 1 + largest  # the index and what came before
    before = stamps(folder)
    write(target, talks, folder)
    assert contents(folder) == whole
    assert {name: stamps(folder)[name] for name in before} == before
