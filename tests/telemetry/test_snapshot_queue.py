"""Late joiners cost the engine a bounded share of its time."""

import sys
from typing import Any

from stepscope.engine.loop.outlet import MAX_WAIT_NS, SHARE, SnapshotQueue
from tests.support.engines.core_ends import Client


def test_many_late_joiners_cost_a_bounded_time_share_and_all_get_a_snapshot() -> None:
    now_ns, cost_ns, num_made = 0, 3_000_000, 0

    def take() -> Any:
        nonlocal now_ns, num_made
        now_ns += cost_ns
        num_made += 1
        return num_made

    desk = SnapshotQueue(take, lambda: now_ns)
    askers: list[tuple[int, Client]] = []
    num_steps, step_ns = 1000, 10_000_000
    for step in range(num_steps):
        now_ns += step_ns
        for _ in range(1 + step % 3):
            askers.append((num_made, Client()))
            desk.ask(askers[-1][1])
        desk.serve()
    assert num_made * cost_ns <= SHARE * now_ns + 2 * cost_ns
    now_ns = desk.due_ns
    desk.serve()
    assert desk.due_ns == sys.maxsize
    for made_before, asker in askers:
        # Each gets one, made after it asked.
        assert asker.replies == [made_before + 1]


def test_a_single_late_joiner_gets_a_snapshot_at_once_and_others_eventually() -> None:
    now_ns = 0

    def take() -> Any:
        nonlocal now_ns
        now_ns += 10**12
        return "snapshot"

    desk = SnapshotQueue(take, lambda: now_ns)
    first, second, third = Client(), Client(), Client()
    desk.ask(first)
    desk.serve()
    assert first.replies == ["snapshot"]
    desk.ask(second)
    desk.serve()
    assert second.replies == []
    now_ns += MAX_WAIT_NS
    desk.serve()
    assert second.replies == ["snapshot"]
    desk.ask(third)
    desk.serve(at_once=True)  # the engine ends
    assert third.replies == ["snapshot"]
