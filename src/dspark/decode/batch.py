"""What the device work of a step is told."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dspark.decode.sampling import Sampling


@dataclass
class Batch:
    """What a step reads of its R rows, and k drafted."""

    anchors: Tensor  # [R] newest tokens, not yet seen by the target
    starts: Tensor  # [R] their positions
    longest: int  # the greatest of these
    sampling: list[Sampling]
    uniforms: Tensor | None  # [R, 2k + 1] in [0, 1); None when all rows are greedy
    bucket: int | None = None  # cached positions that each pass reads; None: as many as it needs

    def length(self, tokens: int) -> int:
        """Cached positions that a pass over `tokens` tokens a row reads."""
        return self.longest + tokens if self.bucket is None else self.bucket
