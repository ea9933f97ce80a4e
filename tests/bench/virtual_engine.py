"""A simulated engine that schedules a step ahead, and the parts of each request's wait."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.simulation.step_time import StepShape, StepTime, StepTimeModel
from stepscope.engine.simulation.virtual.replica import Replica
from stepscope.engine.simulation.virtual.requests import SimulatedRequest
from stepscope.engine.simulation.virtual.session import run_requests
from stepscope.recordings.simulation.figures import RunSums
from stepscope.recordings.state.series.latency import SLO

BLOCK_SIZE = 16
Terms = tuple[float, ...]


class Served(NamedTuple):
    """When a request came, had its first and its last token: of the virtual clock, in seconds.

    `terms` are those of all steps until each of these times, summed.
    """

    at_s: float
    first_s: float
    last_s: float
    terms: tuple[Terms, Terms, Terms]


class _Summing(RunSums):
    """A model of steps with the sums of their terms, and the sink of the one replica that has it.

    The host takes no time.
    """

    def __init__(self, model: StepTimeModel, terms: Callable[[StepShape], Terms]) -> None:
        super().__init__(SLO())
        self._model, self._terms = model, terms
        self._ends_ns = [0]
        self._sums = [tuple(0.0 for _ in terms(StepShape(0, 0, 0, 0, 0)))]
        self.replica: Replica | None = None
        self.served: dict[str, Served] = {}

    def step_time(self, shape: StepShape) -> StepTime:
        assert self.replica is not None
        time = self._model.step_time(shape)
        begin_ns = max(self._ends_ns[-1], self.replica.now_ns)
        self._ends_ns.append(begin_ns + round(time.device_s * 1e9))
        self._sums.append(tuple(map(float.__add__, self._sums[-1], self._terms(shape))))
        return time

    def add_finished(self, request: Any, worst_itl_ns: int) -> None:
        times_ns = request.arrival_ns, request.first_token_ns, request.last_token_ns
        sums = tuple(self._sums[bisect_right(self._ends_ns, ns) - 1] for ns in times_ns)
        self.served[request.client_id] = Served(*(ns / 1e9 for ns in times_ns), sums)


def serve(
    arrivals: Sequence[SimulatedRequest],
    model: StepTimeModel,
    knobs: Knobs,
    num_blocks: int,
    terms: Callable[[StepShape], Terms] = lambda shape: (),
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
    summing = _Summing(model, terms)
    scheduler = Scheduler(KVCacheManager(num_blocks, BLOCK_SIZE), knobs, limits)
    summing.replica = Replica(scheduler, summing, summing, overlap=True)
    run_requests(summing.replica, arrivals)
    return [summing.served[each.name] for each in arrivals]
