"""Every command that a help text or a page shows is one that the command line takes.

All are parsed, and those on experiments composed, with the configs that the pages tell the reader to
write. What costs little is run.
"""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from snakemake.cli import get_argument_parser

from dspark.cli import cli
from dspark.config import compose_points, compose_training, job_config, split_overrides
from dspark.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "results" / "README.md"]
PAGES += sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
MAKE_TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
PROGRAMS = ("dspark", "make", "snakemake", "torchrun")  # whose commands are looked at
CHEAP = {"config", "status"}  # verbs that are run


@dataclass(frozen=True)
class Example:
    """A command and where it is shown."""

    where: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


def commands(where: str, text: str) -> list[Example]:
    """The commands among some lines: a backslash goes on, two blanks and # begin a comment."""
    lines = [
        re.split(r"\s{2,}# ", line)[0].strip() for line in text.replace("\\\n", " ").splitlines()
    ]
    chosen = [line for line in lines if line.startswith(tuple(f"{name} " for name in PROGRAMS))]
    return [Example(where, tuple(shlex.split(line))) for line in chosen]


def help_examples() -> list[Example]:
    found = []
    for name, verb in sorted(cli.commands.items()):
        _, _, shown = (verb.help or "").partition("Example: ")
        found += commands(f"{name} --help", shown.split("\n\n")[0])
    return found


def page_examples() -> list[Example]:
    found = []
    for page in PAGES:
        for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S):
            found += commands(page.name, block) if not kind else []
    return found


HELP, SHOWN = help_examples(), page_examples()
OURS = [
    example
    for example in HELP + SHOWN
    if example.words[0] == "dspark" or "dspark.cli" in example.words
]


def verb_and_args(example: Example) -> tuple[str, list[str]]:
    start = example.words.index("dspark.cli" if "dspark.cli" in example.words else "dspark")
    return example.words[start + 1], list(example.words[start + 2 :])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's configs, with the files that the pages tell the reader to write."""
    folder = tmp_path_factory.mktemp("checkout") / "config"
    shutil.copytree(ROOT / "config", folder)
    for page in PAGES:
        told = r"`config/([\w/]+\.yaml)`[^`]*:\n\n```yaml\n(.*?)^```"
        for path, text in re.findall(told, page.read_text(), re.M | re.S):
            if (
                page.name != "README.md"
            ):  # its experiment `mine` is another, composed by its own test
                (folder / path).write_text(text)
    return folder


@pytest.mark.parametrize("verb", sorted(cli.commands))
def test_every_verb_shows_an_example_of_itself(verb: str) -> None:
    own = [e for e in HELP if e.where == f"{verb} --help"]
    assert own and {verb_and_args(example)[0] for example in own} == {verb}


@pytest.mark.parametrize("example", OURS, ids=str)
def test_a_shown_command_is_taken(
    example: Example, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    name, args = verb_and_args(example)
    assert name in cli.commands
    if name.startswith("-"):
        return
    context = cli.commands[name].make_context(name, list(args))
    if "experiment" in context.params:
        experiment, overrides = context.params["experiment"], context.params["overrides"]
        points = compose_points(experiment, overrides, config)
        if context.params.get("dataset"):
            job_config(points[""], context.params["dataset"])
    elif "overrides" in context.params:
        compose_training(context.params["overrides"], config)


@pytest.mark.parametrize("example", [e for e in SHOWN if e.words[0] == "snakemake"], ids=str)
def test_a_shown_workflow_is_taken(example: Example, config: Path) -> None:
    words = list(example.words[1:])
    known = vars(get_argument_parser().parse_args(words))
    if known["workflow_profile"]:
        assert (ROOT / known["workflow_profile"]).is_dir()
    settings = dict(item.split("=", 1) for item in known["config"] or [])
    if known["config"]:
        experiment = settings.get("experiment", "demo")
        compose_points(experiment, split_overrides(settings.get("overrides")), config)


@pytest.mark.parametrize("example", [e for e in SHOWN if e.words[0] == "make"], ids=str)
def test_a_shown_make_target_exists(example: Example) -> None:
    assert {word for word in example.words[1:] if "=" not in word} <= MAKE_TARGETS


@pytest.mark.parametrize("example", [e for e in OURS if verb_and_args(e)[0] in CHEAP], ids=str)
def test_a_cheap_command_runs(
    example: Example, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    name, args = verb_and_args(example)
    done = CliRunner().invoke(cli, [name, *args])
    assert done.exit_code == 0, done.exception
    assert done.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_verbs_in_running_text_exist(page: Path) -> None:
    assert set(re.findall(r"`dspark ([\w-]+)", page.read_text())) <= set(cli.commands)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run", "demo", "--prfile", "x"], "--profile"),
        (["config", "demo", "--datset", "gsm8k"], "--dataset"),
        (["table", "--alow-unpaired"], "--allow-unpaired"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(args: list[str], said: str) -> None:
    with pytest.raises(click.NoSuchOption) as caught:
        cli.main(args, standalone_mode=False)
    assert said in caught.value.format_message()


def test_a_misspelt_verb_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"did you mean 'doctor'\?"):
        cli.main(["docter"], standalone_mode=False)
