"""All parts of one picture show the same step and the same counts of requests."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol.wire import BatchRow, EngineInfo, Telemetry
from stepscope.recordings.history.history import History
from stepscope.recordings.history.windows import Windows
from stepscope.recordings.session.knee import Knee
from stepscope.recordings.state.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.views.charts import budget_chart, kv_map
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.panels import header, latency_panel
from stepscope.tui.views.view import View
from tests.support.screens.screen_text import line_texts
from tests.support.sessions.history_steps import DECODE, LAST, MS, PREFILL, history_of, step
from tests.support.sessions.received import busy_messages

Call = Callable[..., Any]

FRAME_S = 0.1


def messages(num_steps: int = 300) -> Iterator[tuple[int, Telemetry]]:
    """Messages of a session in which requests arrive, wait and end all the time."""
    return iter(busy_messages(num_steps, seed=5))


def figures(app: Dashboard, *names: str) -> dict[str, set[tuple[str, ...]]]:
    """All values that the shown views give for one kind of figure."""
    said = "\n".join(app.main.canvas.text_of(*names))
    return {
        "step": set(re.findall(r"\bstep ([\d,]+)(?=  | \(follows)", said)),
        "run": set(re.findall(r"RUN (\d+)/|(\d+) run \d+ wait", said)),
        "wait": set(re.findall(r"WAIT (\d+)|\d+ run (\d+) wait", said)),
    }


def values(found: set[Any]) -> set[str]:
    return {part for each in found for part in ([each] if isinstance(each, str) else each) if part}


@pytest.mark.parametrize(
    ("width", "page"), [(120, "live"), (160, "live"), (200, "live"), (120, "step")]
)
async def test_all_views_show_the_same_step(width: int, page: str, still_source: Call) -> None:
    now_s = 0.0
    history = History(SLO(ttft_ms=500.0, itl_ms=30.0))
    coming = messages()
    for _ in range(100):
        history.append(*next(coming))
    source = still_source(1)
    source.history = history
    app = Dashboard(source, any_terminal=True, fps=1.0, clock=lambda: now_s)
    async with app.run_test(size=(width, 60)) as pilot:
        if page == "step":
            await pilot.press("2")
        places = app.main.canvas.places
        names = ("header", "figures", "lanes", "inspector", "page")
        shown = [name for name in names if name in places]
        assert ("inspector" in shown) == (width >= 160)
        steps, running, waiting = set(), set(), set()
        for _ in range(40):
            for _ in range(3):
                history.append(*next(coming))
            now_s += FRAME_S
            app.main.draw_if_changed()
            found = {kind: values(each) for kind, each in figures(app, *shown).items()}
            assert {kind: len(each) for kind, each in found.items()} == dict.fromkeys(found, 1)
            steps |= found["step"]
            running |= found["run"]
            waiting |= found["wait"]
        moved = 40 if page == "live" else 5
        assert min(len(steps), 40) >= moved - 1  # the session and its counts did change
        assert min(len(running), len(waiting)) > 1


async def test_header_and_scrub_bar_say_silent_in_the_same_frame(still_source: Call) -> None:
    now_s = 0.0
    source = still_source()
    app = Dashboard(source, any_terminal=True, fps=1.0, clock=lambda: now_s)
    async with app.run_test(size=(120, 40)):
        for status in ("live", "stale", "down", "live"):
            source.status = status
            now_s += FRAME_S
            app.main.draw_if_changed()
            header, scrub = app.main.canvas.text_of("header", "scrub")
            assert f"▐{status.upper()}▌" in header
            assert f" {status.upper()} " in scrub


def test_steps_that_arrive_while_a_picture_is_made_are_in_the_next_picture() -> None:
    history = History()
    coming = messages()
    for _ in range(100):
        history.append(*next(coming))

    class Coming(View):
        """A view that is so slow to read that another step arrives meanwhile."""

        @property
        def axis(self) -> str:  # type: ignore[override]
            history.append(*next(coming))
            return "step"

        @axis.setter
        def axis(self, value: str) -> None:
            return

    frame = FrameBuilder(history, clock=lambda: 0.0).build(Coming(), 40, 20, 4)
    assert history.last_step > frame.cursor
    last = next(column for column in reversed(frame.columns) if column is not None)
    assert frame.cursor == frame.state.step == frame.summary.step == last.last


class Session:
    """A session whose messages come when a clock says, and the builder of its frames."""

    def __init__(self, cpu_s: float = 0.0) -> None:
        self.now_s = self.cpu_s = 0.0
        self.history = History(SLO(ttft_ms=500.0, itl_ms=30.0))
        self._coming = list(messages(3_000))[::-1]
        self._builder = FrameBuilder(
            self.history, clock=lambda: self.now_s, cpu_clock=partial(self._spent, cpu_s)
        )
        self._begun_ns = 0

    def _spent(self, cpu_s: float) -> float:
        self.cpu_s += cpu_s
        return self.cpu_s

    def receive(self, until_s: float) -> None:
        """Receive what the engine sent up to `until_s` on its own clock."""
        while True:
            sequence, message = self._coming[-1]
            time_ns = getattr(message, "tokens_ns", 0)
            self._begun_ns = self._begun_ns or time_ns
            if time_ns > self._begun_ns + until_s * 1e9:
                return
            self._coming.pop()
            if isinstance(message, EngineInfo):  # as if it ran in real time
                message = msgspec.structs.replace(message, simulated=None)
            self.history.append(sequence, message)

    def drawn(self, late_s: float = 0.0) -> Frame:
        self.receive(self.now_s - late_s)
        return self._builder.build(View(), 60, 12, 4)


def badge_of(frame: Frame) -> str:
    return header.badge(frame, header.SourceState("ipc://engine-0", "live", 10.0))[0]


def test_the_badge_of_a_starved_observer_says_that_it_is_behind() -> None:
    session = Session()
    for _ in range(30):
        session.now_s += 0.1
        assert badge_of(session.drawn()) == "▐LIVE▌"
    session.now_s += 12.0  # nothing ran here; then the messages are worked off slowly
    frame = session.drawn(late_s=10.0)
    assert badge_of(frame) == "▐LIVE 10 s behind▌"
    assert "figures are 1" in line_texts(header.verdict(frame, 80, 1, 0))[0]
    session.now_s += 0.5
    assert badge_of(session.drawn(late_s=4.0)) == "▐LIVE 4.0 s behind▌"
    session.now_s += 0.5
    assert badge_of(session.drawn()) == "▐LIVE▌"


@pytest.mark.parametrize(("cpu_s", "most_s"), [(0.0, 1.1), (0.5, 5.1)])
def test_figures_keep_up_on_a_busy_machine_or_say_their_age(cpu_s: float, most_s: float) -> None:
    session = Session(cpu_s)
    ages = set()
    for _ in range(90):
        session.now_s += 0.4  # a frame comes late, because others have the processor
        frame = session.drawn()
        ages.add(frame.figures_age_s)
        panel = line_texts(latency_panel.draw(frame, 58, 10, 14))[0]
        assert ("s ago" in panel) == (frame.figures_age_s >= 3.0)
        if frame.figures_age_s < 0.01:
            late = [each for each in frame.columns if each is not None and each.has_breach]
            assert not late or (frame.stall is not None and frame.stall.step >= late[-1].first)
    assert max(ages) <= most_s + 0.4


def test_wall_time_and_mixed_steps_are_of_the_minute_that_the_panel_names() -> None:
    """Of 60 steps, one a second, all but the last 15 have a prefill beside a decode."""
    rows = [BatchRow(1, DECODE, 8, 1, 0, 1, LAST), BatchRow(2, PREFILL, 0, 8, 0, 1, 0)]
    messages = []
    for number in range(60):
        is_mixed, at_ms = number < 45, 1000 * number
        times_ns = {
            "schedule_start_ns": at_ms * MS,
            "launch_ns": at_ms * MS,
            "tokens_ns": (at_ms + (1000 if is_mixed else 100)) * MS,
        }
        messages.append(step(number, rows if is_mixed else rows[:1], **times_ns))
    frame = FrameBuilder(history_of(enumerate(messages))).build(View(), 60, 12, 4)
    panel = "\n".join(line_texts(latency_panel.draw(frame, 80, 10, 14)))
    assert "ms (last 59 s)" in panel
    assert "idle 21%  mixed steps 75%" in panel


def test_a_map_that_is_drawn_more_rarely_says_of_which_step_it_is() -> None:
    session = Session()
    session.now_s = 2.0
    frame = session.drawn()
    for width in (58, 60, 140):
        assert f"as of step {frame.step:,} " in line_texts(kv_map.draw(frame, width, 9, 14))[0]


def test_the_knee_beside_the_budget_is_found_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(cpu_s=0.005)
    found_s: list[float] = []
    find = Windows.knee

    def noted(windows: Windows, last_step: int | None) -> Knee | None:
        found_s.append(session.now_s)
        return find(windows, last_step)

    monkeypatch.setattr(Windows, "knee", noted)
    for _ in range(80):
        session.now_s += 0.5
        frame = session.drawn()
    assert len(found_s) == 2
    assert found_s[1] - found_s[0] >= 4_000 * 0.005  # 250 us a second
    for each, title in (
        (frame, "─ steps: token budget · knee 480 (1 col"),
        (replace(frame, knee=None), "─ steps: token budget (1 col"),
    ):
        assert title in line_texts(budget_chart.draw(each, 100, 9, 14))[0]
