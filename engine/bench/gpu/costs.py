"""Lower bounds for a step: the bytes it must move and the operations it must compute.

Bytes of a decode: all weights once (layers, norms, the head) and the keys and values of all
contexts. Embeddings are left out, because only single rows are read. Activations and writes are
left out too: they are less than a hundredth of the bytes.

Operations of a prefill, where a multiplication and an addition count as two: the weights of the
layers for every token, the products of causal attention for every pair of a query and a visible
key, and the head for the tokens whose logits are needed. What follows the attention of the last
layer is computed for those tokens only, too.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Costs(NamedTuple):
    """The sizes of one model, from which bytes and operations follow.

    Weights are counted in elements.
    """

    layer_weights: int  # in the matrices of all layers
    tail_weights: int  # of these, those in the last layer after its attention
    norm_weights: int
    head_weights: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int  # bytes per element of the weights and the KV cache

    @classmethod
    def of(cls, shape: Mapping[str, Any], itemsize: int) -> "Costs":
        """Build from an entry of `random_shapes.SHAPES`, or another config of Llama or Qwen3."""
        hidden, dim = shape["hidden_size"], shape["head_dim"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        num_layers = shape["num_hidden_layers"]
        attention = hidden * dim * (2 * heads + 2 * kv_heads)
        mlp = 3 * hidden * shape["intermediate_size"]
        head_norms = 2 * dim if shape["model_type"] == "qwen3" else 0
        return cls(
            layer_weights=num_layers * (attention + mlp),
            tail_weights=heads * dim * hidden + mlp,
            norm_weights=num_layers * (2 * hidden + head_norms) + hidden,
            head_weights=shape["vocab_size"] * hidden,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            itemsize=itemsize,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that every step reads."""
        return (self.layer_weights + self.norm_weights + self.head_weights) * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    def decode_bytes(self, batch: int, context: int) -> int:
        """Return the least bytes that a decode step reads.

        Args:
            batch: number of requests.
            context: tokens of each request.
        """
        return self.weight_bytes + batch * context * self.kv_bytes_per_token

    def flops(self, lengths: Iterable[tuple[int, int]], num_logits: int) -> int:
        """Return the operations of one step.

        Args:
            lengths: for each request, its tokens before the step and its tokens in the step.
            num_logits: number of tokens whose logits are needed.
        """
        num_tokens = num_pairs = 0
        for before, count in lengths:
            num_tokens += count
            num_pairs += causal_pairs(before, count)
        return (
            2 * (self.layer_weights - self.tail_weights) * num_tokens
            + attention_flops(num_pairs, self.num_heads, self.head_dim) * self.num_layers
            + 2 * (self.tail_weights + self.head_weights) * num_logits
        )


def causal_pairs(before: int, count: int) -> int:
    """Return how many pairs of a query and a key visible to it causal attention computes.

    Args:
        before: tokens in the cache, visible to every query.
        count: new tokens, each of which is a query and a key.
    """
    return count * before + count * (count + 1) // 2


def attention_flops(num_pairs: int, num_heads: int, head_dim: int) -> int:
    """Return the operations of one layer's two matrix products of attention (scores and values)."""
    return 4 * num_pairs * num_heads * head_dim
