"""Rounds of dspark and its peers: which count, what they are set against, and the table. See peers.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from tqdm import tqdm

from dspark.errors import UserError

PRECISIONS = ("float32", "bfloat16")
OURS = "dspark"


class PeerFailed(Exception):
    """A peer cannot go on; the message says why."""


@dataclass(frozen=True)
class Model:
    """A peer's model at a precision: what one worker holds."""

    peer: str
    precision: str

    def __str__(self) -> str:
        return f"{self.peer} {self.precision}"


@dataclass(frozen=True)
class Cell:
    """A row of the table: mode is plain, k=3 for drafts of 3 tokens, or lookup for prompt lookup."""

    model: Model
    mode: str
    concurrency: int

    @property
    def baseline(self) -> Cell:
        """What it is set against: ours, plain, at its precision; nothing of ours is Q4_1."""
        own = self.model.precision
        return Cell(
            Model(OURS, own if own in PRECISIONS else "bfloat16"), "plain", self.concurrency
        )


@dataclass(frozen=True)
class Round:
    """A cell's run over all prompts: seconds of the clock and of all its threads, token ids."""

    wall: float
    cpu: float
    outputs: list[list[int]]

    @property
    def skew(self) -> float:
        return self.wall / self.cpu

    @property
    def tok_s(self) -> float:
        return sum(map(len, self.outputs)) / self.wall


Pass = dict[Cell, Round]


def layout(
    peers: Sequence[str], precisions: Sequence[str], ks: Sequence[int], sizes: Sequence[int]
) -> Iterator[Cell]:
    """All cells; what is set against each other is near each other, in the table and in time."""
    for size in sizes:
        for precision in precisions:
            for mode in ("plain", *(f"k={k}" for k in ks)):
                yield Cell(Model(OURS, precision), mode, size)
            for peer in peers:
                yield Cell(Model(peer, precision), "plain", size)
                if peer == "transformers" and size == 1:  # it assists one text at a time
                    yield Cell(Model(peer, precision), "lookup", size)
                if peer == "llama.cpp" and precision == "bfloat16":
                    yield Cell(Model(peer, "q4_1"), "plain", size)


def measure(
    cells: Sequence[Cell],
    decode: Callable[[Cell], Round],
    rounds: int,
    drift: float,
    before: Callable[[], None],
) -> tuple[list[Pass], dict[Model, str]]:
    """Run passes until every cell has `rounds` rounds that count, at most twice as many.

    Args:
        drift: see `steady`.
        before: called at the start of each pass.

    Returns:
        The passes, and why a peer's model failed on the way; its rounds are left out.

    Raises:
        UserError: ours failed.
    """
    passes: list[Pass] = []
    failed: dict[Model, str] = {}
    with tqdm(total=rounds * len(cells), desc="measuring", unit="round") as bar:
        while len(passes) < 2 * rounds:
            due = lacking([c for c in cells if c.model not in failed], passes, rounds, drift)
            if not due:
                break
            bar.total = max(rounds * len(cells), bar.n + len(due))
            before()
            passes.append({})
            for cell in due if len(passes) % 2 else reversed(due):
                bar.set_postfix_str(f"{cell.model} {cell.mode}")
                if cell.model not in failed:
                    try:
                        passes[-1][cell] = decode(cell)
                    except PeerFailed as error:
                        if cell.model.peer == OURS:
                            raise UserError(f"{cell.model}: {error}") from error
                        failed[cell.model] = str(error)
                bar.update()
    return [{c: one[c] for c in one if c.model not in failed} for one in passes], failed


def lacking(cells: Sequence[Cell], passes: Sequence[Pass], rounds: int, drift: float) -> list[Cell]:
    """The cells that need more rounds and what they are set against, in their order."""
    short = {cell for cell in cells if len(pairs(cell, passes, drift)) < rounds}
    needed = short | {cell.baseline for cell in short}
    return [cell for cell in cells if cell in needed]


def pairs(cell: Cell, passes: Sequence[Pass], drift: float) -> list[tuple[Round, Round]]:
    """A cell's rounds, each with the baseline's of the same pass, where both count."""
    own, against = steady(cell, passes, drift), steady(cell.baseline, passes, drift)
    return [(own[index], against[index]) for index in own if index in against]


def steady(cell: Cell, passes: Sequence[Pass], drift: float) -> dict[int, Round]:
    """A cell's rounds by pass, without those whose wall time has drifted from their CPU time.

    Whoever else takes the cores adds to the wall time alone. The measure is the cell's round with the
    least wall time for its CPU time: what exceeds that by more than the share `drift` does not count.
    """
    rounds = {index: one[cell] for index, one in enumerate(passes) if cell in one}
    least = min((one.skew for one in rounds.values()), default=0.0)
    return {index: one for index, one in rounds.items() if one.skew <= (1 + drift) * least}


def agreement(
    expected: Sequence[list[int]], outputs: Sequence[list[int]], eos_ids: frozenset[int]
) -> float:
    """Share of the expected tokens before the first other one, mean over the prompts.

    What follows the expected end of text is nobody's answer and is not compared.
    """
    shares = []
    for wanted, found in zip(expected, outputs, strict=True):
        length = answer_length(wanted, eos_ids)
        same = next((i for i in range(length) if wanted[i] != found[i]), length)
        shares.append(same / length)
    return mean(shares)


def answer_length(output: Sequence[int], eos_ids: frozenset[int]) -> int:
    """Tokens up to the end of text, which is counted too."""
    return next((i + 1 for i, token in enumerate(output) if token in eos_ids), len(output))


def table(
    cells: Sequence[Cell],
    passes: Sequence[Pass],
    drift: float,
    limits: Mapping[Model, float],
    eos_ids: frozenset[int],
) -> Iterator[str]:
    """The lines of the markdown table, one for each cell that was measured.

    Args:
        limits: the most plain steps a second that the memory allows a model.
    """
    yield (
        "| concurrency | decoder | precision | tok/s | over dspark plain: median (min..max) "
        "| rounds | CPU s / wall s | of the read limit | same text |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for cell in cells:
        both = [one for one in passes if cell in one and cell.baseline in one]
        if not both:
            continue
        same = agreement(both[0][cell.baseline].outputs, both[0][cell].outputs, eos_ids)
        shown = f"| {cell.concurrency} | {cell.model.peer} {cell.mode} | {cell.model.precision} |"
        rounds = pairs(cell, passes, drift)
        if rounds:
            ratios = [own.tok_s / against.tok_s for own, against in rounds]
            tok_s = median(own.tok_s for own, _ in rounds)
            busy = median(own.cpu / own.wall for own, _ in rounds)
            limit = "—"  # a speculative step makes several tokens
            if cell.mode == "plain":
                limit = f"{tok_s / cell.concurrency / limits[cell.model]:.0%}"
            yield (
                f"{shown} {tok_s:.1f} | {median(ratios):.3f}x ({min(ratios):.3f}..{max(ratios):.3f}) "
                f"| {len(rounds)} | {busy:.2f} | {limit} | {same:.1%} |"
            )
        else:
            yield f"{shown} — | — | 0 | — | — | {same:.1%} |"
