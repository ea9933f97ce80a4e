"""A step that an attached vLLM has scheduled but not finished is in flight."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stepscope.engine.adapters.vllm.watcher import VllmWatcher


def scheduler(request: Any) -> Any:
    """The part of vLLM's scheduler that the watcher reads; with two KV groups it has no blocks."""
    return SimpleNamespace(
        requests={request.request_id: request},
        running=[request],
        finished_req_ids=set(),
        waiting=[],
        block_size=16,
        max_num_running_reqs=8,
        scheduler_config=SimpleNamespace(policy="fcfs"),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None, None]),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        ),
    )


def test_a_step_is_in_flight_until_vllm_has_finished_it() -> None:
    request = SimpleNamespace(
        request_id="a",
        arrival_time=time.time(),
        max_tokens=8,
        num_computed_tokens=64,  # vLLM counts them as soon as they are scheduled
        num_prompt_tokens=100,
        num_output_tokens=0,
        num_tokens=100,
        priority=0,
        pooling_params=None,
        status=SimpleNamespace(name="RUNNING"),
    )
    out: Any = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="a", block_ids=[[1, 2]], num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
        ),
        num_scheduled_tokens={"a": 64},
        total_num_scheduled_tokens=64,
        preempted_req_ids=None,
        scheduled_spec_decode_tokens={},
    )
    watcher = VllmWatcher(scheduler(request), Path("unused"))
    watcher.added(request)
    assert watcher.recorder.step_under_way is None
    watcher.scheduled(out, watcher.note(out, 1_000, 2_000, 512))
    running = watcher.recorder.step_under_way
    assert running is not None
    said = running.message(5_000_000_000)
    assert (said.step, said.since_ns, said.token_budget) == (0, 1_000, 512)
    assert (said.num_prefill_tokens, said.num_decodes) == (64, 0)
    watcher.updated(out, None, 6_000_000_000, 0, {}, None, (), [])
    assert watcher.recorder.step_under_way is None
