"""config/dataset/*.yaml: each composes, and gives the published prompts of the official files."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dspark.config import DatasetConfig, History, JobConfig, PromptSource, from_yaml, to_yaml
from dspark.data.prepare import prepare_prompts

Load = Callable[..., DatasetConfig]
FOLDER = Path(__file__).parents[2] / "config" / "dataset"
ALL = sorted(path.stem for path in FOLDER.glob("*.yaml"))

BASES = ("gsm8k", "humaneval", "math500", "mbpp", "mt_bench", "ultrachat")


def test_the_six_datasets_of_the_table_have_a_config() -> None:
    assert set(BASES) <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_a_dataset_config_composes_and_is_pinned(
    name: str, dataset_config: Load, tmp_path: Path
) -> None:
    config = dataset_config(name)
    assert config.source is PromptSource.hub
    assert config.name == next(base for base in BASES if name.startswith(base))
    assert re.fullmatch("[0-9a-f]{40}", str(config.revision))
    assert config.max_new_tokens == 128
    assert (FOLDER / f"{name}.yaml").read_text().startswith("# ")
    # A job reads its config back from YAML text: braces, newlines and backslashes must survive.
    text = to_yaml(JobConfig(experiment="x", dataset=config))
    (tmp_path / "job.yaml").write_text(text)
    assert from_yaml(JobConfig, tmp_path / "job.yaml").dataset == config


@pytest.mark.parametrize("name", ALL)
def test_published_formats_are_raw_and_the_authors_are_chats(
    name: str, dataset_config: Load
) -> None:
    assert dataset_config(name).chat is (name not in BASES)


@pytest.mark.parametrize(
    ("name", "row", "turn"),
    [
        ("math500", {"problem": "P"}, "Solve the problem step by step.\n\nProblem: P\nAnswer:"),
        ("gsm8k", {"question": "Q"}, "Solve the problem step by step.\n\nQuestion: Q\nAnswer:"),
        ("humaneval", {"prompt": "def f():\n"}, "def f():\n"),
        (
            "mbpp",
            {"text": "T"},
            "Write a Python solution for the following task.\n\nT\n\n```python\n",
        ),
    ],
)
def test_the_published_prompt_formats(
    name: str, row: dict[str, str], turn: str, dataset_config: Load, fill_cache
) -> None:
    config = dataset_config(name)
    fill_cache(config.repo, config.revision, config.file, encode(str(config.file), [row]))
    assert prepare_prompts(config)[0].turns == [turn]


def encode(file: str, rows: list[dict[str, Any]]) -> bytes:
    """The rows in the kind of file that a config names."""
    if file.endswith(".parquet"):
        sink = BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), sink)
        return sink.getvalue()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def rows_of(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    return [json.loads(line) for line in text.split("\n") if line]


def turns_in(path: Path) -> list[list[str]]:
    return [row["turns"] for row in rows_of(path)]


@pytest.mark.parametrize(
    ("name", "raw", "count"),
    [
        ("gsm8k_boxed", "gsm8k_test.jsonl", 1319),
        ("math500_boxed", "math500_test.jsonl", 500),
        ("humaneval_fenced", "HumanEval.jsonl.gz", 164),
        ("mbpp_plain", "mbpp.jsonl", 500),
    ],
)
def test_the_authors_prompts_follow_from_the_official_files(
    name: str, raw: str, count: int, dataset_config: Load, fill_cache, shared: Path
) -> None:
    config = dataset_config(name)
    rows = rows_of(shared / "raw" / raw)
    if config.name == "mbpp":  # its test split
        rows = [row for row in rows if 11 <= row["task_id"] <= 510]
    fill_cache(config.repo, config.revision, config.file, encode(str(config.file), rows))
    found = prepare_prompts(config)
    assert len(found) == count
    assert [prompt.turns for prompt in found] == turns_in(shared / f"{config.name}.jsonl")
    assert [prompt.id for prompt in found] == [f"{config.name}/{i}" for i in range(count)]


def test_a_raw_gzip_file_reads_without_unpacking(
    dataset_config: Load, fill_cache, shared: Path
) -> None:
    config = dataset_config("humaneval_fenced", file="HumanEval.jsonl.gz")
    raw = (shared / "raw" / "HumanEval.jsonl.gz").read_bytes()
    fill_cache(config.repo, config.revision, config.file, raw)
    assert [p.turns for p in prepare_prompts(config)] == turns_in(shared / "humaneval.jsonl")


def test_mt_bench_keeps_both_turns_of_every_question(
    dataset_config: Load, fill_cache, shared: Path
) -> None:
    config = dataset_config("mt_bench")
    # The hub's file is the makers' with "turns" replaced by "prompt" all over, question text too.
    raw = (shared / "raw" / "mt_bench_question.jsonl").read_bytes()
    fill_cache(config.repo, config.revision, config.file, raw.replace(b"turns", b"prompt"))
    found = prepare_prompts(config)
    assert [p.turns for p in found] == turns_in(shared / "mt_bench.jsonl")
    assert sum(len(p.turns) for p in found) == 160
    assert config.history is History.independent
    assert dataset_config("mt_bench_dialogue").history is History.model


def test_ultrachat_takes_the_first_5000_chats(dataset_config: Load, fill_cache) -> None:
    config = dataset_config("ultrachat")
    rows = [
        {
            "prompt": f"q{i}",
            "messages": [
                {"role": role, "content": f"{role}{i}.{turn}"}
                for turn in range(1 + i % 2)
                for role in ("user", "assistant")
            ],
        }
        for i in range(5001)
    ]
    fill_cache(config.repo, config.revision, config.file, encode(str(config.file), rows))
    found = prepare_prompts(config)
    assert len(found) == 5000
    assert found[0].turns == ["User: user0.0\nAssistant:"]
    assert found[1].turns == ["User: user1.0\nAssistant: assistant1.0\nUser: user1.1\nAssistant:"]
    dialogue = dataset_config("ultrachat_dialogue")
    assert prepare_prompts(dialogue)[1].turns == ["user1.0", "user1.1"]
