"""How far simulated runs are from real ones that others published.

    python tests/bench/bench_sim.py --validation DIR [--left-out model] [--share 0.25]

DIR has `train13.csv` and `workloads.json` (runs of vLLM 0.15.1 on H100) and the per-request times
of a run on an RTX 4090 (`llmservingsim_*_requests.jsonl`); docs/simulate.md says where they come
from. The real scheduler serves each workload again on a virtual clock. Each of the 13 runs is
predicted with coefficients that were fitted on the other 12 (`--left-out model`: on those of the
other models). `--share` is of the time of each stage.
Errors are those of the source: |simulated - measured| / measured of each figure of a whole run,
and their median over runs. The run on the RTX 4090 is fitted on its first 40 % of requests and
judged on the rest.
"""

import csv
import json
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from common import parser

from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.simulation.model_shape import ModelShape, model_shape
from stepscope.engine.simulation.replica import Replica
from stepscope.engine.simulation.roofline import (
    GPUS,
    TERMS,
    GpuRates,
    RooflineCoefficients,
    RooflineModel,
    gpu_named,
    num_kv_tokens,
)
from stepscope.engine.simulation.step_time import StepShape, StepTime, StepTimeModel
from stepscope.engine.simulation.virtual_requests import SimulatedRequest
from stepscope.engine.simulation.virtual_session import run_requests
from stepscope.recordings.session.regression import fit_relative
from stepscope.recordings.simulation.figures import RunSums
from stepscope.recordings.state.latency import SLO

# Public runs, with their measured figures

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


# Fits

WAITED_STEPS = 2.5  # half of a running step, the one prepared meanwhile, its own
FITTED_SHARE = 0.4
_ROUNDS = 6
_AT_LEAST = (1.0, 1.0, 0.0, 0.0)  # of `TERMS`: nothing is read faster than the data sheet says


class Fit(NamedTuple):
    coefficients: RooflineCoefficients
    request_s: float  # of a request outside of steps: its way in and its first token's way out


def fit_runs(runs: Sequence[PublicRun]) -> Fit:
    """One set of coefficients for all runs, from the means of their stages.

    By Little's law a stage has as many rows in a step as requests arrive in the mean E2E; the time
    of a step is what is between two tokens.
    """
    rows, seconds, requests_s = [], [], []
    for run in runs:
        roofline = RooflineModel(run.gpu, run.shape, run.tensor_parallel)
        for stage, (rate, _) in enumerate(run.workload["stages"]):
            measured = run.measured[str(stage)]
            decode_s = (measured["e2e_mean"] - measured["ttft_mean"]) / 1e3
            cycle_s = decode_s / (run.num_output_tokens - 1)
            num_rows = max(1, round(rate * measured["e2e_mean"] / 1e3))
            context = run.num_prompt_tokens + run.num_output_tokens // 2
            rows.append(roofline.terms(StepShape(num_rows, num_rows, 0, 0, num_rows * context)))
            seconds.append(cycle_s - roofline.exchange_s(num_rows))
            requests_s.append(measured["ttft_mean"] / 1e3 - WAITED_STEPS * cycle_s)
    return Fit(fitted(rows, seconds), max(0.0, median(requests_s)))


def fitted(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> RooflineCoefficients:
    by = dict(zip(TERMS, fit_relative(rows, seconds, _AT_LEAST), strict=True))
    return RooflineCoefficients(
        weights=by["weights"],
        attention=by["attention"],
        step_us=by["step"] * 1e6,
        row_layer_us=by["row_layer"] * 1e6,
    )


def simulated_errors(share: float, run: PublicRun, fit: Fit) -> dict[str, float]:
    """Metric -> error of the whole run, with its sign."""
    roofline = RooflineModel(run.gpu, run.shape, run.tensor_parallel, coefficients=fit.coefficients)
    served = serve(arrivals_of(run, 1, share), roofline, run.knobs, run.num_blocks)
    found, real = figures(run, served, fit.request_s), run.measured[WHOLE]
    return {metric: found[metric] / real[metric] - 1 for metric in METRICS}


def all_but_one(runs: Sequence[PublicRun], left_out: str) -> list[Fit]:
    """For each run a fit on the others, or on those of other models."""

    def is_other(each: PublicRun, run: PublicRun) -> bool:
        return each is not run and (left_out == "run" or each.shape != run.shape)

    fits = [fit_runs([each for each in runs if is_other(each, run)]) for run in runs]
    print(f"coefficients of all {len(runs)} runs, and their range with one {left_out} left out:")
    whole, *each_fit = (
        {**msgspec.structs.asdict(fit.coefficients), "request_ms": fit.request_s * 1e3}
        for fit in (fit_runs(runs), *fits)
    )
    for name in ("weights", "attention", "step_us", "row_layer_us", "request_ms"):
        values = [fit[name] for fit in each_fit]
        print(f"  {name:12}{whole[name]:8.3f}   {min(values):.3f} to {max(values):.3f}")
    return fits


def judge_runs(runs: Sequence[PublicRun], fits: Sequence[Fit], share: float) -> None:
    print("\nerror in % of each run, predicted from others")
    print(" " * 38 + "".join(f"{metric:>10}" for metric in METRICS))
    all_errors: list[dict[str, float]] = []
    with ProcessPoolExecutor(2) as pool:
        for run, errors in zip(
            runs, pool.map(partial(simulated_errors, share), runs, fits), strict=True
        ):
            all_errors.append(errors)
            cells = "".join(f"{100 * error:+10.1f}" for error in errors.values())
            print(f"{run.name[:37]:38}{cells}", flush=True)
    print("\nmedian of the absolute error in %, 90 % interval over runs")
    for metric in METRICS:
        sizes = [abs(errors[metric]) * 100 for errors in all_errors]
        chance = random.Random(1)  # resamples the runs
        medians = [median(chance.choices(sizes, k=len(sizes))) for _ in range(2000)]
        low, high = np.percentile(medians, (5, 95))
        print(f"  {metric:10}{median(sizes):7.1f}   {low:5.1f} to {high:5.1f}")


def judge_requests(file: Path) -> None:
    """Fit the first requests of a run, and simulate all of it.

    The errors over all requests are those of the source; those over the requests that were not
    fitted are harder.
    """
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    about = json.loads(Path(str(file).replace("_requests.jsonl", "_meta.json")).read_text())
    sizes = {
        name: about["engine_kwargs"][name] for name in ("max_num_batched_tokens", "max_num_seqs")
    }
    knobs = Knobs(**sizes, order="arrival")
    arrivals, real = [], []
    for number, row in enumerate(rows):
        at_ns = round((row["queued_ts"] - rows[0]["queued_ts"]) * 1e9)
        lengths = row["input_toks"], row["output_toks"]
        arrivals.append(SimulatedRequest(at_ns, *lengths, name=str(number)))
        times_s = row["queued_ts"], row["first_token_ts"], row["last_token_ts"]
        real.append(Served(*times_s, ((), (), ())))
    num_fitted = round(FITTED_SHARE * len(rows))
    shape, coefficients = model_shape(about["model"]), RooflineCoefficients()
    served: list[Served] = []
    for _ in range(_ROUNDS):
        roofline = RooflineModel(GPUS["rtx4090"], shape, coefficients=coefficients)
        served = serve(
            arrivals, roofline, knobs, about["kv_cache"]["num_gpu_blocks"], roofline.terms
        )
        terms, seconds = [], []
        for ours, theirs in list(zip(served, real, strict=True))[:num_fitted]:
            begin, first, last = map(np.array, ours.terms)
            terms += [last - first, first - begin]
            seconds += [theirs.last_s - theirs.first_s, theirs.first_s - theirs.at_s]
        coefficients = fitted(terms, seconds)
    device = about["hardware"]["device_name"]
    print(f"\n{device}, {shape.name}, {len(rows)} requests; fitted on the")
    print(f"first {num_fitted}: {coefficients}")
    kinds = [
        [latencies(each, row["output_toks"]) for each, row in zip(of, rows, strict=True)]
        for of in (real, served)
    ]
    statistics = {"mean": fmean, "p50": median, "p99": lambda values: np.percentile(values, 99)}
    starts = {"all": 0, "not fitted": num_fitted}
    for kind, whose, what in product(("ttft", "e2e", "tpot"), starts, statistics):
        truth, found = (
            float(statistics[what]([each[kind] for each in of[starts[whose] :]])) for of in kinds
        )
        error = 100 * (found / truth - 1)
        print(f"  {kind} {what:5} {whose:10} real {truth:9.4f} s   simulated {error:+6.1f} %")


def latencies(served: Served, num_output_tokens: int) -> dict[str, float]:
    """In seconds."""
    return {
        "ttft": served.first_s - served.at_s,
        "e2e": served.last_s - served.at_s,
        "tpot": (served.last_s - served.first_s) / max(1.0, num_output_tokens - 1),
    }


def main() -> None:
    options = parser(__doc__, validation=Path, share=1.0)
    options.add_argument("--left-out", choices=("run", "model"), default="run")
    given = options.parse_args()
    if given.validation is None:
        print("nothing to compare with: give --validation DIR with train13.csv and workloads.json")
        return
    runs = read_runs(given.validation / "train13.csv", given.validation / "workloads.json")
    judge_runs(runs, all_but_one(runs, given.left_out), given.share)
    for file in sorted(given.validation.glob("llmservingsim_*_requests.jsonl")):
        judge_requests(file)


if __name__ == "__main__":
    main()
