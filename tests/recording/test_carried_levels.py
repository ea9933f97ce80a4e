"""A recording carries the service levels it was watched with, and is judged by them."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.recordings import samples
from stepscope.recordings.check.rewrite import rewrite
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import levels_in, slo_of
from stepscope.recordings.history.history import History
from stepscope.recordings.state.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.settings.preferences import Preferences
from stepscope.tui.settings.setting_values import parse_levels
from stepscope.tui.views.frame.chart_columns import ChartColumns
from stepscope.tui.views.view import View
from tests.support.engines.simulated_run import simulate
from tests.support.screens.screen_text import screen_text
from tests.support.sessions.history_steps import history_of

Call = Callable[..., Any]


@pytest.fixture
def recording(recorded_to: Call, tmp_path: Path) -> Call:
    """Makes files of the same session that carry these levels."""

    def make(name: str, engine_levels: dict[str, float] | None = None, **levels: float) -> Path:
        path = tmp_path / f"{name}.mcap"
        with recorded_to(path, levels=levels) as source:
            for sequence, message in messages(**engine_levels or {}):
                source.take(sequence, message)
        return path

    return make


def carried(path: Path) -> dict[str, float]:
    with Recording(path) as recording:
        return dict(levels_in(recording.metadata))


def test_record_writes_the_given_levels(live_engine: Any, stepscope: Call, tmp_path: Path) -> None:
    path, address = tmp_path / "a.mcap", live_engine.endpoint.control
    done = stepscope(
        *("record", address, "-o", str(path), "--seconds", "0.3"),
        *("--slo-itl", "20ms", "--slo-ttft", "1.5s"),
    )
    assert done.exit_code == 0, done.stderr
    assert carried(path) == {"slo_ttft_ms": 1500.0, "slo_itl_ms": 20.0}
    told = "  service levels it was recorded with: TTFT 1,500 ms, ITL 20 ms\n"
    assert told in stepscope("verify", str(path)).stdout
    document = json.loads(stepscope("verify", str(path), "--json").stdout)
    assert document["service_levels"] == {"slo_ttft_ms": 1500.0, "slo_itl_ms": 20.0}
    wrong = stepscope("record", address, "-o", str(tmp_path / "b.mcap"), "--slo-itl", "soon")
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1)
    assert not list(tmp_path.glob("b.*"))


def test_record_writes_configured_levels(live_engine: Any, stepscope: Call, tmp_path: Path) -> None:
    arguments = ("record", live_engine.endpoint.control, "--seconds", "0.3", "-o")
    stepscope(*arguments, str(tmp_path / "a.mcap"))
    (tmp_path / "config" / "stepscope").mkdir(parents=True)
    (tmp_path / "config" / "stepscope" / "config.toml").write_text("[dashboard]\nslo_itl_ms = 7\n")
    stepscope(*arguments, str(tmp_path / "b.mcap"))
    assert carried(tmp_path / "a.mcap") == {}
    assert "service levels" not in stepscope("verify", str(tmp_path / "a.mcap")).stdout
    assert carried(tmp_path / "b.mcap") == {"slo_itl_ms": 7.0}


def test_repair_and_strip_keep_the_service_levels(recording: Call, tmp_path: Path) -> None:
    path = recording("a", slo_itl_ms=12.0, slo_ttft_ms=900.0)
    cut = tmp_path / "cut.mcap"
    cut.write_bytes(path.read_bytes()[:-200])
    rewrite(cut, tmp_path / "mended.mcap", lambda share: None)
    rewrite(path, tmp_path / "stripped.mcap", lambda share: None, without_tokens=True)
    for each in (cut, tmp_path / "mended.mcap", tmp_path / "stripped.mcap"):
        assert carried(each) == {"slo_itl_ms": 12.0, "slo_ttft_ms": 900.0}


@pytest.mark.parametrize("text", ["", "soon", "-1", "0", "nan", "inf"])
def test_a_service_level_must_be_a_time_above_zero(text: str) -> None:
    assert levels_in({"slo_itl_ms": text, "slo_ttft_ms": "5"}) == {"slo_ttft_ms": 5.0}


def test_shipped_samples_carry_service_levels_fit_for_their_machine_or_none() -> None:
    paths = samples.shipped()
    for name in ("freeze", "chunked"):
        assert carried(paths[name]) == {"slo_ttft_ms": 1500.0, "slo_itl_ms": 150.0}
    assert carried(paths["vllm"]) == {}


def test_compare_uses_the_levels_of_the_first_with_any(recording: Call, stepscope: Call) -> None:
    a, b, none = recording("a", slo_itl_ms=12.0), recording("b", slo_itl_ms=33.0), recording("n")
    first = stepscope("compare", str(a), str(b), "--json")
    assert json.loads(first.stdout)["slo"]["itl_ms"] == 12.0
    said = f"{b} carries other service levels, ITL 33 ms; both are judged by those of {a}"
    assert said in first.stderr
    second = stepscope("compare", str(none), str(b), "--json")
    assert json.loads(second.stdout)["slo"]["itl_ms"] == 33.0
    assert "note:" not in second.stderr
    own = stepscope("compare", str(a), str(b), "--slo-itl", "5ms", "--json")
    assert json.loads(own.stdout)["slo"]["itl_ms"] == 5.0


def test_explain_uses_the_files_levels_or_those_given(recording: Call, stepscope: Call) -> None:
    path = str(recording("a", slo_itl_ms=12.0))
    own = stepscope("explain", path).stdout.splitlines()
    assert "longer than 12.0 ms (as the recording says)" in own[1]
    firsts = next(line for line in own if line.startswith("first tokens: "))
    assert "longer than 500.0 ms (the default)" in firsts
    given = stepscope("explain", path, "--slo-itl", "30ms").stdout.splitlines()
    assert "longer than 30.0 ms (--slo-itl)" in given[1]


ENGINE = {"slo_ttft_ms": 3000.0, "slo_itl_ms": 150.0}


def test_explain_names_the_config_file_and_the_variable_of_a_level(
    recording: Call, stepscope: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config" / "stepscope").mkdir(parents=True)
    (tmp_path / "config" / "stepscope" / "config.toml").write_text("[dashboard]\nslo_itl_ms = 7\n")
    of_engine = stepscope("explain", str(recording("a", ENGINE))).stdout.splitlines()
    assert "longer than 7.0 ms (config.toml)" in of_engine[1]
    stored = str(recording("b", slo_itl_ms=12.0))
    assert "longer than 12.0 ms (as the recording says)" in stepscope("explain", stored).stdout
    monkeypatch.setenv("STEPSCOPE_DASHBOARD_SLO_ITL_MS", "9")
    of_variable = stepscope("explain", stored).stdout
    assert "longer than 9.0 ms (STEPSCOPE_DASHBOARD_SLO_ITL_MS)" in of_variable


def test_check_says_that_a_baseline_is_judged_by_the_levels_of_the_run(
    recording: Call, stepscope: Call
) -> None:
    """The run has the defaults, which are not the viewer's own."""
    run, baseline = recording("a"), recording("b", slo_itl_ms=12.0)
    done = stepscope("check", str(run), "--baseline", str(baseline))
    said = f"{baseline} carries other service levels, ITL 12 ms; both are judged by those of {run}"
    assert said in done.stderr
    assert "your own" not in done.stderr
    assert "carries other" not in stepscope("check", str(run), "--baseline", str(run)).stderr


@pytest.mark.parametrize("command", [("check", "--baseline"), ("compare", "--json")])
def test_levels_of_the_config_file_that_do_not_apply_hide_no_others(
    recording: Call, stepscope: Call, tmp_path: Path, command: tuple[str, str]
) -> None:
    (tmp_path / "config" / "stepscope").mkdir(parents=True)
    (tmp_path / "config" / "stepscope" / "config.toml").write_text("[dashboard]\nslo_itl_ms = 7\n")
    first, second = recording("a", slo_itl_ms=12.0), recording("b", {"slo_itl_ms": 80.0})
    name, *options = command
    said = stepscope(name, str(first), *options, str(second)).stderr
    assert f"{second} carries other service levels, ITL 80 ms; both are judged" in said


def messages(**levels: float) -> list[tuple[int, Any]]:
    """A session whose engine says these levels."""
    return [
        (number, msgspec.structs.replace(each, **levels) if each.topic == b"info" else each)
        for number, each in simulate(seed=3, num_steps=200)
    ]


@pytest.mark.parametrize(
    ("chosen", "carried", "slo", "own"),
    [
        ({}, {}, SLO(3000, 150), ""),
        ({"slo_itl_ms": 33.0}, {}, SLO(3000, 33), "your own, not ITL 150 ms"),
        ({"slo_itl_ms": 150.0}, {}, SLO(3000, 150), ""),
        ({}, {"slo_itl_ms": "70"}, SLO(3000, 70), ""),
        ({"slo_itl_ms": 33.0}, {"slo_itl_ms": "70"}, SLO(3000, 33), "your own, not ITL 70 ms"),
    ],
)
def test_the_viewers_choice_comes_before_the_recording_and_that_before_the_engine(
    chosen: dict[str, float], carried: dict[str, str], slo: SLO, own: str
) -> None:
    history = History(chosen)
    history.carried = carried
    assert history.slo == slo_of(chosen)  # before anything of the engine is known
    for sequence, message in messages(**ENGINE):
        history.append(sequence, message)
    assert (history.slo, history.own_levels) == (slo, own)


def test_levels_of_a_restarted_engine_apply_and_a_choice_in_the_dashboard_stays() -> None:
    history = History()
    for sequence, message in messages(**ENGINE):
        history.append(sequence, message)
    history.set_slo(SLO(3000, 40))
    assert (history.slo, history.own_levels) == (SLO(3000, 40), "your own, not ITL 150 ms")
    info = msgspec.structs.replace(messages()[0][1], engine_id="other", slo_ttft_ms=900.0)
    history.append(10_000, info)
    assert (history.slo, history.own_levels) == (SLO(900, 40), "")


def test_a_file_is_judged_by_its_engine(recording: Call, stepscope: Call) -> None:
    path = recording("a", ENGINE)
    shown = stepscope("stats", str(path))
    assert "levels TTFT 3,000 ms, ITL 150 ms" in shown.stdout
    assert "service levels" not in shown.stderr
    chosen = stepscope("stats", str(path), "--slo-itl", "9ms")
    assert "levels TTFT 3,000 ms, ITL 9 ms" in chosen.stdout
    assert "service levels: ITL 9 ms, your own, not ITL 150 ms\n" in chosen.stderr


def test_service_levels_do_not_make_another_engine() -> None:
    assert EngineConfig().hash() == EngineConfig(slo_itl_ms=9.0).hash()


@pytest.mark.parametrize("slo", [SLO(100, 15), SLO(5000, 300), SLO(0.5, 0.5), SLO(500, 30)])
def test_a_changed_level_applies_as_if_set_from_the_start(still_source: Call, slo: SLO) -> None:
    still = still_source(400).history
    steps = [(step, still.record(step)) for step in range(still.num_steps)]
    changed, again = history_of(steps, SLO(ttft_ms=500.0, itl_ms=30.0)), history_of(steps, slo)
    assert changed.windows.breaches(None, 10_000)  # looked at before, as the dashboard does
    changed.set_slo(slo)
    assert changed.windows.breaches(None, 10_000) == again.windows.breaches(None, 10_000)
    assert changed.windows.latency() == again.windows.latency()
    assert changed.last_stall() == again.last_stall()
    assert changed.last_stall(200) == again.last_stall(200)
    columns = (ChartColumns(each).visible(View(), 200, each.last_step) for each in (changed, again))
    assert next(columns) == next(columns)


async def test_levels_changed_in_a_dashboard_are_saved(still_source: Call, tmp_path: Path) -> None:
    source = still_source()
    path = tmp_path / "config.toml"
    began: dict[str, Any] = {"slo_ttft_ms": 500.0, "slo_itl_ms": 30.0}
    given = {"any_terminal": True, "fps": 1.0, "preferences": Preferences(path, began)}
    app = Dashboard(source, **given)
    async with app.run_test(size=(200, 60)) as pilot:
        assert "TTFT <500" not in screen_text(app)
        assert " <30 " in screen_text(app)
        num_breaches = len(source.history.windows.breaches(None, 10_000))
        await pilot.press("b", "ctrl+u", *"itl=soon", "enter")
        assert "write ttft=500 itl=50, above 0 and in ms, or ttft=0.5s" in screen_text(app)
        assert "^u empties it" in screen_text(app)
        await pilot.press("ctrl+u", *"itl=12ms", "enter")
        assert " <12 " in screen_text(app)
        assert " <500 " in screen_text(app)
        assert len(source.history.windows.breaches(None, 10_000)) > num_breaches
        await pilot.press("5")
        assert "ITL <12" in screen_text(app)
    app.close()
    assert tomllib.loads(path.read_text())["dashboard"] == {"slo_itl_ms": 12.0}


async def test_an_offered_value_is_replaced_by_typing_and_kept_by_arrow(still_source: Call) -> None:
    source = still_source()
    app = Dashboard(source, any_terminal=True, fps=1.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("b")
        assert "ttft=500 itl=30_  typing replaces it, → keeps it" in screen_text(app)
        await pilot.press(*"itl=40 ttft=5s", "enter")
        assert "service levels: TTFT within 5,000 ms, ITL within 40 ms" in screen_text(app)
        assert source.history.slo == SLO(5000, 40)
        await pilot.press("b", "right", "backspace", *"5", "enter")
        assert source.history.slo == SLO(5000, 45)
        for key in ("backspace", "delete"):
            await pilot.press("b", key)
            assert "in ms or 2s: _" in screen_text(app)
            await pilot.press("escape")
        await pilot.press("b", "enter")  # as they are
        assert "TTFT within 5,000 ms, ITL within 45 ms, for this session only" in screen_text(app)


def test_service_levels_are_parsed_in_every_spelling() -> None:
    now = SLO(500, 50)
    assert parse_levels("itl=30", now) == SLO(500, 30)
    assert parse_levels(" TTFT=1500ms itl=0.5 ", now) == SLO(1500, 0.5)
    assert parse_levels("ttft=2s itl=.5s", now) == SLO(2000, 500)  # as --slo-ttft takes them
    for text in ("", "itl", "itl=0", "itl=-3", "itl=nan", "itl=inf", "itl=1e10", "tpot=3", "500"):
        with pytest.raises(ValueError, match="write ttft=500 itl=50"):
            parse_levels(text, now)
