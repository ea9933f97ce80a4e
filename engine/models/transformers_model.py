"""Any decoder-only model of the transformers library, run over our paged KV cache.

transformers supplies the layers and the weights. Attention is ours: transformers calls a function
that we register as `ATTENTION`. It gets queries, keys and values after RoPE, stores the new keys
and values, and attends over the pages. The `StepContext` of a step is passed through the model's
keyword arguments, so two models in one process do not interfere.

If a model asks attention for something that we do not implement, it is refused. Its config may show
that, or a probe: a run of two short prompts, which also finds every layer that does not call our
attention.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from stepscope.engine.models.checkpoint import refuse_file
from stepscope.engine.models.model_config import refuse, sliding_layers
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.scheduling.kv_memory import KVShape
from stepscope.kernels.paged_attention import (
    AttentionOptions,
    LayerCache,
    PagedBatch,
    StepContext,
    store_kv,
)
from stepscope.kernels.reference import ReferenceAttention

# No mask function is registered under this name, so the library builds no masks. It must not
# contain "flash" or begin with "paged|", because the library treats such names specially.
ATTENTION = "stepscope_pages"

# Arguments of an attention function that we can ignore: we do not train or return attention
# weights, and the keys contain the positions already.
_HARMLESS = frozenset(
    {"dropout", "position_ids", "use_cache", "return_dict", "training", "cache_position"}
)


_TRIAL_TOKENS, _TRIAL_BLOCK = 24, 16
# Most that the logits of a trial may be off, by the bytes of a number: rounding, not other numbers.
_TRIAL_ERROR = {8: 1e-6, 4: 1e-3, 2: 0.1}


class LayerCall(NamedTuple):
    """The arguments with which one layer called attention."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    dtype: torch.dtype


class Probe(dict[int, LayerCall]):
    """Used instead of a `StepContext` in the probe: keeps each layer's call, computes nothing."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    step_context: StepContext | Probe | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention over our pages; has the signature of transformers' attention functions.

    Args:
        query: [1, num_heads, num_tokens, head_dim], and `key`, `value` with num_kv_heads.
        s_aux: attention sinks, [num_heads].

    Returns the result, [1, num_tokens, num_heads, head_dim]; and None in place of attention
    weights.
    """
    if step_context is None:
        raise ConfigError(
            "unsupported_model",
            f"{type(module).__name__} does not hand the arguments of a step to its attention",
        )
    layer: int = module.layer_idx
    if isinstance(step_context, Probe):
        _check_call(module, query, key, value, attention_mask, kwargs)
        if layer in step_context:
            raise ConfigError("unsupported_model", f"two of its layers are number {layer}")
        step_context[layer] = LayerCall(key.shape[1], key.shape[3], sliding_window, key.dtype)
        return query.transpose(1, 2).contiguous(), None
    cache, slots = step_context.caches[layer], step_context.batch.slot_mapping
    store_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), cache, slots)
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    output = step_context.attend(layer, query[0].transpose(0, 1), options)
    return output.unsqueeze(0), None


def _check_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    who = type(module).__name__
    asked = {"attention_mask": attention_mask} | kwargs
    unknown = [
        name
        for name, setting in asked.items()
        if setting is not None
        and not (name in _HARMLESS or name.startswith("output_"))
        and not (name == "is_causal" and setting is True)
    ]
    if unknown or getattr(module, "is_causal", True) is False:
        what = ", ".join(unknown) or "attention in both directions"
        raise ConfigError("unsupported_model", f"{who} asks attention for {what}")
    if key.shape != value.shape or query.shape[3] != key.shape[3]:
        raise ConfigError(
            "unsupported_model",
            f"{who} has heads of several sizes (query {query.shape[3]}, key {key.shape[3]}, "
            f"value {value.shape[3]})",
        )


class TransformersModel:
    """A loaded model of the library, the second kind of `loader.Model`; see `Decoder`."""

    implementation = "transformers modules"
    is_thread_invariant = False  # unknown for the library's code
    is_capturable = False  # the library's code may wait for the device

    def __init__(self, model: Any, name: str, device: torch.device) -> None:
        """Probe `model`, which is on `device` and was loaded with `ATTENTION`.

        Raises ConfigError: the model cannot be served exactly.
        """
        self.name = name
        self.device = device
        self.architecture = type(model).__name__
        self._model = model
        self._text_config = model.config.get_text_config()
        self.vocab_size = int(self._text_config.vocab_size)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.weight_bytes = sum(p.nbytes for p in model.parameters())
        self.flops_per_token = self._count_flops()
        parameters = inspect.signature(model.forward).parameters
        for needed in ("position_ids", "logits_to_keep"):
            if needed not in parameters:
                refuse(self.name, f"it takes no {needed}")
        self.dtype, self.kv_shape = self._probe()
        self._compare()

    def _count_flops(self) -> int:
        """In a mixture of experts, only active experts count."""
        text = self._text_config
        num_experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
        active = getattr(text, "num_experts_per_tok", None)
        total = 0.0
        for name, weight in self._model.named_parameters():
            if ".layers." not in name and ".h." not in name:
                continue
            share = active / num_experts if num_experts and active and ".experts." in name else 1.0
            total += 2 * weight.numel() * share
        return round(total)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: StepContext | Probe,
        logits_of: torch.Tensor,
    ) -> torch.Tensor:
        output = self._model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            logits_to_keep=logits_of,
            use_cache=False,
            step_context=context,
        )
        return output.logits[0]

    @torch.inference_mode()
    def _probe(self) -> tuple[torch.dtype, KVShape]:
        """Run two short prompts, check the layers' calls, and return KV dtype and shape of them."""
        probe = Probe()
        tokens = torch.arange(6, device=self.device) % self.vocab_size
        positions = torch.tensor([0, 1, 2, 0, 1, 2], device=self.device)
        last = torch.tensor([2, 5], device=self.device)
        try:
            self.forward(tokens, positions, probe, last)
        except ConfigError as error:
            raise ConfigError(error.code, f"{self.name} cannot be served: {error}") from None
        except Exception as error:  # noqa: BLE001 - the library's code may raise anything
            refuse_file("unsupported_model", f"{self.name} fails on a trial of six tokens", error)
        num_layers = int(self._text_config.num_hidden_layers)
        if sorted(probe) != list(range(num_layers)):
            refuse(
                self.name,
                f"only {len(probe)} of its {num_layers} layers attend through the library's "
                "attention interface",
            )
        deaf = [i for i in sorted(sliding_layers(self._text_config)) if not probe[i].sliding_window]
        if deaf:
            refuse(self.name, f"layer {deaf[0]} has a sliding window, but its attention ignores it")
        shapes = {(call.num_kv_heads, call.head_dim, call.dtype) for call in probe.values()}
        if len(shapes) > 1:
            refuse(self.name, "its layers have KV heads of several shapes")
        heads, dim, dtype = shapes.pop()
        return dtype, KVShape(
            num_layers=num_layers, num_kv_heads=heads, head_dim=dim, dtype_bytes=dtype.itemsize
        )

    @torch.inference_mode()
    def _compare(self) -> None:
        """Compare a prompt over pages, whole and in chunks, with the model's own forward pass."""
        tokens = (torch.arange(_TRIAL_TOKENS, device=self.device) * 7 + 1) % self.vocab_size
        ways = {"whole": (_TRIAL_TOKENS,), "in chunks": (7, 1, _TRIAL_TOKENS - 8)}
        try:
            self._model.set_attn_implementation("eager")
            expected = self._model(input_ids=tokens[None], use_cache=False).logits[0].float()
            self._model.set_attn_implementation(ATTENTION)
            found = {how: self._over_pages(tokens, sizes).float() for how, sizes in ways.items()}
        except Exception as error:  # noqa: BLE001 - the library's code may raise anything
            refuse_file("unsupported_model", f"{self.name} fails on a trial prompt", error)
        for how, got in found.items():
            apart = torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected)
            if not apart < _TRIAL_ERROR[self.dtype.itemsize]:
                refuse(
                    self.name,
                    f"over a paged KV cache its logits of a prompt {how} are {apart:.0%} apart "
                    "from those of its own forward pass",
                )

    def _over_pages(self, tokens: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        shape, num_blocks = self.kv_shape, -(-len(tokens) // _TRIAL_BLOCK)
        size = 2, shape.num_layers, num_blocks, _TRIAL_BLOCK, shape.num_kv_heads, shape.head_dim
        both = torch.zeros(size, dtype=self.dtype, device=self.device)
        caches = [LayerCache(*each) for each in zip(*both, strict=True)]
        logits, start = [], 0
        for num_tokens in sizes:
            positions = torch.arange(start, start + num_tokens, device=self.device)
            start += num_tokens
            batch = PagedBatch(
                query_starts=np.array([0, num_tokens]),
                context_lens=np.array([start]),
                block_tables=np.arange(num_blocks)[None],
                slot_mapping=positions,
                block_size=_TRIAL_BLOCK,
                device=self.device,
            )
            context = StepContext(batch, caches, ReferenceAttention())
            every = torch.arange(num_tokens, device=self.device)
            logits.append(self.forward(tokens[positions], positions, context, every))
        return torch.cat(logits)
