"""The structured configs: the only place where a field of an experiment is declared.

An experiment is one Hydra composition: the groups target/, drafter/, engine/ and tracking/ are each
picked once, dataset/ once for each prompt set (under `datasets.<name>`) and run/ once for each arm
(under `runs.<name>`). The unit of scheduling is a dataset, so the composition is cut into one
`JobConfig` a dataset; its YAML text decides whether that job runs again.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dspark.errors import UserError, nearest


class ModelSource(Enum):
    """Where a checkpoint comes from."""

    hub = "hub"  # a Hugging Face repo at a pinned revision
    local = "local"  # a directory on this machine
    embedded = "embedded"  # ships with the project or with a package that it pins
    train = "train"  # drafters alone: trained for the target by the same DAG


class PromptSource(Enum):
    """Where a dataset's prompts come from."""

    hub = "hub"  # a Hugging Face dataset file at a pinned revision
    file = "file"  # a prompts.jsonl of the user's
    builtin = "builtin"  # prompts written for this project, shipped as package data


class History(Enum):
    """What a later turn of a conversation is asked with."""

    model = "model"  # the model's own earlier answers come before it
    independent = "independent"  # it is sent alone, as the published table did


class Mode(Enum):
    """What one decoding step of a run does."""

    baseline = "baseline"  # one token a step
    speculative = "speculative"  # draft k, verify in one target pass, accept, bonus token


class LearningRate(Enum):
    """What follows the warm-up."""

    cosine = "cosine"  # down to 0
    constant = "constant"  # as it is after the warm-up


class Device(Enum):
    """Where the engine runs; auto takes cuda when there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class CudaGraphs(Enum):
    """Whether steps are handed to a GPU as CUDA graphs; auto does so where there is a GPU."""

    auto = "auto"
    off = "off"  # operation by operation; in a YAML file 'off' needs its quotes


class Precision(Enum):
    """The dtype of weights, activations and KV caches; auto takes what is fastest on the device."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class TargetConfig:
    """The model whose output is wanted."""

    name: str = MISSING  # what tables call it; embedded: which of those that ship
    source: ModelSource = MISSING
    repo: str | None = None  # hub: owner/name
    revision: str | None = None  # hub: a commit sha, so that a re-run gets the same weights
    path: str | None = None  # local: a Hugging Face model directory
    trust_remote_code: bool = False  # run the Python code that the model brings, if it brings any


class ConfidenceLabel(Enum):
    """What the confidence head learns to predict."""

    survival = "survival"  # 1 - TV: acceptance when tokens are sampled at temperature 1 (the paper)
    agreement = "agreement"  # whether the likeliest draft token is the target's: greedy acceptance


class TrainOptimizer(Enum):
    """What turns gradients into steps."""

    adamw = "adamw"  # the paper's
    muon = "muon"  # the layers' matrices by Muon, the rest by AdamW: fewer steps, each dearer


@dataclass
class DrafterShape:
    """The network of a drafter that is trained from nothing. Width and heads are the target's."""

    layers: int = 2  # the drafter's own
    target_layer_ids: list[int] = field(default_factory=list)  # empty: spread evenly
    taps: int = 4  # how many layers are spread when target_layer_ids is empty
    block_size: int = 7  # positions that it predicts at once: the greatest k
    draft_vocab_size: int = 0  # the most frequent tokens of the training text; 0: all tokens
    markov_rank: int = 32  # width of the Markov head
    markov_head_type: str = "vanilla"  # vanilla, gated or rnn
    confidence_head_with_markov: bool = True  # it sees the token before, as the Markov head does
    mask_token_id: int = 3  # stands in a block where tokens are to come


@dataclass
class TrainConfig:
    """How a drafter is made: `dspark train`. Loss weights and decay are the paper's (section 4)."""

    shape: DrafterShape = field(default_factory=DrafterShape)
    start: str | None = None  # drafter to train on from: a directory, or one that ships
    device: Device = Device.auto
    # synthesise
    prompts: int = 6000  # conversations
    prompt_files: list[str] = field(default_factory=list)  # your own prompts.jsonl, answered too
    max_new_tokens: int = 128  # of an answer at most
    # cache
    precision: Precision = Precision.bfloat16  # of the target's forward and of the cached states
    shard_tokens: int = 32768  # of a file of the cache at most
    cache_gb: float = 64.0  # what the states may take on disk; conversations beyond are left out
    # fit
    held_out: int = 64  # conversations for validation
    calibration: int = 64  # conversations for calibration, not seen in training either
    epochs: float = 1.0  # passes over the training conversations
    batch: int = 8  # conversations a device and forward pass
    accumulate: int = 1  # passes a step
    anchors: int = 24  # blocks drawn from each conversation
    optimizer: TrainOptimizer = TrainOptimizer.adamw
    lr: float = 6e-4  # learning rate at its highest
    weight_decay: float = 0.0  # of the layers' matrices and of the projection of the taps
    schedule: LearningRate = LearningRate.cosine
    warmup: float = 0.04  # share of all steps
    grad_clip: float = 1.0  # the gradient's greatest norm
    weight_ce: float = 0.1  # cross-entropy with the target's token
    weight_l1: float = 0.9  # L1 distance of the two distributions
    weight_confidence: float = 1.0  # binary cross-entropy of the confidence
    confidence_label: ConfidenceLabel = ConfidenceLabel.survival
    decay: float = 4.0  # position t of a block weighs exp(-t / decay)
    draw_slots: bool = False  # draw positions that weigh little instead of computing them all
    compile: bool = False  # torch.compile for the losses: needs a C++ compiler
    validate_every: int = 200  # steps; a checkpoint to resume from is written as often
    patience: int = 0  # stop after so many validations without a longer accept length; 0: never
    seed: int = 0  # of prompts, drawn anchors and the drafter's start


@dataclass
class DrafterConfig:
    """The DSpark checkpoint that drafts for the target."""

    name: str = MISSING  # what tables call it; embedded: which of those that ship
    source: ModelSource = MISSING
    repo: str | None = None  # hub: owner/name
    revision: str | None = None  # hub: a commit sha
    path: str | None = None  # local: a checkpoint's directory, in either format
    train: TrainConfig | None = None  # source train: how it is made


@dataclass
class DatasetConfig:
    """One prompt set and how its rows become requests."""

    name: str = MISSING  # what the table calls it
    source: PromptSource = PromptSource.builtin
    path: str | None = None  # file: a prompts.jsonl
    repo: str | None = None  # hub: the dataset's id
    revision: str | None = None  # hub: a commit sha
    file: str | None = None  # hub: the file inside the repo (parquet, json or jsonl)
    template: str | None = None  # hub: a row's fields to one user turn, "{question}"
    turns_field: str | None = None  # hub: the field that holds a row's list of turns instead
    messages_field: str | None = None  # hub: the field that holds a row's chat messages instead
    transcript: bool = False  # hub: write those messages out as one prompt, "User: ..\nAssistant:"
    limit: int | None = None  # prompts to take, in file order; null takes all
    history: History = History.model
    chat: bool = True  # put the turns through the target's chat template
    max_new_tokens: int = 128  # of an answer at most
    shards: int = 1  # parts that are measured as jobs of their own, on as many devices at once


@dataclass
class ResourcesConfig:
    """What a dataset's job asks a cluster for, where it differs from the profile's default-resources.

    The names are those of Snakemake and its SLURM executor that suit one process on one node; CPU
    cores are the profile's `set-threads`. docs/slurm.md says what each becomes.
    """

    slurm_partition: str | None = None  # where the job is queued
    slurm_account: str | None = None  # whom to bill
    slurm_cluster: str | None = None  # where one submits to several
    qos: str | None = None  # quality of service
    constraint: str | None = None  # features of the node
    runtime: int | None = None  # minutes, a hard limit
    mem_mb: int | None = None  # host memory of the job
    mem_mb_per_cpu: int | None = None  # or of each core
    gpu: int | None = None  # null: 1, or 0 when the engine is to stay on the CPU
    gpu_model: str | None = None  # where SLURM knows GPUs by type
    gres: str | None = None  # where gpu is not understood; set gpu to 0 then
    slurm_extra: str | None = None  # further arguments of sbatch


@dataclass
class ScheduledDataset(DatasetConfig):
    """A dataset of an experiment: what its job is, and what the job asks a cluster for."""

    resources: ResourcesConfig = field(default_factory=ResourcesConfig)


@dataclass
class RunConfig:
    """One arm: a row of the table for each dataset."""

    mode: Mode = Mode.baseline
    k: int = 0  # draft tokens a step; 1..block_size when speculative, 0 for baseline
    confidence_threshold: float = 0.0  # verify only up to the first less confident draft token
    schedule: bool = False  # verify as many draft tokens as pay on this device (Algorithm 1)


@dataclass
class EngineConfig:
    """How the decoder runs."""

    device: Device = Device.auto
    precision: Precision = Precision.float32
    concurrency: int = 4  # closed loop: requests in flight
    interleave: int = 8  # prompts a block for each request in flight; the arms take turns by blocks
    warmup: int = 4  # requests before each arm's first block, never measured prompts
    threads: int | None = None  # CPU threads; null takes the cores that this process may use
    cuda_graphs: CudaGraphs = CudaGraphs.auto  # hand a GPU whole steps at once
    kernels: bool = False  # Triton's, on a GPU; not measured: see benchmarks/triton_kernels.py


@dataclass
class SamplingConfig:
    """How tokens are chosen; temperature 0 is greedy."""

    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0  # keep the likeliest tokens that together are as probable
    top_k: int = 0  # 0 keeps the whole vocabulary
    seed: int = 0  # a request's draws depend on it and the request's id alone
    ignore_eos: bool = False  # let every answer reach max_new_tokens
    stop: list[str] = field(default_factory=list)  # texts that end an answer


@dataclass
class TrackingConfig:
    """Where MLflow keeps the runs."""

    uri: str = "sqlite:///results/mlflow.db"  # an MLflow tracking URI: a SQLite file or a server
    experiment: str = "dspark"  # the MLflow experiment's name


@dataclass
class ExperimentConfig:
    """A whole table: every dataset with every run, on one target and drafter."""

    name: str = ""  # the experiment file's name, filled in when it is composed
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    datasets: dict[str, ScheduledDataset] = field(default_factory=dict)
    runs: dict[str, RunConfig] = field(default_factory=dict)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    allow_unpaired: bool = False  # mark speedups of arms that were not measured alike, don't refuse
    sweep: dict[str, list[Any]] = field(default_factory=dict)  # option: the values that it takes


@dataclass
class ModelsConfig:
    """A target and its drafter: what preparing them, and training the drafter, depends on."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)


@dataclass
class JobConfig:
    """One dataset with all its runs: what one job, or one a shard, does on one device."""

    experiment: str = MISSING
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    runs: dict[str, RunConfig] = field(default_factory=dict)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


# What an option may belong to that a sweep varies: the models are prepared once for all points.
SWEPT_GROUPS = ("datasets", "runs", "engine", "sampling")

ConfigStore.instance().store(name="schema", node=ExperimentConfig)
ConfigStore.instance().store(name="models_schema", node=ModelsConfig)


def split_overrides(overrides: str | Iterable[str] | None) -> list[str]:
    """Split `"engine.concurrency=8 sampling.seed=1"` into Hydra overrides; a list is kept."""
    if overrides is None:
        return []
    if isinstance(overrides, str):
        return shlex.split(overrides)
    return [str(item) for item in overrides]


def compose_experiment(
    experiment: str, overrides: Sequence[str] = (), config_dir: str | Path = "config"
) -> ExperimentConfig:
    """Compose config/experiment/<experiment>.yaml with the user's overrides.

    Raises:
        UserError: an unknown experiment, group or field, or a value that does not fit.
    """
    root = _config_root(config_dir)
    known = [path.stem for path in (root / "experiment").glob("*.yaml")]
    if experiment not in known:
        raise UserError(
            f"experiment '{experiment}' not found in {root / 'experiment'}: "
            f"{nearest(experiment, known)}"
        )
    chosen, what = f"+experiment={experiment}", f"experiment '{experiment}'"
    try:
        config: ExperimentConfig = _compose(root, "config", [chosen, *overrides], what)
    except UnknownEntry as error:  # a dataset or run: the experiment itself knows the names
        known = list(getattr(_compose(root, "config", [chosen], what), error.group))
        raise UserError(
            f"{what}: '{error.group}' has no '{error.entry}': {nearest(error.entry, known)}"
        ) from None
    config.name = experiment
    _validate(config)
    return config


def compose_points(
    experiment: str, overrides: Sequence[str] = (), config_dir: str | Path = "config"
) -> dict[str, ExperimentConfig]:
    """The experiment at each point of its sweep, by the name of the point's folder.

    An experiment that sweeps nothing is one point without a name, "".

    Raises:
        UserError: see `compose_experiment`; an option cannot be swept, or a value name no folder.
    """
    config = compose_experiment(experiment, overrides, config_dir)
    if not config.sweep:
        return {"": config}
    for option, values in config.sweep.items():
        _validate_swept(experiment, option, values)
    points = {}
    for chosen in product(*config.sweep.values()):
        options = dict(zip(config.sweep, map(_value_text, chosen), strict=True))
        at_point = [f"{option}={value}" for option, value in options.items()]
        points[point_name(options)] = compose_experiment(
            experiment, [*overrides, *at_point], config_dir
        )
    return points


def _validate_swept(experiment: str, option: str, values: list[Any]) -> None:
    what = f"experiment '{experiment}' sweeps {option}"
    if option.partition(".")[0] not in SWEPT_GROUPS:
        raise UserError(
            f"{what}: only options of {', '.join(SWEPT_GROUPS)} can be swept; make an experiment for "
            "each of the others"
        )
    texts = [_value_text(value) for value in values]
    odd = [text for text in texts if not re.fullmatch(r"[A-Za-z0-9_.-]+", text)]
    if odd or not texts or len(set(texts)) < len(texts):
        raise UserError(
            f"{what} over {texts}: list different values, each a number, a switch or a word of "
            "letters, digits and '_', '.', '-'"
        )


def _value_text(value: Any) -> str:
    """A value as an override writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def point_name(options: Mapping[str, str]) -> str:
    """Name of a sweep's point and its folder: `engine.concurrency=4,runs.dspark_k3.k=1`."""
    return ",".join(f"{option}={value}" for option, value in options.items())


def point_options(folder: str) -> dict[str, str]:
    """What a folder's name says was swept; nothing when it is no point's."""
    if "=" not in folder:
        return {}
    return dict(part.split("=", 1) for part in folder.split(",") if "=" in part)


def compose_training(
    overrides: Sequence[str] = (), config_dir: str | Path = "config"
) -> ModelsConfig:
    """Compose config/training.yaml with the user's overrides: a target and how its drafter is made.

    Raises:
        UserError: an unknown group or field, or a value that does not fit.
    """
    config: ModelsConfig = _compose(_config_root(config_dir), "training", overrides, "training")
    _validate_drafter(config.drafter)
    return config


class UnknownEntry(Exception):
    """An override names a dataset or run that the experiment does not have."""

    def __init__(self, group: str, entry: str) -> None:
        super().__init__(group, entry)
        self.group, self.entry = group, entry


def _config_root(config_dir: str | Path) -> Path:
    root = Path(config_dir).resolve()
    if not root.is_dir():
        raise UserError(f"no config folder '{root}': run from the top of the checkout")
    return root


def _compose(root: Path, name: str, overrides: Sequence[str], what: str) -> Any:
    """One Hydra composition as dataclasses; errors name `what` was being composed."""
    try:
        with initialize_config_dir(str(root), version_base="1.3"):
            tree = compose(name, overrides=list(overrides))
        for entry, dataset in (tree.get("datasets") or {}).items():
            if OmegaConf.is_missing(dataset, "name"):
                dataset.name = entry
        # Once more against the schema, for an override with a plus adds whatever it names.
        schema = OmegaConf.structured(OmegaConf.get_type(tree))
        return OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.to_container(tree)))
    except OverrideParseException as error:
        raise UserError(
            f"{what}: override '{error.override}' cannot be read: write name=value, and quotes around a "
            "value that holds blanks or other special characters"
        ) from error
    except AssertionError as error:  # Hydra's way to say that it found null where it wants fields
        raise UserError(
            f"{what}: an override sets a field of what is null: choose the whole first, as "
            "drafter=trained before drafter.train.prompts"
        ) from error
    except (HydraException, OmegaConfBaseException) as error:
        groups = [path.name for path in root.iterdir() if path.is_dir()]
        raise UserError(f"{what}: {_explain(error, groups)}") from error
    except ValueError as error:
        raise UserError(
            f"{what}: {error}: an override of a config group names one of its files"
        ) from error


def _explain(error: BaseException, groups: Iterable[str] = ()) -> str:
    """One line of Hydra's message, with the nearest name where a name is unknown.

    Args:
        groups: the config groups that there are.

    Raises:
        UnknownEntry: the names are those of the experiment's own datasets or runs.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    entry = re.search(r"Key '(\w+)' is not in struct full_key: (datasets|runs)\.", text)
    if entry:
        raise UnknownEntry(entry[2], entry[1]) from None
    field = re.search(r"Key '(\w+)' (?:is )?not in '(\w+)'", text)
    if field and field[2] in globals():
        names = globals()[field[2]].__dataclass_fields__
        return f"{field[2]} has no field '{field[1]}': {nearest(field[1], names)}"
    group = re.search(
        r"Could not find '(\S+)/(\S+)' Available options in '\S+': (.*?) Config search", text
    )
    if group:
        return f"{group[1]} '{group[2]}' not found: {nearest(group[2], group[3].split())}"
    whole = re.search(
        r"(?:Invalid type assigned: (?:str|int|float|bool) is not a subclass of \w+|field '\S+' is not "
        r"Optional).* full_key: (\S+)",
        text,
    )
    if whole:
        entry = re.match(r"(dataset|run)s\.", whole[1])
        out = f"; +{entry[1]}@{whole[1]}=FILE adds one, ~{whole[1]} takes it out" if entry else ""
        return f"{whole[1]} has fields: set them, as {whole[1]}.FIELD=VALUE{out}"
    added = re.search(r"dict is not a subclass of (?:Scheduled)?(Run|Dataset)", text)
    if added:
        kind = added[1].lower()
        return (
            f"a {kind} is added by its group, as +{kind}@{kind}s.NAME=FILE; set its fields in further "
            "overrides"
        )
    if re.search(r"is not in struct full_key: sweep\.", text):
        return "a sweep is added, as '+sweep={engine.concurrency:[1,4]}'"
    no_group = re.search(r"config group '(\S+)' does not exist", text)
    if no_group:
        return f"no config group '{no_group[1]}': {nearest(no_group[1], groups)}"
    value = re.search(r"^(.*?) full_key: (\S+)", text)
    if value:
        return f"{value[2]}: {value[1]}"
    return text


def _validate(config: ExperimentConfig) -> None:
    """Refuse values that can only fail later, each with the field's name."""
    _file_name("experiment", config.name, ("logs", "models", "profiles", "training"))
    for name in config.datasets:
        _file_name("datasets", name, ("logs", "models"))
    for name in config.runs:
        _file_name("runs", name, ("shards",))
    if not config.datasets:
        raise UserError(f"experiment '{config.name}' has no datasets: list them in its defaults")
    if "baseline" not in config.runs:
        raise UserError(
            f"experiment '{config.name}' has no run named 'baseline': every speedup is relative "
            "to it, add '/run@runs.baseline: baseline' to its defaults"
        )
    for name, run in config.runs.items():
        if run.mode is Mode.speculative and run.k < 1:
            raise UserError(f"runs.{name}.k is {run.k}: a speculative run needs k of at least 1")
        if run.mode is Mode.baseline and run.k != 0:
            raise UserError(f"runs.{name}.k is {run.k}: a baseline run drafts nothing, set k to 0")
        if not 0 <= run.confidence_threshold <= 1:
            raise UserError(f"runs.{name}.confidence_threshold must lie in [0, 1]")
        if run.schedule and run.confidence_threshold > 0:
            raise UserError(
                f"runs.{name} has both schedule and confidence_threshold: the schedule decides "
                "alone, set one of them"
            )
        train = config.drafter.train
        if train is not None and run.k > train.shape.block_size:
            raise UserError(
                f"runs.{name}.k is {run.k}, and drafter.train.shape.block_size is "
                f"{train.shape.block_size}: a draft is at most one block, change either"
            )
    named: dict[str, str] = {}
    for name, dataset in config.datasets.items():
        other = named.setdefault(dataset.name, name)
        if other != name:
            raise UserError(
                f"datasets.{other} and datasets.{name} are both named '{dataset.name}', and a table "
                f"holds each name once: set datasets.{name}.name={name}"
            )
        _positive(f"datasets.{name}.max_new_tokens", dataset.max_new_tokens)
        if dataset.limit is not None:
            _positive(f"datasets.{name}.limit", dataset.limit)
        _positive(f"datasets.{name}.shards", dataset.shards)
        if dataset.limit is not None and dataset.shards > dataset.limit:
            raise UserError(
                f"datasets.{name}.shards is {dataset.shards} and its limit {dataset.limit}: every "
                f"shard needs a prompt, set shards to {dataset.limit} or less"
            )
        _validate_resources(f"datasets.{name}.resources", asked_resources(dataset))
    _validate_drafter(config.drafter)
    _positive("engine.concurrency", config.engine.concurrency)
    _positive("engine.interleave", config.engine.interleave)
    if config.engine.threads is not None:
        _positive("engine.threads", config.engine.threads)
    if config.sampling.temperature < 0:
        raise UserError("sampling.temperature must not be negative; 0 is greedy")
    if "" in config.sampling.stop:
        raise UserError("sampling.stop holds an empty string, which would end every answer at once")
    if not 0 < config.sampling.top_p <= 1:
        raise UserError("sampling.top_p must lie in (0, 1]; 1 keeps the whole distribution")


def _validate_resources(where: str, asked: dict[str, Any]) -> None:
    for name in ("runtime", "mem_mb", "mem_mb_per_cpu"):
        if name in asked:
            _positive(f"{where}.{name}", asked[name])
    if asked.get("gpu", 0) < 0:
        raise UserError(f"{where}.gpu is {asked['gpu']}: it must not be negative")


def _validate_drafter(drafter: DrafterConfig) -> None:
    if drafter.source is not ModelSource.train:
        return
    if drafter.train is None:
        raise UserError(
            f"drafter '{drafter.name}' has source 'train' but no train settings: add "
            "'/train@train: default' to its defaults"
        )
    _file_name("drafter.name", drafter.name)
    train = drafter.train
    for name in ("prompts", "max_new_tokens", "shard_tokens", "held_out", "calibration", "batch"):
        _positive(f"drafter.train.{name}", getattr(train, name))
    for name in ("accumulate", "anchors", "validate_every"):
        _positive(f"drafter.train.{name}", getattr(train, name))
    _positive("drafter.train.shape.block_size", train.shape.block_size)
    if train.prompts <= train.held_out + train.calibration:
        raise UserError(
            f"drafter.train.prompts is {train.prompts}: held_out ({train.held_out}) and calibration "
            f"({train.calibration}) leave nothing to train on"
        )


def _file_name(what: str, name: str, taken: Sequence[str] = ()) -> None:
    """Refuse a name that becomes one of a file in results/ and cannot be, or is another thing's."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name) or name in taken:
        also = f", and is none of {', '.join(taken)}" if taken else ""
        raise UserError(
            f"{what} '{name}' cannot name a file in results/: a name begins with a letter or digit, has "
            f"letters, digits, '_', '.' and '-' alone{also}"
        )


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{name} is {value}: it must be at least 1")


def training_name(config: ModelsConfig) -> str:
    """Name of the folder that a training goes to: the same settings share it, others don't."""
    return f"{config.drafter.name}-{digest(config)[:8]}"


def models_config(config: ExperimentConfig) -> ModelsConfig:
    """The part of an experiment that preparing its models depends on."""
    return ModelsConfig(target=config.target, drafter=config.drafter)


def job_config(config: ExperimentConfig, dataset: str) -> JobConfig:
    """The part of an experiment that one dataset's job depends on: not what it asks a cluster for."""
    if dataset not in config.datasets:
        raise UserError(
            f"experiment '{config.name}' has no dataset '{dataset}': "
            f"{nearest(dataset, config.datasets)}"
        )
    scheduled = config.datasets[dataset]
    own = {entry.name: getattr(scheduled, entry.name) for entry in fields(DatasetConfig)}
    return JobConfig(
        experiment=config.name,
        dataset=DatasetConfig(**own),
        runs=config.runs,
        engine=config.engine,
        sampling=config.sampling,
    )


def asked_resources(dataset: ScheduledDataset) -> dict[str, Any]:
    """What a dataset asks a cluster for itself, by resource name: strings and ints."""
    return {name: value for name, value in asdict(dataset.resources).items() if value is not None}


def to_yaml(config: Any) -> str:
    """Canonical text of a config: its identity, by which a job knows whether it must run again."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True, sort_keys=True)


def from_yaml(kind: type, path: str | Path) -> Any:
    """Read a resolved config back as the dataclass `kind`, checked against its schema.

    Raises:
        UserError: the file is absent, not YAML, or does not fit the schema.
    """
    try:
        return OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.load(path))
        )
    except FileNotFoundError as error:
        raise UserError(f"config file '{path}' does not exist") from error
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise UserError(f"config file '{path}': {_explain(error)}") from error


def digest(config: Any) -> str:
    """First 16 hex digits of the sha256 of a config's canonical text."""
    return hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16]
