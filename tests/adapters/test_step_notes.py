"""Notes of the engine's thread are read in order, whichever thread reads them."""

import threading

import pytest

from stepscope.engine.adapters.attached.step_notes import StepNotes


def test_queued_step_calls_are_made_in_order_whichever_thread_makes_them() -> None:
    notes = StepNotes()
    read: list[int] = []
    has_ended = threading.Event()

    def pump() -> None:
        while not has_ended.is_set():
            notes.wait(5.0)
            notes.read()

    thread = threading.Thread(target=pump)
    thread.start()
    for number in range(2_000):
        notes.put(read.append, number)
        if number % 3 == 0:
            notes.wake()
        if number % 7 == 0:
            with notes.done():
                assert read == list(range(number + 1))
    has_ended.set()
    notes.wake()
    thread.join()
    assert read == list(range(2_000))


def test_after_a_queued_step_call_fails_no_further_one_is_made() -> None:
    notes = StepNotes()
    read: list[int] = []

    def fail() -> None:
        raise ValueError("cannot be read")

    notes.put(read.append, 1)
    notes.put(fail)
    notes.put(read.append, 2)
    with pytest.raises(ValueError, match="cannot be read"), notes.done():
        raise AssertionError("nothing is done with half of the notes")
    notes.put(read.append, 3)
    notes.read()
    assert read == [1]
