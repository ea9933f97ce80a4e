"""The schedules of each batching mode, and of changes between modes while requests run."""

import itertools
from typing import get_args

import pytest

from stepscope.engine.protocol.knobs import Batching
from stepscope.engine.protocol.wire import FirstToken
from stepscope.engine.scheduling.scheduler import Scheduler
from tests.support.engines.bare_scheduler import add, make_scheduler, step, turn

MODES: tuple[Batching, ...] = get_args(Batching)


def first_tokens(scheduler: Scheduler) -> list[int]:
    return [e.request_id for e in scheduler.drain_events() if isinstance(e, FirstToken)]


def run_to_end(scheduler: Scheduler) -> int:
    for count in itertools.count():
        if not scheduler.has_work():
            return count
        step(scheduler)
    raise AssertionError


# naive


def test_switching_to_naive_batching_finishes_running_requests_one_after_the_other() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    for number in (1, 2, 3):
        add(scheduler, number, 6, max_tokens=3)
    assert step(scheduler) == {1: 6, 2: 6, 3: 4}
    turn(scheduler, batching="naive")
    assert [step(scheduler) for _ in range(7)] == [
        {1: 1}, {1: 1}, {2: 1}, {2: 1}, {3: 2}, {3: 1}, {3: 1},
    ]  # fmt: skip
    assert not scheduler.has_work()


# static


def test_a_static_batch_is_padded_on_the_left_and_runs_to_its_end() -> None:
    scheduler = make_scheduler(batching="static", max_num_seqs=3)
    for number, (num_prompt, max_tokens) in enumerate([(10, 2), (4, 4), (7, 3), (2, 2)], start=1):
        add(scheduler, number, num_prompt, max_tokens)
    seen = []
    while scheduler.has_work():
        tokens = step(scheduler)
        seen.append((tokens, scheduler.num_padded_tokens, first_tokens(scheduler)))
    assert seen == [
        ({1: 10, 2: 4, 3: 7}, 3 * 10 - 21, [1, 2, 3]),
        ({1: 1, 2: 1, 3: 1}, 0, []),
        ({2: 1, 3: 1}, 1, []),  # request 1 has ended; its row stays
        ({2: 1}, 2, []),
        ({4: 2}, 0, [4]),  # only now the next batch
        ({4: 1}, 0, []),
    ]


def test_a_padded_static_prefill_above_the_budget_runs_in_slices_ending_together() -> None:
    scheduler = make_scheduler(batching="static", max_num_batched_tokens=12)
    for number, num_prompt in enumerate([10, 3, 6], start=1):
        add(scheduler, number, num_prompt)
    assert [(step(scheduler), scheduler.num_padded_tokens) for _ in range(3)] == [
        ({1: 4}, 8),  # columns 0..3: the others are still padding
        ({1: 4, 2: 1, 3: 4}, 3),
        ({1: 2, 2: 2, 3: 2}, 0),
    ]
    assert first_tokens(scheduler) == [1, 2, 3]


def test_a_static_batch_has_no_more_rows_than_the_budget_has_tokens() -> None:
    scheduler = make_scheduler(batching="static", max_num_batched_tokens=2)
    for number in (1, 2, 3):
        add(scheduler, number, 1, max_tokens=2)
    assert step(scheduler) == {1: 1, 2: 1}


def test_without_chunked_prefill_a_whole_padded_static_batch_fits_the_budget() -> None:
    scheduler = make_scheduler(
        batching="static", enable_chunked_prefill=False, max_num_batched_tokens=64
    )
    for number, num_prompt in enumerate([20, 30, 5], start=1):
        add(scheduler, number, num_prompt, max_tokens=1)
    assert step(scheduler) == {1: 20, 2: 30}  # three rows of 30 would be 90 tokens
    assert scheduler.num_padded_tokens == 10
    assert scheduler.waiting_reasons() == {"budget": 1}


def test_under_a_budget_below_its_size_a_static_batch_decodes_in_turn_and_counts_padding() -> None:
    scheduler = make_scheduler(batching="static")
    for number, max_tokens in enumerate([3, 9, 9], start=1):
        add(scheduler, number, 2, max_tokens)
    step(scheduler)
    turn(scheduler, max_num_batched_tokens=2)
    served = [list(step(scheduler)) for _ in range(4)]
    assert served == [[1, 2], [3, 1], [2, 3], [2, 3]]
    assert scheduler.num_padded_tokens == 0
    turn(scheduler, max_num_batched_tokens=3)
    assert (step(scheduler), scheduler.num_padded_tokens) == ({2: 1, 3: 1}, 1)


def test_a_budget_below_a_static_batch_prefills_its_prompts_in_turn() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, long_prefill_token_threshold=3)
    for number in (1, 2, 3):
        add(scheduler, number, 5)
    assert step(scheduler) == {1: 3, 2: 3, 3: 3}
    turn(scheduler, batching="static", max_num_batched_tokens=2)
    assert [step(scheduler) for _ in range(4)] == [
        {1: 1, 2: 1}, {3: 1}, {1: 1, 2: 1}, {3: 1, 1: 1},
    ]  # fmt: skip
    assert first_tokens(scheduler) == [1, 2, 3]


def test_switching_to_static_batching_makes_the_running_requests_the_first_batch() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, 1, 2, max_tokens=4)
    add(scheduler, 2, 12, max_tokens=2)
    assert step(scheduler) == {1: 2, 2: 6}
    add(scheduler, 3, 2)
    turn(scheduler, batching="static")
    # Request 2 has four more columns of prompt to go than request 1, which waits for it.
    assert [(step(scheduler), scheduler.num_padded_tokens) for _ in range(4)] == [
        ({2: 4}, 4), ({1: 1, 2: 2}, 1), ({1: 1, 2: 1}, 0), ({1: 1}, 1),
    ]  # fmt: skip
    assert step(scheduler) == {3: 2}


def test_changing_the_batching_mode_drops_the_padding_rows_of_a_static_batch() -> None:
    scheduler = make_scheduler(batching="static")
    for number, max_tokens in ((1, 1), (2, 9)):
        add(scheduler, number, 2, max_tokens)
    step(scheduler)
    step(scheduler)
    assert scheduler.num_padded_tokens == 1
    for batching in ("chunked", "static"):
        turn(scheduler, batching=batching)
        step(scheduler)
        assert scheduler.num_padded_tokens == 0


def test_a_static_batch_whose_requests_are_all_aborted_gives_way_to_the_next() -> None:
    scheduler = make_scheduler(batching="static", max_num_seqs=2)
    for number in (1, 2, 3):
        add(scheduler, number, 2)
    step(scheduler)
    for number in (1, 2):
        scheduler.abort(number, "the client went away")
    assert step(scheduler) == {3: 2}
    assert scheduler.num_padded_tokens == 0


# continuous and separate


def test_continuous_batching_prefills_whole_prompts_while_decodes_wait() -> None:
    scheduler = make_scheduler(batching="continuous", max_num_batched_tokens=40)
    add(scheduler, 1, 4)
    assert [step(scheduler) for _ in range(2)] == [{1: 4}, {1: 1}]
    for number, num_prompt in ((2, 30), (3, 8), (4, 10)):
        add(scheduler, number, num_prompt)
    assert step(scheduler) == {2: 30, 3: 8}  # request 4 fits no more, and is not cut
    assert scheduler.waiting_reasons() == {"budget": 1}
    assert step(scheduler) == {4: 10}
    assert step(scheduler) == {1: 1, 2: 1, 3: 1, 4: 1}


def test_in_continuous_batching_a_prompt_above_the_budget_stalls_decodes_for_several_steps() -> (
    None
):
    scheduler = make_scheduler(batching="continuous", max_num_batched_tokens=16)
    add(scheduler, 1, 4)
    step(scheduler)
    add(scheduler, 2, 40)
    add(scheduler, 3, 4)
    assert [step(scheduler) for _ in range(4)] == [
        {2: 16}, {2: 16}, {2: 8, 3: 4}, {1: 1, 2: 1, 3: 1},
    ]  # fmt: skip


def test_separate_batching_prefills_all_chunks_before_any_decode() -> None:
    scheduler = make_scheduler(batching="separate", max_num_batched_tokens=16)
    add(scheduler, 1, 4)
    step(scheduler)
    for number, num_prompt in ((2, 10), (3, 12)):
        add(scheduler, number, num_prompt)
    assert [step(scheduler) for _ in range(3)] == [{2: 10, 3: 6}, {3: 6}, {1: 1, 2: 1, 3: 1}]


@pytest.mark.parametrize("batching", ["chunked", "separate"])
def test_while_a_request_decodes_prefills_wait_for_every_nth_step(batching: Batching) -> None:
    scheduler = make_scheduler(
        batching=batching, prefill_schedule_interval=3, max_num_batched_tokens=8
    )
    add(scheduler, 0, 4)
    assert step(scheduler) == {0: 4}
    add(scheduler, 1, 14)
    for _ in range(2):
        assert step(scheduler) == {0: 1}
        assert scheduler.has_held_prefills
        assert scheduler.waiting_reasons() == {"cadence": 1}
    decode = {0: 1} if batching == "chunked" else {}
    assert step(scheduler) == {**decode, 1: 8 - len(decode)}
    assert [step(scheduler) for _ in range(2)] == [{0: 1}, {0: 1}]
    assert scheduler.has_held_prefills  # the rest of a prompt that runs already
    assert step(scheduler) == {**decode, 1: 14 - 8 + len(decode)}
    assert not scheduler.has_held_prefills
    assert step(scheduler) == {0: 1, 1: 1}


def test_prefills_wait_for_nobody_where_no_request_decodes() -> None:
    scheduler = make_scheduler(prefill_schedule_interval=50, max_num_batched_tokens=8)
    add(scheduler, 0, 20)
    add(scheduler, 1, 20)
    assert [step(scheduler) for _ in range(2)] == [{0: 8}, {0: 8}]
    turn(scheduler, prefill_schedule_interval=1)
    assert step(scheduler) == {0: 4, 1: 4}


@pytest.mark.parametrize("batching", ["continuous", "separate", "chunked"])
@pytest.mark.parametrize(
    ("order", "served"),
    [("decode_first", [[1, 2], [3, 1], [2, 3]]), ("arrival", [[1, 2], [1, 2], [1, 2]])],
)
def test_if_the_budget_holds_only_some_decodes_the_order_knob_decides_which_are_served(
    batching: str, order: str, served: list[list[int]]
) -> None:
    scheduler = make_scheduler(batching=batching, order=order)
    for number in (1, 2, 3):
        add(scheduler, number, 2, max_tokens=9)
    step(scheduler)
    turn(scheduler, max_num_batched_tokens=2)
    assert [list(step(scheduler)) for _ in range(3)] == served


# All of them


@pytest.mark.parametrize("before", MODES)
@pytest.mark.parametrize("after", MODES)
def test_the_batching_mode_can_change_from_any_to_any_other_while_requests_run(
    before: Batching, after: Batching
) -> None:
    # Whatever the first mode has left: partial prompts, decodes, an unfinished batch.
    for num_steps in range(1, 9):
        scheduler = make_scheduler(num_blocks=24, batching=before, max_num_batched_tokens=12)
        requests = [add(scheduler, number, 3 + 9 * (number % 4), 5) for number in range(6)]
        for _ in range(num_steps):
            step(scheduler)
        turn(scheduler, batching=after)
        run_to_end(scheduler)
        assert [request.num_output_tokens for request in requests] == [5] * 6
        assert scheduler.kv.counts().used == 0
