"""A step gets the number of threads that has been faster for steps of its size, lately."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.execution.machine.thread_choice import LAST_TRIAL, ThreadChoice

ALL = 8


def run(
    choice: ThreadChoice, num_steps: int, time_ns: Callable[[int], int], num_tokens: int = 16
) -> list[int]:
    """The threads of each step, when a step with so many threads takes `time_ns` of them."""
    chosen = []
    for _ in range(num_steps):
        threads = choice.choose(num_tokens)
        choice.note(num_tokens, threads, time_ns(threads))
        chosen.append(threads)
    return chosen


@pytest.mark.parametrize(("faster", "slower"), [(ALL, 1), (1, ALL)])
def test_the_faster_way_is_found_and_the_slower_one_is_tried_ever_less(
    faster: int, slower: int
) -> None:
    chosen = run(ThreadChoice(ALL), 2000, lambda threads: 100 if threads == faster else 300)
    assert chosen.count(slower) <= 30
    assert chosen[-LAST_TRIAL:].count(slower) <= 1


def test_it_changes_over_soon_when_a_neighbour_takes_the_cores_away() -> None:
    choice = ThreadChoice(ALL)
    run(choice, 1000, lambda threads: 100 if threads == ALL else 200)
    chosen = run(choice, 100, lambda threads: 800 if threads == ALL else 250)
    assert chosen[20:].count(1) >= 70
    # ... and back, when it is gone.
    chosen = run(choice, 1000, lambda threads: 100 if threads == ALL else 200)
    assert chosen[-100:].count(ALL) >= 95


def test_sizes_of_steps_are_judged_apart() -> None:
    choice = ThreadChoice(ALL)
    small = run(choice, 200, lambda threads: 50 * threads, num_tokens=1)
    large = run(choice, 200, lambda threads: 5000 // threads, num_tokens=200)
    assert small[-50:].count(1) >= 45
    assert large[-50:].count(ALL) >= 45


def test_a_large_step_is_never_tried_with_one_thread() -> None:
    chosen = run(ThreadChoice(ALL), 300, lambda threads: threads, num_tokens=4096)
    assert set(chosen) == {ALL}


def test_ways_that_take_the_same_are_not_changed_back_and_forth() -> None:
    chosen = run(ThreadChoice(ALL), 500, lambda threads: 100)
    assert chosen.count(1) < 30


@settings(max_examples=50, deadline=None)
@given(times=st.lists(st.integers(1, 10**9), min_size=1, max_size=300))
def test_whatever_steps_take_only_one_or_all_threads_are_used(times: list[int]) -> None:
    choice = ThreadChoice(ALL)
    left = iter(times)
    assert set(run(choice, len(times), lambda threads: next(left))) <= {1, ALL}
