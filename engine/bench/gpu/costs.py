"""What a step has to move and to compute, by the shape of its model: the floors of the shares.

Bytes of a decode: every weight that is multiplied by once (layers, norms, the head; of the
embeddings only rows are read, and they are left out), and the keys and values of all contexts.
Activations and what is written are left out: they are below a hundredth, and a floor is a floor.

Operations of a prefill, two for a multiplication and an addition: the weights of the layers for
every token, the products of causal attention for every pair of a query and a key it sees, and the
head for the tokens that are asked for logits.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Costs(NamedTuple):
    """Of one model. Counts are of elements."""

    layer_weights: int  # of the matrices of all layers
    norm_weights: int
    head_weights: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int  # bytes of an element, of weights and of the KV cache

    @classmethod
    def of(cls, shape: Mapping[str, Any], itemsize: int) -> "Costs":
        """`shape`: of `random_shapes.SHAPES`, or any config of these two families."""
        hidden, dim = shape["hidden_size"], shape["head_dim"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        num_layers = shape["num_hidden_layers"]
        attention = hidden * dim * (2 * heads + 2 * kv_heads)
        mlp = 3 * hidden * shape["intermediate_size"]
        head_norms = 2 * dim if shape["model_type"] == "qwen3" else 0
        return cls(
            layer_weights=num_layers * (attention + mlp),
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
        """That every step reads."""
        return (self.layer_weights + self.norm_weights + self.head_weights) * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    def decode_bytes(self, batch: int, context: int) -> int:
        """Of a step in which `batch` requests of `context` tokens each get one more."""
        return self.weight_bytes + batch * context * self.kv_bytes_per_token

    def flops(self, lengths: Iterable[tuple[int, int]], num_logits: int) -> int:
        """Of a step with (tokens before, tokens in it) of each request."""
        num_tokens = num_pairs = 0
        for before, count in lengths:
            num_tokens += count
            num_pairs += causal_pairs(before, count)
        return (
            2 * self.layer_weights * num_tokens
            + attention_flops(num_pairs, self.num_heads, self.head_dim) * self.num_layers
            + 2 * self.head_weights * num_logits
        )


def causal_pairs(before: int, count: int) -> int:
    """Pairs of a query and a key that it sees, of `count` queries after `before` tokens."""
    return count * before + count * (count + 1) // 2


def attention_flops(num_pairs: int, num_heads: int, head_dim: int) -> int:
    """Of both products, in one layer."""
    return 4 * num_pairs * num_heads * head_dim
