"""Tokens a second of stepscope and of others, side by side in one run.

On the same random checkpoints, with the same token ids, greedy, without an end token. Each
contender is a process of its own that is stopped while it is not its turn; rounds go through the
contenders in changing order, and the median of the rounds counts. First it is checked that the work
is right: in fp32 stepscope and transformers must choose the same tokens, and every contender must
make as many tokens as were asked for.

    python tests/bench/bench_throughput.py                     # about 5 minutes
    python tests/bench/bench_throughput.py --full              # every point, on one core and on all
    python tests/bench/bench_throughput.py --vllm --sizes 5M --cores 1

Where others use the machine too, `--clock cpu` counts the processor time of each contender instead
of the time on the wall (on one core the two are the same when nobody else is there).

A CPU without bf16 instructions multiplies bf16 a hundred times slower than fp32: there everybody
runs in fp32, stepscope as its `--dtype auto` would.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from checkpoints import SHAPES, Shape, ensure
from contenders import CONTENDERS, MACHINE, Contender, ContenderError, Running, running
from protocol import Work
from throughput_points import POINTS, PREFILL, Cell, Point, roofline, show_point, show_roofline

TIMEOUT_S = 900.0
SAMPLE = (Work(1, 5, 16, 1), Work(3, 33, 16, 2), Work(2, 200, 16, 3))
# In bf16 a near tie falls either way, so some first tokens differ; of a wrong model all do.
MIN_SHARE_OF_EQUAL_FIRST_TOKENS = 0.5


VLLM_POINTS = {
    "5M": ["decode1", "decode16", "decode64", "mixed"],
    "25M": ["decode1", "decode16", "decode64", "mixed"],
    "135M": ["decode1", "decode16", "short"],
}
QUICK_POINTS = {
    "5M": ["decode1", "decode16", "mixed"],
    "25M": ["decode1", "decode16", "mixed"],
    "135M": ["decode1", "decode16"],
}
TOO_LONG_FOR_QUICK = {("25M", "mixed"): "generate_batch"}
QUICK = ["stepscope", "generate", "generate-fp32", "generate_batch"]
FULL = [*QUICK, "stepscope-fp32", "generate_batch-bf16"]
VLLM = ["vllm", "vllm-processes"]


def main() -> None:
    options = _options()
    keys = options.contenders or ([*FULL] if options.full else [*QUICK])
    if options.vllm:
        keys = [*keys, *(key for key in VLLM if key not in keys)]
    results: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    print(
        f"output tokens/s by {options.clock} time, median (best) of the rounds; "
        f"load before it began {load:.1f}",
        flush=True,
    )
    start_s = time.perf_counter()
    for num_cores in options.cores:
        cores = sorted(os.sched_getaffinity(0))[-num_cores:]
        machine = measure_machine(cores)
        print(f"\n{len(cores)} core(s): {json.dumps(machine)}", flush=True)
        contenders = [CONTENDERS[key] for key in keys]
        if machine["bf16_gflops"] < machine["fp32_gflops"]:
            contenders = in_fp32(contenders)
            print("this CPU multiplies bf16 slower than fp32: everybody in fp32", flush=True)
        for size in options.sizes:
            shape = SHAPES[size]
            usual = VLLM_POINTS if set(keys) & set(VLLM) else QUICK_POINTS
            points = options.points or (list(POINTS) if options.full else usual[size])
            result = bench(
                shape, [POINTS[key] for key in points], contenders, cores, machine, options
            )
            results.append(result)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    print(f"\n{time.perf_counter() - start_s:.0f} s in all")


def in_fp32(contenders: list[Contender]) -> list[Contender]:
    """Each kind of contender once, in fp32."""
    chosen: dict[tuple[str, str], Contender] = {}
    for each in contenders:
        how = str(each.settings.get("contender", each.settings.get("processes", "")))
        settings = {**each.settings, "dtype": "float32"}
        chosen.setdefault((each.script, how), each._replace(settings=settings))
    return list(chosen.values())


def bench(
    shape: Shape,
    points: list[Point],
    contenders: list[Contender],
    cores: list[int],
    machine: dict[str, float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """All points of one size on these cores."""
    folder = ensure(shape)
    check_sample(folder, cores)
    millions = shape.num_parameters / 1e6
    print(f"\n{shape.name}: {millions:.1f} M parameters, {len(cores)} core(s)", flush=True)
    table: dict[str, dict[str, Cell]] = {}
    prefill = Cell("", len(cores))
    with running(contenders, folder, cores) as runners:
        for point in points:
            here = runners
            if not options.full and (shape.name, point.key) in TOO_LONG_FOR_QUICK:
                key = TOO_LONG_FOR_QUICK[shape.name, point.key]
                here = [each for each in runners if each.contender.key != key]
                print(f"  {point}: without {key}, which takes minutes (--full)")
            table[point.key] = measure(point, here, len(cores), options)
            show_point(point, table[point.key], options.clock)
            sys.stdout.flush()
        for runner in runners:
            if runner.contender.key == "stepscope":
                done = [runner.ask(PREFILL.work(seed), TIMEOUT_S) for seed in range(5)]
                prefill.rounds = [each._replace(outputs=[]) for each in done[1:]]
    dtype = {each.key: str(each.settings["dtype"]) for each in contenders}.get("stepscope", "")
    shares = roofline(shape, table, prefill, machine, options.clock, dtype)
    show_roofline(shares)
    return {
        "size": shape.name,
        "num_parameters": shape.num_parameters,
        "num_cores": len(cores),
        "machine": machine,
        "software": {each.contender.key: each.description for each in runners},
        "points": {
            key: {contender: cell.as_dict() for contender, cell in cells.items()}
            for key, cells in table.items()
        },
        "roofline": shares,
    }


def check_sample(folder: Path, cores: list[int]) -> None:
    """Exits unless stepscope and `generate` choose the same tokens in fp32."""
    pair = [CONTENDERS["stepscope-fp32"], CONTENDERS["generate-fp32"]]
    with running(pair, folder, cores) as runners:
        for work in SAMPLE:
            ours, theirs = (each.ask(work, TIMEOUT_S).outputs for each in runners)
            if ours != theirs:
                sys.exit(f"{folder.name}: other tokens than generate for {work}:\n{ours}\n{theirs}")
            if len({token_id for output in theirs for token_id in output}) < 8:
                sys.exit(f"{folder.name}: a model that says always the same proves nothing")


def measure(
    point: Point, runners: list[Running], num_cores: int, options: argparse.Namespace
) -> dict[str, Cell]:
    """Rounds in changing order. Of contenders with one name only the fastest counts."""
    cells = {
        each.contender.key: Cell(str(each.description.get("how")), num_cores) for each in runners
    }
    for runner in runners:
        num_prompt_tokens = min(64, point.num_prompt_tokens)
        runner.ask(Work(point.num_requests, num_prompt_tokens, 4, 1_000), TIMEOUT_S)
    for number in range(options.repeats):
        first_tokens: dict[str, list[int]] = {}
        turn = number % len(runners)
        for runner in [*runners[turn:], *runners[:turn]]:
            key = runner.contender.key
            cell = cells.get(key)
            if cell is None or cell.time(options.clock) > options.seconds:
                continue
            done = runner.ask(point.work(number), TIMEOUT_S)
            first_tokens[key] = [each[0] for each in done.outputs]
            cell.num_tokens = sum(len(each) for each in done.outputs)
            cell.rounds.append(done._replace(outputs=[]))
        compare_first_tokens(point, first_tokens)
        if number == 0:
            cells = fastest_of_each_name(cells, options.clock)
    return cells


def compare_first_tokens(point: Point, first_tokens: dict[str, list[int]]) -> None:
    """Exits if a contender clearly runs another model, or other prompts, than the others."""
    if len(first_tokens) < 2 or point.num_requests < 8:
        return
    reference_key = next(iter(first_tokens))
    reference = first_tokens[reference_key]
    for key, tokens in first_tokens.items():
        share = statistics.mean(a == b for a, b in zip(tokens, reference, strict=True))
        if share < MIN_SHARE_OF_EQUAL_FIRST_TOKENS:
            sys.exit(f"{key} and {reference_key} agree on {share:.0%} of the first tokens: {point}")


def fastest_of_each_name(cells: dict[str, Cell], clock: str) -> dict[str, Cell]:
    best: dict[str, str] = {}
    for key, cell in cells.items():
        name = CONTENDERS[key].name
        if name not in best or cell.rate(clock) > cells[best[name]].rate(clock):
            best[name] = key
    return {key: cells[key] for key in best.values()}


def measure_machine(cores: list[int]) -> dict[str, float]:
    """GFLOP/s of matrix products and GB/s read; see peers/machine_peer.py."""
    with running([MACHINE], Path(), cores) as (runner,):
        details = runner.ask(Work(0, 0, 0, 0), TIMEOUT_S).details
    return {name: round(value, 1) for name, value in details.items()}


def _options() -> argparse.Namespace:
    num_cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--points", nargs="+", choices=POINTS, help="default: those of the size")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    parser.add_argument("--vllm", action="store_true", help="install vLLM (once) and run it too")
    parser.add_argument("--full", action="store_true", help="all points, contenders and cores")
    parser.add_argument("--cores", nargs="+", type=int, help=f"numbers of cores (all: {num_cores})")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="no new round for who has used so many"
    )
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args()
    if options.cores is None:
        options.cores = sorted({1, num_cores}) if options.full else [num_cores]
    return options


if __name__ == "__main__":
    try:
        main()
    except ContenderError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
