"""dspark's engine beside its peers: same model, prompts, greedy tokens and threads, in one run.

    python benchmarks/peers.py --setup llama.cpp      # once: 1 GB, two minutes
    python benchmarks/peers.py --setup vllm           # once: 3.5 GB; its first run compiles for minutes
    python benchmarks/peers.py                        # after `make demo`, which makes the target

transformers needs no set-up: it is this project's own. Each peer's model runs in a process of its own, in
an environment of its own (peers_setup.py, peers_worker.py), started once: no start-up is measured.

Every prompt gets the same number of new tokens, whatever they are: an end of text ends no answer, so that
all do the same work (llama.cpp forbids such tokens, the others go on after them). Times include the
prefill, and what a peer could remember of earlier rounds is switched off.

In a pass every decoder runs over all prompts once, at each concurrency; every second pass runs backwards.
Ratios are taken within a pass. A round whose wall time has drifted from its CPU time counts for nothing,
nor does the ratio to it; who lacks rounds then runs again beside its baseline, in up to as many further
passes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import click
from gguf import GGUFReader
from peers_rounds import (
    OURS,
    PRECISIONS,
    Cell,
    Model,
    Pass,
    PeerFailed,
    Round,
    answer_length,
    layout,
    measure,
    steady,
    table,
)
from peers_setup import PACKAGES, READY, gguf_of, python_of, set_up
from tqdm import tqdm

from dspark.data.builtin import builtin_names, builtin_prompts
from dspark.data.prompts import Prompt, read_prompts
from dspark.decode.environment import describe
from dspark.errors import UserError
from dspark.models.tokenizer import load_tokenizer

WORKER = Path(__file__).with_name("peers_worker.py")
PEERS = ("transformers", *PACKAGES)
WARM_UP = 8  # tokens
CLOSING_S = 20
COUNT = click.IntRange(min=1)


class Worker:
    """The process that decodes with one model, see peers_worker.py.

    Raises:
        PeerFailed: it cannot load the model.
    """

    def __init__(self, python: Path, settings: dict[str, Any], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log.open("w")
        self.process = subprocess.Popen(
            [python, WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(settings["threads"])},
        )
        self.facts = self.ask(settings)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Its answer to one question.

        Raises:
            PeerFailed: the answer is an error, or the process has ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self.process.wait()
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise PeerFailed(f"its process ended with {ending}, see '{self.log.name}'")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{answer['error']}, see '{self.log.name}'")
        return answer

    def decode(self, cell: Cell, prompts: Sequence[list[int]], new: int) -> Round:
        """Decode `new` tokens after each of these prompts (token ids).

        Raises:
            PeerFailed: it failed, or made another number of tokens.
        """
        question = {"mode": cell.mode, "concurrency": cell.concurrency}
        answer = self.ask({**question, "prompts": prompts, "new": new})
        for output in answer["outputs"]:
            if len(output) != new:
                raise PeerFailed(f"it made {len(output)} tokens where {new} were asked for")
        return Round(**answer)

    def close(self) -> None:
        """End the process; at the end of its input it has some seconds to do so itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


@dataclass(frozen=True)
class Running:
    """A model that is loaded."""

    worker: Worker
    step_bytes: int  # of weights, which a plain step reads once


@dataclass(frozen=True)
class Work:
    """What all decoders are given."""

    prompts: list[list[int]]  # token ids
    new: int
    threads: int
    eos_ids: frozenset[int]


@dataclass(frozen=True)
class Comparison:
    """What was measured: passes, and at the start of each the load average and bytes read a second."""

    cells: list[Cell]
    passes: list[Pass]
    loads: list[float]
    bandwidths: list[float]
    running: dict[Model, Running]
    left_out: list[str]  # a line for each


@click.command()
@click.option(
    "--setup", type=click.Choice(list(PACKAGES)), help="Make a peer's environment, no run."
)
@click.option(
    "--envs",
    type=click.Path(path_type=Path, file_okay=False),
    default="results/peers",
    show_default=True,
    help="Folder of the peers' environments, and of the workers' logs.",
)
@click.option("--peer", "peers", multiple=True, type=click.Choice(PEERS), help="Default: all.")
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(PRECISIONS),
    default=PRECISIONS,
    show_default=True,
)
@click.option("--k", "ks", multiple=True, type=COUNT, default=(3, 7), show_default=True)
@click.option(
    "--concurrency", "sizes", multiple=True, type=COUNT, default=(1, 4), show_default=True
)
@click.option("--target", default="results/models/smollm2_135m", show_default=True)
@click.option("--drafter", default="src/dspark/assets/drafters/smollm2_135m", show_default=True)
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    help="A prompts.jsonl; by default the built-in sets in turn.",
)
@click.option(
    "--limit", type=COUNT, default=8, show_default=True, help="Prompts, the first turn of each."
)
@click.option(
    "--new", type=COUNT, default=128, show_default=True, help="New tokens for each prompt."
)
@click.option("--rounds", type=COUNT, default=5, show_default=True)
@click.option(
    "--drift",
    type=click.FloatRange(min=0),
    default=0.1,
    show_default=True,
    help="Of wall from CPU time, at most.",
)
@click.option(
    "--threads",
    type=COUNT,
    default=len(os.sched_getaffinity(0)),
    show_default="the cores",
    help="Of each.",
)
def main(
    setup: str | None,
    envs: Path,
    peers: tuple[str, ...],
    precisions: tuple[str, ...],
    ks: tuple[int, ...],
    sizes: tuple[int, ...],
    target: str,
    drafter: str,
    file: Path | None,
    limit: int,
    new: int,
    rounds: int,
    drift: float,
    threads: int,
) -> None:
    """Measure dspark's engine and its peers, and print a markdown table."""
    try:
        if setup is not None:
            set_up(setup, envs)
            return
        tokenizer = load_tokenizer(target)
        chat = tokenizer.tokenizer.chat_template is not None
        prompts = [tokenizer.encode_turn(p.turns[:1], [], chat) for p in chosen(file, limit)]
        work = Work(prompts, new, threads, tokenizer.eos_ids)
        cells = list(layout(peers or PEERS, precisions, ks, sizes))
        models = {"target": str(Path(target).resolve()), "drafter": str(Path(drafter).resolve())}
        result = compare(cells, work, models, envs, rounds, drift)
        for line in report(result, work, drift):
            click.echo(line)
    except UserError as error:
        raise click.ClickException(str(error)) from error


def chosen(file: Path | None, limit: int) -> list[Prompt]:
    """The first prompts of a file, by default of all built-in sets in turn.

    Raises:
        UserError: the file is no prompts.jsonl.
    """
    if file is not None:
        return read_prompts(file)[:limit]
    sets = [builtin_prompts(name) for name in builtin_names()]
    return list(chain.from_iterable(zip(*sets, strict=True)))[:limit]


def compare(
    cells: list[Cell], work: Work, models: dict[str, str], envs: Path, rounds: int, drift: float
) -> Comparison:
    """Load what can be loaded, and measure it.

    Args:
        models: directories of target and drafter.

    Raises:
        UserError: ours cannot run.
    """
    settings = {
        **models,
        "capacity": max(map(len, work.prompts)) + max(work.new, WARM_UP),
        "concurrency": max(cell.concurrency for cell in cells),
        "threads": work.threads,
    }
    with ExitStack() as stack:
        running, left_out = start(cells, work, settings, envs, stack)
        cells = [cell for cell in cells if cell.model in running]
        loads: list[float] = []
        bandwidths: list[float] = []
        reader = next(one.worker for model, one in running.items() if model.peer == OURS)

        def before() -> None:
            loads.append(os.getloadavg()[0])
            bandwidths.append(reader.ask({"bandwidth": True})["bandwidth"])

        def decode(cell: Cell) -> Round:
            return running[cell.model].worker.decode(cell, work.prompts, work.new)

        passes, failed = measure(cells, decode, rounds, drift, before)
    left_out += [f"{model} is left out: {reason}" for model, reason in failed.items()]
    return Comparison(cells, passes, loads, bandwidths, running, left_out)


def start(
    cells: list[Cell], work: Work, settings: dict[str, Any], envs: Path, stack: ExitStack
) -> tuple[dict[Model, Running], list[str]]:
    """Load each model, to be closed by `stack`, and decode a few tokens in each of its cells.

    Returns:
        What runs, and a line for what is left out.

    Raises:
        UserError: ours cannot run.
    """
    running: dict[Model, Running] = {}
    left_out: list[str] = []
    for model in tqdm(list(dict.fromkeys(cell.model for cell in cells)), desc="loading"):
        mine = [cell for cell in cells if cell.model == model]
        if model.peer in PACKAGES and not (envs / model.peer / READY).exists():
            line = f"`python benchmarks/peers.py --setup {model.peer} --envs {envs}` adds it"
            left_out.append(f"{model.peer} is left out: {line}")
            continue
        try:
            one = load(model, running.get(mine[0].baseline.model), settings, envs, stack)
            for cell in mine:
                one.worker.decode(cell, work.prompts, WARM_UP)
        except PeerFailed as error:
            if model.peer == OURS:
                raise UserError(f"{model}: {error}") from error
            left_out.append(f"{model} is left out: {error}")
        else:
            running[model] = one
    return running, list(dict.fromkeys(left_out))


def load(
    model: Model, ours: Running | None, settings: dict[str, Any], envs: Path, stack: ExitStack
) -> Running:
    """Start the worker of a model, to be closed by `stack`.

    Args:
        ours: our model at this precision; None where it is ours that is loaded.

    Raises:
        PeerFailed: it cannot load its model, or has another model than we.
    """
    folder = envs / model.peer
    settings = {**settings, "peer": model.peer, "precision": model.precision}
    settings["cache"] = str((folder / "cache").resolve())
    if model.peer == "llama.cpp":
        settings["gguf"] = str(gguf_of(folder, model.precision).resolve())
    python = python_of(folder) if model.peer in PACKAGES else Path(sys.executable)
    worker = Worker(python, settings, envs / "logs" / f"{model.peer}-{model.precision}.log")
    stack.callback(worker.close)
    if ours is None:
        return Running(worker, worker.facts["bytes"])
    if model.peer == "llama.cpp":
        return Running(worker, gguf_bytes(settings["gguf"], ours.worker.facts["parameters"]))
    return Running(worker, ours.step_bytes)


def gguf_bytes(path: str, parameters: int) -> int:
    """Bytes of the weights that a plain step reads of a GGUF model.

    Raises:
        PeerFailed: it has not as many parameters as the target.
    """
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    found = sum(int(tensor.n_elements) for tensor in tensors.values())
    if found != parameters:
        raise PeerFailed(f"its model has {found} parameters, the target {parameters}")
    if "output.weight" in tensors:  # else the embedding is the LM head
        del tensors["token_embd.weight"]
    return sum(int(tensor.n_bytes) for tensor in tensors.values())


def report(result: Comparison, work: Work, drift: float) -> Iterator[str]:
    """The table, and under it what its numbers mean."""
    bandwidth = median(result.bandwidths)
    limits = {model: bandwidth / one.step_bytes for model, one in result.running.items()}
    yield from table(result.cells, result.passes, drift, limits, work.eos_ids)
    lengths = [len(prompt) for prompt in work.prompts]
    yield ""
    here = describe("cpu", "")
    yield (
        f"- {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, {work.new} new tokens "
        f"each, greedy, ends of text ignored; threads: {work.threads}, waiting "
        f"{here['omp_wait_policy']}; {here['device']}"
    )
    yield from (f"- {line}" for line in kept(result, work, drift))
    yield (
        f"- Read bandwidth {spread(result.bandwidths, 1e9)} GB/s, measured before each pass; the read "
        "limit is where a plain step takes as long as reading the weights once"
    )
    yield f"- Load average before the passes, this run's own load included: {spread(result.loads, 1)}"
    versions = {model.peer: one.worker.facts["version"] for model, one in result.running.items()}
    yield from (f"- {peer}: {version}" for peer, version in versions.items())
    yield from (f"- {line}" for line in result.left_out)


def kept(result: Comparison, work: Work, drift: float) -> Iterator[str]:
    """How many rounds count, and how many of our answers end before their last token."""
    total = sum(len(one) for one in result.passes)
    counted = sum(len(steady(cell, result.passes, drift)) for cell in result.cells)
    yield (
        f"Passes: {len(result.passes)}; {total - counted} of {total} rounds do not count: their wall time "
        f"drifted from their CPU time by more than {drift:.0%}"
    )
    first = result.cells[0]
    outputs = result.passes[0][first].outputs
    ended = sum(answer_length(output, work.eos_ids) < work.new for output in outputs)
    yield (
        f"{ended} of {len(outputs)} answers of {first.model} end before that; `same text` compares "
        "with dspark plain up to that end or the first other token"
    )


def spread(values: list[float], unit: float) -> str:
    """Median (min..max) in a unit."""
    return f"{median(values) / unit:.1f} ({min(values) / unit:.1f}..{max(values) / unit:.1f})"


if __name__ == "__main__":
    main()
