"""Public runs of vLLM, with their measured figures, and the simulated engine that serves them."""

import csv
import json
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.simulation.model_shape import ModelShape, model_shape
from stepscope.engine.simulation.roofline import GpuRates, gpu_named, num_kv_tokens
from stepscope.engine.simulation.step_time import StepShape, StepTime, StepTimeModel
from stepscope.engine.simulation.virtual.replica import Replica
from stepscope.engine.simulation.virtual.requests import SimulatedRequest
from stepscope.engine.simulation.virtual.session import run_requests
from stepscope.recordings.simulation.figures import RunSums
from stepscope.recordings.state.series.latency import SLO

BLOCK_SIZE = 16
WHOLE = "-1"  # the stage that stands for the whole run
METRICS = ("e2e_mean", "itl_mean", "ttft_mean", "e2e_p90", "e2e_p99", "ttft_p90", "ttft_p99")
_PAUSE_S = 60.0  # between two stages: all requests of the first have ended


class PublicRun(NamedTuple):
    """A run of the table; `measured`: stage -> metric -> milliseconds."""

    name: str
    gpu: GpuRates
    shape: ModelShape
    tensor_parallel: int
    knobs: Knobs
    workload: dict[str, Any]
    measured: dict[str, dict[str, float]]

    @property
    def num_blocks(self) -> int:
        return num_kv_tokens(self.gpu, self.shape, self.tensor_parallel) // BLOCK_SIZE

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.workload["system"]) + int(self.workload["question"])

    @property
    def num_output_tokens(self) -> int:
        return int(self.workload["output"])


def read_runs(table: Path, workloads: Path) -> list[PublicRun]:
    specs = json.loads(workloads.read_text())
    runs: dict[str, PublicRun] = {}
    with table.open(newline="") as lines:
        for row in csv.DictReader(lines):
            run = runs.get(row["run"]) or runs.setdefault(row["run"], _run(row, specs))
            stage = run.measured.setdefault(row["stage"], {})
            stage[row["metric"]] = float(row["measured_ms"])
    return list(runs.values())


def _run(row: dict[str, str], specs: dict[str, Any]) -> PublicRun:
    shape = model_shape(row["model"])
    return PublicRun(
        name=f"{row['run']} {row['workload']} {shape.name}",
        gpu=gpu_named(row["hardware"]),
        shape=shape,
        tensor_parallel=int(row["tensor_parallel"]),
        knobs=Knobs(
            max_num_batched_tokens=int(row["max_num_batched_tokens"]),
            max_num_seqs=specs["max_num_seqs"],
            order="arrival",
        ),
        # Of `general` and `reasoning` there is a lighter kind; the shares of the stages in the
        # means of a whole run say that it was the one sent.
        workload=specs.get(f"{row['workload']}-lite") or specs[row["workload"]],
        measured={},
    )


def arrivals_of(run: PublicRun, seed: int, share: float) -> list[SimulatedRequest]:
    """Poisson arrivals; the same prompts again and again.

    The client makes one prompt for each system prompt and user and sends them in turn, so that
    after the first round all but the end of a prompt is in the prefix cache.

    Args:
        share: of the time of each stage.
    """
    chance, workload = random.Random(seed), run.workload
    num_blocks = run.num_prompt_tokens // BLOCK_SIZE
    num_shared = int(workload["system"]) // BLOCK_SIZE
    prompts = [
        (group,) * num_shared + (1000 * (1 + group) + user,) * (num_blocks - num_shared)
        for group in range(workload["num_system_prompts"])
        for user in range(workload["users"])
    ]
    chance.shuffle(prompts)
    found: list[SimulatedRequest] = []
    begin_s = 0.0
    for rate, length_s in workload["stages"]:
        at_s = begin_s + chance.expovariate(rate)
        end_s = begin_s + length_s * share
        while at_s < end_s:
            lengths = run.num_prompt_tokens, run.num_output_tokens
            prefix, name = prompts[len(found) % len(prompts)], str(len(found))
            found.append(
                SimulatedRequest(
                    round(at_s * 1e9), *lengths, name=name, prefix=prefix, prefix_tokens=BLOCK_SIZE
                )
            )
            at_s += chance.expovariate(rate)
        begin_s = end_s + _PAUSE_S
    return found


# A simulated engine that schedules a step ahead, and the parts of each request's wait

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


def figures(run: PublicRun, served: Sequence[Served], request_s: float) -> dict[str, float]:
    """The metrics of the table, in milliseconds. `request_s`: of a request outside of steps."""
    ttft = np.array([each.first_s - each.at_s + request_s for each in served]) * 1e3
    e2e = np.array([each.last_s - each.at_s + request_s for each in served]) * 1e3
    # The ITL of the table is divided by the output tokens as the clients counted them.
    real = run.measured[WHOLE]
    num_gaps = (real["e2e_mean"] - real["ttft_mean"]) / real["itl_mean"]
    found = {"itl_mean": (e2e.mean() - ttft.mean()) / num_gaps}
    for name, values in (("ttft", ttft), ("e2e", e2e)):
        found |= {f"{name}_p{rank}": np.percentile(values, rank) for rank in (90, 99)}
        found[f"{name}_mean"] = values.mean()
    return {name: float(value) for name, value in found.items()}
