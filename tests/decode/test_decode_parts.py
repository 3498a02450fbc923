"""What a step must read, and the seconds of its parts."""

from __future__ import annotations

import time

import pytest
import torch
from decode_helpers import make_drafter, make_target, request, serve

from dspark.decode.engine import Engine
from dspark.decode.parts import PARTS, Laps, read_bandwidth, step_bytes

CPU = torch.device("cpu")


def test_laps_add_up_to_the_time_that_passed() -> None:
    laps = Laps(CPU)
    laps.restart()
    begun = time.perf_counter()
    for part in ("host", "accept", "host"):
        time.sleep(0.01)
        laps(part)
    passed = time.perf_counter() - begun
    assert sum(laps.seconds.values()) == pytest.approx(passed, rel=0.05)
    assert laps.seconds["host"] > laps.seconds["accept"] >= 0.01


def test_an_engine_names_the_parts_of_its_work_and_nothing_else() -> None:
    target = make_target()
    laps = Laps(CPU)
    engine = Engine(target, make_drafter(target), k=3, capacity=30, lap=laps)
    serve(engine, [request("a", [1, 2, 3], 12)])
    assert set(laps.seconds) == set(PARTS) - {"schedule"}
    plain = Laps(CPU)
    serve(Engine(target, capacity=30, lap=plain), [request("a", [1, 2, 3], 12)])
    drafting = {"draft backbone", "Markov loop", "schedule", "drafter's context"}
    assert set(plain.seconds) == set(PARTS) - drafting


def test_a_plain_step_reads_the_weights_and_every_rows_context() -> None:
    target = make_target()
    embedding = target.embed.weight.numel() * 4
    config = target.config
    width = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * 4
    assert not config.tie_word_embeddings
    expected = target.weight_bytes - embedding + 3 * 100 * width
    assert step_bytes(target, None, rows=3, k=0, context=100) == expected
    assert step_bytes(target, make_drafter(target), rows=3, k=0, context=100) == expected


def test_a_tied_embedding_is_the_lm_head_and_read() -> None:
    target = make_target(tie_word_embeddings=True)
    assert step_bytes(target, None, rows=1, k=0, context=0) == target.weight_bytes


def test_each_drafted_position_reads_the_markov_matrix_once_more() -> None:
    target = make_target()
    drafter = make_drafter(target)
    sizes = [step_bytes(target, drafter, 1, k, 0) for k in (0, 1, 2, 3)]
    matrix = drafter.markov_head.markov_w2.weight.numel() * 4
    assert sizes[2] - sizes[1] == sizes[3] - sizes[2] == matrix
    own = sum(weight.numel() for weight in drafter.parameters())
    own -= drafter.markov_head.markov_w1.weight.numel()
    assert sizes[1] - sizes[0] == 4 * (own + drafter.lm_head.weight.numel())


def test_packing_changes_nothing_of_what_is_read() -> None:
    target, drafter = make_target(), None
    drafter = make_drafter(target)
    before = step_bytes(target, drafter, 2, 3, 50)
    target.pack()
    drafter.pack()
    assert step_bytes(target, drafter, 2, 3, 50) == before


def test_bandwidth_is_that_of_memory() -> None:
    assert 1e8 < read_bandwidth(CPU) < 1e12
