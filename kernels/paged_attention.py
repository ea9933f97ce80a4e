"""Attention over a paged KV cache: what every backend is given, and which backend is taken.

The caller owns the tensors; a backend owns only scratch memory. One file per backend; adding one
means a file, a `_Candidate` in the table below and nothing else.

Layout of a cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, one tensor for keys and one
for values in each layer. Slot `s` of a cache is block `s // block_size`, offset `s % block_size`.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


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

    @property
    def num_requests(self) -> int:
        return len(self.context_lens)


class AttentionBackend(Protocol):
    """Causal attention of the queries of a step over the paged keys and values of their requests.

    `query` is `[num_tokens, num_heads, head_dim]` and so is the result. Query `q` of a request sees
    its keys `k <= q`, with a window only those with `k > q - sliding_window`. Scores are
    `scale * q.k`, then `softcap * tanh(score / softcap)`; a sink is one more score per head,
    `[num_heads]`, that takes part in the softmax and has no value.
    """

    name: str

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
) -> None:
    """Write the new keys and values `[num_tokens, num_kv_heads, head_dim]` into their slots."""
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


class BackendUnavailableError(ValueError):
    """The backend that was asked for cannot be used here; the message says why."""


class Availability(NamedTuple):
    name: str
    usable: bool
    reason: str


class Choice(NamedTuple):
    backend: AttentionBackend
    reason: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    """`probe(device type, dtype)` says whether it runs here, and why or why not.

    `device` is the only type of device that it is for; None: any.
    """

    name: str
    device: str | None
    probe: Callable[[str, torch.dtype], tuple[bool, str]]
    create: Callable[[], AttentionBackend]


def _probe_cpu(device: str, dtype: torch.dtype) -> tuple[bool, str]:
    from stepscope.kernels import cpu_attention, cpu_library

    if dtype not in cpu_attention.DTYPES:
        return False, f"has float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    try:
        level = cpu_library.usable_levels()[-1]
    except cpu_library.LibraryMissingError as error:
        return False, str(error)
    return True, f"C++ on cpu, {level} instructions"


def _create_cpu() -> AttentionBackend:
    from stepscope.kernels import cpu_attention, cpu_library

    return cpu_attention.CpuAttention(cpu_library.load())


def _create_torch() -> AttentionBackend:
    from stepscope.kernels.torch_attention import TorchAttention

    return TorchAttention()


def _create_reference() -> AttentionBackend:
    from stepscope.kernels.reference import ReferenceAttention

    return ReferenceAttention()


# Fastest first: 'auto' takes the first that is usable.
_CANDIDATES = (
    _Candidate("cpu", "cpu", _probe_cpu, _create_cpu),
    _Candidate(
        "torch",
        None,
        lambda device, dtype: (True, f"plain PyTorch, batched, on {device}"),
        _create_torch,
    ),
    _Candidate(
        "reference",
        None,
        lambda device, dtype: (True, "plain PyTorch, request by request: slow, for checking"),
        _create_reference,
    ),
)


def _probe(candidate: _Candidate, kind: str, dtype: torch.dtype) -> tuple[bool, str]:
    if candidate.device not in (None, kind):
        return False, f"runs on {candidate.device}, not on {kind}"
    return candidate.probe(kind, dtype)


def available_backends(
    device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Availability]:
    """Every backend, the preferred one first, with why it can or cannot be used on `device`."""
    kind = torch.device(device).type
    return [Availability(c.name, *_probe(c, kind, dtype)) for c in _CANDIDATES]


def choose(name: str = "auto", device: str = "cpu", dtype: torch.dtype = torch.float32) -> Choice:
    """The backend called `name`, or with 'auto' the fastest that runs on `device`.

    The reason also says what a faster one lacks.

    Raises:
        BackendUnavailableError: no such backend, or it cannot run here.
    """
    kind = torch.device(device).type
    found = [c for c in _CANDIDATES if name in ("auto", c.name)]
    if not found:
        known = ", ".join(["auto", *(c.name for c in _CANDIDATES)])
        raise BackendUnavailableError(
            f"no attention backend is called {name!r}; there are: {known}"
        )
    reasons: list[tuple[str | None, str]] = []
    for candidate in found:
        usable, reason = _probe(candidate, kind, dtype)
        if usable:
            missed = [text for device, text in reasons if device in (None, kind)]
            return Choice(candidate.create(), "; ".join([reason, *missed]))
        reasons.append((candidate.device, f"{candidate.name}: {reason}"))
    raise BackendUnavailableError(
        f"attention backend {name!r} cannot run here ({'; '.join(text for _, text in reasons)})"
    )
