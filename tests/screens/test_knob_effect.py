"""The effect of a knob change on the latencies, or in words why it is unknown."""

import re

import msgspec
import pytest

from stepscope.engine.protocol.wire import KnobsChanged, KnobValue, StepRecord
from stepscope.recordings.history.history import History
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.pages import knobs_page
from stepscope.tui.views.pages.audit_rows import effect_of
from stepscope.tui.views.view import View
from tests.support.engines.simulated_run import simulate

S = 10**9
SESSION = simulate(seed=5, num_steps=300)


def change_at(time_ns: int, version: int) -> KnobsChanged:
    old, new = {"max_num_seqs": 8}, {"max_num_seqs": 8 - version}
    return KnobsChanged(
        version=version, effective_step=300, who="anna", old=old, new=new, time_ns=time_ns
    )


@pytest.fixture
def history() -> History:
    """A history of some seconds of work and then none."""
    history = History()
    for sequence, message in SESSION:
        history.append(sequence, message)
    return history


def changed(history: History, after_s: float, version: int = 1) -> KnobsChanged:
    """Change a knob so many seconds after the last step."""
    last = history.summary(history.last_step or 0)
    assert last is not None
    change = change_at(last.tokens_ns + round(after_s * S), version)
    history.append((history.last_sequence or 0) + 1, change)
    return change


def said(history: History, change: KnobsChanged, after_s: float) -> str:
    return effect_of(history, change, change.time_ns + round(after_s * S)).missing


def test_the_effect_of_a_knob_change_at_idle_says_that_nothing_ran(history: History) -> None:
    change = changed(history, 60)
    assert said(history, change, 3) == "nothing ran before, nor since"
    assert said(history, change, 30) == "nothing ran before, nor in the 10 s after"
    later = changed(history, 64, version=2)
    assert said(history, change, 30) == "nothing ran before, nor up to the next change"
    assert said(history, later, 3) == "nothing ran after the change before, nor since"


def test_the_effect_of_a_knob_change_before_idle_says_that_nothing_ran_since(
    history: History,
) -> None:
    change = changed(history, 0.5)
    assert said(history, change, 3) == "nothing ran since"
    assert effect_of(history, change, change.time_ns + 3 * S).figures[0][0] is not None


def test_the_effect_of_a_knob_change_older_than_memory_says_so(history: History) -> None:
    assert said(history, change_at(1, 1), 3) == "older than memory"
    fresh = History()
    fresh.begin(history.state_at(history.last_step or 0), 0)
    change = change_at(fresh.state.time_ns + S, 1)
    fresh.append(1, change)
    assert said(fresh, change, 3) == "before not in memory, nothing ran since"


def test_a_knob_change_before_the_first_step_does_not_count_as_older_than_memory(
    history: History,
) -> None:
    now = history.snapshot()
    assert now is not None
    history = History()
    history.reset(msgspec.structs.replace(now, step=-1, sequence=3, time_ns=90 * S, requests=[]))
    change = change_at(95 * S, 1)
    history.append(4, change)
    assert said(history, change, 3) == "nothing ran before, nor since"


def test_the_effect_distinguishes_steps_without_first_tokens_from_no_steps(
    history: History,
) -> None:
    sequence, change = 0, None
    steps = History()
    for sequence, message in SESSION:
        steps.append(sequence, message)
        if steps.num_steps == 1 and change is None:
            change = change_at(steps.state.time_ns, 1)
    assert change is not None
    steps.append(sequence + 1, change)
    assert said(steps, change, 0.001) == "no second token before, nothing ran since"


def test_the_knob_screen_says_in_list_and_detail_why_an_effect_has_no_figures(
    history: History,
) -> None:
    changed(history, 60)
    view = View(page="knobs")
    view.row = 99  # the last line
    lines = knobs_page.draw(FrameBuilder(history).build(view, 80, 20, 20), 120, 40)
    rows = ["".join(text for text, _ in line) for line in lines]
    (listed,) = [row for row in rows if "anna " in row and "max_num_seqs 8→7" in row]
    assert "nothing ran before, nor since" in listed
    assert "—→—" not in listed
    assert any("max_num_seqs 8→7; nothing ran before, nor since" in row for row in rows)


def drawn(history: History, width: int) -> list[str]:
    view = View(page="knobs")
    lines = knobs_page.draw(FrameBuilder(history).build(view, 80, 20, 20), width, 30)
    return ["".join(text for text, _ in line) for line in lines]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_effect_shows_the_longest_itl_even_of_one_freeze_at_any_width(width: int) -> None:
    """One late token in thousands: percentiles alone would make such a change look harmless."""
    steps = simulate(seed=5, num_steps=400)
    history, late_ns = History(), 0
    for sequence, message in steps:
        if isinstance(message, StepRecord) and message.step >= 300:
            late_ns = 700_000_000
        if isinstance(message, StepRecord) and late_ns:
            message = msgspec.structs.replace(
                message,
                schedule_start_ns=message.schedule_start_ns + late_ns * (message.step > 300),
                schedule_end_ns=message.schedule_end_ns + late_ns * (message.step > 300),
                launch_ns=message.launch_ns + late_ns * (message.step > 300),
                tokens_ns=message.tokens_ns + late_ns,
            )
        history.append(sequence * 2, message)
        if isinstance(message, StepRecord) and message.step == 290:
            history.append(sequence * 2 + 1, change_at(message.tokens_ns, 1))
    rows = drawn(history, width)
    (heading,) = [row for row in rows if "ITL max" in row]
    (listed,) = [row for row in rows if "anna" in row and "→" in row and "by anna" not in row]
    end = heading.index("ITL max") + len("ITL max")
    after = re.search(r"→(\d+)!$", listed[:end])
    assert after is not None, listed
    assert int(after[1]) >= 700


@pytest.mark.parametrize("width", [80, 120, 200])
def test_all_knobs_of_a_change_are_named_and_its_author_shown_whole(
    history: History, width: int
) -> None:
    old: dict[str, KnobValue] = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}
    new: dict[str, KnobValue] = {"max_num_batched_tokens": 8192, "enable_chunked_prefill": False}
    time_ns = history.state.time_ns
    change = KnobsChanged(
        version=1, effective_step=200, who="bob (root@vm)", old=old, new=new, time_ns=time_ns
    )
    history.append((history.last_sequence or 0) + 1, change)
    rows = drawn(history, width)
    (listed,) = [row for row in rows if "on→off" in row]
    assert re.search(r" (budget|max_num_batched_tokens) 256→8192, ", listed)
    assert re.search(r" bob  ", listed)
    assert "…" not in listed
    (last,) = [row for row in rows if "enable_chunked_prefill" in row and "on→off" not in row]
    assert re.search(r"\d\d:\d\d:\d\d by bob", last)
    assert "…" not in last.partition(" by bob")[2][:20]
