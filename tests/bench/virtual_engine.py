"""A simulated engine that schedules a step ahead, and the parts of each request's wait."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.simulation.step_time import StepShape, StepTime, StepTimeModel
from stepscope.engine.simulation.virtual.replica import EndedRequest, Replica
from stepscope.engine.simulation.virtual.requests import SimulatedRequest
from stepscope.engine.simulation.virtual.session import run_requests
from stepscope.recordings.simulation.figures import RunSums
from stepscope.recordings.state.series.latency import SLO

BLOCK_SIZE = 16


class Served(NamedTuple):
    """Seconds of the virtual clock; terms are summed over all steps until then."""

    at_s: float
    first_s: float
    last_s: float
    begin_terms: tuple[float, ...]
    first_terms: tuple[float, ...]
    last_terms: tuple[float, ...]


class _SummedTerms:
    """A `StepTimeModel`, and the sums of terms when each of its steps ends. The host takes none."""

    def __init__(self, model: StepTimeModel, terms: Callable[[StepShape], tuple[float, ...]]):
        self._model = model
        self._terms = terms
        self._ends_ns = [0]
        self._sums = [tuple(0.0 for _ in terms(StepShape(0, 0, 0, 0, 0)))]
        self.replica: Replica | None = None

    def step_time(self, shape: StepShape) -> StepTime:
        assert self.replica is not None
        time = self._model.step_time(shape)
        begin_ns = max(self._ends_ns[-1], self.replica.now_ns)
        self._ends_ns.append(begin_ns + round(time.device_s * 1e9))
        self._sums.append(tuple(map(float.__add__, self._sums[-1], self._terms(shape))))
        return time

    def until(self, time_ns: int) -> tuple[float, ...]:
        return self._sums[bisect_right(self._ends_ns, time_ns) - 1]


class _Ended(RunSums):
    """A sink that keeps ended requests by name."""

    def __init__(self) -> None:
        super().__init__(SLO())
        self.by_name: dict[str, EndedRequest] = {}

    def add_finished(self, request: EndedRequest, worst_itl_ns: int) -> None:
        self.by_name[request.client_id] = request  # type: ignore[attr-defined]


def serve(
    arrivals: Sequence[SimulatedRequest],
    model: StepTimeModel,
    knobs: Knobs,
    num_blocks: int,
    terms: Callable[[StepShape], tuple[float, ...]] = lambda shape: (),
) -> list[Served]:
    """Serve all of them, in the order of their arrivals; their names differ.

    As vLLM does by default, a step is scheduled when the step before it begins: a request that
    arrives meanwhile waits for both.
    """
    limits = Limits(
        max_num_batched_tokens=knobs.max_num_batched_tokens,
        max_num_seqs=knobs.max_num_seqs,
        max_model_len=max(each.num_prompt_tokens + each.num_output_tokens for each in arrivals),
    )
    scheduler = Scheduler(KVCacheManager(num_blocks, BLOCK_SIZE), knobs, limits)
    ended, summed = _Ended(), _SummedTerms(model, terms)
    summed.replica = Replica(scheduler, summed, ended, overlap=True)
    run_requests(summed.replica, arrivals)
    return [_served(ended.by_name[each.name], summed) for each in arrivals]


def _served(request: EndedRequest, summed: _SummedTerms) -> Served:
    assert request.first_token_ns is not None
    assert request.last_token_ns is not None
    times_ns = request.arrival_ns, request.first_token_ns, request.last_token_ns
    return Served(*(ns / 1e9 for ns in times_ns), *map(summed.until, times_ns))
