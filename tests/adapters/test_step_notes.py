"""Notes of the engine's thread are read in order, whichever thread reads them."""

import threading

from stepscope.engine.adapters.attached.hooks import StepNotes


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
