"""Our own ("lean") decoder for Llama, Qwen2, Qwen3 and Mistral. A layer has four matrix products:

    norm ─ qkv ─ [q/k norm, RoPE, store K/V] ─ attention over pages ─ out
    add+norm ─ [gate and up, SiLU * mul] ─ down

The families differ in the parts of a layer (biases, norms of queries and keys, windows), not in
their order, so one forward method serves all four. Weights that multiply the same input are joined:
Q, K and V, and the MLP's gate and up.

Models that this decoder cannot run are served by transformers' modules. The tests compare this
decoder with them (`tests/models/test_exactness.py`).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.engine.models.checkpoint import Progress
from stepscope.engine.models.model_config import DecoderConfig
from stepscope.engine.models.weights import WeightSource
from stepscope.engine.scheduling.kv_memory import KVShape
from stepscope.kernels.cpu.linear import HugePages
from stepscope.kernels.dispatch.fused import add_rms_norm, norm_rope_store
from stepscope.kernels.dispatch.linear import Linear
from stepscope.kernels.paged_attention import AttentionOptions, QKVHeads, StepContext


@dataclass(slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    heads: QKVHeads
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    options: AttentionOptions


class Decoder:
    """A loaded decoder, the first kind of `loader.Model`.

    Attributes:
        implementation: for people: whether our decoder or transformers runs the layers, and how.
        dtype: of the weights, and of keys and values before they are stored.
        weight_bytes: memory of the weights. Packed tied embeddings are stored twice, and count so.
        flops_per_token: multiplications and additions for one token with the weights of the layers.
            Leaves out attention scores over the context, and the logits, which only the last token
            of a prompt needs: both depend on the step.
        is_thread_invariant: a step has the same result, to the bit, with any number of CPU threads.
        is_capturable: the kernels of a step depend only on input shapes, so that CUDA graphs work.
    """

    is_capturable = True

    def __init__(
        self,
        weights: WeightSource,
        name: str,
        config: Any,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
    ) -> None:
        """Read `weights`.

        Args:
            config: a `PreTrainedConfig` for which `misfit` returns None.
            max_model_len: all positions are below it.

        Raises ConfigError: weights are missing, have another shape, or cannot be read.
        """
        self.name = name
        self.device = device
        self.dtype = dtype
        self._weights = weights
        self._config = shape = self._with_own_head(DecoderConfig.of(config))
        self._weights.check(shape.weight_shapes())
        self.architecture, self.vocab_size = shape.architecture, shape.vocab_size
        self.kv_shape = KVShape(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype_bytes=dtype.itemsize,
        )
        sizes = {name: math.prod(each) for name, each in shape.weight_shapes().items()}
        self.num_parameters = sum(sizes.values())
        self.flops_per_token = 2 * sum(sizes[name] for name in sizes if ".layers." in name)
        # Tied embeddings are packed for the head, too.
        num_tied = sizes["model.embed_tokens.weight"] if shape.tied else 0
        self._memory = HugePages((self.num_parameters + num_tied) * dtype.itemsize)
        self._rope = _rope_table(config, shape.head_dim, max_model_len).to(device)
        self._embeddings = self._read("model.embed_tokens.weight")
        self._layers = []
        for i in range(shape.num_layers):
            progress("loading weights", i / shape.num_layers)
            self._layers.append(self._layer(i))
        self._norm = self._read("model.norm.weight")
        self._head = Linear(
            self._embeddings if shape.tied else self._read("lm_head.weight"), memory=self._memory
        )
        self.implementation = f"stepscope decoder, {self._head.layout} weights"
        products = [
            product
            for each in self._layers
            for product in (each.qkv, each.out, each.gate_up, each.down)
        ]
        self.is_thread_invariant = all(each.layout == "packed" for each in (*products, self._head))
        if not (shape.tied and self._head.layout == "plain"):  # else the embeddings are the head
            products.append(self._head)
        # Embeddings, norms and biases; the products have all other weights.
        shapes = shape.weight_shapes()
        num_others = sum(
            sizes[name] for name in shapes if len(shapes[name]) == 1 or "embed" in name
        )
        self.weight_bytes = num_others * dtype.itemsize + sum(each.num_bytes for each in products)

    def _with_own_head(self, shape: DecoderConfig) -> DecoderConfig:
        """Untie the head if the weights have one that differs from the embeddings."""
        head, embeddings = "lm_head.weight", "model.embed_tokens.weight"
        if not shape.tied or not (self._weights.has(head) and self._weights.has(embeddings)):
            return shape
        ours, theirs = (self._weights.read(each, self.dtype) for each in (head, embeddings))
        return shape if torch.equal(ours, theirs) else replace(shape, tied=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: StepContext,
        logits_of: torch.Tensor,
    ) -> torch.Tensor:
        """Run one step, and return logits [len(logits_of), vocab_size].

        Args:
            input_ids: [num_tokens], all requests of the step one after the other.
            positions: [num_tokens], of each token in its request.
            logits_of: indices of the tokens whose logits are needed; may be empty. If there are
                as many as tokens, they must be all of them, in order.
        """
        config, batch = self._config, context.batch
        eps, last = config.norm_eps, len(self._layers) - 1
        x = F.embedding(input_ids, self._embeddings)
        residual: torch.Tensor | None = None
        for i, layer in enumerate(self._layers):
            x, residual = add_rms_norm(x, residual, layer.input_norm, eps)
            qkv = layer.qkv(x)
            query = norm_rope_store(
                qkv, self._rope, positions, batch.slot_mapping, context.caches[i], layer.heads
            )
            x = context.attend(i, query, layer.options).flatten(1)
            if i == last and len(logits_of) < len(x):
                # All keys and values are stored; the rest is only needed for these tokens.
                x, residual = x[logits_of], residual[logits_of]
                if not len(x):
                    break
            x, residual = add_rms_norm(layer.out(x), residual, layer.mlp_norm, eps)
            x = layer.down(layer.gate_up(x))
        if not len(x):
            return x.new_empty(0, config.vocab_size)
        x, _ = add_rms_norm(x, residual, self._norm, eps)
        return self._head(x)

    def _layer(self, i: int) -> _Layer:
        config = self._config

        def read(name: str, kind: str = "weight") -> torch.Tensor:
            return self._read(f"model.layers.{i}.{name}.{kind}")

        def linear(*names: str, bias: bool, is_gated: bool = False) -> Linear:
            """The product of one input with several projections, row after row."""
            weight = torch.cat([read(f"{name}_proj") for name in names])
            biases = torch.cat([read(f"{name}_proj", "bias") for name in names]) if bias else None
            return Linear(weight, biases, self._memory, is_gated=is_gated)

        names = ("self_attn.q_norm", "self_attn.k_norm")
        q_norm, k_norm = (read(name) if config.qk_norm else None for name in names)
        return _Layer(
            input_norm=read("input_layernorm"),
            qkv=linear("self_attn.q", "self_attn.k", "self_attn.v", bias=config.qkv_bias),
            heads=QKVHeads(config.num_heads, config.num_kv_heads, q_norm, k_norm, config.norm_eps),
            out=linear("self_attn.o", bias=config.out_bias),
            mlp_norm=read("post_attention_layernorm"),
            gate_up=linear("mlp.gate", "mlp.up", bias=config.mlp_bias, is_gated=True),
            down=linear("mlp.down", bias=config.mlp_bias),
            options=AttentionOptions(config.head_dim**-0.5, config.windows[i]),
        )

    def _read(self, tensor: str) -> torch.Tensor:
        return self._weights.read(tensor, self.dtype).to(self.device)


def _rope_table(config: Any, head_dim: int, num_positions: int) -> torch.Tensor:
    """Make the RoPE table [num_positions, head_dim] in fp32: cosines, then sines.

    There are head_dim/2 cosines and as many sines, one for each frequency. The transformers library
    computes the frequencies of every kind of scaling ('llama3', 'yarn', 'linear', ...).
    We do not use its rotary module: importing that takes longer than the whole start of an engine.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        frequencies, scale = 1.0 / (rope["rope_theta"] ** exponents), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1).contiguous()
