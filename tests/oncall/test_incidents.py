"""Incidents are written to files automatically, although nobody watches."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineStatus, FrontEnd
from stepscope.recordings.alerts import keeper as incident_keeper
from stepscope.recordings.alerts.keeper import (
    DEFAULT_RULES,
    MAX_S,
    IncidentFolder,
    IncidentKeeper,
    KeptIncident,
)
from stepscope.recordings.alerts.rule import parse_rule
from stepscope.recordings.check.strip import holds_tokens
from stepscope.recordings.check.verify import verify
from stepscope.recordings.file.incident import FiredRule, Incident, incident_in, incidents_in
from stepscope.recordings.file.overview import overview
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.verdict import verdict_of
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.live_engine import LiveEngine
from tests.support.full_disk import full_disk
from tests.support.sessions.following import following
from tests.support.waiting import wait_for
from tests.telemetry.test_step_in_flight import asking


class Measured:
    """A meter with values chosen by the test."""

    def __init__(self) -> None:
        self.values: dict[str, float | None] = {"itl_p99": 10.0, "queue_age": 0.0}

    def measure(self) -> Mapping[str, float | None]:
        return self.values


class Watched:
    """An incident keeper over a session without new steps, and its clock."""

    def __init__(self, source: Any, path: Path, keep_bytes: int | None = None) -> None:
        self.now_s = 0.0
        self.source = source
        self.meter = Measured()
        self.kept: list[KeptIncident] = []
        rules = [parse_rule("itl_p99 > 50ms"), parse_rule("queue_age > 5s")]
        self.keeper = IncidentKeeper(
            source, rules, IncidentFolder(path, keep_bytes), 3.0, 10.0, lambda: self.now_s
        )
        self.keeper._meter = self.meter  # type: ignore[assignment]

    def passes(self, seconds: float, **values: float) -> None:
        self.meter.values |= values
        for _ in range(round(seconds)):
            self.now_s += 1.0
            kept = self.keeper.look()
            if kept is not None:
                self.kept.append(kept)

    def has_incident(self) -> None:
        self.passes(1, itl_p99=80.0)
        self.passes(30, itl_p99=10.0)


@pytest.fixture
def watched(still_source: Callable[..., Any], tmp_path: Path) -> Watched:
    return Watched(still_source(), tmp_path / "kept")


def test_overlapping_alerts_make_one_incident_file_that_names_each(watched: Watched) -> None:
    watched.passes(5)
    watched.passes(2, itl_p99=80.0)
    watched.passes(3, queue_age=7.0)
    watched.passes(9, itl_p99=10.0, queue_age=0.0)
    assert watched.kept == []
    watched.passes(5)
    (kept,) = watched.kept
    assert kept.path.name.endswith("-itl_p99.mcap")
    with Recording(kept.path) as recording:
        incident = incident_in(recording.metadata)
        first, last = recording.first_step, recording.last_step
    assert incident == kept.incident
    assert [(each.rule, each.value) for each in incident.rules] == [
        ("itl_p99 > 50ms", 80.0),
        ("queue_age > 5s", 7.0),
    ]
    assert (incident.seconds, incident.is_over) == (4.0, True)
    assert incident.num_late is not None
    assert "TTFT" in incident.explanation or "ITL" in incident.explanation
    assert incident.explanation.startswith(verdict_of(watched.source.history).trouble)
    assert verify(kept.path, lambda share: None).is_good
    history = watched.source.history
    assert last == history.last_step
    begin_ns = history.state.time_ns - 17_000_000_000  # from three seconds before it
    assert first == max(0, history.step_at(begin_ns))


def test_a_flapping_alert_makes_one_incident_file(watched: Watched) -> None:
    for _ in range(20):
        watched.passes(2, itl_p99=80.0)
        watched.passes(4, itl_p99=10.0)
    watched.passes(20)
    assert len(watched.kept) == 1


def test_an_endless_incident_is_written_once(watched: Watched) -> None:
    watched.passes(3 * MAX_S, itl_p99=80.0)
    (kept,) = watched.kept
    assert not kept.incident.is_over
    watched.passes(30, itl_p99=10.0)
    watched.has_incident()
    assert len(watched.kept) == 2


def test_beyond_the_limit_old_incidents_are_deleted_but_never_the_latest_ones(
    still_source: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_keeper, "KEEP_LAST", 2)
    (tmp_path / "incident-mine.mcap").write_bytes(b"no incident of ours")
    watched = Watched(still_source(60), tmp_path, keep_bytes=1)
    for _ in range(4):
        watched.has_incident()
    paths = [kept.path for kept in watched.kept]
    assert sorted(path for path, _ in incidents_in(tmp_path)) == sorted(p for p in paths[2:] if p)
    assert (tmp_path / "incident-mine.mcap").exists()


def test_a_full_disk_is_reported_leaves_no_file_and_later_incidents_are_kept(
    watched: Watched,
) -> None:
    with full_disk(2_000):
        watched.has_incident()
    (failed,) = watched.kept
    assert failed.path is None
    assert "cannot write" in failed.error
    assert list(watched.keeper._folder.path.iterdir()) == []
    watched.has_incident()
    assert watched.kept[1].path is not None


def test_no_prompt_gets_into_an_incident_file(telling_engine: LiveEngine, tmp_path: Path) -> None:
    with following(telling_engine.endpoint) as source:
        with asking(telling_engine.endpoint):
            wait_for(lambda: source.history.last_step == 3, "steps come")
        rules = [parse_rule("steps >= 1")]
        keeper = IncidentKeeper(source, rules, IncidentFolder(tmp_path, None), 5.0, 1.0)
        assert keeper.look() is None
        kept = keeper.close()
    with Recording(kept.path) as recording:
        assert not recording.info.with_tokens
        frames = [frame for frame, _ in recording.frames()]
    assert not any(holds_tokens(wire.decode(frame.payload)) for frame in frames)


@pytest.mark.slow
def test_an_engine_killed_in_mid_step_leaves_an_incident(tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    with (
        EngineProcess(f"{tmp_path}/engine", "", "", str(hang)) as engine,
        following(engine.endpoint) as source,
    ):
        rules = [parse_rule("step_in_flight > 1s"), parse_rule("silent > 2s")]
        keeper = IncidentKeeper(source, rules, IncidentFolder(tmp_path, None), 5.0, 1.0)
        with asking(engine.endpoint):
            wait_for(lambda: source.history.last_step == 3, "steps come")
            hang.touch()
            with asking(engine.endpoint):
                wait_for(lambda: keeper.look() is None and keeper.is_open, "it hangs")
        engine.kill()
        kept: list[KeptIncident] = []
        wait_for(lambda: bool(kept.extend(filter(None, [keeper.look()])) or kept), "it is written")
        incident = kept[0].incident
        assert "in flight" in incident.explanation
        assert "not ended" in incident.explanation
        assert overview(kept[0].path).incident == incident.text
        assert verify(kept[0].path, lambda share: None).is_good


def test_an_engine_stopped_for_some_seconds_leaves_an_incident_that_says_so(
    still_source: Callable[..., Any], tmp_path: Path
) -> None:
    source, now = still_source(), [0.0]
    rules = [parse_rule(text) for text in DEFAULT_RULES if text in ("silent > 10s", "itl_max > 5s")]
    folder = IncidentFolder(tmp_path, None)
    keeper = IncidentKeeper(source, rules, folder, 3.0, 10.0, lambda: now[0])

    def passes(seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            now[0] += 0.5
            assert keeper.look() is None

    passes(1)
    assert not keeper.is_open
    passes(3.5)  # nothing comes any more, as a source notices only after some seconds
    source.status, source.error = "down", "still answers nothing: stopped or cut off"
    passes(7.5)
    history, stop_ns = source.history, 12_000_000_000
    last = history.record(history.last_step)
    decodes = [row for row in last.batch if row.phase == wire.Phase.DECODE]
    late = msgspec.structs.replace(
        last,
        step=last.step + 1,
        schedule_start_ns=last.tokens_ns + 1_000_000,
        tokens_ns=last.tokens_ns + stop_ns,
        batch=[msgspec.structs.replace(row, start=row.start + 1) for row in decodes],
        events=[],
        hold_ups=[wire.HoldUp("stopped", last.tokens_ns - 20_000_000, stop_ns)],
    )
    history.append(history.last_sequence + 1, late)
    source.status, source.error = "live", None
    passes(1)
    kept = keeper.close()
    assert [each.rule for each in kept.incident.rules] == ["silent > 10s", "itl_max > 5s"]
    said = kept.incident.explanation
    assert said.startswith("still answers nothing: stopped or cut off. ")
    assert "the engine's process was stopped" in said


def test_an_incident_names_an_api_server_that_stood_still_though_its_engine_did_not(
    still_source: Callable[..., Any],
) -> None:
    history = still_source().history
    last = history.record(history.last_step)
    request_id, at_ns, second_ns = last.batch[0].request_id, last.tokens_ns, 1_000_000_000
    taken = [wire.TakenRow(request_id, at_ns - second_ns, at_ns - second_ns, is_streamed=True)]
    chunks = [(request_id, at_ns + each, at_ns + each) for each in (0, 12 * second_ns)]
    same: Any = {"step": last.step, "state": "running", "num_running": 1, "num_waiting": 0}
    front = [FrontEnd.of(0, taken, chunks, [])]
    status = EngineStatus(time_ns=at_ns + 13 * second_ns, front=front, **same)
    history.append(history.last_sequence + 1, status)
    _, said = incident_keeper.explained(history, None)
    assert "API server 0: longest served ITL 12,000 ms, by the engine " in said


def test_record_keeps_incidents_runs_the_hook_and_replay_lists_them(
    live_engine: LiveEngine, stepscope: Callable[..., Any], tmp_path: Path
) -> None:
    folder, heard = tmp_path / "incidents", tmp_path / "heard"
    script = tmp_path / "page.sh"
    script.write_text(f'#!/bin/sh\necho "$1" > {heard}\ncat >> {heard}\n')
    script.chmod(0o755)
    arguments = [live_engine.endpoint.control, "--incidents", str(folder), "--seconds", "1.2"]
    arguments += ["--when", "steps >= 1", "--on-incident", str(script)]
    with asking(live_engine.endpoint):
        wait_for(lambda: live_engine.core.last_step >= 3, "steps run")
        done = stepscope("record", *arguments)
    assert done.exit_code == 0
    assert "1 incident kept" in done.stdout
    path, summary = heard.read_text().split("\n", 1)
    assert json.loads(summary)["path"] == path
    listed = stepscope("replay", str(folder))
    assert path in listed.stdout
    assert "steps >= 1: 4" in listed.stdout
    assert stepscope("replay", str(tmp_path)).exit_code == 1


def test_the_file_name_of_an_incident_says_what_happened() -> None:
    rules = [FiredRule("itl_p99 > 50ms for 30s", 73.0, "73 ms")]
    same: Any = {"started_wall_ns": 1_790_000_000_000_000_000, "seconds": 42.0, "is_over": True}
    incident = Incident(engine="gpu 0/a", rules=rules, num_late=3, **same)
    assert incident.file_name == "incident-20260921T141320Z-gpu-0-a-itl_p99.mcap"
    assert incident.text == "itl_p99 > 50ms for 30s: 73 ms, 42 s, 3 streams late"
