"""Tokens a second of stepscope and of others, side by side in one run.

On the same random checkpoints, with the same token ids, greedy, without an end token. Each
contender is a process of its own that is stopped while it is not its turn; rounds go through the
contenders in changing order, and the median of the rounds counts. First it is checked that the work
is right: in fp32 stepscope and transformers must choose the same tokens, and every contender must
make as many tokens as were asked for.

    python tests/bench/bench_throughput.py --contenders stepscope generate vllm --sizes 5M --cores 1

There are --repeats rounds, and no new one for who has used --seconds.

A CPU without bf16 instructions multiplies bf16 a hundred times slower than fp32: there everybody
runs in fp32, stepscope as its `--dtype auto` would.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from checkpoints import SHAPES, Shape, ensure
from common import parser
from contenders import CONTENDERS, MACHINE, Contender, ContenderError, Running, running
from protocol import Done, Work

TIMEOUT_S = 900.0
SAMPLE = (Work(1, 5, 16, 1), Work(3, 33, 16, 2), Work(2, 200, 16, 3))
# In bf16 a near tie falls either way, so some first tokens differ; of a wrong model all do.
MIN_SHARE_OF_EQUAL_FIRST_TOKENS = 0.5


class Point(NamedTuple):
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    def __str__(self) -> str:
        return f"{self.num_requests} x {self.num_prompt_tokens} -> {self.num_output_tokens}"


DECODES = [Point(1, 32, 128), Point(16, 32, 128), Point(64, 32, 128)]
POINTS = {
    "5M": [*DECODES, Point(32, 512, 64)],
    "25M": [*DECODES, Point(32, 512, 64)],
    "135M": [*DECODES[:2], Point(16, 128, 64)],
}
PREFILL = Point(8, 512, 1)
Rounds = dict[str, list[Done]]  # by the contender's key


def main() -> None:
    given = options()
    print(f"output tokens/s, median (best) of the rounds; load before {os.getloadavg()[0]:.1f}")
    start_s = time.perf_counter()
    for num_cores in given.cores:
        cores = sorted(os.sched_getaffinity(0))[-num_cores:]
        with running([MACHINE], Path(), cores) as (runner,):
            rates = runner.ask(Work(0, 0, 0, 0), TIMEOUT_S).details
        machine = {name: round(rate, 1) for name, rate in rates.items()}
        print(f"\n{len(cores)} core(s): {json.dumps(machine)}", flush=True)
        contenders = [CONTENDERS[key] for key in given.contenders]
        if machine["bf16_gflops"] < machine["fp32_gflops"]:
            contenders = [each.with_dtype("float32") for each in contenders]
            print("this CPU multiplies bf16 slower than fp32: everybody in fp32", flush=True)
        for size in given.sizes:
            bench(SHAPES[size], contenders, cores, machine, given)
    print(f"\n{time.perf_counter() - start_s:.0f} s in all")


def options() -> argparse.Namespace:
    num_cores = len(os.sched_getaffinity(0))
    made = parser(__doc__, sizes=tuple(SHAPES), cores=(num_cores,), repeats=3, seconds=8.0)
    default = ["stepscope", "generate"]
    made.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=default)
    return made.parse_args()


def bench(
    shape: Shape,
    contenders: list[Contender],
    cores: list[int],
    machine: dict[str, float],
    given: argparse.Namespace,
) -> None:
    """All points of one size on these cores."""
    folder = ensure(shape)
    check_sample(folder, cores)
    millions = shape.num_parameters / 1e6
    print(f"\n{shape.name}: {millions:.1f} M parameters, {len(cores)} core(s)", flush=True)
    with running(contenders, folder, cores) as runners:
        ours = next((each for each in runners if each.contender.key == "stepscope"), None)
        dtype = "float32" if ours is None else ours.contender.settings["dtype"]
        roofline = Roofline(shape, machine, dtype)
        for point in POINTS[shape.name]:
            rounds = measure(point, runners, given.repeats, given.seconds)
            show_point(point, runners, rounds)
            if ours is not None and point in DECODES:
                roofline.show_decode(point, rounds["stepscope"])
        if ours is not None:
            done = [ours.ask(Work(*PREFILL, seed), TIMEOUT_S) for seed in range(5)]
            roofline.show_prefill(min(each.seconds for each in done[1:]))


def check_sample(folder: Path, cores: list[int]) -> None:
    """Exits unless stepscope and `generate` choose the same tokens in fp32."""
    pair = [CONTENDERS[key].with_dtype("float32") for key in ("stepscope", "generate")]
    with running(pair, folder, cores) as runners:
        for work in SAMPLE:
            ours, theirs = (each.ask(work, TIMEOUT_S).outputs for each in runners)
            if ours != theirs:
                sys.exit(f"{folder.name}: other tokens than generate for {work}:\n{ours}\n{theirs}")
            if len({token_id for output in theirs for token_id in output}) < 8:
                sys.exit(f"{folder.name}: a model that says always the same proves nothing")


def measure(point: Point, runners: list[Running], repeats: int, seconds: float) -> Rounds:
    """Rounds in changing order; no new one for who has used so many seconds."""
    rounds: Rounds = {each.contender.key: [] for each in runners}
    for runner in runners:
        short = point._replace(
            num_prompt_tokens=min(64, point.num_prompt_tokens), num_output_tokens=4
        )
        runner.ask(Work(*short, 1_000), TIMEOUT_S)
    for number in range(repeats):
        first_tokens: dict[str, list[int]] = {}
        turn = number % len(runners)
        for runner in [*runners[turn:], *runners[:turn]]:
            key = runner.contender.key
            if sum(each.seconds for each in rounds[key]) > seconds:
                continue
            done = runner.ask(Work(*point, number), TIMEOUT_S)
            first_tokens[key] = [each[0] for each in done.outputs]
            rounds[key].append(done._replace(outputs=[]))
        compare_first_tokens(point, first_tokens)
    return rounds


def compare_first_tokens(point: Point, first_tokens: dict[str, list[int]]) -> None:
    """Exits if a contender clearly runs another model, or other prompts, than the others."""
    if point.num_requests < 8 or not first_tokens:
        return
    (known, reference), *others = first_tokens.items()
    for key, tokens in others:
        share = mean(a == b for a, b in zip(tokens, reference, strict=True))
        if share < MIN_SHARE_OF_EQUAL_FIRST_TOKENS:
            sys.exit(f"{key} and {known} agree on {share:.0%} of the first tokens: {point}")


def show_point(point: Point, runners: list[Running], rounds: Rounds) -> None:
    print(f"  {point}")
    num_tokens = point.num_requests * point.num_output_tokens
    rates = {key: [num_tokens / each.seconds for each in done] for key, done in rounds.items()}
    for runner in runners:
        key = runner.contender.key
        rate, against = median(rates[key]), ""
        if "stepscope" in rates and key != "stepscope":
            against = f"stepscope is {median(rates['stepscope']) / rate:.2f} x"
        print(
            f"    {key:15}{rate:10,.1f} {f'({max(rates[key]):,.1f})':>11} of {len(rates[key])}  "
            f"{against:20} {runner.how}",
            flush=True,
        )


class Roofline(NamedTuple):
    """What share of the machine stepscope reaches (a weight and a K/V element have its dtype).

    Prefill: multiplications of the layers for every token and of the head for one token a request;
    attention is left out. Decode: the weights and the K/V that a step must read, and its
    multiplications, by the median decode-only step. Weights that fit the cache of the processor are
    read faster than memory: a share above 1 is no mistake.
    """

    shape: Shape
    machine: dict[str, float]
    dtype: str

    def gemm_share(self, flop: float, seconds: float) -> str:
        rate = self.machine["fp32_gflops" if self.dtype == "float32" else "bf16_gflops"]
        return f"{flop / seconds / 1e9 / rate:.0%} of the gemm rate"

    def show_prefill(self, seconds: float) -> None:
        layers = self.shape.num_layers * self.shape.num_layer_parameters
        head = self.shape.num_matmul_parameters - layers
        num_tokens = PREFILL.num_requests * PREFILL.num_prompt_tokens
        flop = 2 * (layers * num_tokens + head * PREFILL.num_requests)
        rate = num_tokens / seconds
        print(f"  {PREFILL}: {rate:,.0f} tokens/s, {self.gemm_share(flop, seconds)}")

    def show_decode(self, point: Point, rounds: list[Done]) -> None:
        step_s = min(each.details["steps"]["decode_step_ms"]["p50"] for each in rounds) / 1e3
        itemsize = 4 if self.dtype == "float32" else 2
        context = point.num_prompt_tokens + point.num_output_tokens / 2
        num_elements = self.shape.num_matmul_parameters
        num_elements += round(self.shape.kv_elements_per_token * context * point.num_requests)
        read = itemsize * num_elements / step_s / 1e9 / self.machine["read_gb_per_s"]
        flop = 2 * self.shape.num_matmul_parameters * point.num_requests
        print(
            f"      {step_s * 1e3:.2f} ms a step, {read:.0%} of the memory rate: "
            f"{self.gemm_share(flop, step_s)}"
        )


if __name__ == "__main__":
    try:
        main()
    except ContenderError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
