"""Text to token ids and back, with the target's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dspark.errors import UserError
from dspark.models.directory import check_code

_MARK = "\u2402user\u2402"  # stands for the user's text while the template's open prefix is found


class ChatTokenizer:
    """The target's tokenizer: turns of a conversation to ids, ids to text."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids

    def encode_turn(self, turns: Sequence[str], answers: Sequence[str], chat: bool) -> list[int]:
        """Ids of the prompt for the last of `turns`, with the answers given to the earlier ones.

        With `chat` the target's template lays the conversation out and opens the answer; without
        it the texts are joined by blank lines and sent as they are.

        Raises:
            UserError: `chat` is asked of a tokenizer without a chat template, or that fails.
        """
        if not chat:
            parts = [part for pair in zip(turns, answers, strict=False) for part in pair]
            return self.tokenizer("\n\n".join([*parts, turns[-1]]))["input_ids"]
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": turn},
            ]
        return self._ids(self._lay_out(messages, add_generation_prompt=True))

    def open_user_turn(self, opener: str) -> list[int]:
        """Ids of a conversation whose first user turn has begun with `opener` and is not over.

        Raises:
            UserError: the tokenizer has no chat template, or that fails.
        """
        text = self._lay_out([{"role": "user", "content": _MARK}], add_generation_prompt=False)
        return self._ids(text.split(_MARK)[0] + opener)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _lay_out(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        if self.tokenizer.chat_template is None:
            raise UserError(
                "the target's tokenizer has no chat template: set chat=false for its datasets"
            )
        try:  # the template is code of the model's, in Jinja's sandbox
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:
            raise UserError(
                f"the target's chat template fails ({_one_line(error)}): mend it in the tokenizer's "
                "files, or set chat=false for its datasets"
            ) from error

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> ChatTokenizer:
    """Load the tokenizer of a Hugging Face model directory and its end-of-sequence ids.

    Args:
        trust_remote_code: whether code that the directory brings may run.

    Raises:
        UserError: the directory holds no tokenizer that transformers can load, its configs are
            broken, or it brings code that is not trusted.
    """
    check_code(path, trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise UserError(
            f"target '{path}' has no usable tokenizer ({_one_line(error)}): put the model's tokenizer "
            "files beside its config"
        ) from error
    return ChatTokenizer(tokenizer, _eos_ids(Path(path), tokenizer.eos_token_id))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _eos_ids(path: Path, fallback: int | None) -> frozenset[int]:
    """What ends an answer: generation_config.json's ids (there may be several), else config.json's."""
    for name in ("generation_config.json", "config.json"):
        file = path / name
        try:
            value = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise UserError(
                f"'{file}' is not a JSON object ({error}): fetch the model again"
            ) from error
        if value is not None:
            return frozenset([value] if isinstance(value, int) else value)
    return frozenset() if fallback is None else frozenset([fallback])
