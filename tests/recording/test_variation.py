"""`record --vary` moves a knob while it records: when, in which range, and what ends it."""

from typing import Any

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.client.errors import CommandRefused
from stepscope.tui.session.control.variation import KnobRange, KnobVariation

BUDGET = "max_num_batched_tokens"


def test_a_varied_budget_is_changed_for_a_quarter_of_each_minute_and_restored(
    live_engine: Any,
) -> None:
    with ControlClient(live_engine.endpoint) as client:
        client.set_knobs({BUDGET: 700}, "operator")
        variation = KnobVariation(client, KnobRange(BUDGET, 256, 1024), "recorder")
        seen = []
        for second in range(120):
            variation.tick(second)
            # Not from a snapshot: the engine refuses so many of them within a moment.
            seen.append(live_engine.core.scheduler.knobs.max_num_batched_tokens)
        assert set(seen[:60]) == {700, 256, 512, 1024}
        assert seen[:60] == seen[60:]
        assert seen[:60].count(700) == 45
        variation.tick(10)
        assert client.snapshot().knobs[BUDGET] == 256
        variation.close()
        assert client.snapshot().knobs[BUDGET] == 700
        assert variation.ended is None


def test_the_variation_ends_when_an_operator_sets_the_varied_knob(live_engine: Any) -> None:
    with ControlClient(live_engine.endpoint) as client:
        variation = KnobVariation(client, KnobRange(BUDGET, 256, 1024), "recorder")
        client.set_knobs({BUDGET: 300}, "operator")
        variation.tick(10)
        assert variation.ended is not None
        assert variation.ended.startswith(f"{BUDGET} is no longer varied: ")
        variation.close()
        assert client.snapshot().knobs[BUDGET] == 300


@pytest.mark.parametrize(("name", "high"), [("budget", 8), (BUDGET, 1 << 40)])
def test_a_knob_range_that_the_engine_rejects_is_refused_at_the_start(
    live_engine: Any, name: str, high: int
) -> None:
    with ControlClient(live_engine.endpoint) as client:
        before = client.snapshot().knobs
        with pytest.raises(CommandRefused):
            KnobVariation(client, KnobRange(name, 4, high), "recorder")
        assert client.snapshot().knobs == before


@pytest.mark.parametrize("text", ["", BUDGET, "a=1", "a=2..1", "a=0..4", "a=x..y", "=1..2"])
def test_a_malformed_knob_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected KNOB=LOW\.\.HIGH"):
        KnobRange.parse(text)
