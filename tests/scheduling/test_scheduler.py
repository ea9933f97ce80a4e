"""The scheduling rules that operators rely on, one rule a test.

Others are laws (test_scheduler_laws.py) or rules of vLLM, too (test_conformance.py).
"""

import pytest

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.wire import Phase, Preempted
from stepscope.engine.scheduling.request import RequestStatus
from stepscope.engine.scheduling.step import ScheduledRow
from tests.support.engines.bare_scheduler import add, make_scheduler, step, tokens_of, turn

# Budget and order


def test_decodes_are_scheduled_first_and_a_prefill_chunk_takes_the_rest() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, 1, 25)
    add(scheduler, 2, 4)
    turn(scheduler, max_num_batched_tokens=14)
    assert list(step(scheduler).items()) == [(1, 14)]
    assert list(step(scheduler).items()) == [(1, 11), (2, 3)]
    add(scheduler, 3, 30)
    assert list(step(scheduler).items()) == [(1, 1), (2, 1), (3, 12)]
    assert list(step(scheduler).items()) == [(1, 1), (2, 1), (3, 12)]


def test_with_order_decode_first_a_decode_overtakes_a_long_prompt_admitted_earlier() -> None:
    for order, expected in (("decode_first", [(2, 1), (1, 9)]), ("arrival", [(1, 10)])):
        scheduler = make_scheduler(order=order, max_num_batched_tokens=10)
        add(scheduler, 1, 40)
        add(scheduler, 2, 2)
        turn(scheduler, long_prefill_token_threshold=8)
        assert list(step(scheduler).items()) == [(1, 8), (2, 2)]
        turn(scheduler, long_prefill_token_threshold=0)
        assert list(step(scheduler).items()) == expected


def test_a_partly_prefilled_prompt_gets_its_rest_whole_once_chunking_is_off() -> None:
    scheduler = make_scheduler(order="arrival", max_num_batched_tokens=20)
    add(scheduler, 1, 2, max_tokens=4)
    add(scheduler, 2, 60, max_tokens=4)
    assert step(scheduler) == {1: 2, 2: 18}
    turn(scheduler, enable_chunked_prefill=False, max_num_batched_tokens=42)
    add(scheduler, 3, 2)
    # 42 tokens remain, one short of fitting beside the decode: it waits, and so does request 3.
    assert step(scheduler) == {1: 1}
    assert scheduler.waiting_reasons() == {"budget": 1}
    assert step(scheduler) == {1: 1}
    assert step(scheduler) == {1: 1}
    assert step(scheduler) == {2: 42}
    assert step(scheduler) == {2: 1, 3: 2}


# Memory


def test_a_pool_too_small_for_one_request_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="3 KV blocks of 4 tokens do not hold one request of"):
        make_scheduler(num_blocks=3, max_model_len=13)


@pytest.mark.parametrize(
    ("reserve", "admitted"), [("none", [1, 2, 3]), ("prompt", [1, 2]), ("output", [1])]
)
def test_the_reserve_knob_sets_the_blocks_needed_to_admit_a_request(
    reserve: str, admitted: list[int]
) -> None:
    # 7 blocks: a first chunk takes 2, a prompt 4, prompt and output 7.
    scheduler = make_scheduler(
        num_blocks=7, max_model_len=28, reserve=reserve, long_prefill_token_threshold=8
    )
    for number in range(1, 4):
        add(scheduler, number, 16, max_tokens=12)
    assert list(step(scheduler)) == admitted


def test_the_watermark_stays_free_unless_no_request_runs() -> None:
    scheduler = make_scheduler(num_blocks=20, watermark=0.5, max_model_len=64)
    add(scheduler, 1, 60, max_tokens=3)  # 15 of 20 blocks, alone
    add(scheduler, 2, 4)
    assert step(scheduler) == {1: 60}
    assert scheduler.waiting_reasons() == {"kv_blocks": 1}
    turn(scheduler, watermark=0.1)
    assert step(scheduler) == {1: 1, 2: 4}


def test_the_latest_admitted_request_is_preempted_and_resumes_from_its_cached_blocks() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=32, order="arrival")
    first = add(scheduler, 1, 15, max_tokens=10)
    second = add(scheduler, 2, 15, max_tokens=4)
    assert step(scheduler) == {1: 15, 2: 15}
    assert step(scheduler) == {1: 1, 2: 1}
    scheduler.drain_events()
    rows = scheduler.schedule()
    assert tokens_of(rows) == {1: 1}  # it took the block that request 2 had to give
    assert scheduler.drain_events() == [Preempted(2, 4, "kv_full")]
    assert second.status is RequestStatus.PREEMPTED
    assert (second.num_computed_tokens, second.block_table) == (0, [])
    assert scheduler.waiting_reasons() == {"preemption": 1}
    scheduler.update(rows, [0])
    assert step(scheduler) == {1: 1}
    assert scheduler.waiting_reasons() == {"kv_blocks": 1}
    while second.status is not RequestStatus.RUNNING:
        rows = scheduler.schedule()
        scheduler.update(rows, [0] * len(rows))
    # Request 1 needed two of its four blocks, and took those at the tail.
    assert rows[-1] == ScheduledRow(second, Phase.RECOMPUTE, 8, 9, True)
    assert scheduler.resumed_now == {2: 8} == scheduler.admitted_now
    assert second.num_cached_tokens == 0  # at its first admission
    assert first.num_preemptions == 0


def test_by_priority_a_request_already_in_the_step_can_be_preempted_and_frees_its_budget() -> None:
    pool = {"num_blocks": 8, "max_model_len": 32, "max_num_batched_tokens": 64}
    scheduler = make_scheduler(**pool, policy="priority", order="arrival")
    low = add(scheduler, 1, 14, max_tokens=10, priority=5)
    step(scheduler)
    add(scheduler, 2, 16, max_tokens=10, priority=1)
    assert step(scheduler) == {1: 1, 2: 16}
    turn(scheduler, max_num_batched_tokens=2)
    scheduler.drain_events()
    # Request 1 stands first and is scheduled first; then request 2 needs its block.
    assert step(scheduler) == {2: 1}
    assert scheduler.drain_events() == [Preempted(1, 4, "kv_full")]
    assert low.high_water == 15  # the withdrawn row computed nothing


# Queues


def test_the_queue_policy_may_change_while_requests_wait() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for number, priority in ((1, 2), (2, 0), (3, 1), (4, 0)):
        add(scheduler, number, 2, max_tokens=1, priority=priority)
    assert list(step(scheduler)) == [1]
    turn(scheduler, policy="priority")
    assert list(step(scheduler)) == [2]
    turn(scheduler, policy="fcfs")
    assert [list(step(scheduler)) for _ in range(2)] == [[3], [4]]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_aborting_most_of_a_long_queue_keeps_the_order_of_the_rest(policy: str) -> None:
    scheduler = make_scheduler(policy=policy, max_num_seqs=1)
    for number in range(200):
        add(scheduler, number, 2, max_tokens=1, priority=-number % 3)
    expected = [r.request_id for r in scheduler.waiting if r.request_id % 10 == 0]
    for number in range(200):
        if number % 10:
            scheduler.abort(number, "test")
    assert [next(iter(step(scheduler))) for _ in range(20)] == expected


def test_a_sampling_row_without_a_token_is_an_error() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, 2)
    with pytest.raises(ValueError, match="request 1 samples and got no token"):
        scheduler.update(scheduler.schedule(), [None])
