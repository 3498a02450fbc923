"""The target: any decoder-only causal LM that transformers loads, behind one small interface.

The decoder needs four things of a target: embeddings, a forward pass over tokens at given positions
with a caller's KV cache, the hidden states of some layers ("taps"), and logits for chosen rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from dspark.errors import UserError


class Target:
    """A loaded causal LM in eval mode. D hidden size, V vocabulary."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.config = self.model.config.get_text_config()
        self.decoder: Any = self.model.get_decoder()
        self.embed: nn.Module = self.model.get_input_embeddings()
        self.lm_head: Any = self.model.get_output_embeddings()
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.num_layers: int = self.config.num_hidden_layers
        self.max_positions: int = self.config.max_position_embeddings
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def windows(self) -> dict[str, int | None]:
        """Attention window (in tokens, None: unlimited) of each kind of layer the model has."""
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:  # one kind only: Llama has no window, Mistral may have one
            return {"all": window}
        return {kind: window if kind == "sliding_attention" else None for kind in set(kinds)}

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Any,
        masks: dict[str, Tensor],
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run `tokens` [R, T] at `positions` [R, T].

        Args:
            cache: has `update(key, value, layer)`, which stores K and V [R, G, T, h] and returns all
                that this layer attends to.
            masks: for each kind of layer in `windows` a bool mask [R, 1, T, S], true = attend.
            taps: layers whose outputs are wanted; -1 is the embedding output.

        Returns:
            Final states (after the last norm) [R, T, D], and the taps concatenated [R, T, M*D].
        """
        caught: dict[int, Tensor] = {}
        hooks = [self._tap(layer, caught) for layer in taps]
        mask: Any = masks["all"] if "all" in masks else masks
        try:
            states = self.decoder(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                cache=cache,
                use_cache=True,
            ).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return states, torch.cat([caught[layer] for layer in taps], dim=-1) if taps else None

    def _tap(self, layer: int, caught: dict[int, Tensor]) -> Any:
        module = self.embed if layer == -1 else self.decoder.layers[layer]

        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            caught[layer] = output[0] if isinstance(output, tuple) else output

        return module.register_forward_hook(keep)

    def logits(self, states: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Final states [..., D] to logits [..., V], or to those of `tokens` [C] alone [..., C]."""
        if tokens is None:
            logits = self.lm_head(states)
        else:
            bias = None if self.lm_head.bias is None else self.lm_head.bias[tokens]
            logits = nn.functional.linear(states, self.lm_head.weight[tokens], bias)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def load_target(path: str | Path, device: str, dtype: torch.dtype) -> Target:
    """Load a Hugging Face model directory, safetensors only and without remote code.

    Raises:
        UserError: no such directory, a model transformers cannot load as a causal LM, or weights
            that are corrupt or in another format than safetensors.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        if config.is_encoder_decoder:
            raise UserError(f"target '{path}' is an encoder-decoder ({config.model_type}): "
                            "only decoder-only causal LMs can be decoded here")
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"target '{path}' cannot be loaded: {reason}") from error
    return Target(model.to(device))
