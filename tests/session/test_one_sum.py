"""A figure of a session is the same whichever way one came to it, and as counted by hand."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs
from stepscope.recordings.compare.advice import RecentRun, advice
from stepscope.recordings.compare.feed import Feed, HistoryFeed
from stepscope.recordings.compare.file_run import FileRun
from stepscope.recordings.compare.recording_feed import RecordingFeed
from stepscope.recordings.export.moments import moments
from stepscope.recordings.figures import FIGURES
from stepscope.recordings.file.chunk_cache import ChunkCache
from stepscope.recordings.file.messages import stored_index
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.recordings.importing.client_results import read as read_result
from stepscope.recordings.importing.source import ForeignFile
from stepscope.recordings.plot.series import read_series
from stepscope.recordings.samples import shipped
from stepscope.recordings.session.steps import StepTable
from stepscope.recordings.session.sums import Sums, sums_of
from stepscope.recordings.simulation.recorded import recorded_work
from stepscope.recordings.state.clocks import known_since
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.outcome import AppliedStep
from stepscope.recordings.state.session import SessionState
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.by_hand import Messages, figures_by_hand
from tests.support.sessions.replayed import replayed, seek
from tests.support.sessions.seek_sessions import record

Session = Callable[[], Messages]
LEVELS = SLO(ttft_ms=500.0, itl_ms=50.0)
CHATS = SimulatedWorkload(rate=14.0, document_share=0.1, document_tokens=1500, output_tokens=60)


@cache
def simulated(**knobs: object) -> Messages:
    given_knobs = Knobs(**{"max_num_batched_tokens": 512, "reserve": "none", **knobs})
    small = {"num_blocks": 160, "max_model_len": 2048}
    return simulate(seed=3, num_steps=500, knobs=given_knobs, workload=CHATS, **small)


def preempting() -> Messages:
    return simulated()


def static() -> Messages:
    return simulated(batching="static")


def speculating() -> Messages:
    return simulated(speculative="ngram")


def with_a_repeated_step() -> Messages:
    """The publisher repeats two steps under new numbers."""
    found: Messages = []
    for number, (_, message) in enumerate(preempting()):
        found.append((len(found), message))
        if number in (200, 400) and isinstance(message, wire.StepRecord):
            found.append((len(found), message))
    assert len(found) == len(preempting()) + 2
    return found


def with_ranks() -> Messages:
    """Two ranks share each step; of every third step one has not told."""
    found: Messages = []
    for number, (sequence, message) in enumerate(preempting()):
        if isinstance(message, wire.StepRecord) and number % 3:
            took_ns = (message.tokens_ns - message.schedule_start_ns) // 2
            parts = (1, 1 + number % 4)
            ranks = [wire.RankTimes(0, took_ns // part, 0, None) for part in parts]
            message = replace(message, ranks=ranks)
        found.append((sequence, message))
    return found


def status_before(step: wire.StepRecord, **told: object) -> wire.EngineStatus:
    told = {"num_running": step.num_running, "num_waiting": step.num_waiting, "kv": step.kv, **told}
    time_ns, number = step.schedule_start_ns - 1, step.step - 1
    return wire.EngineStatus(state="running", step=number, time_ns=time_ns, **told)


def with_arrivals_between_steps() -> Messages:
    """Requests are told of before the step that admits them, in a status, as vLLM's plugin does."""
    found: Messages = []
    for _, message in preempting():
        if isinstance(message, wire.StepRecord):
            arrived = [each for each in message.events if isinstance(each, wire.Arrived)]
            if arrived:
                told = {"num_running": 0, "num_waiting": len(arrived), "events": arrived}
                found.append((len(found), status_before(message, **told)))
                rest = [each for each in message.events if each not in arrived]
                message = replace(message, events=rest)
        found.append((len(found), message))
    return found


def served() -> Messages:
    """A front end writes out each token some milliseconds after its step, and tells it later."""
    found: Messages = []
    chunks: list[tuple[int, int, int]] = []
    taken: list[wire.TakenRow] = []
    for _, message in preempting():
        if isinstance(message, wire.StepRecord):
            fronts = [wire.FrontEnd.of(1, taken, chunks, [])] if chunks or taken else None
            taken, chunks = [], []
            for event in message.events:
                if isinstance(event, wire.Arrived):
                    times_ns = event.time_ns - 5 * 10**6, event.time_ns
                    taken.append(wire.TakenRow(event.request_id, *times_ns, True))
            for at, row in enumerate(message.batch or ()):
                if row.flags & wire.RowFlag.LAST_CHUNK:
                    out_ns = message.tokens_ns + (at + 1) * (1 + message.step % 3) * 10**6
                    chunks.append((row.request_id, message.tokens_ns, out_ns))
            if message.step % 2 and fronts:
                found.append((len(found), status_before(message, front=fronts)))
            else:
                message = replace(message, front=fronts)
        found.append((len(found), message))
    return found


def with_lost_messages() -> Messages:
    return [each for at, each in enumerate(preempting()) if not 200 <= at < 240]


def from_the_middle() -> Messages:
    state, messages = SessionState(), preempting()
    for _, message in messages[:250]:
        state.apply(message)
    told = state.snapshot(messages[249][0])
    return [(messages[249][0], replace(told, pauses=[])), *messages[250:]]


def of_totals() -> Messages:
    """An engine whose /metrics are read once a second."""
    info = replace(simulated()[0][1], totals_every_s=1.0, num_blocks=None)
    found: Messages = [(0, info)]
    counts = {"num_steps": 50, "num_preempted": 5, "num_finished": 10, "num_cached_tokens": 150}
    counts |= {"num_prompt_tokens": 300, "num_output_tokens": 200, "num_queried_tokens": 300}
    work = {"num_prefill_tokens": 150, "num_decode_tokens": 200, "num_running": 7, "num_waiting": 3}
    itl = [wire.LatencyEstimate(20.0, 180), wire.LatencyEstimate(75.0, 20)]
    for at in range(12):
        ttft = [wire.LatencyEstimate(40.0 * at, 3)]
        totals = wire.Totals(kv_used=0.9, ttft=ttft, itl=itl, **counts)
        times = {"schedule_start_ns": at * 10**9, "tokens_ns": (at + 1) * 10**9}
        found.append((at + 1, wire.StepRecord(step=at, totals=totals, **times, **work)))
    return found


def of_a_client() -> Messages:
    """The result of a benchmark, as `vllm bench serve` wrote it."""
    sample = Path(__file__).parents[1] / "importing" / "samples" / "vllm_bench_serve.json"
    found = read_result(ForeignFile(sample))
    return [(0, found.info), *enumerate(found.messages, 1)]


WHOLE: list[Session] = [
    preempting, static, speculating, with_a_repeated_step, with_arrivals_between_steps, with_ranks,
]  # fmt: skip
ALL = [*WHOLE, served, with_lost_messages, from_the_middle, of_totals, of_a_client]


def history_of(messages: Messages) -> History:
    history = History(LEVELS)
    sequence, first = messages[0]
    if isinstance(first, wire.Snapshot):
        history.known_since_ns = known_since(first)
        history.reset(first)
    else:
        history.append(sequence, first)
    for sequence, message in messages[1:]:
        history.append(sequence, message)
    return history


def in_memory(recording: Recording) -> History:
    history = History(LEVELS, known_since_ns=recording.known_since_ns)
    for frame, _ in recording.frames():
        if frame.topic != b"mark":
            history.append(frame.sequence, frame.payload)
    return history


def figures_of_side(feed: Feed) -> dict[str, float | None]:
    while feed.read(float("inf")) and not feed.is_done:
        pass
    return feed.side.figures()


def history_of_replay(path: Path) -> History:
    with replayed(path, History(LEVELS)) as source:
        seek(source, source.recording.last_step or 0)
        return source.history


def ways_to_figures(messages: Messages, path: Path) -> dict[str, dict[str, float | None]]:
    record(path, messages)
    history = history_of(messages)
    return {
        "live": history.windows.figures(None, None),
        "compare, live": figures_of_side(HistoryFeed(history, "a", LEVELS, StepRange())),
        "file": figures_of_side(RecordingFeed(Recording(path), "a", LEVELS, StepRange())),
        "replay": history_of_replay(path).windows.figures(None, None),
        "index": figures_of_index(path),
        "index, made from messages": figures_of_index(path, is_made=True),
    }


def figures_of_index(
    path: Path, first: int | None = None, *, is_made: bool = False
) -> dict[str, float | None]:
    with Recording(path) as recording, pytest.MonkeyPatch.context() as patch:
        if is_made:
            patch.setattr(ChunkCache, "stored_index", lambda chunks, number: None)
        return FileRun(recording, LEVELS, first).figures()


@pytest.mark.parametrize("session", ALL)
def test_every_way_gives_the_same_figures(session: Session, tmp_path: Path) -> None:
    ways = ways_to_figures(session(), tmp_path / "a.mcap")
    for way, figures in ways.items():
        assert figures == ways["live"], way


@pytest.mark.parametrize("name", ["freeze", "chunked", "speculation", "vllm"])
def test_a_sample_has_the_same_figures_read_into_memory_and_summed_up(name: str) -> None:
    with Recording(shipped()[name]) as recording:
        history = in_memory(recording)
        feed = RecordingFeed(Recording(recording.path), name, LEVELS, StepRange())
        assert figures_of_side(feed) == history.windows.figures(None, None)
        run = FileRun(recording, LEVELS)
        assert run.figures() == history.windows.figures(None, None)
        if name != "vllm":  # it is longer than the minute that is judged in memory
            minute = RecentRun(history, history.state)
            limited = {each: sums for each, sums in run.limited.items() if sums.num_records}
            assert minute.limited == limited
            assert minute.share_late_beside_prefill == run.share_late_beside_prefill
            assert advice(minute) == advice(run)


# Not per time: a window on the screen begins with the last step before it, a run with its first.
UNTIMED = {name for name in FIGURES if not name.endswith(("_per_s", "_per_min"))} - {
    "busy", "seconds",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("session", ALL)
def test_a_stretch_has_the_same_figures(session: Session, tmp_path: Path) -> None:
    messages = session()
    path = record(tmp_path / "a.mcap", messages)
    check_stretches(history_of(messages), path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["freeze", "chunked", "speculation", "vllm"])
def test_a_stretch_of_a_sample_has_the_same_figures_on_the_screen_and_compared(name: str) -> None:
    path = shipped()[name]
    check_stretches(history_of_replay(path), path)


def check_stretches(history: History, path: Path) -> None:
    with Recording(path) as recording:
        first, last = recording.first_step or 0, recording.last_step or 0
    places = [round(first + (last - first) * share) for share in (0.2, 0.5, 0.7, 0.9)]
    for begin, end in [*((each, last) for each in places), *itertools.combinations(places, 2)]:
        begins, ends = history.summary(begin), history.summary(end)
        if begins is None or ends is None:
            continue  # lost
        stretch = StepRange(begin + 1, None if end == last else end)
        compared = figures_of_side(RecordingFeed(Recording(path), "a", LEVELS, stretch))
        live = figures_of_side(HistoryFeed(history, "a", LEVELS, stretch))
        assert compared == live
        if end == last:
            assert compared == figures_of_index(path, begin + 1)
        seconds = (ends.tokens_ns - begins.tokens_ns) / 1e9
        shown = history.windows.figures(ends.tokens_ns, seconds)
        for name in UNTIMED:
            assert compared[name] == shown[name], name


@pytest.mark.parametrize("name", ["freeze", "chunked", "speculation", "vllm"])
def test_a_sample_holds_an_index_of_each_chunk_that_its_messages_give(name: str) -> None:
    path = shipped()[name]
    with Recording(path) as recording:
        assert all(stored_index(recording, each) for each in range(recording.num_chunks))
    assert figures_of_index(path) == figures_of_index(path, is_made=True)


@pytest.mark.parametrize("session", WHOLE)
def test_figures_are_as_counted_by_hand(session: Session) -> None:
    messages = session()
    figures = history_of(messages).windows.figures(None, None)
    for name, value in figures_by_hand(messages, *LEVELS).items():
        assert figures[name] == pytest.approx(value, rel=1e-12), name


def test_what_a_front_end_tells_is_as_counted_by_hand_gaps_to_within_two_percent() -> None:
    out: dict[int, list[int]] = defaultdict(list)
    came: dict[int, int] = {}
    for _, message in served():
        for front in getattr(message, "front", None) or ():
            came.update((row.request_id, row.http_ns or 0) for row in front.taken)
            for request_id, _, out_ns in front.chunks():
                out[request_id].append(out_ns)
    ttft = sorted((at[0] - came[each]) / 1e6 for each, at in out.items())
    itl = sorted((b - a) / 1e6 for at in out.values() for a, b in itertools.pairwise(at))
    figures = history_of(served()).windows.figures(None, None)
    for rank in (50, 90, 99):
        assert figures[f"served_ttft_p{rank}"] == ttft[-(-rank * len(ttft) // 100) - 1]
        by_hand = itl[-(-rank * len(itl) // 100) - 1]
        assert figures[f"served_itl_p{rank}"] == pytest.approx(by_hand, rel=0.02)
    assert history_of(preempting()).windows.figures(None, None)["served_itl_p50"] is None


def test_an_export_has_each_step_once(tmp_path: Path) -> None:
    with Recording(record(tmp_path / "a.mcap", with_a_repeated_step())) as recording:
        found = [each.message for each in moments(recording, StepRange(), lambda _: None)]
    steps = [each.step for each in found if isinstance(each, wire.StepRecord)]
    assert steps == list(range(500))


@pytest.mark.parametrize("session", [preempting, from_the_middle, of_totals])
def test_a_plot_has_the_same_figures(session: Session, tmp_path: Path) -> None:
    messages = session()
    figures = history_of(messages).windows.figures(None, None)
    with Recording(record(tmp_path / "a.mcap", messages)) as recording:
        series = read_series(recording, StepRange(), LEVELS, 50, lambda *_: None)
    spreads, sums = series.waits.spreads(), series.sums
    for kind, spread in spreads.items():
        for rank, name in ((50, "p50"), (95, "p95"), (99, "p99"), (100, "max")):
            ns = spread.at_ns.get(rank)
            assert (None if ns is None else ns / 1e6) == figures[f"{kind}_{name}"]
        assert kind not in ("ttft", "itl") or spread.within_slo == figures[f"{kind}_within_slo"]
    assert sums.num_steps == figures["steps"]
    assert sums.num_preempted == figures["preemptions"]
    assert figures["out_tokens_per_s"] == pytest.approx(sums.num_output_tokens / sums.seconds)


def test_totals_alone_leave_unknown_what_needs_steps() -> None:
    figures = history_of(of_totals()).windows.figures(None, None)
    assert {name: figures[name] for name in (
        "finished", "preemptions", "steps", "waiting", "kv_used", "kv_peak", "prefix_hit_rate",
        "in_tokens_per_s", "out_tokens_per_s", "steps_per_s", "itl_p50", "itl_within_slo",
    )} == {
        "finished": 120, "preemptions": 60, "steps": 600, "waiting": 3, "kv_used": 0.9,
        "kv_peak": 0.9, "prefix_hit_rate": 0.5, "in_tokens_per_s": 300, "out_tokens_per_s": 200,
        "steps_per_s": 50, "itl_p50": 20, "itl_within_slo": 0.9,
    }  # fmt: skip
    unknown = [
        "step_p50", "e2e_p50", "arrived", "goodput", "goodput_per_s", "mixed_steps", "busy",
        "recomputed_share", "recompute_tax", "evictions", "budget_used", "limit_work",
    ]  # fmt: skip
    assert [name for name in unknown if figures[name] is not None] == []


@pytest.mark.parametrize(
    ("left_out", "unknown"),
    [
        ({"batch": None, "events": []}, {
            "finished", "arrived", "preemptions", "out_tokens_per_s", "in_tokens_per_s",
            "recomputed_share", "recompute_tax", "goodput", "goodput_per_s", "finished_per_s",
            "preemptions_per_min", "ttft_p50", "itl_p50", "tpot_p50", "e2e_p50",
        }),
        ({"kv": None}, {"kv_used", "kv_peak", "evictions", "prefix_hit_rate"}),
        ({"token_budget": None}, {"budget_used"}),
        ({"totals": wire.Totals(is_load_known=False)}, {"waiting"}),
    ],
)  # fmt: skip
def test_what_an_engine_does_not_publish_is_unknown_and_not_zero(
    left_out: dict[str, object], unknown: set[str], tmp_path: Path
) -> None:
    messages = [
        (number, replace(each, **left_out) if isinstance(each, wire.StepRecord) else each)
        for number, each in preempting()
    ]
    for way, figures in ways_to_figures(messages, tmp_path / "a.mcap").items():
        assert {name for name in unknown if figures[name] is not None} == set(), way


@pytest.mark.slow
@settings(max_examples=20)
@given(st.lists(st.integers(0, 500), max_size=4))
def test_the_sums_of_all_parts_add_up_to_those_of_the_whole(cuts: list[int]) -> None:
    table = table_of(preempting())
    places = sorted({0, len(table), *(min(cut, len(table)) for cut in cuts)})
    parts = [sums_of(table, *each) for each in itertools.pairwise(places)]
    whole = sum(parts, Sums())
    starts_ns = table.column("schedule_start_ns")
    between_ns = sum(starts_ns[at] - table.tokens_ns[at - 1] for at in places[1:-1])
    assert whole.span_ns + between_ns == sums_of(table, 0, len(table)).span_ns
    for name in Sums.__slots__:
        if name != "span_ns":
            assert getattr(whole, name) == getattr(sums_of(table, 0, len(table)), name), name


def table_of(messages: Messages) -> StepTable:
    state, table = SessionState(), StepTable()
    for sequence, message in messages:
        outcome = state.apply(message)
        if isinstance(message, wire.StepRecord) and outcome is not None:
            table.append(AppliedStep(sequence, message, outcome))
    return table


@pytest.mark.parametrize("name", ["freeze", "chunked"])
def test_a_forecast_judges_requests_as_every_other_command_does(name: str) -> None:
    with Recording(shipped()[name]) as recording:
        work = recorded_work(recording, SLO(1500.0, 150.0))
        figures = figures_of_side(RecordingFeed(recording, name, SLO(1500.0, 150.0), StepRange()))
    share = work.figures.goodput_per_s / work.figures.requests_per_s
    assert share == pytest.approx(figures["goodput"], rel=1e-12)
