"""The target's states of all training conversations, computed once and kept on disk.

Training reads the same conversations epoch after epoch and the target is frozen, so its forward pass
need not be repeated. A cache is a folder of shards (safetensors, whole conversations one after the
other) and an index.json that lists the finished ones; a shard's bytes depend on its conversations and
the target alone, so a killed run goes on where it stopped and ends with the same files.

Shapes: S tokens of a conversation, T of a shard, b conversations of a forward pass, M tapped layers,
D hidden size, V vocabulary.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.errors import UserError
from dspark.files import write_text, written_aside
from dspark.models.packed import PackedLinear
from dspark.models.target import Target
from dspark.progress import Bar
from dspark.train.states import target_states
from dspark.train.synthesize import Conversation

FORMAT = 1  # of the files; another one is another fingerprint
PASS_TOKENS = 4096  # of a forward pass, padding included; a longer conversation goes alone
PASS_LOGITS = 2**26  # logits held at a time when their logsumexp is taken
SAMPLE = 4096  # elements of each of the target's tensors that enter the fingerprint
INDEX = "index.json"


@dataclass(frozen=True)
class CachedConversation:
    """All that training needs of one conversation of S tokens. Tensors are on the CPU."""

    id: str
    ids: Tensor  # [S] int64, prompt then response
    response_start: int
    taps: Tensor  # [S, M*D] raw outputs of the tapped layers, in the target's dtype
    final: Tensor  # [S, D] states after the target's last norm, in the target's dtype
    # [S] float32, logsumexp of the target's logits over its whole vocabulary, so that probabilities
    # of a part of it can be had without the rest; 0 before position response_start - 1.
    logz: Tensor


class Span(NamedTuple):
    """Where a conversation lies in its shard: rows begin..end, the response from response_start."""

    id: str
    begin: int
    response_start: int
    end: int


@dataclass(frozen=True)
class Shard:
    """A finished shard as the index lists it."""

    file: str
    sha256: str
    bytes: int
    tokens: int
    conversations: list[Span]


@dataclass(frozen=True)
class Index:
    """The content of index.json. `planned` conversations are to be in the shards in the end."""

    fingerprint: str
    layers: list[int]
    dtype: str
    hidden_size: int
    bytes_per_token: int
    planned: int
    shards: list[Shard]


def write_cache(
    target: Target,
    conversations: list[Conversation],
    layers: list[int],
    folder: Path,
    *,
    shard_tokens: int,
    max_bytes: int,
) -> None:
    """Bring `folder` to hold the states of `conversations`, in their order.

    Finished shards that are sound are kept; a cache of other conversations, layers or weights is
    replaced. On one machine the files do not depend on how often the run was interrupted.

    Args:
        target: on any device; its dtype is the dtype of the states.
        layers: whose outputs are kept, as `target_states` takes them.
        shard_tokens: a shard is closed before it would exceed this (a longer conversation has one
            of its own).
        max_bytes: what the shards' tensors may take; the conversations from the first one that
            does not fit on are left out, and a line on stderr says so. Headers and the index, less
            than a thousandth, are not counted.

    Raises:
        UserError: no conversation, room for none, or the folder cannot be written (finished shards
            stay and are used by the next run).
    """
    size = (len(layers) + 1) * target.hidden_size * target.dtype.itemsize
    size += torch.float32.itemsize + torch.int32.itemsize  # logz and ids
    kept = _those_that_fit(conversations, size, max_bytes)
    plan = _plan(kept, shard_tokens)
    fingerprint = _fingerprint(target, conversations, layers)
    done = _sound_shards(folder, fingerprint, plan)
    dtype = str(target.dtype).removeprefix("torch.")

    def save_index() -> None:
        finished = [done[name] for name, _ in plan if name in done]
        index = Index(
            fingerprint, list(layers), dtype, target.hidden_size, size, len(kept), finished
        )
        write_text(folder / INDEX, json.dumps(asdict(index)) + "\n")

    save_index()
    with Bar(
        total=sum(_length(item) for item in kept),
        initial=sum(shard.tokens for shard in done.values()),
        desc="target states",
        unit="token",
        unit_scale=True,
    ) as bar:
        first = 0
        for name, spans in plan:
            if name not in done:
                batch = kept[first : first + len(spans)]
                tensors = _shard_tensors(target, batch, spans, layers, bar.update)
                done[name] = _write_shard(folder / name, tensors, spans)
                save_index()
            first += len(spans)


def _length(item: Conversation) -> int:
    return len(item.prompt_ids) + len(item.response_ids)


def _those_that_fit(
    conversations: list[Conversation], bytes_per_token: int, max_bytes: int
) -> list[Conversation]:
    if not conversations:
        raise UserError("there are no conversations to cache states of: synthesise some first")
    room, count = max_bytes // bytes_per_token, 0
    for item in conversations:
        room -= _length(item)
        if room < 0:
            break
        count += 1
    remedy = "raise drafter.train.cache_gb"
    if count == 0:
        raise UserError(
            f"not one conversation fits into a cache of {max_bytes} bytes ({bytes_per_token} bytes "
            f"a token, {_length(conversations[0])} tokens): {remedy}"
        )
    if count < len(conversations):
        click.echo(
            f"cache: the first {count} of {len(conversations)} conversations fit "
            f"({bytes_per_token} bytes a token): {remedy} for the rest, or take fewer prompts",
            err=True,
        )
    return conversations[:count]


def _plan(conversations: list[Conversation], shard_tokens: int) -> list[tuple[str, list[Span]]]:
    """File names of the shards and what goes into each, in order."""
    groups: list[list[Span]] = []
    for item in conversations:
        length = _length(item)
        if not groups or groups[-1][-1].end + length > shard_tokens:
            groups.append([])
        begin = groups[-1][-1].end if groups[-1] else 0
        groups[-1].append(Span(item.id, begin, begin + len(item.prompt_ids), begin + length))
    return [(f"shard-{index:05}.safetensors", spans) for index, spans in enumerate(groups)]


def _fingerprint(target: Target, conversations: list[Conversation], layers: list[int]) -> str:
    """SHA-256 over what decides the states.

    Of each of the target's tensors it takes some elements, spread evenly: other weights differ in
    nearly all of them, and reading all would take longer than many a cache.
    """
    config = target.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):  # where and by whom it was written
        config.pop(name, None)
    digest = hashlib.sha256()

    def add(value: object) -> None:
        digest.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\n")

    add([FORMAT, list(layers), str(target.dtype), config])
    for item in conversations:
        add([item.id, item.prompt_ids, item.response_ids])
    for name, tensor in _tensors(target):
        add([name, list(tensor.shape), str(tensor.dtype)])
        some = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLE)]
        digest.update(some.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _tensors(target: Target) -> Iterator[tuple[str, Tensor]]:
    """The target's tensors by name, those of packed layers too."""
    yield from target.model.named_parameters()
    yield from target.model.named_buffers()
    for layer in target.fused.layers if target.fused is not None else ():
        yield from layer.tensors()
    for name, module in target.model.named_modules():
        if isinstance(module, PackedLinear):
            yield f"{name}.weight", module.packed.to_dense()


def _sound_shards(
    folder: Path, fingerprint: str, plan: list[tuple[str, list[Span]]]
) -> dict[str, Shard]:
    """Finished shards of an earlier run by file name; all else that such a run left is removed."""
    sound: dict[str, Shard] = {}
    try:
        index = _read_index(folder)
        if index is not None and index.fingerprint != fingerprint:
            click.echo(
                f"cache '{folder}' is of other conversations, layers or weights: written anew",
                err=True,
            )
            index = None
    except UserError as error:
        click.echo(f"{error}: written anew", err=True)
        index = None
    planned = dict(plan)
    listed = [] if index is None else index.shards
    for shard in Bar(listed, desc="check cache", unit="shard", disable=not listed, leave=False):
        if planned.get(shard.file) == shard.conversations and _is_sound(folder, shard):
            sound[shard.file] = shard
    try:
        # The index first: without it the shards left by a kill in between are known to be no one's.
        if index is None:
            (folder / INDEX).unlink(missing_ok=True)
        for pattern in ("shard-*.safetensors", "shard-*.part", "index.json.*.part"):
            for file in folder.glob(pattern):
                if file.name not in sound:
                    file.unlink()
    except NotADirectoryError:
        pass  # the folder is a file: writing will say so
    except OSError as error:
        raise UserError(f"cannot clean up cache '{folder}': {error.strerror}") from error
    return sound


def _is_sound(folder: Path, shard: Shard) -> bool:
    file = folder / shard.file
    try:
        return file.stat().st_size == shard.bytes and _sha256(file) == shard.sha256
    except OSError:
        return False


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _read_index(folder: Path) -> Index | None:
    """The folder's index, or None when it has none.

    Raises:
        UserError: it cannot be read or is not an index.
    """
    file = folder / INDEX
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        shards = [
            Shard(**{**item, "conversations": [Span(*span) for span in item["conversations"]]})
            for item in raw["shards"]
        ]
        return Index(**{**raw, "shards": shards})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"cache index '{file}' is broken ({error})") from error


def _passes(lengths: list[int]) -> Iterator[list[int]]:
    """Groups of like lengths, by their indices, that fill a forward pass each."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if group and (len(group) + 1) * lengths[index] > PASS_TOKENS:
            yield group
            group = []
        group.append(index)
    yield group


@torch.no_grad()
def _shard_tensors(
    target: Target,
    conversations: list[Conversation],
    spans: list[Span],
    layers: list[int],
    progress: Callable[[int], Any],
) -> dict[str, Tensor]:
    """The tensors of a shard of T tokens; `progress` is called with the tokens of each pass."""
    total, width = spans[-1].end, target.hidden_size
    ids = torch.tensor([t for item in conversations for t in item.prompt_ids + item.response_ids])
    taps = torch.empty(total, len(layers) * width, dtype=target.dtype)
    final = torch.empty(total, width, dtype=target.dtype)
    logz = torch.zeros(total)
    for group in _passes([span.end - span.begin for span in spans]):
        rows = [spans[index] for index in group]
        padded = torch.zeros(len(rows), rows[-1].end - rows[-1].begin, dtype=torch.long)
        for row, span in enumerate(rows):
            padded[row, : span.end - span.begin] = ids[span.begin : span.end]
        states, tapped = target_states(target, padded.to(target.device), layers)
        for row, span in enumerate(rows):
            length = span.end - span.begin
            final[span.begin : span.end] = states[row, :length]
            taps[span.begin : span.end] = tapped[row, :length]
            first = max(span.begin, span.response_start - 1)
            logz[first : span.end] = _logsumexp(target, states[row, first - span.begin : length])
        progress(sum(span.end - span.begin for span in rows))
    return {"ids": ids.to(torch.int32), "taps": taps, "final": final, "logz": logz}


def _logsumexp(target: Target, states: Tensor) -> Tensor:
    """Float32 logsumexp [n], over the vocabulary, of the logits of final states [n, D]."""
    chunk = max(1, PASS_LOGITS // target.vocab_size)
    return torch.cat([target.logits(rows).float().logsumexp(-1) for rows in states.split(chunk)])


def _write_shard(path: Path, tensors: dict[str, Tensor], spans: list[Span]) -> Shard:
    with written_aside(path) as aside:
        try:
            save_file(tensors, aside, metadata={"format": "pt"})
        except SafetensorError as error:  # what it makes of a full disk; the number is in its text
            raise OSError(errno.EIO, str(error)) from error
        os.chmod(aside, 0o644)  # it is written for its owner alone
        size, sha256 = aside.stat().st_size, _sha256(aside)
    return Shard(path.name, sha256, size, spans[-1].end, spans)


class StateCache:
    """A finished cache, read from memory-mapped shards: only the rows asked for are touched.

    Conversations are in the order they were given to `write_cache`.

    Raises:
        UserError: the folder holds no cache, or one that is broken or not finished.
    """

    def __init__(self, folder: Path) -> None:
        index = _read_index(folder)
        if index is None:
            raise UserError(f"'{folder}' holds no cache of target states: write it first")
        self.folder = folder
        self.bytes_per_token = index.bytes_per_token
        self.layers = index.layers
        self.fingerprint = index.fingerprint
        self._items = [(shard, span) for shard in index.shards for span in shard.conversations]
        self._handles: dict[str, Any] = {}
        for shard in index.shards:
            file = folder / shard.file
            if not file.is_file() or file.stat().st_size != shard.bytes:
                raise UserError(f"cache shard '{file}' is missing or cut short: write it again")
        if len(self._items) != index.planned:
            raise UserError(
                f"cache '{folder}' holds {len(self._items)} of {index.planned} conversations: "
                "write the rest first"
            )

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> CachedConversation:
        """One conversation.

        Raises:
            UserError: its shard cannot be read.
        """
        shard, span = self._items[index]
        try:
            # A slice is a view of the mapped file: cloned, so that no caller writes into the next read.
            ids, taps, final, logz = (
                self._open(shard.file).get_slice(name)[span.begin : span.end].clone()
                for name in ("ids", "taps", "final", "logz")
            )
        except (SafetensorError, RuntimeError, OSError) as error:  # Runtime: it cannot be mapped
            raise UserError(
                f"cache shard '{self.folder / shard.file}' cannot be read ({error}): write it again"
            ) from error
        return CachedConversation(
            span.id, ids.long(), span.response_start - span.begin, taps, final, logz
        )

    def response_ids(self, index: int) -> Tensor:
        """The response of one conversation [S - response_start] int64, without its states."""
        shard, span = self._items[index]
        return self._open(shard.file).get_slice("ids")[span.response_start : span.end].long()

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = safe_open(self.folder / file, framework="pt")
        return self._handles[file]
