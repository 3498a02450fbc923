"""Putting the shards of one dataset together, so that their summary is that of one measurement.

Only measurements made alike go together. What they say of tokens is then what one job over all
prompts would have said; times stay apart by shard, since every device has a clock of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.config import JobConfig
from dspark.data.prompts import Prompt, split_prompts
from dspark.decode.records import RequestRecord
from dspark.errors import UserError
from dspark.metrics.lossless import Difference, judge

# Facts of environment.json without which two measurements say nothing of each other.
ALIKE = (
    "device",
    "precision",
    "threads",
    "kernels",
    "cuda_graphs",
    "omp_wait_policy",
    "gomp_spincount",
    "driver",
    "cuda",
    "python",
    "dspark",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "git_sha",
    "git_dirty",
    "config_digest",
    "job",  # digest of the engine's code, the prompts and the models too
)


def merge_records(
    job: JobConfig, prompts: Sequence[Prompt], parts: Sequence[Sequence[RequestRecord]]
) -> list[RequestRecord]:
    """The requests of all shards, in run and prompt order, as one job would have left them.

    Args:
        job: the job that the shards are parts of.
        prompts: all prompts of its dataset.
        parts: the records of each shard, in the shards' order.

    Raises:
        UserError: a shard lacks a request of its prompts, or holds another.
    """
    shards = split_prompts(job.dataset, prompts)
    for number, (asked, records) in enumerate(zip(shards, parts, strict=True), start=1):
        wanted = {
            (number, run, prompt.id, turn)
            for run in job.runs
            for prompt in asked
            for turn in range(len(prompt.turns))
        }
        odd = sorted(wanted ^ {(r.shard, r.run, r.prompt_id, r.turn) for r in records})
        if odd:
            _, run, prompt_id, turn = odd[0]
            raise UserError(
                f"dataset '{job.dataset.name}' shard {number} of {len(shards)}: run '{run}' of prompt "
                f"'{prompt_id}' turn {turn + 1} is {'missing' if odd[0] in wanted else 'not its own'}"
                ": run the shard's bench job again"
            )
    runs = list(job.runs)
    place = {prompt.id: index for index, prompt in enumerate(prompts)}
    return sorted(
        (record for records in parts for record in records),
        key=lambda r: (runs.index(r.run), place[r.prompt_id], r.turn),
    )


def merge_verdicts(
    parts: Sequence[Mapping[str, dict[str, Any]]], records: Sequence[RequestRecord]
) -> dict[str, dict[str, Any]]:
    """The verdict on each arm over the requests of all shards; its differences in their order.

    Args:
        parts: what `dspark.metrics.lossless.judge` said in each shard, by run.
        records: the merged requests.
    """
    place = {record.request_id: index for index, record in enumerate(records)}
    merged = {}
    for run in parts[0]:
        verdicts = [part[run] for part in parts]
        differences = [Difference(**d) for verdict in verdicts for d in verdict["differences"]]
        merged[run] = judge(
            sorted(differences, key=lambda d: place[d.request_id]),
            sum(verdict["compared"] for verdict in verdicts),
            verdicts[0]["precision"],
            temperature=verdicts[0]["temperature"],
        )
    return merged


def merge_environments(dataset: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the shards ran on: one value of each fact in `ALIKE`, a list with every shard's else.

    Raises:
        UserError: a fact in `ALIKE` differs; it is named, with both values.
    """
    for number, part in enumerate(parts[1:], start=2):
        for fact in ALIKE:
            if part.get(fact) != parts[0].get(fact):
                raise UserError(
                    f"dataset '{dataset}': {fact} is {parts[0].get(fact)} in shard 1 of {len(parts)} "
                    f"and {part.get(fact)} in shard {number}: one table needs shards that were "
                    "measured alike, delete the odd one's folder and run it again"
                )
    facts = dict.fromkeys(fact for part in parts for fact in part)
    return {
        fact: parts[0][fact] if fact in ALIKE else [part.get(fact) for part in parts]
        for fact in facts
    }
