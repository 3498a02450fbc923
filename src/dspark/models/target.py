"""The target: any decoder-only causal LM that transformers loads, behind one small interface.

The decoder needs four things of a target: embeddings, a forward pass over tokens at given positions
with a caller's KV cache, the hidden states of some layers ("taps"), and logits for chosen rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from dspark.errors import UserError
from dspark.memory import free_bytes, gib, is_out_of_memory
from dspark.models.attention import NAME, Packing
from dspark.models.directory import check_code, weight_bytes, weight_files
from dspark.models.fused import FAMILIES, FusedDecoder
from dspark.models.head import LMHead
from dspark.models.packed import pack_linears


class Target:
    """A loaded causal LM in eval mode. D hidden size, V vocabulary."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = self.model.config.get_text_config()
        self.decoder: Any = self.model.get_decoder()
        self.embed: nn.Module = self.model.get_input_embeddings()
        self.lm_head: Any = self.model.get_output_embeddings()
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.num_layers: int = self.config.num_hidden_layers
        self.max_positions: int = self.config.max_position_embeddings
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        # Cohere multiplies its logits, Granite divides them.
        multiplier = getattr(self.config, "logit_scale", None) or 1.0
        self.head = LMHead(
            self.lm_head.weight,
            self.lm_head.bias,
            multiplier / (getattr(self.config, "logits_scaling", None) or 1.0),
            getattr(self.config, "final_logit_softcapping", None),
        )
        self.fused: FusedDecoder | None = None
        self.packs = False  # whether a pass may hold rows of different lengths, see Packing

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def pack(self) -> None:
        """Lay the weights out for decoding on a CPU: faster, and no more to be trained or saved."""
        if self.config.model_type in FAMILIES:
            self.fused = FusedDecoder(self.decoder, self.config, self.windows)
        else:
            pack_linears(self.decoder)
        self.head = self.head.pack()

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
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run `tokens` [R, T] at `positions` [R, T].

        Args:
            cache: has `update(key, value, layer)`, which stores K and V [R, G, T, h] and returns all
                that this layer attends to.
            masks: for each kind of layer in `windows` a bool mask [R, 1, T, S], true = attend.
            taps: layers whose outputs are wanted; -1 is the embedding output.
            packing: tokens and positions are [1, B], rows of different lengths one after the other;
                masks are the padded rows'. Only where `packs`.

        Returns:
            Final states (after the last norm) [R, T, D], and the taps concatenated [R, T, M*D].
        """
        if self.fused is not None:
            return self.fused(tokens, positions, cache, masks, taps, packing)
        caught: dict[int, Tensor] = {}
        hooks = [self._tap(layer, caught) for layer in taps]
        mask: Any = masks.get("all", masks)
        try:
            states = self.decoder(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                cache=cache,
                use_cache=True,
                **({} if packing is None else {"packing": packing}),
            ).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return states, torch.cat([caught[layer] for layer in taps], dim=-1) if taps else None

    def _tap(self, layer: int, caught: dict[int, Tensor]) -> Any:
        def keep_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught[layer] = args[0] if args else kwargs["hidden_states"]

        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            caught[layer] = output[0] if isinstance(output, tuple) else output

        if layer == -1:  # what the first layer reads: some families scale the embeddings
            return self.decoder.layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)
        return self.decoder.layers[layer].register_forward_hook(keep)

    def logits(self, states: Tensor) -> Tensor:
        """Final states [..., D] to logits [..., V]."""
        return self.head(states)


def load_target(
    path: str | Path, device: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> Target:
    """Load a Hugging Face model directory, safetensors only.

    Args:
        trust_remote_code: whether code that the directory brings may run.

    Raises:
        UserError: no such directory, a model transformers cannot load as a causal LM, weights that
            are incomplete, corrupt, too large for the device or in another format than safetensors,
            code that is not trusted, or a family whose forward pass does more than the decoder knows
            of.
    """
    if not (Path(path) / "config.json").is_file():
        raise UserError(f"target '{path}' has no config.json: give a Hugging Face model directory")
    check_code(path, trust_remote_code)
    files = weight_files(path, "target")
    too_large = partial(_too_large, path, files, device, dtype)
    if _needed(files, dtype) > free_bytes(device):
        raise UserError(too_large())
    logging.disable_progress_bar()  # a bar over the tensors of a local file only clutters the log
    try:
        config = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
        _check_weights_name(path, config)
        if config.is_encoder_decoder:
            raise UserError(
                f"target '{path}' is an encoder-decoder ({config.model_type}): "
                "only decoder-only causal LMs can be decoded here"
            )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # so that the report names them
            output_loading_info=True,
        )
        model, report = loaded
        _check_complete(path, report)
        model = model.to(device)
        theirs = _own_logits(model)
        _check_finite(path, model, theirs)
        model.set_attn_implementation(NAME)
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(too_large()) from error
        raise UserError(
            f"target '{path}' cannot be loaded ({_one_line(error)}): check config.json, or fetch the "
            "model again"
        ) from error
    try:
        target = Target(model)
        reason = _length_dependent_rope(target.config) or _disagreement(target, theirs)
    except Exception as error:
        reason = _one_line(error)
    if reason is not None:
        raise UserError(
            f"target '{path}': models of type {config.model_type} cannot be decoded here "
            f"({reason}); choose a causal LM with plain full or sliding-window attention"
        )
    target.packs = _packs(target, theirs)
    return target


def _needed(files: list[Path], dtype: Any) -> int:
    """Bytes of the weights as they are loaded; `dtype` may be transformers' "auto"."""
    return weight_bytes(files, dtype if isinstance(dtype, torch.dtype) else None)


def _too_large(path: str | Path, files: list[Path], device: str, dtype: Any) -> str:
    kind = str(dtype).removeprefix("torch.")
    return (
        f"target '{path}' needs {gib(_needed(files, dtype))} for its weights in {kind} and {device} has "
        f"{gib(free_bytes(device))} free: take a smaller model, precision bfloat16 or a device with "
        "more memory"
    )


def _check_weights_name(path: str | Path, config: Any) -> None:
    """Refuse a config that names another file for its weights: transformers would open a pickle."""
    name = getattr(config, "transformers_weights", None)
    if name is not None:
        raise UserError(
            f"target '{path}': transformers_weights in config.json names '{name}', and weights are read "
            "from model.safetensors or its index alone: delete the field"
        )


def _length_dependent_rope(config: Any) -> str | None:
    """Name of a RoPE whose rotations depend on the longest row of a batch, or None.

    With such a one a row's output would depend on its neighbours, and on drafts past its end.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    names = {kind.get("rope_type") for kind in kinds} & {"dynamic", "longrope"}
    return f"its {names.pop()} RoPE changes with the batch's longest row" if names else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _check_complete(path: str | Path, report: Any) -> None:
    """Refuse weights that transformers would fill up with random numbers."""
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise UserError(
            f"target '{path}': tensor {name} is {list(stored)}, expected {list(expected)}: "
            "fetch the model again"
        )
    for name in sorted(report["missing_keys"]):
        raise UserError(f"target '{path}': tensor {name} is missing: fetch the model again")


def _check_finite(path: str | Path, model: Any, logits: Tensor) -> None:
    """Refuse a model whose logits say nothing, naming the tensor that makes them so if one does."""
    if logits.isfinite().all():
        return
    tensors = model.named_parameters()
    broken = next((name for name, value in tensors if not value.isfinite().all()), None)
    cause = "" if broken is None else f", for tensor {broken} holds values that are not"
    raise UserError(
        f"target '{path}' gives logits that are not finite{cause}: fetch the model again, or take "
        "precision float32"
    )


class _Appended:
    """The least KV cache: appends what it is given, to the rows that `packing` names."""

    def __init__(self, packing: Packing | None = None) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.packing = packing

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.packing is not None:
            spread = self.packing.spread
            key, value = (spread(x[0].transpose(0, 1)).transpose(1, 2) for x in (key, value))
        if layer in self.layers:
            before = self.layers[layer]
            key, value = torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
        self.layers[layer] = key, value
        return key, value


CHECKED = 8  # tokens of the self-check


def _check_ids(model: Any) -> Tensor:
    return (
        torch.arange(CHECKED, device=model.device)[None] % model.config.get_text_config().vocab_size
    )


@torch.inference_mode()
def _own_logits(model: Any) -> Tensor:
    """Logits [1, 8, V] of a few tokens by the model itself, with transformers' own attention."""
    return model(input_ids=_check_ids(model), use_cache=False).logits.float()


def _masks(target: Target, positions: Tensor, length: int) -> dict[str, Tensor]:
    distance = positions[..., None] - torch.arange(length, device=target.device)
    return {
        kind: ((distance >= 0) & (distance < (window or length)))[:, None]
        for kind, window in target.windows.items()
    }


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours.float() - theirs).abs().mean() <= 0.2 * theirs.std())


@torch.inference_mode()
def _disagreement(target: Target, theirs: Tensor) -> str | None:
    """Run a few tokens in two parts through `target`, against what the model itself made of them.

    Returns:
        None when the logits agree; else what is wrong. A family may scale its logits, keep other
        states than K and V or mask in its own way: that must not pass for the target's output.
    """
    ids, cache, parts = _check_ids(target.model), _Appended(), []
    for begin, end in ((0, 5), (5, CHECKED)):
        positions = torch.arange(begin, end, device=target.device)[None]
        masks = _masks(target, positions, end)
        states, _ = target.forward(ids[:, begin:end], positions, cache, masks, (-1, 0))
        parts.append(target.logits(states))
    same = _agree(torch.cat(parts, dim=1), theirs)
    return None if same else "its logits are not those of its last layer"


@torch.inference_mode()
def _packs(target: Target, theirs: Tensor) -> bool:
    """Whether the family hands a packing on to its attention: rows of 8 and 5 tokens in one pass."""
    ids, packing = _check_ids(target.model)[0], Packing.of([CHECKED, 5], target.device)
    masks = _masks(target, torch.arange(CHECKED, device=target.device).expand(2, -1), CHECKED)
    positions = packing.places[None]
    try:
        cache = _Appended(packing)
        states, _ = target.forward(ids[packing.places][None], positions, cache, masks, (), packing)
        return _agree(target.logits(states)[0], theirs[0, packing.places])
    except Exception:  # whatever a family does with a keyword or with shapes that it does not know
        return False
