"""An operator's pause is in no latency, whichever way one comes to it."""

from pathlib import Path

import pytest

from stepscope.engine.http.metrics_reducer import EngineMetrics
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.recordings.alerts.judge import num_stalled, queue_age_s
from stepscope.recordings.autopilot.pilot import Load
from stepscope.recordings.export.moments import moments
from stepscope.recordings.export.tables import COLUMNS, Table, table_rows
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.simulation.recorded import recorded_work
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.requests import RequestTable
from stepscope.recordings.state.session import SessionState
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.later import Later
from tests.support.sessions.paused import Messages, paused
from tests.support.sessions.seek_sessions import record

SLO_ = SLO(ttft_ms=500.0, itl_ms=50.0)
PLAIN = Later(
    lambda: simulate(
        seed=3,
        num_steps=240,
        knobs=Knobs(max_num_batched_tokens=256, max_num_seqs=32),
        workload=SimulatedWorkload(rate=9.0, document_share=0.25, output_tokens=30),
        cost=CostModel(floor_ms=12.0, token_us=120.0, context_ns=4.0),
        num_blocks=512,
    )
)


def metrics_of(messages: Messages) -> EngineMetrics:
    metrics = EngineMetrics()
    for _, message in messages:
        (metrics.join if isinstance(message, wire.Snapshot) else metrics.apply)(message)  # type: ignore[operator]
    return metrics


def samples(metrics: EngineMetrics) -> dict[tuple[str, str], float]:
    return {
        (sample.name, str(sample.labels)): sample.value
        for family in metrics.meters.registry.collect()
        for sample in family.samples
        if "_created" not in sample.name
    }


def test_the_metrics_of_an_engine_count_a_pause_as_a_pause_and_in_no_latency() -> None:
    plain, found = samples(metrics_of([*PLAIN])), samples(metrics_of(paused([*PLAIN])))
    assert found.pop(("stepscope_pauses_total", "{}")) == 1
    assert found.pop(("stepscope_paused_seconds_total", "{}")) == 1
    for name in ("stepscope_pauses_total", "stepscope_paused_seconds_total"):
        assert plain.pop((name, "{}")) == 0
    assert found == pytest.approx(plain)
    kept = history_of(paused([*PLAIN]), SLO_).windows.figures(None, None)
    num_kept = found["stepscope_requests_within_levels_total", "{}"]
    assert num_kept == round((kept["goodput_per_s"] or 0) * (kept["seconds"] or 0)) > 0


@pytest.mark.parametrize("first", [0, 119, 125])
@pytest.mark.parametrize("table", ["requests", "steps"])
def test_exported_latencies_are_without_pauses(table: Table, first: int, tmp_path: Path) -> None:
    names = [column.name for column in COLUMNS[table]]
    latencies = {"ttft_ms", "tpot_ms", "itl_max_ms", "max_itl_ns"}.intersection(names)
    found: list[list[float]] = []
    for name, messages in (("plain", [*PLAIN]), ("paused", paused([*PLAIN]))):
        with Recording(record(tmp_path / f"{name}.mcap", messages)) as recording:
            rows = table_rows(table, moments(recording, StepRange(first), lambda share: None))
            found.append([row[names.index(each)] or 0 for row in rows for each in latencies])
    assert len(found[0]) > 10
    assert found[1] == pytest.approx(found[0])


def test_the_measured_side_of_a_forecast_is_without_pauses(tmp_path: Path) -> None:
    with Recording(record(tmp_path / "plain.mcap", [*PLAIN])) as recording:
        plain = recorded_work(recording, SLO()).figures
    with Recording(record(tmp_path / "paused.mcap", paused([*PLAIN]))) as recording:
        found = recorded_work(recording, SLO()).figures
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert getattr(found, name) == pytest.approx(getattr(plain, name))


def test_a_pause_makes_no_token_late_to_the_autopilot() -> None:
    loads = []
    for messages in ([*PLAIN], paused([*PLAIN])):
        load = Load(level_ns=50_000_000)
        for _, message in messages:
            if isinstance(message, wire.StepRecord):
                load.add(message)
            elif isinstance(message, wire.EngineStatus):
                load.pauses = load.pauses.after(message)
        loads.append(load)
    assert (loads[1].num_late, loads[1].num_gaps) == (loads[0].num_late, loads[0].num_gaps)
    assert loads[0].num_gaps > 100


def test_a_pause_ages_no_queue_and_stalls_no_stream() -> None:
    waiting = wire.RequestView(
        request_id=1,
        client_id="a",
        status="waiting",
        arrival_ns=1_000_000_000,
        num_prompt_tokens=4,
        max_tokens=9,
    )
    state = SessionState(
        state="running",
        time_ns=9_000_000_000,
        table=RequestTable([waiting]),
        pauses=PauseTrail((wire.PauseSpan(1_200_000_000, 8_900_000_000),)),
    )
    assert queue_age_s(state) == pytest.approx(0.3)
    assert num_stalled(state, SLO_) == 0
    state.pauses = PauseTrail()
    assert num_stalled(state, SLO_) == 1
