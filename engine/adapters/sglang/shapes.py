"""What the adapter reads of SGLang's objects, without importing SGLang, and whether it is there.

`check` says which schedulers cannot be watched, `is_first_rank` on which of their ranks to attach.
"""

from collections.abc import Sequence
from typing import Any, Protocol


class SglangReq(Protocol):
    """SGLang's `Req`. The times in `time_stats` are those of `time.perf_counter`."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    finished_len: int | None
    finished_reason: Any  # why it ended; the type in its `to_json()`: `stop`, `length`, `abort`
    priority: int | None
    kv: Any  # its `kv_committed_len` grows when tokens are scheduled
    sampling_params: Any
    time_stats: Any


class SglangBatch(Protocol):
    """SGLang's `ScheduleBatch`. Only a batch with prefill has `prefix_lens` and `extend_lens`."""

    reqs: Sequence[SglangReq]
    forward_mode: Any
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


NEEDED = (
    "get_next_batch_to_run", "run_batch", "process_batch_result", "set_internal_state",
    "send_abort_output", "_add_request_to_queue", "_poll_timeout_aborts",
    *SglangScheduler.__annotations__,
    "disaggregation_mode", "enable_pdmux", "enable_overlap_mlx", "dllm_config", "spec_algorithm",
    "is_generation",
)  # fmt: skip
TRIED_RELEASE = "0.5.23"


def check(scheduler: Any, parallel: Any) -> None:
    """Raises RuntimeError if the adapter cannot watch this scheduler; it says why."""
    missing = [name for name in NEEDED if not hasattr(scheduler, name)]
    if missing:
        raise RuntimeError(f"this SGLang's scheduler has no {', '.join(missing)}")
    not_watched = {
        "prefill and decode on separate servers": scheduler.disaggregation_mode.value != "null",
        "pipeline parallelism": parallel.pp_size > 1,
        "prefill and decode multiplexed on one GPU": scheduler.enable_pdmux,
        "the overlap of MLX": scheduler.enable_overlap_mlx,
        "a diffusion language model": scheduler.dllm_config is not None,
        "speculative decoding": not scheduler.spec_algorithm.is_none(),
        "a model that only embeds": not scheduler.is_generation,
    }
    if found := [what for what, is_so in not_watched.items() if is_so]:
        raise RuntimeError(f"stepscope does not watch {found[0]}")


def is_first_rank(parallel: Any) -> bool:
    """Whether this rank receives the requests and broadcasts them to its tensor-parallel group."""
    return not (parallel.pp_rank or parallel.attn_tp_rank or parallel.attn_cp_rank)
