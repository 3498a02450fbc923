"""Training text that the target makes itself: it is asked to write user turns, then to answer them.

A user turn of the chat template is left open after a few words of our own (`openers.txt`) and the
target continues it at temperature 1; what passes the filter is answered greedily, as the benchmark
decodes. So no prompt of any benchmark is needed, and the responses are the target's own distribution.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from tqdm import tqdm

from dspark.decode.engine import Engine, Request
from dspark.decode.loop import closed_loop
from dspark.decode.sampling import Sampling
from dspark.errors import UserError
from dspark.models.target import Target
from dspark.models.tokenizer import ChatTokenizer

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
    """Read what `synthesize` wrote; a last line cut short by a kill is left out."""
    conversations = []
    for line in Path(path).read_text().splitlines():
        try:
            conversations.append(Conversation(**json.loads(line)))
        except ValueError:
            continue
    return conversations


def openers() -> list[str]:
    """The first words of user turns, one a line; `\\n` in the file is a line break."""
    text = (files("dspark") / "assets" / "train" / "openers.txt").read_text()
    return [line.replace("\\n", "\n") for line in text.splitlines() if line.strip()]


def synthesize(
    target: Target,
    tokenizer: ChatTokenizer,
    out: Path,
    *,
    prompts: int,
    max_new_tokens: int,
    seed: int,
    concurrency: int = 64,
) -> None:
    """Append conversations to `out` until it holds `prompts` of them. Seeded and resumable.

    Raises:
        UserError: the target writes nothing that can be used.
    """
    if out.exists():
        _drop_cut_line(out)
    done = read_conversations(out) if out.exists() else []
    seen = {normalise(item.user) for item in done}
    capacity = min(512 + max_new_tokens, target.max_positions)
    engine = Engine(target, concurrency=concurrency, capacity=capacity)
    chunk = int(done[-1].id.split("/")[0]) + 1 if done else 0
    barren = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as handle, tqdm(total=prompts, initial=len(done), unit="prompt") as bar:
        while bar.n < prompts:
            users = [
                user
                for user in _write_users(engine, tokenizer, chunk, seed)
                if normalise(user) not in seen and not seen.add(normalise(user))  # type: ignore[func-returns-value]
            ]
            before = bar.n
            for conversation in _answer(engine, tokenizer, users, chunk, max_new_tokens):
                handle.write(json.dumps(asdict(conversation)) + "\n")
                bar.update()
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
            tokenizer.open_user_turn(opener[name]),
            PROMPT_TOKENS,
            Sampling(temperature=1.0, seed=seed),
            tokenizer.eos_ids,
        )

    for row in closed_loop(engine, [(name, 1) for name in names], request):
        text = opener[row.request.prompt_id] + tokenizer.decode(row.output)
        if row.finish_reason == "stop" and acceptable(text):
            yield text.strip()


def _answer(
    engine: Engine, tokenizer: ChatTokenizer, users: list[str], chunk: int, max_new_tokens: int
) -> Iterator[Conversation]:
    def request(name: str, turn: int, _answers: list[list[int]]) -> Request:
        ids = tokenizer.encode_turn([users[int(name)]], [], chat=True)
        return Request(name, turn, ids, max_new_tokens, Sampling(), tokenizer.eos_ids)

    for row in closed_loop(engine, [(str(i), 1) for i in range(len(users))], request):
        if len(row.output) >= 8:  # too short to hold a block
            name = row.request.prompt_id
            yield Conversation(f"{chunk}/{name}", users[int(name)], row.request.tokens, row.output)


def acceptable(text: str) -> bool:
    """Whether a written user turn reads like one: some words, no markup of the template."""
    words = text.split()
    return 4 <= len(words) <= 120 and "<|" not in text and text.isprintable() | ("\n" in text)


def normalise(text: str) -> str:
    """Letters and digits alone, lower case: how prompts are compared."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
