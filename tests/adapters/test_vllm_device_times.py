"""GPU time of each step of an attached vLLM, with stand-ins for torch and the worker."""

import sys
from types import SimpleNamespace

import pytest

from stepscope.engine.protocol.wire import StepRecord
from tests.adapters.conftest import Attach, published
from tests.adapters.played_vllm import PlayedScheduler
from tests.adapters.test_vllm_schedules import Played

STEP_MS = 7.25


class Event:
    """A CUDA event of a device that takes `STEP_MS` for each model."""

    is_broken = False
    is_done = True

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.is_recorded = False

    def record(self) -> None:
        if Event.is_broken:
            raise RuntimeError("CUDA error")
        self.is_recorded = True

    def query(self) -> bool:
        return Event.is_done

    def elapsed_time(self, end: "Event") -> float:
        assert self.is_recorded
        assert end.is_recorded
        return STEP_MS


class Worker:
    def execute_model(self, scheduler_output: object) -> str:
        return "vLLM's own output"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: True, Event=Event)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=Worker))


def device_times(attach: Attach) -> list[int | None]:
    """The device time of each step of a played session; the worker runs each output."""
    scheduler = PlayedScheduler("0.32.0", "asynchronous")
    attachment = attach(scheduler)
    for call in scheduler.play():
        if call == "schedule":
            assert Worker().execute_model(scheduler.outputs[-1]) == "vLLM's own output"
        attachment.notes.read()
    with attachment.notes.done():
        records = [each for _, each in published(attachment) if isinstance(each, StepRecord)]
    attachment.close()
    assert Worker.execute_model.__name__ == "execute_model"  # nothing of ours is left
    return [record.device_ns for record in records]


@pytest.mark.parametrize(("is_done", "device_ns"), [(True, 7_250_000), (False, None)])
def test_each_step_has_the_time_between_its_cuda_events_if_they_are_over(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, is_done: bool, device_ns: int | None
) -> None:
    monkeypatch.setattr(Event, "is_done", is_done)
    found = device_times(attach)
    assert len(found) > 20
    assert set(found) == {device_ns}


def test_a_device_error_detaches_stepscope_and_vllm_continues(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Event, "is_broken", True)
    assert device_times(attach) == []
    assert "stepscope has detached itself, vLLM goes on: RuntimeError: CUDA error" in caplog.text


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", None])
def test_steps_name_the_cuda_graph_and_padding_that_vllm_reports(
    attach: Attach, mode: str | None
) -> None:
    stats = mode and SimpleNamespace(runtime_mode=mode, num_paddings=5)

    def report(scheduler: PlayedScheduler) -> None:
        scheduler.model_output = SimpleNamespace(cudagraph_stats=stats)
        scheduler.vllm_config.compilation_config = SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name=mode), cudagraph_capture_sizes=[1, 2, 512, 256]
        )

    played = Played(attach, "0.32.0", "chunked", prepare=report)
    expected = (mode.lower(), 5) if mode else (None, None)
    assert {(each.cuda_graph, each.num_graph_padding) for each in played.steps} == {expected}
    assert {each.max_graph_tokens for each in played.infos} == {None if mode == "NONE" else 512}
