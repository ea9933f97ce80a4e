"""Attention over a paged KV cache: what every backend is given.

The caller owns the tensors; a backend owns only scratch memory. One file per backend;
`backends.py` says which there are and which is taken.

Layout of a cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, one tensor for keys and one
for values in each layer. Slot `s` of a cache is block `s // block_size`, offset `s % block_size`.
Its dtype may be another than that of the queries; `fp8.py` says what FP8 holds.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from stepscope.kernels.fp8 import FP8, KVScales, to_fp8

IntArray = npt.NDArray[np.int64]


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor with what is in `array`, on `device`; waits for nothing that runs there.

    A GPU copies from page-locked memory only without waiting; torch keeps that until the copy is
    done. On a CPU the tensor is the array.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class BatchTensors(NamedTuple):
    """The arrays of a `PagedBatch` on the device, for kernels that read them there (int32).

    They may have been filled for a larger step: a request behind the last has one query, and a
    context of no tokens.
    """

    query_starts: torch.Tensor  # [R + 1]
    context_lens: torch.Tensor  # [R]
    block_tables: torch.Tensor  # [R, blocks], rows contiguous


@dataclass(slots=True, eq=False)
class PagedBatch:
    """Where the tokens of one step lie; the same for all layers.

    The tokens of R requests stand one request after the other: request `r` has the queries
    `query_starts[r]` up to `query_starts[r + 1]`, which are the last of its `context_lens[r]`
    tokens. `block_tables[r, i]` is the block that holds tokens `[i * block_size, ...)` of `r`;
    entries behind its last block are valid ids too, of any block.

    The host arrays are for planning without waiting for a device.
    """

    query_starts: IntArray  # [R + 1]
    context_lens: IntArray  # [R], the tokens of this step included
    block_tables: IntArray  # [R, blocks]
    slot_mapping: torch.Tensor  # [num_tokens] int64, on the device: where new keys go
    block_size: int
    device: torch.device
    plans: dict[Hashable, object] = field(default_factory=dict)  # of the backend, for this step
    # [R], 1 where the one query of a request is a decode; None: wherever there is one query. A
    # prompt's chunk of one token is then computed like any other chunk.
    decodes: IntArray | None = None
    tensors: BatchTensors | None = None  # by who made the batch, or by `on_device`

    @property
    def num_requests(self) -> int:
        return len(self.context_lens)

    def on_device(self) -> BatchTensors:
        """The arrays on the device; copied there the first time, unless they were given."""
        if self.tensors is None:
            self.tensors = BatchTensors(
                *(
                    to_device(array.astype(np.int32), self.device)
                    for array in (self.query_starts, self.context_lens, self.block_tables)
                )
            )
        return self.tensors


class AttentionBackend(Protocol):
    """Causal attention of the queries of a step over the paged keys and values of their requests.

    `query` is `[num_tokens, num_heads, head_dim]` and so is the result. Query `q` of a request sees
    its keys `k <= q`, with a window only those with `k > q - sliding_window`. Scores are
    `scale * q.k`, then `softcap * tanh(score / softcap)`; a sink is one more score per head,
    `[num_heads]`, that takes part in the softmax and has no value.
    """

    name: str
    is_capturable: bool
    """Whether a decode's launches depend on nothing but the shapes of the batch's tensors."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Write the new keys and values `[num_tokens, num_kv_heads, head_dim]` into their slots.

    Args:
        scales: of caches in FP8.
    """
    if scales is not None:
        key, value = to_fp8(key, scales.key_factor), to_fp8(value, scales.value_factor)
    for heads, cache in ((key, key_cache), (value, value_cache)):
        stored = as_bytes(heads.to(cache.dtype))
        as_bytes(cache).flatten(0, 1).index_copy_(0, slot_mapping, stored)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, FP8 as uint8: torch neither gathers nor scatters FP8."""
    return tensor.view(torch.uint8) if tensor.dtype is FP8 else tensor
