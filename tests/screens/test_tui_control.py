"""The operator's actions reach the engine, and the engine's answers reach the operator."""

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Pause, Resume, Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import KnobsChanged, KnobSpec, KnobValue, StepRecord
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.workload.arrivals import fields_of
from stepscope.recordings.compare.division import landmarks
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import add_mark
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.session import SessionState
from stepscope.tui.app.app import Dashboard
from stepscope.tui.screens.knob_editor import KnobEditor
from stepscope.tui.session import engine_link
from stepscope.tui.session.engine_link import EngineLink, KnobsNow
from stepscope.tui.session.operator import (
    parse_workload,
    published_workload,
    workload_note,
    workload_text,
)
from stepscope.tui.session.record_switch import RecordSwitch
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.pages import knobs_page
from stepscope.tui.views.pages.knobs_page import effect_of
from stepscope.tui.views.theme import Skin
from stepscope.tui.views.view import View
from tests.support.engines.simulated_run import simulate
from tests.support.screens.live_dashboard import press
from tests.support.screens.running import running
from tests.support.screens.screen_text import line_texts, main_text, screen_text
from tests.support.sessions.history_steps import history_of
from tests.support.waiting import until, wait_for


@pytest.fixture
def source(live_engine: Any) -> Iterator[Subscriber]:
    """A subscriber to a busy simulated engine."""
    subscriber = Subscriber(live_engine.endpoint)
    subscriber.start()
    with ControlClient(live_engine.endpoint) as client:
        sampling = SamplingParams(max_tokens=700, ignore_eos=True)
        for number in range(60):  # more than a test can take
            prompt = [number] * 300
            client.ask(Submit(prompt_token_ids=prompt, sampling=sampling, stream=False))
        wait_for(lambda: (subscriber.history.last_step or 0) >= 5)
        yield subscriber  # requests end with the client that asked for them
    subscriber.stop()


def dashboard(source: Any, endpoint: str = "") -> Dashboard:
    endpoint = endpoint or source.endpoint.control
    return Dashboard(source, control_endpoint=endpoint, any_terminal=True, fps=10.0)


async def shows(app: Dashboard, words: str) -> None:
    await until(lambda: words in main_text(app), lambda: f"{words}:\n{main_text(app)}")


async def changed_to(history: History, num_changes: int, **new: KnobValue) -> None:
    """Wait for so many knob changes, of which this is the last."""
    await until(lambda: len(history.knob_changes) == num_changes, f"{num_changes} changes")
    assert history.knob_changes[-1].new == new


async def test_the_budget_editor_changes_the_budget_and_the_chart_marks_it(
    source: Subscriber,
) -> None:
    async with running(dashboard(source)) as (app, _):
        await press(app, "B")
        assert isinstance(app.screen, KnobEditor)
        await press(app, *"256", "enter")
        await changed_to(source.history, 1, max_num_batched_tokens=256)
        step = source.history.knob_changes[-1].effective_step
        await shows(app, f"max_num_batched_tokens 2048→256 applied at step {step:,}")
        await until(lambda: source.history.last_step >= step, "no step after it")
        assert source.history.summary(step).token_budget == 256
        app.main.draw()
        assert "◆" in main_text(app)
        # ... and taken back, and forth.
        for number, value in ((2, 2048), (3, 256), (4, 2048)):
            await press(app, "U")
            await changed_to(source.history, number, max_num_batched_tokens=value)
            await shows(app, f"back: max_num_batched_tokens {2048 + 256 - value}→{value} applied")


async def test_undo_reverts_only_the_dashboards_own_change(source: Subscriber) -> None:
    """The other client has the same name: it is another dashboard of the same person."""
    app, history = dashboard(source), source.history
    async with app.run_test(size=(160, 40)):
        name = app.main.operator.who
        with ControlClient(source.endpoint) as other:
            other.set_knobs({"max_num_batched_tokens": 512}, who=name)
            await changed_to(history, 1, max_num_batched_tokens=512)
            await press(app, "U")
            await shows(app, "has not changed a knob")
            assert f"{name}: max_num_batched_tokens 2048→512" in main_text(app)
            await press(app, "B", *"256", "enter")
            await changed_to(history, 2, max_num_batched_tokens=256)
            # Another knob is no reason to keep it ...
            other.set_knobs({"max_num_seqs": 8}, who="anna")
            await changed_to(history, 3, max_num_seqs=8)
            await press(app, "U")
            await changed_to(history, 4, max_num_batched_tokens=512)
            # ... the same one is.
            other.set_knobs({"max_num_batched_tokens": 1024}, who="anna")
            await changed_to(history, 5, max_num_batched_tokens=1024)
            await press(app, "U")
            await shows(app, "not undone: changed since: anna: max_num_batched_tokens 512→1024")
            assert other.snapshot().knobs["max_num_batched_tokens"] == 1024
    assert len(history.knob_changes) == 5
    app.close()


async def test_undo_ends_an_autopilot_and_then_undoes_the_change_before(source: Subscriber) -> None:
    app, history = dashboard(source), source.history
    async with app.run_test(size=(160, 40)):
        operator = app.main.operator
        await press(app, "B", *"1024", "enter")
        await changed_to(history, 1, max_num_batched_tokens=1024)
        stopped: list[str] = []
        pilot = SimpleNamespace(is_on=True, stop=lambda: stopped.append("stopped"))
        operator._autopilot = pilot
        await press(app, "U")
        assert stopped == ["stopped"]
        pilot.is_on = False
        with ControlClient(source.endpoint) as client:
            for budget in (512, 1024):  # moved, and given back
                client.set_knobs({"max_num_batched_tokens": budget}, who=operator.who)
        await changed_to(history, 3, max_num_batched_tokens=1024)
        await press(app, "U")
        await changed_to(history, 4, max_num_batched_tokens=2048)
    app.close()


async def test_a_pause_key_after_another_clients_pause_does_not_resume(source: Subscriber) -> None:
    """Both see a running engine and press P: the second press must not resume it."""
    async with running(dashboard(source), (160, 40)) as (app, _):
        # It knows only what it has seen so far.
        app.main.operator._history = SimpleNamespace(state=source.history.state)
        with ControlClient(source.endpoint) as other:
            other.ask(Pause(who="anna"))
            await press(app, "P")
            await shows(app, "another client made a change first (anna")
            assert other.snapshot().state == "paused"
            await press(app, "6")
            await shows(app, "audit (2)")
            assert "paused the engine" in main_text(app)
            assert "pause refused: another client made a change first" in main_text(app)
            other.ask(Resume(who="anna"))


async def test_a_switch_in_the_editor_begins_at_its_value_and_cycles(source: Subscriber) -> None:
    async with running(dashboard(source)) as (app, _):
        names = [spec.name for spec in source.history.info.knobs]
        await press(app, "K", *["down"] * names.index("enable_prefix_caching"), "enter")
        await until(lambda: "◀ on ▶" in screen_text(app), "it does not show what holds")
        await press(app, "enter")  # the current value
        await until(lambda: "◀" not in screen_text(app), "it is still being changed")
        assert not source.history.knob_changes
        await press(app, "enter", "right", "enter")
        await changed_to(source.history, 1, enable_prefix_caching=False)


async def test_keys_pause_the_engine_and_run_single_steps(source: Subscriber) -> None:
    app = dashboard(source)
    history = source.history
    async with app.run_test(size=(120, 40)):
        await press(app, "P")
        await until(lambda: history.state.state == "paused", "it does not pause")
        await shows(app, "engine paused")
        step = history.last_step
        await press(app, "N")
        await until(lambda: history.last_step == step + 1, "it runs no step")
        await shows(app, f"the engine runs step {step + 1:,}, then pauses")
        await press(app, "P")
        await until(lambda: history.last_step > step + 5, "it does not go on")
    app.close()


async def test_a_workload_change_keeps_other_fields(source: Subscriber, live_engine: Any) -> None:
    mix = WorkloadSpec(rate=0.5, chat_tokens=77, max_concurrency=3, seed=9)
    given = live_engine.workload.given
    given.append(mix)
    app = dashboard(source)

    async def comes(what: WorkloadSpec, num_given: int) -> None:
        """Wait until it is given and published."""
        await until(lambda: len(given) == num_given, "no workload came")
        assert given[-1] == what
        await until(
            lambda: published_workload(source.history.state.workload_spec) == what, "published"
        )

    async with app.run_test(size=(120, 40)):
        await comes(mix, 1)
        await press(app, "W")
        for said in (
            "now rate=0.5 document_share=0.1 chat_tokens=77 ",
            "seed=9; fields you leave out stay",
        ):
            await until(lambda said=said: said in " ".join(screen_text(app).split()), said)
        await press(app, *"rate=2", "enter")
        mix = msgspec.structs.replace(mix, rate=2.0)
        await comes(mix, 2)
        await press(app, "W", *"output_tokens=9 max_concurrency=none", "enter")
        mix = msgspec.structs.replace(mix, output_tokens=9, max_concurrency=None)
        await comes(mix, 3)
        # The next change starts from another client's change.
        mix = msgspec.structs.replace(mix, chat_tokens=5)
        given.append(mix)
        await comes(mix, 4)
        await press(app, "W", *"rate=fast", "enter")
        assert "rate: expected a number" in screen_text(app)
        await press(app, "ctrl+u", *"rate=3", "enter")
        await comes(msgspec.structs.replace(mix, rate=3.0), 5)
        await press(app, "W", *"off", "enter")
        await until(lambda: len(given) == 6, "it was not stopped")
        assert given[-1] is None
        await shows(app, "stop the workload: done")
    app.close()


def test_unknown_fields_of_a_workload_become_defaults_with_a_notice() -> None:
    state = SessionState(workload="2 requests/s: of an earlier version")
    for told in (None, {"rate": 2.0, "of_a_later_version": 7}):
        state.workload_spec = told
        assert published_workload(told) is None
        said = workload_note(state)
        assert "now 2 requests/s: of an earlier version; its other fields are unknown here" in said
        assert "fields you leave out become rate=1 document_share=0.1 " in said
    assert "now none; fields you leave out are rate=1 " in workload_note(SessionState())
    assert parse_workload("rate=3") == WorkloadSpec(rate=3.0)


def test_a_workload_survives_publishing_and_the_text_form_of_the_editor() -> None:
    for spec in (WorkloadSpec(), WorkloadSpec(rate=0.25, num_requests=7, max_concurrency=2)):
        assert published_workload(fields_of(spec)) == spec
        assert parse_workload(workload_text(spec), WorkloadSpec(rate=8.0, temperature=1.0)) == spec


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("rate=banana", r"^rate: expected a number, got 'banana'$"),
        ("rate=none", r"^rate: expected a number, got 'none'$"),
        *((text, "off|expected|speed") for text in ("", "fast", "speed=3", "rate=0", "rate=2 off")),
    ],
)
def test_an_invalid_workload_text_is_explained(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_workload(text)


async def test_an_unanswered_command_is_reported_without_blocking_the_screen(
    still_source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = still_source()
    async with running(dashboard(source, endpoint=f"ipc://{tmp_path}/nobody")) as (app, _):
        await press(app, "P")
        await shows(app, "no engine at")
        monkeypatch.chdir(tmp_path)
        for status in ("down", "starting", "connecting"):
            source.status = status
            await press(app, "R")
            assert "no engine answers, so nothing can be recorded" in main_text(app)
        assert os.listdir(tmp_path) == []
        await press(app, "left")
        assert "PAUSED" in main_text(app)


async def test_a_dashboard_that_joins_late_shows_who_changed_the_knobs(source: Subscriber) -> None:
    with ControlClient(source.endpoint) as client:
        for budget in (512, 256):
            client.set_knobs({"max_num_batched_tokens": budget}, who="anna")
    late = Subscriber(source.endpoint)
    late.start()
    await until(lambda: late.history.last_step is not None, "no steps come")
    assert late.history.knob_changes == []
    async with running(dashboard(late)) as (app, pilot):
        await press(app, "U")
        await shows(app, "has not changed a knob; the last one is by anna: max_num_batched_tokens")
        await press(app, "6")
        await shows(app, "audit (2)")
        lines = main_text(app).splitlines()
        assert any("anna" in line and "max_num_batched_tokens 512→256" in line for line in lines)
        assert any("256         2048" in line and "by anna" in line for line in lines)
        assert "earlier: snapshot --audit" not in main_text(app)
        with ControlClient(source.endpoint) as client:
            for number in range(30):
                client.set_knobs({"max_num_seqs": 10 + number}, who="anna")
        await shows(app, "; earlier: snapshot --audit)")
        await pilot.resize_terminal(80, 24)
        await shows(app, "earlier: snapshot --audit)  ms before→after")
    late.stop()


async def test_a_pending_command_is_shown_until_it_is_answered(still_source: Any) -> None:
    answer_now = threading.Event()
    client = SimpleNamespace(ask=lambda command: answer_now.wait(60), close=lambda: None)
    app, link = dashboard(still_source(), "ipc:///slow"), EngineLink(lambda: client)
    app.main.operator._link = app.session.link = link
    async with app.run_test(size=(120, 40)):
        await press(app, "P")
        assert "asking: pause the engine" in main_text(app)
        await press(app, "left")  # the screen does not wait
        assert "PAUSED" in main_text(app)
        answer_now.set()
        await until(lambda: "asking" not in main_text(app), "it is still asking")
    app.close()


def test_a_control_client_without_commands_processes_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle, done = threading.Event(), lambda *_: None
    monkeypatch.setattr(engine_link, "_IDLE_S", 0.01)
    link = EngineLink(lambda: SimpleNamespace(ask=done, close=done, idle=idle.set))
    link.ask("pause the engine", Pause())
    assert idle.wait(60)
    link.close()


async def test_a_key_switches_recording_on_and_off(
    source: Subscriber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = dashboard(source)
    await until(lambda: source.history.last_step is not None, "no step came")
    add_mark(source, "before it", "me")
    async with app.run_test(size=(160, 40)):
        await press(app, "R")
        assert "recording (without 1 earlier mark) to /" in main_text(app)
        await shows(app, "● REC")
        first = source.history.last_step
        await until(lambda: source.history.last_step > first + 20, "no steps came")
        await press(app, "R")
        assert "recording ended" in main_text(app)
        await until(lambda: "● REC" not in main_text(app), "it is still shown")
    app.close()
    await until(lambda: bool(list(tmp_path.glob("*.mcap"))), "the file is not finished")
    with Recording(next(tmp_path.glob("*.mcap"))) as recording:
        assert recording.last_step - recording.first_step >= 20
        assert not [each for each in landmarks(recording) if each.kind == "mark"]


@pytest.mark.slow
async def test_why_a_recording_ended_is_shown_until_the_next_key(
    source: Subscriber, live_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with running(dashboard(source)) as (app, _):
        await press(app, "R")
        await shows(app, "● REC")
        first = source.history.last_step
        await until(lambda: source.history.last_step > first, "no step comes into it")
        live_engine.becomes(engine_id="another")
        said = "the engine restarted: the recording ends at step"
        await shows(app, said)
        await until(lambda: "● REC" not in main_text(app), "it is still recording")
        await press(app, "end")
        await until(lambda: said not in main_text(app), "it is still said")
        await press(app, "R")
        await shows(app, "● REC")


def test_a_recording_that_is_completed_meanwhile_keeps_its_name(
    source: Subscriber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.tui.session.record_switch.default_name", lambda source: "a.mcap")
    (tmp_path / "a.mcap.part").touch()
    exists = Path.exists

    def completing(path: Path) -> bool:
        found = exists(path)
        if exists(tmp_path / "a.mcap.part"):
            (tmp_path / "a.mcap.part").rename(tmp_path / "a.mcap")
        return found

    monkeypatch.setattr(Path, "exists", completing)
    assert RecordSwitch(source, tmp_path).new_path() == tmp_path / "a-2.mcap"


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["right"], 1050),
        (["left"], 950),
        (["shift+right"], 1250),
        (["shift+left", "shift+left"], 562),
        ([*"64"], 64),
        ([*"64", "backspace"], 6),
        (["shift+right"] * 20, 8192),
        (["shift+left"] * 60, 1),
        ([*"99999"], None),
        ([*"0"], None),
    ],
)
def test_the_budget_editor_stays_within_the_bounds(keys: list[str], value: int | None) -> None:
    spec = KnobSpec("max_num_batched_tokens", "int", 2048, low=1, high=8192)
    now = KnobsNow("", 0, {spec.name: 1000}, (spec,))
    editor = KnobEditor(Skin("none"), lambda: now, spec.name, is_alone=True)
    for key in keys:
        editor.pressed(key, key if len(key) == 1 else None)
    lines = line_texts(editor.lines(110, 5))
    assert {len(line) for line in lines} == {110}
    shown = "\n".join(lines)
    if value is None:
        assert "must be within 1..8192" in shown
    else:
        assert f" {value}_ " in shown
        assert "must be" not in shown


S = 10**9


def change_at(time_ns: int, version: int) -> KnobsChanged:
    old, new = {"max_num_seqs": 8}, {"max_num_seqs": 8 - version}
    return KnobsChanged(
        version=version, effective_step=300, who="anna", old=old, new=new, time_ns=time_ns
    )


@pytest.fixture
def history() -> History:
    """A history of some seconds of work and then none."""
    return history_of(simulate(seed=5, num_steps=300))


def changed(history: History, after_s: float, version: int = 1) -> KnobsChanged:
    """Change a knob so many seconds after the last step."""
    last = history.summary(history.last_step)
    change = change_at(last.tokens_ns + round(after_s * S), version)
    history.append(history.last_sequence + 1, change)
    return change


def test_a_knob_change_without_steps_around_it_has_no_known_effect(history: History) -> None:
    change = changed(history, 60)
    before, after = effect_of(history, change, change.time_ns + 3 * S)
    assert before.step.num_samples == after.step.num_samples == 0
    (listed,) = [row for row in drawn(history, 120) if "anna " in row and "max_num_seqs 8→7" in row]
    assert " unknown " in listed
    assert effect_of(history, change_at(1, 1), S) is None  # older than memory


def test_the_effect_of_a_knob_change_ends_at_the_next_one(history: History) -> None:
    first, second = changed(history, 0.5), changed(history, 2.0, version=2)
    effect = effect_of(history, first, second.time_ns + 30 * S)
    assert effect[0].itl.num_samples
    assert effect[1].end_ns == second.time_ns


def drawn(history: History, width: int) -> list[str]:
    view = View(page="knobs")
    return line_texts(knobs_page.draw(FrameBuilder(history).build(view, 80, 20, 20), width, 30))


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_effect_shows_the_longest_itl_even_of_one_freeze_at_any_width(width: int) -> None:
    """One late token in thousands: percentiles alone would make such a change look harmless."""
    steps = simulate(seed=5, num_steps=400)
    history, late_ns = History(), 0
    for sequence, message in steps:
        if isinstance(message, StepRecord) and message.step >= 300:
            late_ns = 700_000_000
        if isinstance(message, StepRecord) and late_ns:
            names = ("schedule_start_ns", "schedule_end_ns", "launch_ns") * (message.step > 300)
            later = {name: getattr(message, name) + late_ns for name in (*names, "tokens_ns")}
            message = msgspec.structs.replace(message, **later)
        history.append(sequence * 2, message)
        if isinstance(message, StepRecord) and message.step == 290:
            history.append(sequence * 2 + 1, change_at(message.tokens_ns, 1))
    rows = drawn(history, width)
    (heading,) = [row for row in rows if "ITL max" in row]
    (listed,) = [row for row in rows if "anna" in row and "→" in row and "by anna" not in row]
    end = heading.index("ITL max") + len("ITL max")
    assert int(re.search(r"→(\d+)!$", listed[:end])[1]) >= 700


@pytest.mark.parametrize("width", [80, 120, 200])
def test_all_knobs_of_a_change_and_its_author_are_shown_whole(history: History, width: int) -> None:
    old = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}
    new = {"max_num_batched_tokens": 8192, "enable_chunked_prefill": False}
    who = {"version": 1, "effective_step": 200, "who": "bob (root@vm)"}
    change = KnobsChanged(**who, old=old, new=new, time_ns=history.state.time_ns)
    history.append(history.last_sequence + 1, change)
    rows = drawn(history, width)
    (listed,) = [row for row in rows if "on→off" in row]
    assert re.search(r" (budget|max_num_batched_tokens) 256→8192, ", listed)
    assert re.search(r" bob  ", listed)
    assert "…" not in listed
    (last,) = [row for row in rows if "enable_chunked_prefill" in row and "on→off" not in row]
    assert re.search(r"\d\d:\d\d:\d\d by bob", last)
    assert "…" not in last.partition(" by bob")[2][:20]
