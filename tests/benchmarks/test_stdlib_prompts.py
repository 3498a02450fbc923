"""Prompts from the standard library can be read, answered and told from the evaluation sets."""

from __future__ import annotations

import email
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from dspark.data.prompts import read_prompts

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import stdlib_prompts

    return stdlib_prompts


def test_signature_and_docstring_of_documented_functions(
    script: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "site-packages").mkdir()
    module = '''
class Thing:
    def count(self, word: str, limit=3) -> int:
        """Count how often the word occurs, up to a limit that the caller gives.

        Nothing is counted twice.
        """
        return 1

    def other(self):
        """Too short."""
'''
    (tmp_path / "thing.py").write_text(module)
    (tmp_path / "site-packages/theirs.py").write_text(module)
    (tmp_path / "broken.py").write_text("def (")
    assert list(script.functions(tmp_path)) == [
        (
            "count",
            "def count(word: str, limit=3) -> int:\n"
            '    """Count how often the word occurs, up to a limit that the caller gives.\n\n'
            '    Nothing is counted twice.\n    """',
        )
    ]


def test_the_same_seed_writes_the_same_prompts(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one package of the library: the whole takes seconds to read."""
    package = {"stdlib": str(Path(email.__file__).parent)}
    monkeypatch.setattr(script.sysconfig, "get_paths", lambda: package)
    texts = []
    for name, seed in (("one", "0"), ("same", "0"), ("other", "1")):
        out = tmp_path / f"{name}.jsonl"
        result = CliRunner().invoke(
            script.main, ["--out", str(out), "--limit", "20", "--seed", seed]
        )
        assert result.exit_code == 0, result.output
        prompts = read_prompts(out)
        assert len(prompts) == 20
        assert all("```python\ndef " in prompt.turns[0] for prompt in prompts)
        texts.append([prompt.turns for prompt in prompts])
    assert texts[0] == texts[1] != texts[2]
