"""Times of vLLM's tensor- and pipeline-parallel workers: who was waited for, and how long.

The stand-ins compute and wait by a clock of the test, so the true times are known.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from stepscope.engine.adapters.attached.reports import RankReport, ReportSender
from stepscope.engine.adapters.vllm import plugin
from stepscope.engine.adapters.vllm import ranks as rank_module
from stepscope.engine.adapters.vllm.ranks import _STAMP, RankTable
from stepscope.engine.protocol.wire import EngineInfo, RankTimes, StepRecord
from stepscope.recordings.fleets.figures import figures, measure
from stepscope.recordings.history.history import History
from stepscope.recordings.state.ranks import late_rank, names, waited_for
from stepscope.tui.views.frame.fleet_view import COLUMNS
from stepscope.tui.views.panels import inspector
from tests.adapters.conftest import Attach, published
from tests.adapters.laws import fail
from tests.adapters.played_vllm import PlayedScheduler
from tests.adapters.test_vllm_schedules import explained
from tests.support.engines.fake_engine import info as fake_info
from tests.support.sessions.history_steps import step

MS = 1_000_000
TRANSFER_MS = 1


class Clock:
    now_ns = 1_000 * MS

    @classmethod
    def spend(cls, ms: float) -> None:
        cls.now_ns += round(ms * MS)


class Communicator:
    """A group's: all ranks leave a collective together. The test knows when the last one comes."""

    last_ns = 0

    def all_reduce(self, tensor: str) -> str:
        Clock.now_ns = max(Clock.now_ns, self.last_ns)
        Clock.spend(TRANSFER_MS)
        return tensor

    def combine(self, tensor: str) -> str:
        return self.all_reduce(tensor)  # one collective within another counts once


class PipelineGroup:
    """Sends to the next stage and waits until that has got it."""

    world_size = 1

    def isend_tensor_dict(self, tensors: object) -> list[object]:
        Clock.spend(50)
        return []


class Worker:
    """vLLM's: `run` is what the forward pass does."""

    def __init__(self, rank: int, parallel: SimpleNamespace, mode: int = 0) -> None:
        self.rank = rank
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel,
            compilation_config=SimpleNamespace(mode=mode),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        self.communicator = Communicator()
        self.pipeline = PipelineGroup()
        self.run: Callable[[], object] = lambda: None

    def execute_model(self, scheduler_output: object) -> object:
        return self.run()

    def sample_tokens(self, grammar: None) -> str:
        Clock.spend(2)
        return "tokens"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_module, "monotonic_ns", lambda: Clock.now_ns)


def parallel(tensor: int, pipeline: int) -> SimpleNamespace:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    data = {"data_parallel_size": 1, "data_parallel_rank": 0}
    return SimpleNamespace(**sizes, **data, world_size=tensor * pipeline)


def join(worker: Worker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the plugin in the process of a worker, as vLLM does before the worker is built."""
    state, base = ModuleType("parallel_state"), ModuleType("worker_base")
    tensor = SimpleNamespace(
        world_size=worker.vllm_config.parallel_config.tensor_parallel_size,
        device_communicator=worker.communicator,
    )
    vars(state).update(_TP=tensor, _EP=tensor, _DP=None, get_pp_group=lambda: worker.pipeline)

    class WorkerWrapperBase:
        def init_device(self) -> None:
            self.worker = worker

    vars(base).update(WorkerWrapperBase=WorkerWrapperBase)
    monkeypatch.setitem(sys.modules, "vllm.distributed", SimpleNamespace(parallel_state=state))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", base)
    plugin._wrap_workers(f"ipc://{folder}/vllm")
    WorkerWrapperBase().init_device()


class Group:
    """An engine and its workers, one for each rank."""

    def __init__(self, attach: Attach, tensor: int, pipeline: int) -> None:
        self.scheduler = PlayedScheduler("0.32.0", "chunked")
        self.scheduler.vllm_config.parallel_config = parallel(tensor, pipeline)
        self.attachment = attach(self.scheduler)
        self.workers: list[Worker] = []

    def play(self, run: Callable[[SimpleNamespace, int], None]) -> list[Any]:
        """Let `run` have each output that runs a request, and its number; return the records."""
        number = itertools.count()
        for call in self.scheduler.play():
            if call == "schedule" and self.scheduler.outputs[-1].total_num_scheduled_tokens:
                run(self.scheduler.outputs[-1], next(number))
            self.attachment._read()  # the socket holds a few reports, no step takes time here
        with self.attachment.notes.done():
            found = published(self.attachment)
        return [each for _, each in found if isinstance(each, StepRecord)]


Start = Callable[..., Group]


@pytest.fixture
def group(attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts an engine and its workers; takes options of `Worker`."""

    def start(tensor: int, pipeline: int, **options: Any) -> Group:
        found = Group(attach, tensor, pipeline)
        for rank in range(tensor * pipeline):
            found.workers.append(Worker(rank, parallel(tensor, pipeline), **options))
            join(found.workers[-1], tmp_path, monkeypatch)
        return found

    return start


def side_by_side(
    workers: Sequence[Worker], out: SimpleNamespace, begins: Sequence[float], work: Sequence[float]
) -> None:
    """Run a step on all ranks of a stage, which begin and compute for so many ms, then meet."""
    start_ns = Clock.now_ns
    last_ns = max(start_ns + round((b + w) * MS) for b, w in zip(begins, work, strict=True))
    for worker, begin, ms in zip(workers, begins, work, strict=True):
        Clock.now_ns = start_ns + round(begin * MS)
        worker.communicator.last_ns = last_ns

        def run(worker: Worker = worker, ms: float = ms) -> None:
            Clock.spend(ms)
            worker.communicator.combine("tensor")

        worker.run = run
        assert worker.execute_model(out) is None
        assert worker.sample_tokens(None) == "tokens"


def test_a_rank_that_computes_longer_or_begins_later_is_named(group: Start) -> None:
    ranks = group(2, 1)

    def run(out: SimpleNamespace, number: int) -> None:
        begins, work = [((0, 0), (12.0, 18.5)), ((3, 0), (5.0, 5.0))][number % 2]
        side_by_side(ranks.workers, out, begins, work)

    records = ranks.play(run)
    assert len(records) > 20
    for record in records:
        found = [(each.work_ns / MS, each.wait_ns / MS) for each in record.ranks]
        rank, ns = waited_for(record.ranks)
        if record.step % 2 == 0:
            assert found == [(12.0, 6.5 + TRANSFER_MS), (18.5, TRANSFER_MS)]
            assert (names(record.ranks)[rank], ns) == ("tp1", 6.5 * MS)
        else:
            assert found == [(8.0, TRANSFER_MS), (5.0, 3.0 + TRANSFER_MS)]
            assert (names(record.ranks)[rank], ns) == ("tp0", 3 * MS)
    assert ranks.attachment.core.info.pipeline_parallel_size == 1


def test_a_lost_report_leaves_its_step_unknown_and_shifts_no_other(group: Start) -> None:
    ranks = group(2, 1)

    def run(out: SimpleNamespace, number: int) -> None:
        told = ranks.workers if number % 3 else ranks.workers[:1]
        side_by_side(told, out, [0.0] * len(told), [number + 1.0] * len(told))

    for record in ranks.play(run):
        expected = [(record.step + 1) * MS] * 2 if record.step % 3 else None
        assert (record.ranks and [each.work_ns for each in record.ranks]) == expected


def test_a_stage_works_from_when_it_got_its_input_and_is_else_empty(group: Start) -> None:
    ranks = group(1, 2)
    workers = ranks.workers

    def run(out: SimpleNamespace, number: int) -> None:
        start_ns = Clock.now_ns

        def first() -> None:
            Clock.spend(4)
            workers[0].pipeline.isend_tensor_dict("hidden states")

        workers[0].run = first
        workers[1].run = lambda: Clock.spend(14)  # it receives after 4
        workers[0].execute_model(out)
        Clock.now_ns = start_ns
        workers[1].execute_model(out)
        workers[1].sample_tokens(None)

    for record in ranks.play(run):
        told = [(each.stage, each.work_ns, each.wait_ns) for each in record.ranks]
        assert told == [(0, 4 * MS, 0), (1, 10 * MS, 0)]
        assert names(record.ranks) == ["pp0", "pp1"]


def test_an_empty_stage_is_one_without_work_while_the_engine_had_some() -> None:
    table = RankTable(1, 2)

    # The engine was idle for 6 ms: in the other 14 each stage was empty while the other worked.
    for number, empty in enumerate([[None, None], [10 * MS, 4 * MS]]):
        begin = (100 + 20 * number) * MS
        # 4 ms in the first stage, then 8 in the second, which then samples for 2.
        table.add(RankReport(number, 0, begin, 4 * MS, 0))
        table.add(RankReport(number, 1, begin, 12 * MS, 0))
        found = table.of(SimpleNamespace(**{_STAMP: number}), begin, begin + 14 * MS)
        assert [each.empty_ns for each in found or ()] == empty


def test_on_an_accelerator_or_compiled_the_time_in_collectives_is_unknown(group: Start) -> None:
    ranks = group(2, 1, mode=3)
    assert not any("all_reduce" in vars(worker.communicator) for worker in ranks.workers)
    records = ranks.play(lambda out, _: side_by_side(ranks.workers, out, (0, 0), (1.0, 1.0)))
    assert all(each.wait_ns is None for record in records for each in record.ranks or ())


def test_an_error_of_ours_in_a_worker_ends_its_watch_and_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(1, parallel(2, 1))
    join(worker, tmp_path, monkeypatch)
    assert "execute_model" in vars(worker)

    monkeypatch.setattr(ReportSender, "flush", fail)
    worker.run = lambda: "vLLM's own"
    out = SimpleNamespace(**{_STAMP: 0})
    assert [worker.execute_model(out) for _ in range(2)] == ["vLLM's own"] * 2
    assert caplog.text.count("stepscope watches this worker no more: InjectedError") == 1


def test_the_only_worker_of_an_engine_is_left_alone(group: Start) -> None:
    only = group(1, 1)
    assert "execute_model" not in vars(only.workers[0])
    records = only.play(lambda out, _: None)
    assert not any(hasattr(out, _STAMP) for out in only.scheduler.outputs)
    assert {record.ranks for record in records} == {None}


def test_a_late_token_names_the_rank_that_held_its_step_up(group: Start) -> None:
    ranks = group(2, 1)
    ranks.play(lambda out, _: side_by_side(ranks.workers, out, (0, 0), (1.0, 900.0)))
    found = explained(published(ranks.attachment)).late
    assert all(sum(piece.ns for piece in late.pieces) == late.gap_ns for late in found)
    pieces = [piece for late in found for piece in late.pieces if piece.cause == "rank"]
    assert {piece.detail for piece in pieces} == {"tp1"}
    assert pieces[0].text.startswith("waited for rank tp1 in ")


def test_of_many_ranks_the_worst_is_measured_by_the_median_of_the_others() -> None:
    ranks = [RankTimes(0, ms * MS, 0, None) for ms in (10, 11, 10, 30, 12, 11, 28, 10)]
    assert waited_for(ranks) == (3, 19 * MS)
    works = ((0, 5), (0, 6), (1, 20), (1, 21))
    stages = [RankTimes(stage, ms * MS, 0, None) for stage, ms in works]
    assert waited_for(stages) == (3, 15 * MS)
    assert names(stages) == ["pp0 tp0", "pp0 tp1", "pp1 tp0", "pp1 tp1"]
    assert waited_for(ranks[:1]) is None
    assert late_rank(step(0, ranks=ranks)) == ("tp3", 19 * MS)
    assert late_rank(step(0, ranks=ranks, tokens_ns=300 * MS)) is None  # as much as times vary


def test_an_output_without_tokens_may_end_while_a_later_step_runs(attach: Attach) -> None:
    ranks = Group(attach, 1, 2)
    watcher: Any = ranks.attachment.watcher
    nothing = SimpleNamespace(total_num_scheduled_tokens=0, preempted_req_ids=())

    def end_one(out: SimpleNamespace, number: int) -> None:
        with ranks.attachment.notes.done():
            assert watcher.recorder.has_step_in_flight
            assert watcher.updated(nothing, None, 0, 0, {}, None, (), []) is None

    ranks.play(end_one)
    assert ranks.attachment.is_attached


def lines_of(info: EngineInfo, record: StepRecord) -> list[str]:
    return ["".join(text for text, _ in line) for line in inspector.rank_lines(record, info, 100)]


def test_the_steps_panel_says_who_was_waited_for_and_what_is_unknown(attach: Attach) -> None:
    info = replace(Group(attach, 2, 1).attachment.core.info, device="cpu")
    ranks = [RankTimes(0, round(ms * MS), 0, None) for ms in (12.1, 18.4)]
    [said] = lines_of(info, step(0, ranks=ranks, tokens_ns=30 * MS))
    assert said == " ranks   tp0 12.1 ms, tp1 18.4 ms: tp1 was waited for, 6.3 ms"
    assert lines_of(info, step(0)) == [" ranks   unknown: not all of them told"]
    assert lines_of(replace(info, tensor_parallel_size=1), step(0)) == []
    even = [RankTimes(0, 12 * MS, None, None)] * 8
    [said] = lines_of(replace(info, device="cuda"), step(0, ranks=even))
    assert said == " launch  slowest of 8 12.0 ms, median 12.0, spread 0.00, about even"
    stages = [RankTimes(0, 5 * MS, 0, 15 * MS), RankTimes(1, 6 * MS, 0, None)]
    assert lines_of(info, step(0, ranks=stages))[1] == " empty   pp0 75%, pp1 —"


def test_the_fleet_names_the_rank_that_its_others_wait_for_and_how_much_of_the_time() -> None:
    history = History()
    history.append(0, fake_info(tensor_parallel_size=2))
    for number in range(20):
        works = (2 * MS, 3 * MS) if number % 4 else (4 * MS, 2 * MS)
        ranks = [RankTimes(0, work, 0, None) for work in works]
        history.append(number + 1, step(number, [], ranks=ranks))
    measured = measure(history)
    assert measured["rank_wait"] == (15 * 1 + 5 * 2) / (20 * 8)
    found = figures("a", SimpleNamespace(history=history, status="live", error=None), measured)
    assert (found.slow_rank, found.rank_wait) == ("tp1", measured["rank_wait"])
    [column] = [each for each in COLUMNS if each.key == "ranks"]
    assert column.draw(found) == ("tp1 16%", "caution")
