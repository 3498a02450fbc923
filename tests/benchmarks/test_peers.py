"""dspark beside its peers: what counts as a round, the table, and one real run of two decoders."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from dspark.errors import UserError
from tiny_models import save_tiny_drafter, save_tiny_target

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
NAMES = ("peers_rounds", "peers_setup", "peers")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield {name: import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name)


@pytest.fixture
def rounds(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["peers_rounds"]


def nothing() -> None:
    """What `measure` need not do here before a pass."""


# One real run: dspark and transformers on a tiny model, a peer that is not there, one that is broken.


@pytest.fixture(scope="module")
def printed(scripts: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("peers")
    target = save_tiny_target(folder / "target")
    drafter = save_tiny_drafter(folder / "drafter", target)
    broken = folder / "envs" / "llama.cpp"
    (broken / "bin").mkdir(parents=True)
    (broken / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (broken / scripts["peers_setup"].READY).touch()
    options = {
        "target": target,
        "drafter": drafter,
        "envs": folder / "envs",
        "precision": "float32",
        "limit": 3,
        "new": 24,
        "rounds": 2,
        "drift": 1000,
        "threads": 1,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    result = CliRunner().invoke(
        scripts["peers"].main, [*arguments, "--concurrency", "1", "--concurrency", "2"]
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_decoder_has_its_row_and_makes_the_same_text(printed: str) -> None:
    cells = [line.strip("| ").split(" | ") for line in printed.splitlines() if line[:3] != "- "]
    cells = [row for row in cells if row[0] in ("1", "2")]
    ours = ["dspark plain", "dspark k=3", "dspark k=7"]
    assert [(row[0], row[1]) for row in cells] == [
        *(("1", name) for name in [*ours, "transformers plain", "transformers lookup"]),
        *(("2", name) for name in [*ours, "transformers plain"]),
    ]
    for row in cells:
        assert row[2] == "float32"
        assert float(row[3]) > 0
        assert row[5] == "2"  # rounds
        assert row[8] == "100.0%"
        assert (row[7] == "—") == ("plain" not in row[1])
        if row[1] == "dspark plain":
            assert row[4] == "1.000x (1.000..1.000)"


def test_what_stands_under_the_table(printed: str) -> None:
    assert re.search(
        r"^- 3 prompts of \d+ to \d+ tokens, 24 new tokens each, greedy, ", printed, re.M
    )
    assert "- Passes: 2; 0 of 18 rounds do not count: " in printed
    assert re.search(r"^- Read bandwidth \d+\.\d \(\d+\.\d\.\.\d+\.\d\) GB/s", printed, re.M)
    assert re.search(r"^- Load average before the passes, .*: \d", printed, re.M)
    assert re.search(r"^- transformers: transformers 5\.", printed, re.M)


def test_a_peer_that_is_not_there_is_left_out_and_named(printed: str) -> None:
    lines = [line for line in printed.splitlines() if line.startswith("- vllm")]
    assert len(lines) == 1
    assert re.fullmatch(
        r"- vllm is left out: `python benchmarks/peers.py --setup vllm --envs \S+` adds it",
        lines[0],
    )


def test_a_peer_that_cannot_load_is_left_out_with_its_reason(printed: str) -> None:
    line = next(line for line in printed.splitlines() if line.startswith("- llama.cpp"))
    reason = (
        "llama.cpp float32 is left out: ModuleNotFoundError: No module named 'xllamacpp', see '"
    )
    assert line.startswith(f"- {reason}")
    log = Path(line.rsplit("'", 2)[1])
    assert "Traceback" in log.read_text()


def test_missing_prompts_are_one_line(
    scripts: dict[str, ModuleType], printed: str, tmp_path: Path
) -> None:
    target = str(save_tiny_target(tmp_path / "target"))
    arguments = ["--target", target, "--prompts", str(tmp_path / "none.jsonl")]
    result = CliRunner().invoke(scripts["peers"].main, arguments)
    assert result.exit_code == 1
    assert result.stderr == f"Error: {tmp_path}/none.jsonl does not exist: check the path\n"


# Which rounds count, and how many are run.


def test_a_round_whose_wall_time_drifts_is_repeated_beside_its_baseline(rounds: ModuleType) -> None:
    cells = list(rounds.layout(["transformers"], ["float32"], [], [1]))
    baseline, plain, lookup = cells
    done: list[list[Any]] = []

    def decode(cell: Any) -> Any:
        done[-1].append(cell)
        drifted = cell == plain and len(done) == 1
        return rounds.Round(wall=1.3 if drifted else 1.05, cpu=1.0, outputs=[[1]])

    passes, failed = rounds.measure(cells, decode, 3, 0.1, lambda: done.append([]))
    assert done == [cells, cells[::-1], cells, [plain, baseline]]
    assert failed == {}
    assert list(rounds.steady(plain, passes, 0.1)) == [1, 2, 3]
    assert [len(rounds.pairs(cell, passes, 0.1)) for cell in cells] == [4, 3, 3]
    assert lookup not in passes[3]


def test_a_baseline_that_drifts_costs_the_rounds_beside_it(rounds: ModuleType) -> None:
    cells = list(rounds.layout([], ["float32"], [3], [1]))
    baseline, speculative = cells
    steady, drifted = rounds.Round(1.0, 1.0, [[1]]), rounds.Round(2.0, 1.0, [[1]])
    passes = [{baseline: drifted, speculative: steady}, {baseline: steady, speculative: steady}]
    assert rounds.pairs(speculative, passes, 0.1) == [(steady, steady)]
    assert rounds.lacking(cells, passes, 2, 0.1) == cells


def test_repetitions_are_bounded(rounds: ModuleType) -> None:
    cells = list(rounds.layout([], ["float32"], [], [1]))
    walls = iter([1.0] + [9.0] * 100)
    passes, _ = rounds.measure(
        cells, lambda _cell: rounds.Round(next(walls), 1.0, [[1]]), 3, 0.1, nothing
    )
    assert len(passes) == 6
    assert len(rounds.pairs(cells[0], passes, 0.1)) == 1


def test_a_peer_that_fails_on_the_way_is_left_out_and_the_others_go_on(rounds: ModuleType) -> None:
    cells = list(rounds.layout(["llama.cpp"], ["bfloat16"], [], [1, 4]))
    lost = rounds.Model("llama.cpp", "q4_1")
    calls = 0

    def decode(cell: Any) -> Any:
        nonlocal calls
        calls += 1
        if cell.model == lost and calls > len(cells):
            raise rounds.PeerFailed("its process ended with signal 4")
        return rounds.Round(1.0, 1.0, [[1]])

    passes, failed = rounds.measure(cells, decode, 2, 0.1, nothing)
    assert failed == {lost: "its process ended with signal 4"}
    others = {cell for cell in cells if cell.model != lost}
    assert [set(one) for one in passes] == [others, others]


def test_nothing_is_measured_without_ours(rounds: ModuleType) -> None:
    def decode(_cell: Any) -> Any:
        raise rounds.PeerFailed("its process ended with signal 9")

    cells = list(rounds.layout([], ["float32"], [], [1]))
    with pytest.raises(UserError, match=r"^dspark float32: its process ended with signal 9$"):
        rounds.measure(cells, decode, 2, 0.1, nothing)


# The table.


@pytest.mark.parametrize(
    ("found", "share"),
    [
        ([[5, 6, 2, 7], [5, 6, 7, 8]], 1.0),
        ([[5, 6, 2, 9], [5, 6, 7, 8]], 1.0),
        ([[5, 6, 9, 9], [5, 9, 7, 8]], (2 / 3 + 1 / 4) / 2),
        ([[9, 6, 2, 7], [9, 6, 7, 8]], 0.0),
    ],
    ids=["same", "other-after-the-end", "other-in-the-middle", "other-from-the-start"],
)
def test_same_text_ends_at_the_first_other_token(
    rounds: ModuleType, found: list[list[int]], share: float
) -> None:
    expected = [[5, 6, 2, 7], [5, 6, 7, 8]]
    assert rounds.agreement(expected, found, frozenset([2])) == pytest.approx(share)


def test_ratios_are_taken_within_a_pass(rounds: ModuleType) -> None:
    """The machine slows down by half: 10 and 20 tok/s, then 5 and 10, twice as fast in both."""
    cells = list(rounds.layout(["llama.cpp"], ["bfloat16"], [], [2]))
    ours, brain, q4 = cells
    tokens = [[1] * 10, [1] * 10]
    walls = {ours: (2.0, 4.0), brain: (1.0, 2.0), q4: (1.0, 4.0)}
    passes = [
        {cell: rounds.Round(wall[i], 2 * wall[i], tokens) for cell, wall in walls.items()}
        for i in (0, 1)
    ]
    limits = {ours.model: 20.0, brain.model: 15.0, q4.model: 50.0}
    lines = list(rounds.table(cells, passes, 0.1, limits, frozenset()))
    assert lines[2:] == [
        "| 2 | dspark plain | bfloat16 | 7.5 | 1.000x (1.000..1.000) | 2 | 2.00 | 19% | 100.0% |",
        "| 2 | llama.cpp plain | bfloat16 | 15.0 | 2.000x (2.000..2.000) | 2 | 2.00 | 50% | 100.0% |",
        "| 2 | llama.cpp plain | q4_1 | 12.5 | 1.500x (1.000..2.000) | 2 | 2.00 | 12% | 100.0% |",
    ]


def test_a_row_without_a_round_that_counts_has_no_numbers(rounds: ModuleType) -> None:
    cells = list(rounds.layout([], ["float32"], [3], [1]))
    steady, drifted = rounds.Round(1.0, 1.0, [[1]]), rounds.Round(2.0, 1.0, [[1]])
    passes = [dict(zip(cells, (steady, drifted), strict=True))]
    passes.append(dict(zip(cells, (drifted, steady), strict=True)))
    lines = list(rounds.table(cells, passes, 0.1, {cells[0].model: 1.0}, frozenset()))
    assert lines[3] == "| 1 | dspark k=3 | float32 | — | — | 0 | — | — | 100.0% |"


# llama.cpp's model files.


@pytest.fixture
def q4_1(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A GGUF file as the published one is made, and its tensors' values."""
    random = np.random.default_rng(0)
    norm = random.standard_normal(32).astype(np.float32)
    weights = {name: random.standard_normal((4, 32)).astype(np.float32) for name in "ab"}
    kinds = {"a": GGMLQuantizationType.Q4_1, "b": GGMLQuantizationType.Q8_0}
    writer = GGUFWriter(tmp_path / "q4_1.gguf", "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ö"])
    writer.add_uint32("llama.block_count", 30)
    writer.add_tensor("norm.weight", norm)
    values = {"norm.weight": norm}
    for name, weight in weights.items():
        stored = quantize(weight, kinds[name])
        name = {"a": "token_embd.weight", "b": "output.weight"}[name]
        writer.add_tensor(name, stored, raw_dtype=kinds["a" if "embd" in name else "b"])
        values[name] = dequantize(stored, kinds["a" if "embd" in name else "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "q4_1.gguf", values


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_a_gguf_model_is_rewritten_without_another_loss(
    scripts: dict[str, ModuleType], q4_1: tuple[Path, dict[str, np.ndarray]], kind: str
) -> None:
    source, values = q4_1
    out = source.with_name("out.gguf")
    wanted = GGMLQuantizationType[kind]
    scripts["peers_setup"].convert(source, out, wanted)
    made = GGUFReader(out)
    assert made.fields["llama.block_count"].contents() == 30
    assert made.fields["tokenizer.ggml.tokens"].contents() == ["a", "ö"]
    file_type = {"F32": LlamaFileType.ALL_F32, "BF16": LlamaFileType.MOSTLY_BF16}[kind]
    assert made.fields["general.file_type"].contents() == file_type
    assert {tensor.name for tensor in made.tensors} == set(values)
    for tensor in made.tensors:
        norm = tensor.name == "norm.weight"
        assert tensor.tensor_type == (GGMLQuantizationType.F32 if norm else wanted)
        found = dequantize(tensor.data, tensor.tensor_type)
        precision = 2**-8 if kind == "BF16" and not norm else 0
        np.testing.assert_allclose(found, values[tensor.name], rtol=precision)


def test_bytes_that_a_step_reads_of_a_gguf_model(
    scripts: dict[str, ModuleType], q4_1: tuple[Path, dict[str, np.ndarray]]
) -> None:
    """The embedding is looked up where there is an LM head beside it: 4 rows of 34 bytes, a norm."""
    path = str(q4_1[0])
    assert scripts["peers"].gguf_bytes(path, parameters=32 + 2 * 4 * 32) == 4 * 34 + 32 * 4
    with pytest.raises(
        scripts["peers_rounds"].PeerFailed,
        match=r"^its model has 288 parameters, the target 300$",
    ):
        scripts["peers"].gguf_bytes(path, parameters=300)
