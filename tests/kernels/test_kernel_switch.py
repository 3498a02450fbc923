"""engine.kernels: on where kernels can run, refused in one line where they can't."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dspark.config import EngineConfig, Precision
from dspark.decode import environment
from dspark.decode.environment import describe, set_kernels
from dspark.errors import UserError
from dspark.kernels.switch import kernels_used, use_kernels


@pytest.fixture(autouse=True)
def kernels_off_again() -> Iterator[None]:
    yield
    use_kernels(False)


def test_they_are_off_unless_asked_for() -> None:
    use_kernels(True)
    set_kernels(EngineConfig(), "cpu")
    assert not kernels_used()
    assert describe("cpu", "0")["kernels"] is False


def test_a_device_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError) as caught:
        set_kernels(EngineConfig(kernels=True), "cpu")
    assert str(caught.value) == (
        "engine.kernels is true and there are none for cpu: set engine.kernels=false, or "
        "engine.device=cuda where there is a GPU"
    )
    assert not kernels_used()


def test_without_triton_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_version", lambda package: None)
    with pytest.raises(UserError) as caught:
        set_kernels(EngineConfig(kernels=True), "cuda")
    assert str(caught.value) == (
        "engine.kernels is true and triton is not installed: install PyTorch's build for your GPU, which "
        "brings it along, or set engine.kernels=false"
    )


@pytest.mark.parametrize("precision", [Precision.bfloat16, Precision.auto], ids=["bf16", "auto"])
def test_the_interpreter_is_refused_what_it_computes_wrongly(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError) as caught:
        set_kernels(EngineConfig(kernels=True, precision=precision), "cpu")
    assert str(caught.value) == (
        f"engine.kernels is true, TRITON_INTERPRET is set and engine.precision is {precision.value}: the "
        "interpreter computes bfloat16 wrongly, set engine.precision=float32 or unset TRITON_INTERPRET"
    )


def test_the_interpreter_runs_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    set_kernels(EngineConfig(kernels=True), "cpu")
    assert kernels_used()
    assert describe("cpu", "0")["kernels"] is True
