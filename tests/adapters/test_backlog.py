"""What the engine's thread notes is read in order, whoever reads it."""

import threading

import pytest

from stepscope.engine.adapters.attached.backlog import Backlog


def test_notes_are_read_in_order_by_whichever_thread() -> None:
    backlog = Backlog()
    read: list[int] = []
    has_ended = threading.Event()

    def pump() -> None:
        while not has_ended.is_set():
            backlog.wait(5.0)
            backlog.read()

    thread = threading.Thread(target=pump)
    thread.start()
    for number in range(2_000):
        backlog.put(read.append, number)
        if number % 3 == 0:
            backlog.wake()
        if number % 7 == 0:
            with backlog.done():
                assert read == list(range(number + 1))
    has_ended.set()
    backlog.wake()
    thread.join()
    assert read == list(range(2_000))


def test_what_follows_a_note_that_fails_is_forgotten() -> None:
    backlog = Backlog()
    read: list[int] = []

    def fail() -> None:
        raise ValueError("cannot be read")

    backlog.put(read.append, 1)
    backlog.put(fail)
    backlog.put(read.append, 2)
    with pytest.raises(ValueError, match="cannot be read"), backlog.done():
        raise AssertionError("nothing is done with half of the notes")
    backlog.read()
    assert read == [1]
