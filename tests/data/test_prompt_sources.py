"""File and built-in sources, the limit, and the quality of the shipped prompts."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from dspark.config import DatasetConfig, PromptSource
from dspark.data.builtin import builtin_names, builtin_prompts, warmup_prompts
from dspark.data.prepare import prepare_prompts
from dspark.data.prompts import Prompt
from dspark.errors import UserError

NAMES = ["gsm8k", "humaneval", "math500", "mbpp", "mt_bench", "ultrachat"]
SHARED_RUN = 8  # words in a row; a shorter run is a turn of phrase, not a copy


def config(**fields) -> DatasetConfig:
    return DatasetConfig(**{"name": "mine", "source": PromptSource.file, **fields})


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def runs(text: str) -> set[tuple[str, ...]]:
    """Every run of SHARED_RUN words of a text."""
    found = words(text)
    return {tuple(found[i : i + SHARED_RUN]) for i in range(len(found) - SHARED_RUN + 1)}


@pytest.fixture
def three(tmp_path: Path) -> Path:
    path = tmp_path / "three.jsonl"
    lines = [json.dumps({"id": f"p{i}", "turns": [f"say {i}"]}) for i in range(3)]
    path.write_text("\n".join(lines))
    return path


def test_a_users_file_is_taken_whole_or_up_to_the_limit(three: Path) -> None:
    assert [p.id for p in prepare_prompts(config(path=str(three)))] == ["p0", "p1", "p2"]
    assert [p.id for p in prepare_prompts(config(path=str(three), limit=2))] == ["p0", "p1"]
    assert len(prepare_prompts(config(path=str(three), limit=3))) == 3


def test_a_limit_beyond_the_file_states_both_numbers(three: Path) -> None:
    with pytest.raises(UserError, match="'mine' has 3 prompts but limit asks for 4: set limit"):
        prepare_prompts(config(path=str(three), limit=4))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(three: Path, limit: int) -> None:
    with pytest.raises(UserError, match=f"has limit {limit}: it must be at least 1"):
        prepare_prompts(config(path=str(three), limit=limit))


def test_a_file_source_without_a_path_is_refused() -> None:
    with pytest.raises(UserError, match="source 'file' but no path: set path"):
        prepare_prompts(config())


def test_a_bad_users_file_is_named(three: Path) -> None:
    three.write_text("{}\n")
    with pytest.raises(UserError, match=r"three\.jsonl, line 1: 'id' is missing"):
        prepare_prompts(config(path=str(three)))


def test_builtin_prompts_come_by_the_datasets_name() -> None:
    found = prepare_prompts(config(name="gsm8k", source=PromptSource.builtin, limit=5))
    assert found == builtin_prompts("gsm8k")[:5]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gsm8", "did you mean 'gsm8k'"), ("qqq", "known: gsm8k, humaneval"), ("warmup", "known: ")],
)
def test_an_unknown_builtin_name_gets_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"no built-in prompts are named '{name}': {hint}"):
        prepare_prompts(config(name=name, source=PromptSource.builtin))


def test_the_six_datasets_are_shipped() -> None:
    assert builtin_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_set_has_sixteen_prompts_of_its_datasets_shape(name: str) -> None:
    prompts = builtin_prompts(name)
    assert [p.id for p in prompts] == [f"{name}/b{i}" for i in range(16)]
    assert {len(p.turns) for p in prompts} == {2 if name == "mt_bench" else 1}


def test_warmup_prompts_are_never_measured_ones() -> None:
    warmup = warmup_prompts()
    assert len(warmup) == 8
    measured = {turn for name in NAMES for p in builtin_prompts(name) for turn in p.turns}
    assert not measured & {turn for p in warmup for turn in p.turns}


def test_no_two_shipped_turns_are_equal() -> None:
    prompts = warmup_prompts() + [p for name in NAMES for p in builtin_prompts(name)]
    turns = [" ".join(words(turn)) for p in prompts for turn in p.turns]
    assert len(set(turns)) == len(turns)


def test_shipped_code_tasks_are_one_python_function_with_examples() -> None:
    for prompt in builtin_prompts("humaneval"):
        fenced = re.search(r"```python\n(.*)\n```", prompt.turns[0], re.DOTALL)
        assert fenced, prompt.id
        functions = [n for n in ast.parse(fenced[1]).body if isinstance(n, ast.FunctionDef)]
        assert len(functions) == 1, prompt.id
        assert ">>> " + functions[0].name in (ast.get_docstring(functions[0]) or ""), prompt.id


def test_shipped_prompts_copy_no_published_set(shared: Path) -> None:
    published: set[tuple[str, ...]] = set()
    whole: set[str] = set()
    for path in shared.glob("*.jsonl"):
        for line in path.read_text("utf-8").splitlines():
            for turn in json.loads(line)["turns"]:
                published |= runs(turn)
                whole.add(" ".join(words(turn)))
    assert len(whole) > 1000
    prompts: list[Prompt] = warmup_prompts() + [p for n in NAMES for p in builtin_prompts(n)]
    for prompt in prompts:
        for turn in prompt.turns:
            assert " ".join(words(turn)) not in whole, prompt.id
            assert not runs(turn) & published, prompt.id
