"""How far simulated runs are from real ones that others published.

    python tests/bench/bench_sim.py --validation DIR [--left-out model] [--share 0.25]

DIR has `train13.csv` and `workloads.json` (runs of vLLM 0.15.1 on H100) and the per-request times
of a run on an RTX 4090 (`llmservingsim_*_requests.jsonl`); docs/simulate.md says where they come
from. The real scheduler serves each workload again on a virtual clock. Each of the 13 runs is
predicted with coefficients that were fitted on the other 12 (`--left-out model`: on those of the
other models).
Errors are those of the source: |simulated - measured| / measured of each figure of a whole run,
and their median over runs. The run on the RTX 4090 is fitted on its first 40 % of requests and
judged on the rest.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from public_runs import (
    METRICS,
    WHOLE,
    PublicRun,
    arrivals_of,
    figures,
    read_runs,
)
from virtual_engine import Served, serve

from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.simulation.model_shape import model_shape
from stepscope.engine.simulation.regression import fit_relative
from stepscope.engine.simulation.roofline import GPUS, TERMS, RooflineCoefficients, RooflineModel
from stepscope.engine.simulation.step_time import StepShape
from stepscope.engine.simulation.virtual.requests import SimulatedRequest

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
    return Fit(
        coefficients(fit_relative(rows, seconds, _AT_LEAST)),
        max(0.0, statistics.median(requests_s)),
    )


def coefficients(found: Sequence[float]) -> RooflineCoefficients:
    by = dict(zip(TERMS, found, strict=True))
    return RooflineCoefficients(
        weights=by["weights"],
        attention=by["attention"],
        step_us=by["step"] * 1e6,
        row_layer_us=by["row_layer"] * 1e6,
    )


class Task(NamedTuple):
    run: PublicRun
    fit: Fit
    share: float


def simulate(task: Task) -> dict[str, float]:
    """Metric -> milliseconds, of the whole run."""
    run = task.run
    arrivals = arrivals_of(run, 1, task.share)
    roofline = RooflineModel(
        run.gpu, run.shape, run.tensor_parallel, coefficients=task.fit.coefficients
    )
    served = serve(arrivals, roofline, run.knobs, run.num_blocks)
    return figures(run, served, task.fit.request_s)


def errors(run: PublicRun, simulated: dict[str, float]) -> dict[str, float]:
    """Errors of the whole run, with their signs, as shares."""
    measured = run.measured[WHOLE]
    return {metric: simulated[metric] / measured[metric] - 1 for metric in METRICS}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 90 % interval of the median, by resampling the experiments."""
    chance = random.Random(1)
    medians = [statistics.median(chance.choices(values, k=len(values))) for _ in range(2000)]
    low, high = np.percentile(medians, (5, 95))
    return float(low), float(high)


def all_but_one(runs: Sequence[PublicRun], left_out: str) -> list[Fit]:
    """For each run a fit on the others, or on those of other models."""
    whole = fit_runs(runs)
    fits = [
        fit_runs(
            [
                each
                for each in runs
                if each is not run and (left_out == "run" or each.shape != run.shape)
            ]
        )
        for run in runs
    ]
    print(f"coefficients of all {len(runs)} runs, and their range with one {left_out} left out:")
    for name in ("weights", "attention", "step_us", "row_layer_us"):
        each = [getattr(fit.coefficients, name) for fit in fits]
        found = getattr(whole.coefficients, name)
        print(f"  {name:12}{found:8.3f}   {min(each):.3f} to {max(each):.3f}")
    each = [fit.request_s * 1e3 for fit in fits]
    print(f"  {'request_ms':12}{whole.request_s * 1e3:8.3f}   {min(each):.3f} to {max(each):.3f}")
    return fits


def judge_runs(tasks: Sequence[Task]) -> None:
    print("\nerror in % of each run, predicted from others")
    print(" " * 38 + "".join(f"{metric:>10}" for metric in METRICS))
    all_errors: list[dict[str, float]] = []
    with ProcessPoolExecutor(2) as pool:
        for task, simulated in zip(tasks, pool.map(simulate, tasks), strict=True):
            all_errors.append(errors(task.run, simulated))
            cells = "".join(f"{100 * all_errors[-1][metric]:+10.1f}" for metric in METRICS)
            print(f"{task.run.name[:37]:38}{cells}", flush=True)
    print("\nmedian of the absolute error in %, 90 % interval over runs")
    for metric in METRICS:
        sizes = [abs(each[metric]) * 100 for each in all_errors]
        low, high = interval(sizes)
        print(f"  {metric:10}{statistics.median(sizes):7.1f}   {low:5.1f} to {high:5.1f}")


def judge_requests(file: Path) -> None:
    """Fit the first requests of a run, and simulate all of it.

    The errors over all requests are those of the source; those over the requests that were not
    fitted are harder.
    """
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    about = json.loads(Path(str(file).replace("_requests.jsonl", "_meta.json")).read_text())
    settings = about["engine_kwargs"]
    knobs = Knobs(
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        max_num_seqs=settings["max_num_seqs"],
        order="arrival",
    )
    begin_s = rows[0]["queued_ts"]
    arrivals = [
        SimulatedRequest(
            round((row["queued_ts"] - begin_s) * 1e9),
            row["input_toks"],
            row["output_toks"],
            name=str(number),
        )
        for number, row in enumerate(rows)
    ]
    first = [row["first_token_ts"] - row["queued_ts"] for row in rows]
    last = [row["last_token_ts"] - row["queued_ts"] for row in rows]
    num_fitted = round(FITTED_SHARE * len(rows))
    shape = model_shape(about["model"])
    found = RooflineCoefficients()
    served: list[Served] = []
    for _ in range(_ROUNDS):
        roofline = RooflineModel(GPUS["rtx4090"], shape, coefficients=found)
        served = serve(
            arrivals, roofline, knobs, about["kv_cache"]["num_gpu_blocks"], roofline.terms
        )
        terms, seconds = [], []
        for each, row in list(zip(served, rows, strict=True))[:num_fitted]:
            terms.append(_between(each.first_terms, each.last_terms))
            seconds.append(row["last_token_ts"] - row["first_token_ts"])
            terms.append(_between(each.begin_terms, each.first_terms))
            seconds.append(row["first_token_ts"] - row["queued_ts"])
        found = coefficients(fit_relative(terms, seconds, _AT_LEAST))
    print(
        f"\n{about['hardware']['device_name']}, {shape.name}, {len(rows)} requests; fitted on the"
    )
    print(f"first {num_fitted}: {found}")
    for name, real, simulated in (
        ("ttft", first, [each.first_s - each.at_s for each in served]),
        ("e2e", last, [each.last_s - each.at_s for each in served]),
        (
            "tpot",
            _per_token(last, first, rows),
            _per_token([each.last_s for each in served], [each.first_s for each in served], rows),
        ),
    ):
        for first_row, whose in ((0, "all"), (num_fitted, "not fitted")):
            truth, found_s = sorted(real[first_row:]), sorted(simulated[first_row:])
            for what, of in (
                ("mean", statistics.fmean),
                ("p50", statistics.median),
                ("p99", lambda values: float(np.percentile(values, 99))),
            ):
                error = of(found_s) / of(truth) - 1
                print(
                    f"  {name} {what:5} {whose:10} real {of(truth):9.4f} s"
                    f"   simulated {100 * error:+6.1f} %"
                )


def _between(before: Sequence[float], after: Sequence[float]) -> list[float]:
    return [late - early for early, late in zip(before, after, strict=True)]


def _per_token(
    last: Sequence[float], first: Sequence[float], rows: Sequence[dict[str, float]]
) -> list[float]:
    return [
        (end - begin) / max(1.0, row["output_toks"] - 1)
        for end, begin, row in zip(last, first, rows, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--validation", type=Path, help="the folder of the public runs")
    parser.add_argument("--left-out", choices=("run", "model"), default="run")
    parser.add_argument("--share", type=float, default=1.0, help="of the time of each stage")
    options = parser.parse_args()
    if options.validation is None:
        print("nothing to compare with: give --validation DIR with train13.csv and workloads.json")
        return 0
    folder: Path = options.validation
    runs = read_runs(folder / "train13.csv", folder / "workloads.json")
    tasks = [
        Task(run, fit, options.share)
        for run, fit in zip(runs, all_but_one(runs, options.left_out), strict=True)
    ]
    judge_runs(tasks)
    for file in sorted(folder.glob("llmservingsim_*_requests.jsonl")):
        judge_requests(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
