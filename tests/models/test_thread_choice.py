"""A step gets the number of threads that was lately faster for steps of its size."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.execution.environment import LAST_TRIAL, ThreadChoice

ALL = 8


def run(
    choice: ThreadChoice, num_steps: int, time_ns: Callable[[int], int], num_tokens: int = 16
) -> list[int]:
    """The threads chosen for each step, if a step with n threads takes `time_ns(n)`."""
    chosen = []
    for _ in range(num_steps):
        threads = choice.choose(num_tokens)
        choice.note(num_tokens, threads, time_ns(threads))
        chosen.append(threads)
    return chosen


@pytest.mark.parametrize(("faster", "slower"), [(ALL, 1), (1, ALL)])
def test_the_faster_thread_count_is_found_and_the_slower_tried_ever_less(
    faster: int, slower: int
) -> None:
    chosen = run(ThreadChoice(ALL), 2000, lambda threads: 100 if threads == faster else 300)
    assert chosen.count(slower) <= 30
    assert chosen[-LAST_TRIAL:].count(slower) <= 1


def test_the_thread_count_changes_soon_when_another_process_takes_the_cores() -> None:
    choice = ThreadChoice(ALL)
    run(choice, 1000, lambda threads: 100 if threads == ALL else 200)
    chosen = run(choice, 100, lambda threads: 800 if threads == ALL else 250)
    assert chosen[20:].count(1) >= 70
    # ... and back, when the neighbour is gone.
    chosen = run(choice, 1000, lambda threads: 100 if threads == ALL else 200)
    assert chosen[-100:].count(ALL) >= 95


def test_the_thread_count_is_chosen_for_each_step_size_separately() -> None:
    choice = ThreadChoice(ALL)
    small = run(choice, 200, lambda threads: 50 * threads, num_tokens=1)
    large = run(choice, 200, lambda threads: 5000 // threads, num_tokens=200)
    assert small[-50:].count(1) >= 45
    assert large[-50:].count(ALL) >= 45


def test_a_large_step_never_runs_with_one_thread() -> None:
    chosen = run(ThreadChoice(ALL), 300, lambda threads: threads, num_tokens=4096)
    assert set(chosen) == {ALL}


def test_equally_fast_thread_counts_do_not_alternate() -> None:
    chosen = run(ThreadChoice(ALL), 500, lambda threads: 100)
    assert chosen.count(1) < 30


@settings(max_examples=25)
@given(times=st.lists(st.integers(1, 10**9), min_size=1, max_size=300))
def test_only_one_or_all_threads_are_used_whatever_the_step_times(times: list[int]) -> None:
    choice = ThreadChoice(ALL)
    left = iter(times)
    assert set(run(choice, len(times), lambda threads: next(left))) <= {1, ALL}
