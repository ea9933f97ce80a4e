"""Alert rules: their syntax, when they fire, and where firing is reported."""

import json
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.http.settings import Address
from stepscope.engine.protocol.wire import RequestStatus, RequestView
from stepscope.recordings import samples
from stepscope.recordings.alerts.judge import CALM_S, Judge, Meter, num_stalled, queue_age_s
from stepscope.recordings.alerts.rule import parse_rule
from stepscope.recordings.figures import BoundError
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.requests import RequestTable
from stepscope.recordings.state.session import SessionState
from stepscope.tui.app.app import Dashboard
from stepscope.tui.app.picture import text
from stepscope.tui.cli.engines import watch
from stepscope.tui.cli.engines.watch import serve_alert_metrics
from stepscope.tui.session.session import AlertWatch
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.settings import load_alerts, load_settings
from tests.support.engines.live_engine import LiveEngine
from tests.support.sessions.following import following
from tests.support.waiting import until, wait_for
from tests.telemetry.test_step_in_flight import asking, hanging

# How a rule is written


def test_an_alert_rule_has_a_metric_a_comparison_a_threshold_and_a_duration() -> None:
    rule = parse_rule(" itl_p99 > 50ms for 30s")
    assert (rule.figure, rule.bound.value, rule.for_s) == ("itl_p99", 50.0, 30.0)
    assert parse_rule("goodput < 95%").for_s == 0.0
    assert parse_rule("step_in_flight >= 1500ms for 2m").bound.value == 1.5
    assert rule.said(73.4) == "itl_p99 > 50ms for 30s: 73.4 ms"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("itl_p98 > 50ms", "no figure is called itl_p98; there is itl_p9"),
        ("itl_p99 50ms", "expected one of"),
        ("itl_p99 > fast", "expected a number"),
        ("itl_p99 > 50ms during 3s", "expected 'for 30s' or nothing"),
        ("itl_p99 > 50ms for 30", "expected 'for 30s' or nothing"),
        ("queue_age > 5ms2", "queue_age takes s or ms, got ms2"),
    ],
)
def test_an_invalid_alert_rule_is_refused_with_what_was_expected(text: str, problem: str) -> None:
    with pytest.raises(BoundError, match=problem):
        parse_rule(text)


def test_the_config_file_holds_alert_rules_and_refuses_invalid_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    monkeypatch.setenv("STEPSCOPE_CONFIG", str(file))
    file.write_text('[[alerts]]\nwhen = "itl_p99 > 50ms for 30s"\n[dashboard]\nfps = 5\n')
    assert [rule.text for rule in load_alerts()] == ["itl_p99 > 50ms for 30s"]
    assert load_settings()["dashboard"] == {"fps": 5}
    for wrong in ('[[alerts]]\nwhen = "itl > 5ms"\n', "[alerts]\n", '[[alerts]]\nif = "x"\n'):
        file.write_text(wrong)
        with pytest.raises(WrongUsage, match="alert"):
            load_settings()


# When it fires


def states(judge: Judge, values: list[float | None], every_s: float = 1.0) -> list[str]:
    found = []
    for number, value in enumerate(values):
        judge.apply({"itl_p99": value}, number * every_s)
        found.append(judge.watches[0].state)
    return found


def test_an_alert_rule_fires_as_soon_as_it_has_held_for_its_duration() -> None:
    judge = Judge([parse_rule("itl_p99 > 50ms for 2s")])
    assert states(judge, [60, 40, 60, 60, 60]) == ["pending", "ok", "pending", "pending", "firing"]


def test_a_flapping_alert_rule_fires_once_and_ends_once() -> None:
    judge = Judge([parse_rule("itl_p99 > 50ms")])
    changes = []
    for second in range(100):
        changes += judge.apply({"itl_p99": 70.0 + second if second % 3 else 10.0}, float(second))
    for second in range(100, 120):
        changes += judge.apply({"itl_p99": None}, float(second))  # nothing to measure: calm
    assert [change.is_firing for change in changes] == [True, False]
    assert changes[1].value == 168.0  # the worst
    assert changes[1].seconds == pytest.approx(99, abs=CALM_S)
    assert judge.watches[0].state == "unknown"


def test_an_unknown_figure_neither_fires_nor_ends_an_alert_rule() -> None:
    judge = Judge([parse_rule("itl_p99 > 50ms")])
    assert judge.apply({}, 0.0) == []
    assert judge.watches[0].state == "unknown"
    assert len(judge.apply({"itl_p99": 60.0}, 1.0)) == 1
    assert judge.apply({}, 100.0) == []
    assert judge.watches[0].state == "firing"


# A live engine


def test_a_hung_step_is_measured_while_it_hangs(live_engine: LiveEngine) -> None:
    with following(live_engine.endpoint) as source:
        meter = Meter(source)
        assert meter.measure()["step_in_flight"] == 0.0
        with hanging(live_engine), asking(live_engine.endpoint):
            wait_for(lambda: (meter.measure().get("step_in_flight") or 0) > 1, "it is measured")
            assert meter.measure()["silent"] == 0.0


def test_a_stream_counts_as_stalled_once_its_wait_for_a_token_exceeds_the_itl_level() -> None:
    same: Any = {"client_id": "a", "num_prompt_tokens": 4, "max_tokens": 9, "priority": 0}

    def request(number: int, status: RequestStatus, last_ms: int | None) -> RequestView:
        last_ns = None if last_ms is None else last_ms * 1_000_000
        times: Any = {"arrival_ns": 0, "last_token_ns": last_ns}
        return RequestView(request_id=number, status=status, **times, **same)

    requests = [
        request(0, "running", 940),  # 60 ms ago: beyond the level of 50
        request(1, "running", 960),
        request(2, "waiting", None),  # a second since its arrival, TTFT level 500 ms
        request(3, "finished", 100),
    ]
    state = SessionState(time_ns=1_000_000_000, table=RequestTable(requests), state="running")
    assert num_stalled(state, SLO()) == 2
    assert queue_age_s(state) == 1.0
    state.state = "paused"
    assert num_stalled(state, SLO()) == 0


def test_a_restarted_engine_counts_as_a_restart_in_alert_figures(live_engine: LiveEngine) -> None:
    with following(live_engine.endpoint) as source:
        meter = Meter(source)
        assert meter.measure()["restarts"] == 0
        live_engine.becomes(engine_id="another")
        wait_for(lambda: meter.measure()["restarts"] == 1, "it is noticed")


def test_the_dashboard_marks_the_step_at_which_an_alert_rule_fires(live_engine: LiveEngine) -> None:
    now = [0.0]
    with following(live_engine.endpoint) as source:
        watch = AlertWatch(source, [parse_rule("steps >= 1")], lambda: now[0])
        with asking(live_engine.endpoint):
            wait_for(lambda: source.history.last_step == 3, "steps come")
        changes = watch.news()
        assert [change.is_firing for change in changes] == [True]
        assert watch.news() == []  # once a second
        marks = source.history.marks
        assert [(mark.who, mark.text) for mark in marks] == [("alert", changes[0].text)]
        now[0] = 5.0
        assert watch.standing == [f"ALERT {changes[0].rule.said(4)}, for 5 s"]


@pytest.mark.parametrize(
    ("rule", "code", "state"),
    [
        ("step_in_flight > 5s", 0, "ok"),
        ("silent < 1s", 1, "firing"),
        ("itl_p99 > 50ms", 3, "unknown"),  # no request, so no sample
    ],
)
def test_watch_once_reports_the_state_of_each_alert_rule(
    live_engine: LiveEngine,
    stepscope: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    code: int,
    state: str,
) -> None:
    monkeypatch.setattr(watch, "_UNKNOWN_S", 1.0)
    done = stepscope("watch", live_engine.endpoint.control, "--once", "--json", "--when", rule)
    said = json.loads(done.stdout)
    assert (done.exit_code, said["rule"], said["state"]) == (code, rule, state)


def test_watch_prints_each_change_of_an_alerts_state(
    live_engine: LiveEngine, stepscope: Callable[..., Any]
) -> None:
    control = live_engine.endpoint.control
    done = stepscope("watch", control, "--when", "silent < 1s", "--seconds", "1")
    assert done.exit_code == 1
    assert done.stdout.count("FIRING") == 1
    refused = stepscope("watch", control, "--when", "silent < soon")
    assert refused.exit_code == 2
    assert "expected a number" in refused.stderr
    assert stepscope("watch", control).exit_code == 2  # no rule


def test_an_alert_that_ends_without_samples_is_printed_as_unknown(
    live_engine: LiveEngine, stepscope: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([60.0, 60.0])
    monkeypatch.setattr("stepscope.recordings.alerts.judge.CALM_S", 0.3)
    monkeypatch.setattr(watch.Meter, "measure", lambda meter: {"itl_p99": next(measured, None)})
    control = live_engine.endpoint.control
    done = stepscope("watch", control, "--when", "itl_p99 > 50ms", "--seconds", "2")
    firing, over = (line.split()[1:] for line in done.stdout.splitlines())
    assert firing[0] == "FIRING"
    assert over[:6] == ["UNKNOWN", "itl_p99", ">", "50ms:", "60", "ms"]


def test_watch_says_beside_a_firing_rule_what_the_engine_is_doing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = Subscriber("engine-0", History(SLO(3000, 150)))
    with Recording(samples.shipped()["freeze"]) as recording:
        for frame, _ in recording.frames():
            source.history.append(frame.sequence, frame.payload)
    judge = Judge([parse_rule("itl_p99 > 50ms"), parse_rule("queue_age > 5s")])
    judge.apply({"itl_p99": 766.0, "queue_age": 0.0}, 0.0)
    watched = [(each.rule, each.state, each.value, "said") for each in judge.watches]
    for each in watched:
        watch._print(source, False, *each)
    firing, calm = capsys.readouterr().out.splitlines()
    assert "; 12 streams stood still 0.8 s at step 302 behind the 4,096-token prompt of" in firing
    assert "stood still" not in calm
    watch._print(source, True, *watched[0])
    assert json.loads(capsys.readouterr().out)["verdict"].startswith("12 streams stood still")


async def test_a_firing_alert_rings_the_bell_and_is_shown_in_the_notice_line(
    live_engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bells: list[float] = []
    monkeypatch.setattr(Dashboard, "bell", lambda app: bells.append(time.monotonic()))
    with following(live_engine.endpoint) as source:
        with asking(live_engine.endpoint):
            wait_for(lambda: source.history.last_step == 3, "steps come")
        app = Dashboard(source, any_terminal=True, rules=[parse_rule("steps >= 4")])
        async with app.run_test(size=(120, 40)):
            await until(lambda: "ALERT steps >= 4: 4" in text(app), lambda: text(app))
            await until(lambda: "steps >= 4: 4 (alert)" in text(app), lambda: text(app))
        assert len(bells) == 1


def test_prometheus_gets_the_state_of_each_alert_rule_and_omits_unknown_ones() -> None:
    judge = Judge([parse_rule("silent < 1s"), parse_rule("itl_p99 > 50ms")])
    judge.apply({"silent": 0.25}, 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address(*taken.getsockname())
        with pytest.raises(CommandFailed, match=r"--metrics: 127\.0\.0\.1:"):
            serve_alert_metrics(address, "engine-0", judge.watches).__enter__()
    with (
        serve_alert_metrics(address, "engine-0", judge.watches),
        urllib.request.urlopen(f"http://{address.text}/metrics") as answer,
    ):
        lines = [line for line in answer.read().decode().splitlines() if line[0] != "#"]
    assert lines == [
        'stepscope_alert_firing{engine="engine-0",rule="silent < 1s"} 1.0',
        'stepscope_alert_value{engine="engine-0",figure="silent",rule="silent < 1s",unit="s"} 0.25',
    ]
