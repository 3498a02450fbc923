"""What works on this machine: each finding says what was found, what follows and what to do.

Nothing is changed and nothing is downloaded; what is asked over the network has seconds to answer.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from urllib.request import urlopen

import psutil
from packaging.requirements import Requirement

from dspark.config import ExperimentConfig, ModelSource, TrainConfig, compose_experiment
from dspark.errors import UserError

DEMO = "demo"
ANSWER_S = 5.0  # within which hub, package index, SLURM and MLflow must answer
BUSY_LOAD = 0.5  # other processes' share of the cores from which on they show in the times
# Whose versions decide what can run or what is measured; triton comes with torch for CUDA alone.
PACKAGES = ("torch", "transformers", "snakemake", "mlflow", "triton")
# What the demo takes: the target's float32 weights are 0.54 GB, on the disk once and, while they are
# fetched and converted, beside their compressed form; in memory as loaded and as packed.
DEMO_DISK_BYTES = 2**30
DEMO_MEMORY_BYTES = 2 * 2**30
BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16"}  # of /proc/cpuinfo
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Finding:
    """One thing of this machine."""

    what: str
    found: str
    says: str  # what works or does not, and the remedy
    works: bool = True
    stops_demo: bool = False


def examine(root: Path = Path("results")) -> list[Finding]:
    """Look at this machine, for runs whose results go to `root`."""
    return list(_findings(root))


def render_findings(findings: list[Finding]) -> str:
    """One line a finding: ok, note (something will not work) or FAIL (the demo will not)."""
    width = max(len(finding.what) for finding in findings)
    return "\n".join(
        f"{_mark(finding):4}  {finding.what:{width}}  {finding.found}: {finding.says}"
        for finding in findings
    )


def _mark(finding: Finding) -> str:
    return "FAIL" if finding.stops_demo else "ok" if finding.works else "note"


def _findings(root: Path) -> Iterator[Finding]:
    needed = [_python(), *map(_package, PACKAGES), *_gpus()]
    yield from needed
    if any(finding.stops_demo for finding in needed):
        return  # the rest cannot be asked without them
    yield _cpu()
    yield _cores()
    yield _memory()
    yield _disk(root)
    try:
        demo = compose_experiment(DEMO)
    except UserError as error:
        yield Finding("checkout", str(Path.cwd()), str(error), works=False, stops_demo=True)
    else:
        yield Finding("checkout", str(Path.cwd()), f"experiment '{DEMO}' is here")
        yield _target(demo, root)
        yield _mlflow(demo.tracking.uri)
    yield _hub()
    yield _slurm()


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", f"{found}, {sys.prefix}", "runs what stands below")


def _package(name: str) -> Finding:
    wanted = next(
        (r for r in map(Requirement, requires("dspark") or []) if r.name == name and not r.marker),
        None,
    )
    try:
        found = version(name)
    except PackageNotFoundError:
        if wanted is None:
            return Finding(name, "not installed", "nothing needs it on a CPU")
        return _unfit(name, "not installed")
    if wanted is not None and not wanted.specifier.contains(found, prereleases=True):
        return _unfit(name, f"{found}, needed {wanted.specifier}")
    return Finding(name, found, "as needed")


def _unfit(name: str, found: str) -> Finding:
    remedy = "`make demo` sets up .venv with what requirements.lock pins, use that one"
    return Finding(name, found, remedy, works=False, stops_demo=True)


def _gpus() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield _unfit("GPU", f"torch cannot be loaded ({_line(error)})")
        return
    if not torch.cuda.is_available():
        yield _no_gpu(torch.version.cuda)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        native = properties.major >= 8  # Ampere, the first with bfloat16 in hardware
        yield Finding(
            f"GPU {index}",
            f"{properties.name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, "
            f"CUDA {torch.version.cuda}",
            "engine=gpu works, bfloat16 in hardware"
            if native
            else "works; bfloat16 is emulated and slow here, use engine.precision=float32",
        )


def _no_gpu(built_for: str | None) -> Finding:
    if built_for is not None:
        found = f"none usable, torch is built for CUDA {built_for}"
        remedy = "; see that nvidia-smi lists it and CUDA_VISIBLE_DEVICES does not hide it"
    elif shutil.which("nvidia-smi"):
        found = "nvidia-smi is here, torch is built for CPUs"
        remedy = "; install torch for CUDA to use the GPU"
    else:
        found, remedy = "none", ""
    says = f"engine.device=cuda won't work, auto runs on the CPU{remedy}"
    return Finding("GPU", found, says, works=False)


def _cpu() -> Finding:
    facts = dict(_cpu_facts())
    found = facts.get("model name", platform.machine())
    flags = sorted(BFLOAT16_FLAGS & set(facts.get("flags", "").split()))
    if flags:
        return Finding("CPU", found, f"bfloat16 in hardware ({', '.join(flags)})")
    says = "bfloat16 is emulated and slow here, use engine.precision=float32"
    return Finding("CPU", found, says, works=False)


def _cpu_facts() -> Iterator[tuple[str, str]]:
    """What /proc/cpuinfo says of the first core."""
    for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line:
            return
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()


def _cores() -> Finding:
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    found = f"{cores} of {os.cpu_count()} usable, load {load:.1f}"
    quota = _core_quota()
    if quota < cores:
        says = f"a quota allows the time of {quota:.3g}: set engine.threads={max(1, int(quota))}"
        return Finding("cores", found, says, works=False)
    if load > BUSY_LOAD * cores:
        says = "others use them: what is measured now is slower than this machine"
        return Finding("cores", found, says, works=False)
    return Finding("cores", found, "a job takes them all, unless engine.threads says otherwise")


def _memory() -> Finding:
    usable = min([psutil.virtual_memory().available, *_memory_limits()])
    found = f"{usable / 1e9:.1f} GB usable"
    if usable < DEMO_MEMORY_BYTES:
        says = f"the demo needs {DEMO_MEMORY_BYTES / 1e9:.1f} GB: end other processes"
        return Finding("memory", found, says, works=False, stops_demo=True)
    return Finding("memory", found, "enough for the demo")


def _core_quota(root: Path = CGROUPS) -> float:
    """Cores whose time this process's control groups allow; infinity without a quota."""
    quotas = (text.split() for text in _cgroup_texts("cpu.max", root))
    return min((int(time) / int(of) for time, of in quotas if time != "max"), default=math.inf)


def _memory_limits(root: Path = CGROUPS) -> list[int]:
    """Bytes that this process's control groups allow."""
    return [int(text) for text in _cgroup_texts("memory.max", root) if text != "max"]


def _cgroup_texts(name: str, root: Path) -> Iterator[str]:
    """A file of this process's control group (of version 2) and of all that it lies in."""
    own = next((line for line in OWN_CGROUPS.read_text().splitlines() if line[:3] == "0::"), "0::/")
    folder = root / own[3:].strip("/")
    while True:
        with suppress(OSError):  # the root of all has no limits
            yield (folder / name).read_text().strip()
        if folder == root:
            return
        folder = folder.parent


def _disk(root: Path) -> Finding:
    there = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    found = f"{free / 1e9:.1f} GB free in {root}/"
    if not there.is_dir() or not os.access(there, os.W_OK, effective_ids=True):
        says = f"'{there}' cannot be written: make it writable or run in a checkout of your own"
        return Finding("disk", found, says, works=False, stops_demo=True)
    if free < DEMO_DISK_BYTES:
        says = f"the demo needs {DEMO_DISK_BYTES / 1e9:.1f} GB: free some"
        return Finding("disk", found, says, works=False, stops_demo=True)
    cache = TrainConfig().cache_gb
    if free < cache * 1e9:
        says = f"enough for the demo; a training may cache {cache:.0f} GB, lower drafter.train.cache_gb"
        return Finding("disk", found, says, works=False)
    return Finding("disk", found, "enough for the demo and for a training's cache")


def _target(demo: ExperimentConfig, root: Path) -> Finding:
    """Whether the demo's target is here or can be fetched."""
    name = demo.target.name
    what = f"target {name}"
    if demo.target.source is not ModelSource.embedded:
        return Finding(what, f"source {demo.target.source.value}", "looked at when it is prepared")
    if (root / "models" / name).is_dir():
        return Finding(what, "prepared", "the demo needs no network")
    from dspark.models.embedded import PACKAGE

    package, _, pinned = PACKAGE.partition("==")
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    command += ["--disable-pip-version-check", "--retries", "0", "--timeout", f"{ANSWER_S:g}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if pinned in re.findall(r"[^\s,]+", done.stdout.partition("Available versions:")[2]):
        return Finding(what, f"the package index has {PACKAGE}", "the demo fetches it")
    says = "the demo cannot fetch its target: check the index (PIP_INDEX_URL, pip.conf) and network"
    return Finding(what, f"no {PACKAGE} from pip", says, works=False, stops_demo=True)


def _mlflow(uri: str) -> Finding:
    from sqlalchemy.exc import SQLAlchemyError

    try:
        says = _store(uri)
    except (OSError, ValueError, sqlite3.Error, SQLAlchemyError) as error:
        reason = " ".join(str(error).split())
        return Finding(
            "MLflow store",
            uri,
            f"cannot be written ({reason}): mend it or set tracking.uri",
            works=False,
            stops_demo=True,
        )
    return Finding("MLflow store", uri, says)


def _store(uri: str) -> str:
    """What can be said of an MLflow store.

    Raises:
        OSError, ValueError, sqlite3.Error, SQLAlchemyError: it cannot be used.
    """
    from sqlalchemy.engine import make_url

    if uri.startswith(("http://", "https://")):
        with urlopen(f"{uri.rstrip('/')}/health", timeout=ANSWER_S):
            return "answers"
    if not uri.startswith("sqlite:"):
        return "not looked at, `dspark track` will say"
    file = Path(make_url(uri).database or "").absolute()
    if not file.exists():
        there = next(path for path in file.parents if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK, effective_ids=True):
            raise PermissionError(f"'{there}' is no writable folder")
        return "made when it is first written"
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", ANSWER_S, uri=True)) as database:
        database.execute("BEGIN IMMEDIATE")  # the lock that a writer takes
        database.rollback()
    return "can be written"


def _hub() -> Finding:
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HTTPError

    address = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    try:
        get_session().head(address, timeout=ANSWER_S)
    except (HTTPError, OSError) as error:
        offline = constants.HF_HUB_OFFLINE
        why = (
            "is not asked, HF_HUB_OFFLINE is set"
            if offline
            else f"cannot be reached ({_line(error)})"
        )
        says = (
            "what has source hub (experiment published) won't work unless the cache in HF_HOME holds it: "
            "fill one elsewhere with 'hf download', copy it here and set HF_HUB_OFFLINE=1, or take "
            "source local, file or builtin"
        )
        return Finding("hub", f"{address} {why}", says, works=False)
    return Finding("hub", f"{address} answers", "models and datasets of source hub can be fetched")


def _slurm() -> Finding:
    if not shutil.which("sbatch"):
        says = "--profile profiles/slurm won't work here, runs stay on this machine"
        return Finding("SLURM", "no sbatch on PATH", says, works=False)
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%P"],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().split("\n")[-1]
        says = "--profile profiles/slurm won't work until the controller answers"
        return Finding("SLURM", f"sinfo fails ({told})", says, works=False)
    found = f"partitions {', '.join(done.stdout.split()) or 'none'}"
    if "SLURM_JOB_ID" in os.environ:
        return Finding("SLURM", found, "inside a job of it: run without a SLURM profile here")
    return Finding("SLURM", found, "--profile profiles/slurm works once it names one of them")


def _line(error: object) -> str:
    """The first line of a message."""
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
