"""One dataset's job: all its runs on one device, interleaved in blocks of prompts.

The arms take turns block by block and the order rotates, so that a speedup compares the same prompts
on the same device at nearly the same time. Each finished request is appended to a journal at once; a
killed job that starts again goes on where it stopped, warmed up again and in a new measured window, so
that no window spans the gap.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from dspark.config import History, JobConfig
from dspark.data.prompts import Prompt
from dspark.decode.engine import Engine, Request, Row
from dspark.decode.graphs import graphs_for
from dspark.decode.journal import append_record, open_journal, read_journal
from dspark.decode.loop import closed_loop
from dspark.decode.records import RequestRecord
from dspark.decode.sampling import Sampling
from dspark.decode.schedule import StepCurve
from dspark.decode.usage import Meter, append_usage, usage_beside
from dspark.errors import UserError
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.models.tokenizer import ChatTokenizer
from dspark.progress import Bar, arm_progress

TEMPLATE_SLACK = 16  # tokens that a template may add around each earlier answer


class Job:
    """A dataset's prompts, models and settings, ready to run.

    Args:
        curves: the step curve of each run that schedules its verification.

    Raises:
        UserError: a prompt does not fit the target's context; k does not fit the drafter.
    """

    def __init__(
        self,
        config: JobConfig,
        prompts: Sequence[Prompt],
        warmup: Sequence[Prompt],
        target: Target,
        drafter: DSparkDrafter | None,
        tokenizer: ChatTokenizer,
        curves: Mapping[str, StepCurve] | None = None,
    ) -> None:
        self.config, self.prompts, self.tokenizer = config, list(prompts), tokenizer
        self.warmup = list(warmup)[: config.engine.warmup]
        self.turns = {prompt.id: prompt.turns for prompt in [*self.warmup, *self.prompts]}
        capacity = max(self._longest(prompt, target.max_positions) for prompt in self.prompts)
        capacity = max(capacity, *(self._longest(prompt, None) for prompt in self.warmup), 1)
        capacity = min(capacity, target.max_positions)
        settings = config.sampling
        self.sampling = Sampling(
            settings.temperature, settings.top_p, settings.top_k, settings.seed
        )
        self.graphs = graphs_for(config.engine.cuda_graphs, target.device)
        self.engines = {
            name: Engine(
                target,
                drafter,
                k=run.k,
                concurrency=config.engine.concurrency,
                capacity=capacity,
                confidence_threshold=run.confidence_threshold,
                curve=(curves or {}).get(name),
                detokenize=tokenizer.decode,
                graphs=self.graphs,
            )
            for name, run in config.runs.items()
        }

    @property
    def requests(self) -> int:
        """Requests of all runs together."""
        return sum(len(prompt.turns) for prompt in self.prompts) * len(self.engines)

    @property
    def cuda_graphs(self) -> bool:
        """Whether steps have been CUDA graphs, all of them."""
        return self.graphs is not None and self.graphs.failure is None

    def capture(self) -> None:
        """Capture the graphs of all runs, so that no measured window holds a capture."""
        for engine in self.engines.values():
            engine.capture(self.sampling)

    def _longest(self, prompt: Prompt, limit: int | None) -> int:
        """Positions that the longest turn of a prompt can come to need, its answer included."""
        dataset = self.config.dataset
        longest = 0
        for turn in range(len(prompt.turns)):
            earlier = turn if dataset.history is History.model else 0
            length = len(self._encode(prompt.turns, turn, [""] * turn))
            length += earlier * (dataset.max_new_tokens + TEMPLATE_SLACK)
            if limit is not None and length + dataset.max_new_tokens > limit:
                raise UserError(
                    f"dataset '{dataset.name}' prompt '{prompt.id}' turn {turn + 1} may reach "
                    f"{length} tokens, and {dataset.max_new_tokens} new ones do not fit the target's "
                    f"context of {limit}: leave it out or lower datasets.{dataset.name}.max_new_tokens"
                )
            longest = max(longest, length + dataset.max_new_tokens)
        return longest

    def _encode(self, turns: Sequence[str], turn: int, answers: Sequence[str]) -> list[int]:
        if self.config.dataset.history is History.independent:
            return self.tokenizer.encode_turn([turns[turn]], [], self.config.dataset.chat)
        return self.tokenizer.encode_turn(turns[: turn + 1], answers, self.config.dataset.chat)

    def prompt_tokens(self, prompt_id: str, turn: int, answers: list[list[int]]) -> list[int]:
        """Token ids that a turn is asked with, given the output ids of the turns before it."""
        texts = [self._answer_text(ids) for ids in answers]
        return self._encode(self.turns[prompt_id], turn, texts)

    def _answer_text(self, ids: list[int]) -> str:
        """Text of an earlier answer, without what goes beyond the room that `_longest` leaves for it.

        Text may encode to more tokens than it was decoded from: bytes that are not UTF-8 do.
        """
        room = self.config.dataset.max_new_tokens + TEMPLATE_SLACK // 2
        text = self.tokenizer.decode(ids)
        while len(self.tokenizer.encode_turn([text], [], chat=False)) > room:
            ids = ids[:-1]
            text = self.tokenizer.decode(ids)
        return text

    def request(self, prompt_id: str, turn: int, answers: list[list[int]]) -> Request:
        """The request of one turn, with the job's sampling settings."""
        settings = self.config.sampling
        return Request(
            prompt_id=prompt_id,
            turn=turn,
            tokens=self.prompt_tokens(prompt_id, turn, answers),
            max_new_tokens=self.config.dataset.max_new_tokens,
            sampling=self.sampling,
            eos_ids=frozenset() if settings.ignore_eos else self.tokenizer.eos_ids,
            stop=tuple(settings.stop),
        )


def run_job(job: Job, journal: Path) -> list[RequestRecord]:
    """Run what the journal does not hold yet; returns all records, in run and prompt order.

    Raises:
        UserError: the journal is damaged, another job's, or cannot be written; the clock went
            backwards.
    """
    records = read_journal(journal)
    runs = job.config.runs
    done = _answered(job, records, journal)
    windows = dict.fromkeys(runs, 0)
    for record in records:
        windows[record.run] = max(windows[record.run], record.window + 1)
    warm: set[str] = set()
    meter = Meter(next(iter(job.engines.values())).target.device)
    with (
        open_journal(journal) as handle,
        Bar(
            total=job.requests, initial=len(records), desc=job.config.dataset.name, unit="req"
        ) as bar,
    ):
        for block, name in _schedule(job, list(runs)):
            left = [prompt for prompt in block if len(done[name][prompt.id]) < len(prompt.turns)]
            if not left:
                continue
            if name not in warm:
                bar.set_postfix_str(f"{name} warms up")
                began = time.perf_counter()
                if not warm:
                    job.capture()
                _warm_up(job, name)
                warm.add(name)
                # Rate and time left are of what is measured.
                bar.start_t += time.perf_counter() - began
            answered: list[RequestRecord] = []
            meter.start()
            for row in _run_block(job, name, left, done[name]):
                record = to_record(row, job.config.dataset.name, name, windows[name])
                append_record(handle, record)
                answered.append(record)
                bar.set_postfix_str(arm_progress(name, answered), refresh=False)
                bar.update()
            append_usage(usage_beside(journal), meter.stop(name, windows[name]))
            records += answered
            windows[name] += 1
    return _ordered(records, list(runs), job.prompts)


def _answered(
    job: Job, records: Sequence[RequestRecord], journal: Path
) -> dict[str, dict[str, list[list[int]]]]:
    """Output ids of the turns that are done, in their order, by run and prompt id.

    Raises:
        UserError: the records are not those of a job that was stopped.
    """
    turns = {prompt.id: len(prompt.turns) for prompt in job.prompts}
    done: dict[str, dict[str, list[list[int]]]] = {
        name: defaultdict(list) for name in job.config.runs
    }
    for record in records:
        held = (
            f"journal '{journal}' holds turn {record.turn + 1} of prompt '{record.prompt_id}' in run "
            f"'{record.run}'"
        )
        if record.run not in done or record.turn >= turns.get(record.prompt_id, 0):
            raise UserError(f"{held}, which this job has not: delete the file")
        answers = done[record.run][record.prompt_id]
        if record.turn < len(answers):
            raise UserError(
                f"{held} twice: two processes ran at once, and neither's times can be trusted, so "
                "delete the file"
            )
        if record.turn > len(answers):
            raise UserError(
                f"{held} but not turn {len(answers) + 1}: delete the line, and both run again"
            )
        answers.append(record.output_token_ids)
    return done


def _schedule(job: Job, runs: list[str]) -> Iterator[tuple[list[Prompt], str]]:
    """Blocks of prompts, each with every run; the run that goes first rotates."""
    size = job.config.engine.interleave * job.config.engine.concurrency
    for index, start in enumerate(range(0, len(job.prompts), size)):
        shift = index % len(runs)
        for name in runs[shift:] + runs[:shift]:
            yield job.prompts[start : start + size], name


def _warm_up(job: Job, name: str) -> None:
    if job.warmup:
        list(closed_loop(job.engines[name], [(p.id, 1) for p in job.warmup], job.request))


def _run_block(
    job: Job, name: str, prompts: list[Prompt], answers: dict[str, list[list[int]]]
) -> Iterator[Row]:
    turns = [(prompt.id, len(prompt.turns)) for prompt in prompts]
    earlier = {prompt.id: list(answers[prompt.id]) for prompt in prompts}
    return closed_loop(job.engines[name], turns, job.request, earlier)


def to_record(row: Row, dataset: str, run: str, window: int) -> RequestRecord:
    """The record of a finished row."""
    return RequestRecord(
        prompt_id=row.request.prompt_id,
        turn=row.request.turn,
        dataset=dataset,
        run=run,
        window=window,
        prompt_tokens=len(row.request.tokens),
        output_tokens=len(row.output),
        output_token_ids=list(row.output),
        finish_reason=str(row.finish_reason),
        t_submit=row.t_submit,
        t_first=row.t_first,
        t_last=row.steps[-1].t if row.steps else row.t_first,
        step_t=[step.t for step in row.steps],
        step_emitted=[step.emitted for step in row.steps],
        step_drafted=[step.drafted for step in row.steps],
        step_verified=[step.verified for step in row.steps],
        step_accepted=[step.accepted for step in row.steps],
        step_cut=[step.cut for step in row.steps],
    )


def _ordered(
    records: list[RequestRecord], runs: list[str], prompts: list[Prompt]
) -> list[RequestRecord]:
    place = {prompt.id: index for index, prompt in enumerate(prompts)}
    return sorted(records, key=lambda r: (runs.index(r.run), place[r.prompt_id], r.turn))


@torch.inference_mode()
def top_two_margin(target: Target, tokens: list[int]) -> float:
    """Gap between the target's two greatest logits after `tokens`: how near a tie the choice was."""
    engine = Engine(target, capacity=len(tokens) + 1)
    positions = torch.arange(len(tokens), device=target.device)[None]
    ids = torch.tensor([tokens], device=target.device)
    states, _ = engine.forward(slice(0, 1), ids, positions, len(tokens))
    top = target.logits(states[:, -1]).float().topk(2).values[0]
    return float(top[0] - top[1])
