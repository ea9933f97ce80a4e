"""Checks whether a scheduler of SGLang can be watched, and on which of its ranks."""

from typing import Any

NEEDED = (
    "get_next_batch_to_run",
    "run_batch",
    "process_batch_result",
    "set_internal_state",
    "send_abort_output",
    "_add_request_to_queue",
    "_poll_timeout_aborts",
    "waiting_queue",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "max_running_requests",
    "page_size",
    "disable_radix_cache",
    "enable_overlap",
    "is_mixed_chunk",
    "schedule_policy",
    "model_config",
    "server_args",
    "pool_stats_observer",
    "tree_cache",
    "recv_skipper",
    "truncation_align_size",
    "disaggregation_mode",
    "enable_pdmux",
    "enable_overlap_mlx",
    "dllm_config",
    "spec_algorithm",
    "is_generation",
)
TRIED_RELEASE = "0.5.23"


class UnknownSglangError(RuntimeError):
    """This SGLang cannot be watched. The message says why."""


def check(scheduler: Any, parallel: Any) -> None:
    """Raises UnknownSglangError when the adapter cannot watch this scheduler.

    Args:
        parallel: SGLang's parallel context.
    """
    missing = [name for name in NEEDED if not hasattr(scheduler, name)]
    if missing:
        raise UnknownSglangError(f"this SGLang's scheduler has no {', '.join(missing)}")
    not_watched = {
        "prefill and decode on separate servers": scheduler.disaggregation_mode.value != "null",
        "pipeline parallelism": parallel.pp_size > 1,
        "prefill and decode multiplexed on one GPU": scheduler.enable_pdmux,
        "the overlap of MLX": scheduler.enable_overlap_mlx,
        "a diffusion language model": scheduler.dllm_config is not None,
        "speculative decoding": not scheduler.spec_algorithm.is_none(),
        "a model that only embeds": not scheduler.is_generation,
    }
    for what, is_so in not_watched.items():
        if is_so:
            raise UnknownSglangError(f"stepscope does not watch {what}")


def is_first_rank(parallel: Any) -> bool:
    """Whether this rank receives the requests and broadcasts them to its tensor-parallel group."""
    return not (parallel.pp_rank or parallel.attn_tp_rank or parallel.attn_cp_rank)
