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
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import torch
from checkpoints import SHAPES, Shape, ensure
from common import parser
from contenders import CONTENDERS, ContenderError, Running, running
from peers import Done, Work

from stepscope.engine.execution.machine.devices import find_dtype

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
Rounds = dict[str, list[Done]]  # by the contender's key


def main() -> None:
    given = options()
    print(f"output tokens/s, median (best) of the rounds; load before {os.getloadavg()[0]:.1f}")
    start_s = time.perf_counter()
    for num_cores in given.cores:
        cores = sorted(os.sched_getaffinity(0))[-num_cores:]
        contenders = {key: CONTENDERS[key] for key in given.contenders}
        if find_dtype("auto", torch.device("cpu")) == torch.float32:
            contenders = dict.fromkeys(contenders, "float32")
            print("this CPU has no instructions for bf16: everybody in fp32", flush=True)
        for size in given.sizes:
            bench(SHAPES[size], contenders, cores, given)
    print(f"\n{time.perf_counter() - start_s:.0f} s in all")


def options() -> argparse.Namespace:
    num_cores = len(os.sched_getaffinity(0))
    made = parser(__doc__, sizes=tuple(SHAPES), cores=(num_cores,), repeats=3, seconds=8.0)
    default = ["stepscope", "generate"]
    made.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=default)
    return made.parse_args()


def bench(
    shape: Shape, contenders: Mapping[str, str], cores: list[int], given: argparse.Namespace
) -> None:
    """All points of one size on these cores."""
    folder = ensure(shape)
    check_sample(folder, cores)
    millions = shape.num_parameters / 1e6
    print(f"\n{shape.name}: {millions:.1f} M parameters, {len(cores)} core(s)", flush=True)
    with running(contenders, folder, cores) as runners:
        for point in POINTS[shape.name]:
            rounds = measure(point, runners, given.repeats, given.seconds)
            show_point(point, runners, rounds)


def check_sample(folder: Path, cores: list[int]) -> None:
    """Exits unless stepscope and `generate` choose the same tokens in fp32."""
    pair = ("stepscope", "generate")
    with running(dict.fromkeys(pair, "float32"), folder, cores) as runners:
        for work in SAMPLE:
            ours, theirs = (each.ask(work, TIMEOUT_S).outputs for each in runners)
            if ours != theirs:
                sys.exit(f"{folder.name}: other tokens than generate for {work}:\n{ours}\n{theirs}")
            if len({token_id for output in theirs for token_id in output}) < 8:
                sys.exit(f"{folder.name}: a model that says always the same proves nothing")


def measure(point: Point, runners: list[Running], repeats: int, seconds: float) -> Rounds:
    """Rounds in changing order; no new one for who has used so many seconds."""
    rounds: Rounds = {each.contender: [] for each in runners}
    for runner in runners:
        short = point._replace(
            num_prompt_tokens=min(64, point.num_prompt_tokens), num_output_tokens=4
        )
        runner.ask(Work(*short, 1_000), TIMEOUT_S)
    for number in range(repeats):
        first_tokens: dict[str, list[int]] = {}
        turn = number % len(runners)
        for runner in [*runners[turn:], *runners[:turn]]:
            key = runner.contender
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
        key = runner.contender
        rate, against = median(rates[key]), ""
        if "stepscope" in rates and key != "stepscope":
            against = f"stepscope is {median(rates['stepscope']) / rate:.2f} x"
        print(
            f"    {key:15}{rate:10,.1f} {f'({max(rates[key]):,.1f})':>11} of {len(rates[key])}  "
            f"{against:20} {runner.how}",
            flush=True,
        )


if __name__ == "__main__":
    try:
        main()
    except ContenderError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
