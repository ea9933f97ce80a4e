"""What the adapter reads of vLLM's objects, without importing vLLM, and how its releases differ.

A release is known by its scheduler's attributes, not by a number; `LIVE` says since when some are
there.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from stepscope.engine.adapters.attached.tracked import EngineRequest
from stepscope.engine.protocol.wire import KVGroup


class VllmRequest(EngineRequest, Protocol):
    """vLLM's `Request`. `arrival_time` is wall-clock time in seconds, read by vLLM's front end."""

    arrival_time: float
    status: Any  # a member of vLLM's `RequestStatus`
    pooling_params: object | None  # of a request that puts out no token
    lora_request: Any  # None: it needs no adapter
    block_hashes: Sequence[bytes]  # one per full block, over all tokens up to its end


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
    resumed_req_ids: Collection[str]  # those that run again after a preemption
    new_block_ids: Sequence[Sequence[Sequence[int]] | None]
    num_computed_tokens: Sequence[int]


class SchedulerOutput(Protocol):
    """The result of one `schedule()`."""

    scheduled_new_reqs: Sequence[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: Mapping[str, int]
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]]
    total_num_scheduled_tokens: int
    preempted_req_ids: Collection[str] | None


class VllmScheduler(Protocol):
    """vLLM's `Scheduler` or `AsyncScheduler`, or a scheduler class of the user."""

    requests: Mapping[str, VllmRequest]
    running: Sequence[VllmRequest]
    finished_req_ids: Collection[str]
    max_num_scheduled_tokens: int
    max_num_running_reqs: int
    max_model_len: int
    block_size: int
    # Objects of vLLM's configuration and cache. Their fields differ between versions.
    scheduler_config: Any
    cache_config: Any
    vllm_config: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    waiting: Any


SEATS = "max_num_active_reqs"
RESERVE = "scheduler_reserve_full_isl"
CADENCE = "local_prefill_interval"

NEEDED = (
    *("schedule", "update_from_output", "add_request", "finish_requests", RESERVE),
    *VllmScheduler.__annotations__,
)
_NEEDED_OF_POOL = ("blocks", "num_gpu_blocks", "get_num_free_blocks", "free_blocks")
QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")  # the last from 0.31 on

FIRST_RELEASE = (0, 20)


class LiveKnob(NamedTuple):
    """Where vLLM keeps a knob that can be changed while it runs, and from which release on."""

    since: tuple[int, int]
    attribute: str
    owner: str = ""  # the attribute of the scheduler that has it; empty: the scheduler itself


_LONG_PREFILL = "long_prefill_token_threshold"
LIVE = {
    "max_num_batched_tokens": LiveKnob(FIRST_RELEASE, "max_num_scheduled_tokens"),
    _LONG_PREFILL: LiveKnob(FIRST_RELEASE, _LONG_PREFILL, "scheduler_config"),
    "reserve": LiveKnob(FIRST_RELEASE, RESERVE),
    "max_num_seqs": LiveKnob((0, 31), SEATS),
    "watermark": LiveKnob((0, 31), "watermark_blocks", "kv_cache_manager"),
    "prefill_schedule_interval": LiveKnob((0, 33), CADENCE),
}


def check(scheduler: Any) -> None:
    """Raises RuntimeError if this scheduler lacks what the adapter needs; it says what."""
    missing = [name for name in NEEDED if not hasattr(scheduler, name)]
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    missing += [f"block_pool.{name}" for name in _NEEDED_OF_POOL if not hasattr(pool, name)]
    if missing:
        raise RuntimeError(f"this vLLM's scheduler has no {', '.join(missing)}")


def live_knobs(release: str) -> list[str]:
    """Return the knobs that can change while a release (`0.32.0`) runs; none if it is too old."""
    number = tuple(map(int, release.split(".")[:2]))
    return [name for name, live in LIVE.items() if number >= live.since]


def data_parallel_rank(owner: Any) -> int:
    """Return this process's data-parallel rank.

    If the ranks are independent engines, vLLM keeps the rank in `data_parallel_index`.
    """
    parallel = owner.vllm_config.parallel_config
    index = getattr(parallel, "data_parallel_index", 0)
    return int(index or getattr(parallel, "data_parallel_rank", 0) or 0)


def rank_sizes(parallel: Any) -> tuple[int, int]:
    """Return the ranks of a pipeline stage, and the number of stages, of an engine.

    (1, 1) if its ranks are arranged in another way: then their times are not told apart.
    """
    size = int(getattr(parallel, "tensor_parallel_size", 1))
    num_stages = int(getattr(parallel, "pipeline_parallel_size", 1))
    is_usual = getattr(parallel, "world_size", 1) == size * num_stages
    return (size, num_stages) if is_usual else (1, 1)


_KINDS = {
    "FullAttentionSpec": "full attention",
    "MLAAttentionSpec": "full attention",
    "SlidingWindowSpec": "sliding window",
    "SlidingWindowMLASpec": "sliding window",
    "ChunkedLocalAttentionSpec": "chunked attention",
    "MambaSpec": "Mamba",
}


def groups_of(scheduler: VllmScheduler) -> tuple[list[KVGroup], list[int]] | None:
    """Return the groups of KV blocks, and the group of each block table of vLLM.

    Block tables whose layers hold the same of a context are one group. None if vLLM has kinds of
    layers that stepscope does not know.
    """
    found: dict[tuple[str, int, int | None], list[int]] = {}  # the number of layers of each table
    keys = []
    for table in scheduler.kv_cache_config.kv_cache_groups:
        spec: Any = getattr(table, "kv_cache_spec", None)
        kind = _KINDS.get(type(spec).__name__)
        if kind is None or getattr(table, "host_resident", False):
            return None
        windows = {"sliding window": "sliding_window", "chunked attention": "attention_chunk_size"}
        window = getattr(spec, windows.get(kind, ""), None)
        keys.append((kind, spec.block_size, window))
        found.setdefault(keys[-1], []).append(len(table.layer_names))
    groups = [
        KVGroup(kind, sum(layers), block_size, window, len(layers))
        for (kind, block_size, window), layers in found.items()
    ]
    return (groups, [list(found).index(key) for key in keys]) if groups else None


def max_graph_tokens(config: Any) -> int | None:
    """Return the largest size of a CUDA graph, in tokens; None if there are no graphs."""
    compilation = config.compilation_config
    has_graphs = getattr(compilation.cudagraph_mode, "name", "NONE") != "NONE"
    return max(compilation.cudagraph_capture_sizes) if has_graphs else None


def changes_later(out: SchedulerOutput) -> bool:
    """Whether running the model changes `out` or its requests, so that `out` must be read at once.

    If the worker runs in vLLM's process, it keeps appending to the block lists of new requests, and
    removes draft tokens that it cannot use. A resumed request gets more tokens, and these would
    wrongly count as recomputed.
    """
    is_again = out.scheduled_cached_reqs.resumed_req_ids
    return bool(out.scheduled_new_reqs or out.scheduled_spec_decode_tokens or is_again)


def halt(scheduler: VllmScheduler) -> Literal["draining", "paused"] | None:
    """Return whether vLLM is paused. `draining`: running requests go on, no other is admitted."""
    state: Any = getattr(scheduler, "pause_state", None)
    if not state:
        return None
    holds = scheduler.running or getattr(scheduler, "kv_holding_waiting", ())
    return "draining" if state.name == "PAUSED_NEW" and holds else "paused"


def num_seats(scheduler: VllmScheduler) -> int:
    seats: int | None = getattr(scheduler, SEATS, None)
    return scheduler.max_num_running_reqs if seats is None else seats


def token_budget(scheduler: VllmScheduler) -> int:
    most: int = scheduler.scheduler_config.max_num_batched_tokens
    return min(scheduler.max_num_scheduled_tokens, most)


def elsewhere(request: Any) -> str | None:
    """Return whether another engine computes a part of a request, as in `Arrived.elsewhere`."""
    params: Any = getattr(request, "kv_transfer_params", None) or {}
    if params.get("do_remote_decode"):
        return ""
    return str(params["remote_request_id"]) if params.get("remote_request_id") else None
