"""The hub source on a real client: a cache laid out by hand, and a hub served on this machine."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dspark.config import DatasetConfig, PromptSource
from dspark.data.prepare import prepare_prompts
from dspark.data.prompts import Prompt
from dspark.errors import UserError
from fake_hub import GATED, SHA, Repo, ask, serve


def config(**fields: Any) -> DatasetConfig:
    hub = {"source": PromptSource.hub, "repo": "o/n", "revision": SHA, "file": "d.jsonl"}
    return DatasetConfig(**{"name": "set", **hub, **fields})


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(*rows: dict[str, Any]) -> bytes:
    sink = BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink)
    return sink.getvalue()


@pytest.fixture
def prompts_of(fill_cache: Callable[..., None]) -> Callable[..., list[Prompt]]:
    """Cache one file, then prepare the dataset that it holds."""

    def prepare(content: bytes, **fields: Any) -> list[Prompt]:
        dataset = config(**fields)
        fill_cache("o/n", SHA, str(dataset.file), content)
        return prepare_prompts(dataset)

    return prepare


ROWS = [{"q": "one?", "n": 1}, {"q": "two?", "n": None}]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("d.jsonl", jsonl(*ROWS)),
        ("d.jsonl", jsonl(*ROWS).replace(b"\n", b"\n\n")),
        ("deep/d.jsonl.gz", gzip.compress(jsonl(*ROWS), mtime=0)),
        ("d.json", json.dumps(ROWS, indent=1).encode()),
        ("D.JSON.GZ", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("main/d-00000-of-00001.parquet", parquet(*ROWS)),
    ],
)
def test_every_file_kind_gives_the_same_prompts(prompts_of, file: str, content: bytes) -> None:
    found = prompts_of(content, file=file, template="Q: {q}\nA:")
    assert found == [
        Prompt("set/0", ["Q: one?\nA:"]),
        Prompt("set/1", ["Q: two?\nA:"]),
    ]


def test_values_come_out_as_they_stand_in_the_file(prompts_of) -> None:
    row = {"q": "0012", "id": 12345678901234567890, "date": "2020-01-01", "x": 0.1}
    assert prompts_of(jsonl(row), template="{q} {id} {date} {x}")[0].turns == [
        "0012 12345678901234567890 2020-01-01 0.1"
    ]


def test_braces_in_values_are_left_alone_and_doubled_ones_are_literal(prompts_of) -> None:
    row = {"q": r"$\frac{1}{2}$ {n} {} {{x}}", "n": 1}
    found = prompts_of(jsonl(row), template=r"{q} \boxed{{}} {{q}}")
    assert found[0].turns == [r"$\frac{1}{2}$ {n} {} {{x}} \boxed{} {q}"]


def test_a_field_name_is_plain_text(prompts_of) -> None:
    assert prompts_of(jsonl({"a.b": "x", "c d": "y"}), template="{a.b}{c d}")[0].turns == ["xy"]


@pytest.mark.parametrize("encode", [jsonl, parquet])
def test_a_list_field_gives_the_turns(prompts_of, encode: Callable[..., bytes]) -> None:
    kind = "d.parquet" if encode is parquet else "d.jsonl"
    found = prompts_of(encode({"prompt": ["a", "b"]}), file=kind, turns_field="prompt")
    assert found == [Prompt("set/0", ["a", "b"])]


def chat(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


@pytest.mark.parametrize("encode", [jsonl, parquet])
@pytest.mark.parametrize(
    ("row", "turns"),
    [
        (chat(("user", "a"), ("assistant", "b")), ["a"]),
        (chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")), ["a", "c"]),
        # The last user message has no answer in the dataset: it is not asked.
        (chat(("user", "a"), ("assistant", "b"), ("user", "c")), ["a"]),
        (chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", " ")), ["a"]),
        ({"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a"]),
    ],
)
def test_a_chat_gives_the_user_turns_before_the_last_answer(
    prompts_of, encode: Callable[..., bytes], row: dict[str, Any], turns: list[str]
) -> None:
    kind = "d.parquet" if encode is parquet else "d.jsonl"
    found = prompts_of(encode(row), file=kind, messages_field="messages")
    assert found == [Prompt("set/0", turns)]


def test_a_transcript_is_one_prompt_that_asks_for_the_last_answer(prompts_of) -> None:
    row = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    found = prompts_of(jsonl(row), messages_field="messages", transcript=True)
    assert found == [Prompt("set/0", ["User: a\nAssistant: b\nUser: c\nAssistant:"])]


def test_rows_past_the_limit_are_not_looked_at(prompts_of) -> None:
    content = jsonl({"q": "fine"}, {"q": ""})
    assert len(prompts_of(content, template="{q}", limit=1)) == 1


def test_a_short_dataset_states_both_numbers(prompts_of) -> None:
    with pytest.raises(UserError, match="has 2 prompts but limit asks for 5000"):
        prompts_of(jsonl(*ROWS), template="{q}", limit=5000)


ROW = {"q": "x", "z": None, "many": ["a", "b"]}
WHERE = r"dataset 'set': d\.jsonl of o/n, "


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        (ROW, {"template": "{p}"}, "row 0 has no field 'p': its fields are many, q, z"),
        (ROW, {"turns_field": "p"}, "row 0 has no field 'p': its fields are many, q, z"),
        (ROW, {"messages_field": "p"}, "row 0 has no field 'p': its fields are many, q, z"),
        (ROW, {"template": "{z}"}, "row 0: template field 'z' is null: it must be text"),
        (ROW, {"template": "{many}"}, "row 0: template field 'many' is a list: it must be text"),
        (ROW, {"turns_field": "q"}, "row 0: turns_field 'q' is text, not a list"),
        (ROW, {"messages_field": "q"}, "row 0: messages_field 'q' is text: name a field"),
        (ROW, {"messages_field": "many"}, "row 0: field 'many' is not a chat"),
        ({"q": " "}, {"template": "{q}"}, "row 0: turn 1 is blank"),
        ({"q": ["a", 1]}, {"turns_field": "q"}, "row 0: turn 2 is a number: it must be text"),
        ({"q": []}, {"turns_field": "q"}, "row 0: 'turns' is empty"),
        (chat(("user", "a")), {"messages_field": "messages"}, "row 0: .* has no user message"),
        (chat(("assistant", "a")), {"messages_field": "messages"}, "row 0: .* has no user message"),
        (
            chat(("system", "s"), ("user", "a"), ("assistant", "b")),
            {"messages_field": "messages"},
            "row 0: field 'messages' has a message of role 'system': a prompt holds user turns",
        ),
        ("x", {"template": "{q}"}, "line 1: the row is text, not an object"),
    ],
)
def test_a_row_that_makes_no_prompt_is_named(
    prompts_of, row: Any, fields: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=WHERE + message) as caught:
        prompts_of(jsonl(row), **fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("d.jsonl", b'{"q": "x"}\n{"q": \n', r"d\.jsonl of o/n, line 2: not JSON"),
        ("d.jsonl", b'{"q": "x"}\n\xff', r"d\.jsonl of o/n, line 2: byte 0xff is not UTF-8"),
        ("d.json", b'{"q": "x"}', r"d\.json of o/n: the file is an object, not a list of rows"),
        ("d.json", b"[1]", r"d\.json of o/n, row 0: the row is a number, not an object"),
        ("d.jsonl.gz", b"plain", r"d\.jsonl\.gz of o/n: the file can't be read \(Not a gzipped"),
        ("d.jsonl.gz", gzip.compress(b"x" * 99, mtime=0)[:-9], "the file can't be read"),
        ("d.parquet", b"plain", r"d\.parquet of o/n: not a readable parquet file"),
        ("d.jsonl", b"", r"'set' has no prompts: d\.jsonl has no rows"),
    ],
)
def test_a_damaged_file_is_named(prompts_of, file: str, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        prompts_of(content, file=file, template="{q}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"revision": None}, "source 'hub' but no revision: pin the commit sha"),
        ({"revision": ""}, "source 'hub' but no revision: pin the commit sha"),
        (
            {"revision": "main"},
            "revision 'main', which is not a commit sha: a branch or tag may move",
        ),
        ({"repo": None}, "source 'hub' but no repo: set repo"),
        ({"file": None}, "source 'hub' but no file: set file"),
        ({"file": "d.csv"}, r"can't read 'd\.csv': the file must end in \.parquet, \.jsonl"),
        ({"template": None}, "sets no way to read a row: set exactly one of template, turns"),
        ({"turns_field": "q"}, "sets template and turns_field: set exactly one of"),
        ({"template": "x {"}, "template is malformed .*: write {{ and }} for literal braces"),
        ({"template": r"{q} \boxed{}"}, "braces without a field name: write {field}, or {{}}"),
        ({"template": "{q!r}"}, "template formats field 'q': write {q} alone"),
        ({"template": "{q:>9}"}, "template formats field 'q': write {q} alone"),
        ({"template": "hello"}, "template names no field"),
        ({"template": ""}, "template names no field"),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_any_fetch(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        prepare_prompts(config(**{"template": "{q}", **fields}))
    assert "\n" not in str(caught.value)


def test_offline_without_the_file_names_it_and_the_remedies(fill_cache) -> None:
    fill_cache("o/n", SHA, "other.jsonl", jsonl(*ROWS))
    with pytest.raises(UserError) as caught:
        prepare_prompts(config(template="{q}"))
    message = str(caught.value)
    assert message.startswith(f"dataset 'set': d.jsonl of o/n at revision {SHA}: not in the local")
    assert "HF_HUB_OFFLINE is set" in message
    assert f"'hf download o/n d.jsonl --repo-type dataset --revision {SHA}'" in message
    assert "source=file and path=" in message
    assert "\n" not in message


def test_a_repo_name_that_cannot_be_is_named() -> None:
    with pytest.raises(UserError, match=r"the hub takes no such name .*: check repo"):
        prepare_prompts(config(repo="a/b/c", template="{q}"))


def test_a_file_name_that_leaves_the_repo_is_refused(fill_cache) -> None:
    fill_cache("o/n", SHA, "d.jsonl", jsonl(*ROWS))
    with pytest.raises(UserError, match=r"\.\./d\.jsonl of o/n at revision"):
        prepare_prompts(config(file="../d.jsonl", template="{q}"))


REFUSED = {"X-Error-Message": "Invalid credentials in Authorization header"}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    large = {"d.jsonl.gz": gzip.compress(jsonl(*ROWS), mtime=0)}
    repos = {
        "datasets/o/n": Repo({"d.jsonl": jsonl(*ROWS), **large}),
        "datasets/o/other": Repo(
            {"d.jsonl": jsonl(*ROWS), **large},
            sent={
                "d.jsonl": jsonl(*ROWS).replace(b"one", b"two"),
                "d.jsonl.gz": large["d.jsonl.gz"][:-1] + b"x",
            },
        ),
        "datasets/o/gated": Repo(status=403, headers=GATED),
        "datasets/o/token": Repo(status=401, headers=REFUSED),
    }
    with serve(repos) as address:
        yield address


SCRIPT = """
import json, sys
from dspark.config import DatasetConfig, PromptSource
from dspark.data.prepare import prepare_prompts
from dspark.errors import UserError
for fields in json.loads(sys.argv[1]):
    try:
        found = prepare_prompts(DatasetConfig(source=PromptSource.hub, **fields))
        print(json.dumps([prompt.turns for prompt in found]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def prepare_all(cases: list[dict[str, Any]], home: Path, **env: str) -> list[Any]:
    """Prepare each case; the prompts' turns, or the message that says why not."""
    common = {"name": "set", "repo": "o/n", "revision": SHA, "file": "d.jsonl", "template": "{q}"}
    return ask(SCRIPT, [{**common, **case} for case in cases], home, **env)


def test_a_file_is_fetched_once_and_each_refusal_has_its_remedy(hub: str, tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"repo": "o/none"},
        {"repo": "o/gated"},
        {"repo": "o/token"},
        {"revision": "dead" * 10},
        {"file": "none.jsonl"},
    ]
    turns, repo, gated, token, revision, file = prepare_all(cases, tmp_path, HF_ENDPOINT=hub)
    assert turns == [["one?"], ["two?"]]
    assert "o/none" in repo and "the hub has no such repo" in repo
    assert "the repo is gated: accept its terms" in gated
    assert "the hub refuses (" in token and "check HF_TOKEN" in token
    assert f"at revision {'dead' * 10}: the repo has no such revision" in revision
    assert f"none.jsonl of o/n at revision {SHA}: the repo has no such file" in file
    # What was fetched serves a later run without a network.
    assert prepare_all([{}], tmp_path, HF_HUB_OFFLINE="1") == [turns]


def test_other_bytes_than_the_hub_has_are_refused(hub: str, tmp_path: Path) -> None:
    """Of the right length, or the client itself would notice: small and large files."""
    cases = [{"repo": "o/other", "file": file} for file in ("d.jsonl", "d.jsonl.gz")]
    for message, case in zip(prepare_all(cases, tmp_path, HF_ENDPOINT=hub), cases, strict=True):
        assert f"'{case['file']}' from the hub is corrupt: checksum " in message
        assert "the hub says " in message and "/blobs/" in message


def test_a_network_that_refuses_is_an_unreachable_hub(hub: str, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": hub}
    (message,) = prepare_all([{}], tmp_path, **env)
    assert f"d.jsonl of o/n at revision {SHA}: not in the local cache, and the hub" in message
    assert "HF_HUB_OFFLINE=1" in message and "source=file" in message and "builtin" in message
