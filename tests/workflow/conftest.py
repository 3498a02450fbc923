"""A finished run of the real DAG on a tiny target, in a copy of the checkout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import Checkout, copy_checkout, trained

import tiny_models


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_models.save_tiny_target(folder / "target")
    tiny_models.save_tiny_drafter(folder / "drafter", folder / "target")
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Iterator[Checkout]:
    """The experiment `tiny`, run to its table. Tests must leave it as they found it."""
    checkout = copy_checkout(tmp_path_factory.mktemp("checkout") / "dspark", tiny_pair)
    done = checkout.snakemake("--config", "experiment=tiny")
    assert "The table is results/tiny/table.md" in done.stderr
    yield checkout


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Checkout:
    """The experiment `learned`, run to its table. Tests must leave it as they found it."""
    checkout = copy_checkout(tmp_path_factory.mktemp("trained") / "dspark", tiny_pair)
    checkout.snakemake(*trained("learned"))
    return checkout


@pytest.fixture
def fresh(tmp_path: Path, tiny_pair: Path) -> Checkout:
    """A checkout in which nothing has run."""
    return copy_checkout(tmp_path / "dspark", tiny_pair)
