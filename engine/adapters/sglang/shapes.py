"""Protocols for the parts of SGLang's objects that the adapter reads, without importing SGLang."""

from collections.abc import Sequence
from typing import Any, Protocol


class SglangKv(Protocol):
    """A request's share of the KV pool. `kv_committed_len` grows when tokens are scheduled."""

    kv_committed_len: int


class SglangFinish(Protocol):
    """Why a request ended. Its type is `stop`, `length` or `abort`."""

    def to_json(self) -> dict[str, Any]: ...


class SglangReq(Protocol):
    """SGLang's `Req`. The times in `time_stats` are those of `time.perf_counter`."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    finished_len: int | None
    finished_reason: SglangFinish | None
    priority: int | None
    kv: SglangKv
    sampling_params: Any
    time_stats: Any


class SglangForwardMode(Protocol):
    def is_decode(self) -> bool: ...
    def is_idle(self) -> bool: ...


class SglangBatch(Protocol):
    """SGLang's `ScheduleBatch`. Only a batch with prefill has `prefix_lens` and `extend_lens`."""

    reqs: Sequence[SglangReq]
    forward_mode: SglangForwardMode
    forward_iter: int | None  # number of the forward pass, counted at launch
    batch_is_full: bool
    prefix_lens: Sequence[int]
    extend_lens: Sequence[int]


class SglangPlan(Protocol):
    """What `get_next_batch_to_run` returns."""

    batch_to_run: SglangBatch | None
    running_batch: SglangBatch


class SglangScheduler(Protocol):
    """SGLang's `Scheduler`, one for each tensor-parallel rank."""

    waiting_queue: Sequence[SglangReq]
    chunked_prefill_size: int | None
    max_prefill_tokens: int
    max_running_requests: int
    page_size: int
    disable_radix_cache: bool
    enable_overlap: bool
    is_mixed_chunk: bool
    schedule_policy: str
    # The adapter reads only one or two values of each of these.
    model_config: Any
    server_args: Any
    pool_stats_observer: Any
    tree_cache: Any
    recv_skipper: Any
    truncation_align_size: int | None
