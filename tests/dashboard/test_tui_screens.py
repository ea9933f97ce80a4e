"""The screens beyond the main one show what the records say, and how keys lead to them."""

import re
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.protocol.wire import CACHED, EMPTY, Preempted
from stepscope.recordings.attribution.causes import WORDS, Cause, Piece
from stepscope.recordings.history.history import History
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.latency_samples import Samples
from stepscope.tui.session import navigator
from stepscope.tui.settings.action_table import PAGES, Need, Page, Place
from stepscope.tui.settings.actions import ACTIONS, BY_ID, Abilities
from stepscope.tui.views.charts import kv_map
from stepscope.tui.views.format import clock
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.pages import kv_page, latency_page
from stepscope.tui.views.pages.page_views import PAGE_VIEWS, targets
from stepscope.tui.views.panels import latency_panel
from stepscope.tui.views.theme import CAUSE_GLYPHS, Skin
from stepscope.tui.views.view import View
from tests.support.screens.running import running
from tests.support.screens.screen_text import help_lines, line_texts, screen_text
from tests.support.screens.still_dashboard import dashboard

NUM_STEPS = 400
SIZES = [(80, 20), (80, 24), (120, 40), (200, 60)]
BEYOND: list[Page] = [page for page in PAGES if page != "live"]


def key_of(page: Page) -> str:
    return BY_ID[f"screen_{page}"].keys[0]


def frame_of(history: History, view: View) -> Frame:
    return FrameBuilder(history, clock=lambda: 0.0).build(view, 80, 0, 8)


def drawn(history: History, page: Page, size: tuple[int, int] = (120, 35), **view: Any) -> str:
    frame = frame_of(history, View(page=page, **view))
    return "\n".join(line_texts(PAGE_VIEWS[page].draw(frame, *size)))


# Getting there


async def test_a_digit_opens_each_screen_and_escape_leads_back(source: Any) -> None:
    async with running(dashboard(source)) as (app, pilot):
        titles = ("step 399", "gaps between tokens", "KV map by state", "breaches (", "audit (")
        for number, title in enumerate(titles, 2):
            await pilot.press(str(number))
            assert title in screen_text(app), number
        for page in ("latency", "kv", "request", "step", "live"):
            await pilot.press("escape")
            assert app.main.view.page == page
        await pilot.press("y")
        assert "requests × steps" in screen_text(app)
        assert "last stall: step" in app.clipboard


async def test_enter_opens_the_step_where_the_selected_request_has_not_come_yet(
    source: Any,
) -> None:
    async with running(dashboard(source)) as (app, pilot):
        newest = app.main.view.selected = max(source.history.state.requests)
        await pilot.press("home", "enter")
        assert (app.main.view.page, app.main.view.selected) == ("step", newest)
        await pilot.press("1", "L", "enter")
        assert app.main.view.page == "request"


async def test_the_selected_row_stays_with_its_request_from_step_to_step(source: Any) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("2", "down", "down")
        selected = app.main.view.selected
        assert selected is not None
        for _ in range(6):
            await pilot.press("left")
            rows = targets(app.main.frame)
            if selected in {row.request_id for row in rows}:
                assert rows[app.main.view.row].request_id == selected
        await pilot.press("enter")
        assert app.main.view.page == "request"


@pytest.mark.parametrize("kind", ["live", "replay"])
@pytest.mark.parametrize("page", [*PAGES, "start"])
def test_help_describes_the_screen_and_lists_only_keys_of_it(page: Place, kind: Need) -> None:
    abilities = Abilities(has=frozenset({"engine", "recorder", "files", kind}))
    lines = line_texts(help_lines(abilities, page))
    for action in ACTIONS:
        shown = abilities.allows(action) and page in action.pages
        said = action.help_on(page, is_replay=kind == "replay")
        assert any(line.endswith(said) for line in lines) == shown, action.id
    assert any("This is the " in line for line in lines)


# What they say


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_every_sign_in_a_steps_time_bar_is_explained_below_it(source: Any, width: int) -> None:
    left = width if width < 100 else width // 2
    page = drawn(source.history, "step", size=(width, 35), cursor=250).splitlines()
    bar, names = (line[1 : left - 1] for line in page[1:3])
    signs = set(bar.split(" ms ")[1].strip())
    named = dict(re.findall(r"([sl━]) (sch\w*|lau\w*|mod\w*) ", names))
    assert "━" in signs
    assert signs <= set(named)
    assert [named[sign][:3] for sign in "sl━"] == ["sch", "lau", "mod"]
    assert re.search(r"device (—|[\d.]+)", names)  # the last figure is not cut


def test_the_request_inspector_names_the_cause_of_each_late_token(source: Any) -> None:
    history = source.history
    step, victim = next(
        (s, event.request_id)
        for s in range(NUM_STEPS)
        for event in history.record(s).events
        if isinstance(event, Preempted)
    )
    life = history.lives.life(history.state_at(step).requests[victim])
    wait = next(w for w in life.waits if any(p.cause == "preempted" for p in w.pieces))
    at = {"page": "request", "selected": victim, "cursor": wait.step, "right": wait.step}
    page = drawn(history, size=(160, 50), **at)
    assert f"request r{victim}" in page
    assert "preempted 1x" in page
    row = next(line for line in page.splitlines() if f" {wait.step:,} " in line)
    assert f"{wait.gap_ns / 1e6:,.1f}" in row
    assert "recomputed" in page
    assert "✗" in next(line for line in page.splitlines() if "life" in line)
    assert targets(frame_of(history, View(**at)))[0].step == wait.step
    # All pieces of the selected wait, and they add up.
    below = page.split("in order of time")[1]
    shown = [float(ms.replace(",", "")) for ms in re.findall(r"([\d,.]+) ms +\d+%", below)]
    assert sum(shown) == pytest.approx(wait.gap_ns / 1e6, abs=0.1 * len(shown))


def test_the_kv_map_names_the_owner_of_every_block(source: Any) -> None:
    history = source.history
    frame = frame_of(history, View(page="kv", kv_map="owner"))
    state = history.state
    letters = {
        view.request_id: kv_page._letter(number)
        for number, view in enumerate(kv_map.holders_of(frame))
    }
    for width, height in ((200, 56), (160, 40), (160, 24), (100, 20)):
        body = line_texts(kv_page.draw(frame, width, height))
        assert len(body) == height
        room = width - kv_page.FIGURES_WIDTH - 4
        key = next(y for y, line in enumerate(body) if "most blocks first" in line)
        cells = "".join(line[2 : 2 + room] for line in body[1:key]).rstrip()
        if height >= 24:  # the chart below has use for every row without blocks
            assert key - 1 <= -(-len(cells) // room)
        named = [{EMPTY: "·", CACHED: "░"}.get(o, letters.get(o, "+")) for o in state.block_owner]
        assert cells == "".join(named), (width, height)


def test_late_tokens_that_take_long_to_explain_are_explained_on_request(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(SLO(500, 30))
    for step in range(NUM_STEPS):
        history.append(step, source.history.record(step))
    monkeypatch.setattr(latency_page, "_MOST_ROWS", 0)
    assert "… (Enter explains it)" in drawn(history, "latency", (160, 45))
    breaches = history.windows.breaches(None, 50)
    # One of them is explained: the last stall, which the key figures show.
    assert sum(history.lives.is_known(each.step, each.request_id) for each in breaches) <= 1


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**10), st.integers(0, 10**11), st.integers(1, 9)), min_size=1
    ),
    st.one_of(st.none(), st.floats(0.01, 5000)),
    st.integers(1, 14),
)
def test_latency_heat_map_bands_hold_every_sample_and_split_at_the_service_level(
    samples: list[tuple[int, int, int]], bound_ms: float | None, most_bands: int
) -> None:
    in_order = Samples()
    for sample in sorted(samples):
        in_order.add(*sample)
    counted = latency_panel.count(in_order, 10**10, 10.0, 30, most_bands, bound_ms)
    by_slice = [0] * 30
    for time_ns, _, weight in samples:
        by_slice[min(29, time_ns * 30 // 10**10)] += weight
    assert [sum(column) for column in zip(*counted.cells, strict=True)] == by_slice
    assert sum(sum(row) for row in counted.cells) == sum(weight for _, _, weight in samples)
    assert len(counted.edges) <= max(2, most_bands)
    late = sum(map(sum, counted.cells[len(counted.edges) - counted.num_late :]))
    if bound_ms is None:
        assert late == 0
    else:
        limit_ns = bound_ms * 1e6
        surely = sum(w for _, value, w in samples if value > limit_ns * (1 + 1e-9) + 1)
        at_most = sum(w for _, value, w in samples if value > limit_ns * (1 - 1e-9) - 1)
        assert surely <= late <= at_most


async def test_enter_on_a_breach_goes_to_its_step_and_escape_comes_back(source: Any) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("5", "down", "down")
        breach = source.history.windows.breaches(None, 1000)[-3]
        await pilot.press("enter")
        assert (app.main.view.page, app.main.view.cursor) == ("step", breach.step)
        assert app.main.view.selected == breach.request_id
        await pilot.press("enter")
        assert app.main.view.page == "request"
        assert f"request r{breach.request_id}" in screen_text(app)
        await pilot.press("escape", "escape")
        assert app.main.view.page == "latency"


async def test_page_keys_move_a_list_by_ten_rows_without_moving_in_time(source: Any) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("5", "space", "down", "pagedown")
        cursor, last = app.main.view.cursor, len(targets(app.main.frame)) - 1
        assert app.main.view.row == min(11, last)
        await pilot.press("pagedown", "pageup")
        assert app.main.view.row == max(0, min(21, last) - 10)
        assert app.main.view.cursor == cursor
        await pilot.press("pageup", "pageup", "pageup")
        assert app.main.view.row == 0
        await pilot.press("1", "pageup")
        assert app.main.view.cursor < cursor


async def test_enter_on_a_knob_edits_it_if_there_is_an_engine(source: Any) -> None:
    app = dashboard(source, control_endpoint="ipc:///nobody/here")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("6", "down", "enter")
        assert "knobs of the engine" in screen_text(app)
        assert app.screen._at == 1
    app = dashboard(source, readonly=True, control_endpoint="ipc:///nobody/here")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("6", "enter")
        assert app.screen is app.main
        assert "--readonly" in screen_text(app)


# Causes and glyphs


def test_every_cause_has_a_glyph_of_its_own_also_in_ascii() -> None:
    assert set(CAUSE_GLYPHS) == set(WORDS) == set(get_args(Cause))
    assert all(Piece(cause, 1, 1, 1).text and Piece(cause, 1, 1, 1).short for cause in WORDS)
    glyphs = [glyph for glyph, _ in CAUSE_GLYPHS.values()]
    assert len(set(glyphs)) == len(glyphs)
    ascii_only = [Skin("none", ascii_only=True).text(glyph) for glyph in glyphs]
    assert len(set(ascii_only)) == len(glyphs)
    assert all(glyph.isascii() for glyph in ascii_only)
    for mode in ("dark", "light", "ansi", "none"):
        assert all(Skin(mode).styles[style] is not None for _, style in CAUSE_GLYPHS.values())


# Known from elsewhere


async def test_a_followed_request_stays_visible(source: Any) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("f")
        assert "select a request first" in screen_text(app)
        await pilot.press("down", "f")
        followed = app.main.view.followed
        assert followed is not None
        await pilot.press("o", "o", "escape")
        assert followed in {row.request_id for row in app.main.frame.lanes}
        await pilot.press("3")
        assert f"request r{followed}" in screen_text(app)
        await pilot.press("escape", "f")
        app.main.view.selected = None
        await pilot.press("f")
        assert app.main.view.followed is None


async def test_a_followed_ended_request_shows_its_finish_and_a_key_goes_to_its_last_step(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = source.history
    known = {view.request_id for view in history.snapshot().requests}
    ends = history.events(None, 1000, frozenset({"finish"}))
    end = [each for each in ends if each.request_id not in known][-1]
    monkeypatch.setattr(navigator, "_MAX_SEARCH", 3)  # steps; it ended longer ago
    async with running(dashboard(source)) as (app, pilot):
        app.main.view.selected = app.main.view.followed = end.request_id
        await pilot.press("3")
        when = clock(history.wall_ns(end.time_ns))
        told = f"it ended at {when}, step {end.step:,}; its last step: ,"
        assert end.text in screen_text(app)
        assert told in screen_text(app)
        app.main.view.selected = None  # it stays followed
        await pilot.press("comma")
        assert app.main.view.cursor == end.step
        assert f"request r{end.request_id}" in screen_text(app)
        await pilot.press("L")
        assert told in screen_text(app)
    # Before its arrival, and for an unknown request, no end is shown.
    for request_id, cursor in ((end.request_id, 0), (10**6, None)):
        page = drawn(history, "request", selected=request_id, cursor=cursor)
        assert f"r{request_id} does not exist at this step; its next step: ." in page


async def test_the_session_before_an_engine_restart_can_be_viewed(source: Any) -> None:
    history = source.history
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("p")
        assert "has not restarted" in screen_text(app)
        history.append(0, msgspec.structs.replace(history.info, engine_id="another"))
        app.main.draw()
        await pilot.pause()
        assert "no step yet: the engine has run none since it is watched" in screen_text(app)
        assert "p shows the session before" in screen_text(app)
        await pilot.press("p")
        assert "▐BEFORE THE RESTART▌" in screen_text(app)
        assert f"step {NUM_STEPS - 1}" in screen_text(app)
        for back in ("p", "L"):
            assert "the session before the restart" in screen_text(app)
            assert "p shows the session" not in screen_text(app)
            await pilot.press(back)
            assert "the session before the restart" not in screen_text(app)
            await pilot.press("p")
        await pilot.press("left", "2")
        assert re.search(rf"step {NUM_STEPS - 2}  .* \(follows cursor\)", screen_text(app))
        await pilot.press("L", "1")
        assert "▐LIVE idle▌" in screen_text(app)
        assert "no step yet" in screen_text(app)


def test_a_lane_shows_how_a_request_that_the_state_forgot_has_ended(source: Any) -> None:
    builder, known = FrameBuilder(source.history, clock=lambda: 0.0), source.history.state.requests
    rows = builder.build(View(cursor=399, right=399), 380, 400, 8).lanes
    forgotten = {row.status for row in rows if row.request_id not in known}
    assert forgotten
    assert forgotten <= {"END", "ABRT"}
    rows = builder.build(View(cursor=150, right=399), 380, 400, 8).lanes
    assert {row.status for row in rows if not row.cells[:130].strip(b"\0")} == {""}  # to come


@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
def test_the_help_of_each_knob_is_shown_whole(source: Any, size: tuple[int, int]) -> None:
    specs = {spec.name: spec for spec in source.history.info.knobs}
    for row, name in enumerate(source.history.state.knobs):
        page = drawn(source.history, "knobs", size, row=row)
        text = " ".join(page.replace("│", " ").split())
        assert f"{name}: {' '.join(specs[name].help.split())} (default" in text


def test_a_shortened_list_of_knobs_counts_those_left_out(source: Any) -> None:
    names = {spec.name for spec in source.history.info.knobs} | set(source.history.state.knobs)
    for height, is_cut in ((14, True), (35, False)):
        page = drawn(source.history, "knobs", (80, height))
        shown = sum(f" {name} " in page for name in names)
        said = re.search(r"knobs \((\d+) of (\d+)\)", page)
        assert is_cut == (said is not None) == (shown < len(names)), page
        if said is not None:
            assert (int(said[1]), int(said[2])) == (shown, len(names)), page
