"""vLLM frees blocks of sliding windows unseen: no block map, but its own figure of the KV cache."""

from types import SimpleNamespace

from stepscope.engine.protocol.wire import Admitted, EngineStatus, StepRecord
from stepscope.recordings.history.history import History
from tests.adapters.conftest import Attach, published
from tests.adapters.played_vllm import PlayedScheduler


def test_without_a_block_map_kv_usage_and_prefix_hits_are_vllms_own(attach: Attach) -> None:
    scheduler = PlayedScheduler("0.32.0", "prefix")
    scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=[None, None])
    attachment = attach(scheduler)
    told, history = [], History()
    for call in scheduler.play():
        usage = 1 - scheduler.num_free / scheduler.head["num_blocks"]
        scheduler.kv_cache_manager.usage = usage
        if call == "schedule" and scheduler.outputs[-1].num_scheduled_tokens:
            told.append(usage)
    attachment.close()
    messages = published(attachment)
    steps = [message for _, message in messages if isinstance(message, StepRecord)]
    assert all(step.kv is None and not step.moves for step in steps)
    assert [step.totals and step.totals.kv_used for step in steps] == told
    for sequence, message in messages:
        history.append(sequence, message)
    figures = history.windows.figures(None, None)
    num_hit = sum(e.num_cached_tokens for s in steps for e in s.events if isinstance(e, Admitted))
    num_prompt = sum(line["prompt"] for line in scheduler.calls if line["call"] == "add")
    assert num_hit > 0
    assert figures["prefix_hit_rate"] == num_hit / num_prompt
    assert figures["kv_peak"] == round(max(told), 6)
    last = next(m for _, m in reversed(messages) if isinstance(m, EngineStatus))
    assert last.totals is not None
    assert last.totals.kv_used == usage
