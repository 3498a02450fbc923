"""The data stage: a dataset's config to the prompts that will be asked."""

from __future__ import annotations

from dspark.config import DatasetConfig, PromptSource
from dspark.data.builtin import builtin_prompts
from dspark.data.file import file_prompts
from dspark.data.hub import hub_prompts
from dspark.data.prompts import Prompt
from dspark.errors import UserError


def prepare_prompts(config: DatasetConfig) -> list[Prompt]:
    """The dataset's prompts in file order, the first `limit` of them when a limit is set.

    Raises:
        UserError: the source can't give prompts, or gives fewer than the limit.
    """
    if config.limit is not None and config.limit < 1:
        raise UserError(f"dataset '{config.name}' has limit {config.limit}: it must be at least 1")
    if config.source is PromptSource.hub:
        prompts = hub_prompts(config)
    elif config.source is PromptSource.file:
        prompts = file_prompts(config)
    else:
        prompts = builtin_prompts(config.name)
    if not prompts:
        raise UserError(
            f"dataset '{config.name}' has no prompts: {config.file} has no rows, name another file"
        )
    if config.limit is not None and len(prompts) < config.limit:
        raise UserError(
            f"dataset '{config.name}' has {len(prompts)} prompts but limit asks for "
            f"{config.limit}: set limit to {len(prompts)} or less, or to null to take all"
        )
    return prompts[: config.limit]
