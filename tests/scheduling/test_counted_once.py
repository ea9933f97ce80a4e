"""A prompt counts once, however often its request is preempted: as prompt tokens and as hits."""

import random
from collections.abc import Iterator

import msgspec
import pytest

from stepscope.engine.http.metrics_reducer import EngineMetrics
from stepscope.engine.protocol.knobs import Limits
from stepscope.engine.protocol.wire import (
    Admitted,
    Arrived,
    Preempted,
    RowFlag,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.compare.side import Side
from stepscope.recordings.history.history import History
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState
from tests.support.engines.whole_core import WholeCore

SLO_ = SLO(ttft_ms=500.0, itl_ms=50.0)


def run(num_blocks: int, length: int, num_shared: int, **knobs: int) -> list[Telemetry]:
    """12 prompts of `length` tokens, alike in the first `num_shared`; the pool is too small."""
    limits = Limits(max_num_batched_tokens=512, max_num_seqs=8, max_model_len=96)
    engine = WholeCore(limits, num_blocks=num_blocks, knobs=dict(knobs))
    words = random.Random(1)
    for _ in range(12):
        rest = [words.randrange(100, 30_000) for _ in range(length - num_shared)]
        prompt = [*range(num_shared), *rest]
        engine.submit(prompt, max_tokens=96 - length, ignore_eos=True)
    while engine.core.step():
        pass
    return [engine.core.info, *engine.sink.messages]


def as_counted_before(messages: list[Telemetry]) -> Iterator[Telemetry]:
    """The same session, as engines counted it that looked up requests that come back, too."""
    num_tokens: dict[int, int] = {}
    lost: set[int] = set()
    for message in messages:
        if not isinstance(message, StepRecord) or message.kv is None:
            yield message
            continue
        queried, hit = message.kv.queried_tokens, message.kv.hit_tokens
        for event in message.events:
            if isinstance(event, Arrived):
                num_tokens[event.request_id] = event.num_prompt_tokens
            elif isinstance(event, Preempted):
                lost.add(event.request_id)
            elif isinstance(event, Admitted) and event.request_id in lost:
                queried += num_tokens[event.request_id]
                hit += event.num_cached_tokens
        for row in message.batch or ():
            if row.flags & RowFlag.LAST_CHUNK:
                num_tokens[row.request_id] += 1
        kv = msgspec.structs.replace(message.kv, queried_tokens=queried, hit_tokens=hit)
        yield msgspec.structs.replace(message, kv=kv)


def hits_by_hand(messages: list[Telemetry]) -> int:
    first: dict[int, int] = {}
    for message in messages:
        for event in getattr(message, "events", ()):
            if isinstance(event, Admitted):
                first.setdefault(event.request_id, event.num_cached_tokens)
    return sum(first.values())


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("num_shared", [0, 32])
@pytest.mark.parametrize(
    ("num_blocks", "length", "knobs"),
    [
        (24, 40, {}),  # preempted while they decode
        (12, 40, {}),
        (7, 40, {}),  # most tokens are still cached
        (16, 80, {"max_num_batched_tokens": 32}),  # preempted in the middle of a prompt
        (16, 80, {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 16}),
    ],
)
def test_a_preempted_request_counts_neither_as_prefix_hit_nor_its_prompt_twice(
    num_blocks: int, length: int, knobs: dict[str, int], num_shared: int, is_old: bool
) -> None:
    messages = run(num_blocks, length, num_shared, **knobs)
    num_hit, num_prompt = hits_by_hand(messages), 12 * length
    assert (num_hit > 0) == (num_shared > 0)
    if is_old:
        messages = list(as_counted_before(messages))
    history, side, metrics = History(SLO_), Side("run", SLO_, SessionState()), EngineMetrics()
    for sequence, message in enumerate(messages):
        history.append(sequence, message)
        side.apply(message)
        metrics.apply(message)
    assert history.windows.sums(None, None).num_in_tokens == num_prompt
    for figures in (history.windows.figures(None, None), side.figures()):
        assert (figures["preemptions"] or 0) > 0
        assert figures["prefix_hit_rate"] == num_hit / num_prompt
        in_tokens = (figures["in_tokens_per_s"] or 0.0) * (figures["seconds"] or 0.0)
        assert in_tokens == pytest.approx(num_prompt)
    runs = side.requests.values()
    assert sum(each.num_cached_tokens or 0 for each in runs) == num_hit
    total = metrics.meters.registry.get_sample_value
    assert total("vllm:prompt_tokens_total") == num_prompt
    assert total("vllm:prompt_tokens_cached_total") == num_hit
    if not is_old:
        assert total("vllm:prefix_cache_queries_total") == num_prompt
        assert total("vllm:prefix_cache_hits_total") == num_hit
