"""Protocols for the parts of vLLM's objects that the adapter reads, without importing vLLM."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol


class VllmStatus(Protocol):
    """A member of vLLM's `RequestStatus`."""

    @property
    def name(self) -> str: ...


class VllmRequest(Protocol):
    """vLLM's `Request`. `arrival_time` is wall-clock time in seconds, read by vLLM's front end."""

    request_id: str
    arrival_time: float
    max_tokens: int
    num_computed_tokens: int
    num_prompt_tokens: int
    priority: int
    pooling_params: object | None  # of a request that puts out no token
    lora_request: Any  # None: it needs no adapter
    block_hashes: Sequence[bytes]  # one per full block, over all tokens up to its end

    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def status(self) -> VllmStatus: ...


class NewRequestData(Protocol):
    """A request that is scheduled for the first time. `block_ids` has a list for each KV group."""

    req_id: str
    block_ids: Sequence[Sequence[int]]
    num_computed_tokens: int


class CachedRequestData(Protocol):
    """Requests that were scheduled before, as parallel lists.

    `new_block_ids` is appended to the blocks of a request, or replaces them if it was resumed.
    """

    req_ids: Sequence[str]
    resumed_from_preemption: Sequence[bool]  # before 0.11.1; see `versions.resumed`
    new_block_ids: Sequence[Sequence[Sequence[int]] | None]
    num_computed_tokens: Sequence[int]


class SchedulerOutput(Protocol):
    """The result of one `schedule()`."""

    scheduled_new_reqs: Sequence[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: Mapping[str, int]
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]]
    total_num_scheduled_tokens: int


class VllmBlock(Protocol):
    block_id: int
    block_hash: object | None


class VllmBlockPool(Protocol):
    """vLLM's `BlockPool`. Block 0 is the null block, which no request holds."""

    blocks: Sequence[VllmBlock]
    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int: ...


class VllmScheduler(Protocol):
    """vLLM's `Scheduler` or `AsyncScheduler`, or a scheduler class of the user."""

    requests: Mapping[str, VllmRequest]
    running: Sequence[VllmRequest]
    finished_req_ids: Collection[str]
    max_num_scheduled_tokens: int
    max_num_running_reqs: int
    max_model_len: int
    block_size: int
    num_executed_steps: int  # from 0.33 on, as the next one
    last_prefill_step: int  # by that count
    # Objects of vLLM's configuration and cache. Their fields differ between versions.
    scheduler_config: Any
    cache_config: Any
    vllm_config: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    lora_config: Any
    waiting: Any
