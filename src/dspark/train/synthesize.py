"""Training text that the target makes itself: it is asked to write user turns, then to answer them.

A user turn of the chat template is left open after a few words of our own (`openers.txt`) and the
target continues it at temperature 1; what passes the filter is answered greedily, as the benchmark
decodes. So no prompt of any benchmark is needed, and the responses are the target's own distribution.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from dspark.decode.engine import Engine, Request
from dspark.decode.loop import closed_loop
from dspark.decode.sampling import Sampling
from dspark.errors import UserError
from dspark.models.target import Target
from dspark.models.tokenizer import ChatTokenizer
from dspark.progress import Bar

PROMPT_TOKENS = 96  # longest user turn that the target may write
CHUNK = 256  # prompts between two writes: what a kill can lose
BARREN = 3  # chunks in a row without a new conversation before it gives up


@dataclass
class Conversation:
    """One user turn and the target's answer, as text and as the ids that the target saw."""

    id: str
    user: str
    prompt_ids: list[int]
    response_ids: list[int]


def read_conversations(path: str | Path) -> list[Conversation]:
    """Read what `synthesize` wrote; a last line cut short by a kill is left out.

    Raises:
        UserError: the file is absent or cannot be read.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"conversations '{path}' cannot be read ({error}): synthesise them first"
        ) from error
    conversations = []
    for line in lines:
        try:
            conversations.append(Conversation(**json.loads(line)))
        except ValueError:
            continue
    return conversations


def openers() -> list[tuple[str, str]]:
    """What user turns begin and end with, a pair a line of openers.txt.

    `…` stands where the target writes (at the end when it is absent); `\\n` is a line break.
    """
    text = (files("dspark") / "assets" / "train" / "openers.txt").read_text()
    parts = [line.replace("\\n", "\n").partition("…") for line in text.splitlines() if line.strip()]
    return [(opener.rstrip(" "), closer.lstrip(" ")) for opener, _, closer in parts]


def synthesize(
    target: Target,
    tokenizer: ChatTokenizer,
    out: Path,
    *,
    prompts: int,
    max_new_tokens: int,
    seed: int,
    own: Sequence[str] = (),
    forbidden: Iterable[str] = (),
    concurrency: int = 64,
) -> None:
    """Write `prompts` conversations to `out`: first the answers to `own` prompts, then the target's.

    Seeded and resumable: until it is whole, the file is called `out`.part.

    Args:
        forbidden: prompts that must not be trained on, as those of an evaluation.

    Raises:
        UserError: the target writes nothing that can be used; an own prompt is forbidden.
    """
    if out.exists() and len(read_conversations(out)) >= prompts:
        return
    part = out.with_name(out.name + ".part")
    if out.exists():
        out.replace(part)
    _extend(target, tokenizer, part, prompts, max_new_tokens, seed, own, forbidden, concurrency)
    part.replace(out)


def _extend(
    target: Target,
    tokenizer: ChatTokenizer,
    out: Path,
    prompts: int,
    max_new_tokens: int,
    seed: int,
    own: Sequence[str],
    forbidden: Iterable[str],
    concurrency: int,
) -> None:
    if out.exists():
        _drop_cut_line(out)
    done = read_conversations(out) if out.exists() else []
    seen = {normalise(text) for text in forbidden}
    for text in own:
        if normalise(text) in seen:
            raise UserError(f"prompt {text[:60]!r} is one of an evaluation set: do not train on it")
    seen |= {normalise(item.user) for item in done}
    capacity = min(512 + max_new_tokens, target.max_positions)
    engine = Engine(target, concurrency=concurrency, capacity=capacity)
    written = [int(item.id.split("/")[0]) for item in done if not item.id.startswith("own/")]
    chunk, barren = max(written, default=-1) + 1, 0
    mine = {f"own/{i}": text for i, text in enumerate(own) if normalise(text) not in seen}
    seen |= {normalise(text) for text in own}
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        out.open("a") as handle,
        Bar(total=prompts, initial=len(done), desc="conversations", unit="prompt") as bar,
    ):

        def answer(users: Mapping[str, str]) -> None:
            for conversation in _answer(engine, tokenizer, users, max_new_tokens):
                handle.write(json.dumps(asdict(conversation)) + "\n")
                bar.update()

        answer(mine)
        while bar.n < prompts:
            users: dict[str, str] = {}
            for user in _write_users(engine, tokenizer, chunk, seed):
                if normalise(user) not in seen:
                    seen.add(normalise(user))
                    users[f"{chunk}/{len(users)}"] = user
            before = bar.n
            answer(users)
            handle.flush()
            chunk += 1
            barren = barren + 1 if bar.n == before else 0
            if barren == BARREN:
                raise UserError(
                    f"the target wrote no new usable prompt in {BARREN * CHUNK} tries ('{out}' "
                    f"holds {bar.n} of {prompts}): take an instruction-tuned target or fewer prompts"
                )


def _drop_cut_line(path: Path) -> None:
    """Cut off a last line without an end, so that the next one is not glued to it."""
    with path.open("rb+") as handle:
        handle.truncate(handle.read().rfind(b"\n") + 1)


def _write_users(engine: Engine, tokenizer: ChatTokenizer, chunk: int, seed: int) -> Iterator[str]:
    starts = openers()
    names = [f"{chunk}/{index}" for index in range(CHUNK)]
    opener = {name: starts[(chunk * CHUNK + i) % len(starts)] for i, name in enumerate(names)}

    def request(name: str, turn: int, _answers: list[list[int]]) -> Request:
        return Request(
            name,
            turn,
            tokenizer.open_user_turn(opener[name][0]),
            PROMPT_TOKENS,
            Sampling(temperature=1.0, seed=seed),
            tokenizer.eos_ids,
        )

    for row in closed_loop(engine, [(name, 1) for name in names], request):
        begin, end = opener[row.request.prompt_id]
        text = (begin + tokenizer.decode(row.output)).strip()
        if row.finish_reason == "stop" and acceptable(text):
            yield text.removesuffix(end) + end


def _answer(
    engine: Engine, tokenizer: ChatTokenizer, users: Mapping[str, str], max_new_tokens: int
) -> Iterator[Conversation]:
    """Greedy answers to the user turns, by conversation id."""

    def request(name: str, turn: int, _answers: list[list[int]]) -> Request:
        ids = tokenizer.encode_turn([users[name]], [], chat=True)
        return Request(name, turn, ids, max_new_tokens, Sampling(), tokenizer.eos_ids)

    for row in closed_loop(engine, [(name, 1) for name in users], request):
        if len(row.output) >= 8:  # too short to hold a block
            name = row.request.prompt_id
            yield Conversation(name, users[name], row.request.tokens, row.output)


def acceptable(text: str) -> bool:
    """Whether a written user turn reads like one: some words, no markup of the template."""
    words = text.split()
    return 4 <= len(words) <= 120 and "<|" not in text and text.isprintable() | ("\n" in text)


def normalise(text: str) -> str:
    """Letters and digits alone, lower case: how prompts are compared."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
