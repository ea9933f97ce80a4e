"""The points that bench_throughput.py measures, and how it shows them."""

import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from checkpoints import Shape
from contenders import CONTENDERS
from protocol import Done, Work


class Point(NamedTuple):
    key: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    def __str__(self) -> str:
        return f"{self.num_requests} x {self.num_prompt_tokens} -> {self.num_output_tokens}"

    def work(self, seed: int) -> Work:
        return Work(self.num_requests, self.num_prompt_tokens, self.num_output_tokens, seed)


POINTS = {
    each.key: each
    for each in (
        Point("decode1", 1, 32, 128),
        Point("decode16", 16, 32, 128),
        Point("decode64", 64, 32, 128),
        Point("mixed", 32, 512, 64),
        Point("short", 16, 128, 64),
    )
}
PREFILL = Point("prefill", 8, 512, 1)


@dataclass
class Cell:
    """The result of one contender at one point."""

    how: str
    num_cores: int
    rounds: list[Done] = field(default_factory=list)
    num_tokens: int = 0

    def times(self, clock: str) -> list[float]:
        """Seconds of each round, on the wall or of processor time a core."""
        return [
            each.seconds if clock == "wall" else each.cpu_s / self.num_cores for each in self.rounds
        ]

    def time(self, clock: str) -> float:
        return sum(self.times(clock))

    def rates(self, clock: str) -> list[float]:
        return [self.num_tokens / seconds for seconds in self.times(clock)]

    def rate(self, clock: str) -> float:
        """Output tokens a second, the median of the rounds."""
        return statistics.median(self.rates(clock))

    def as_dict(self) -> dict[str, Any]:
        return {
            "how": self.how,
            "wall": self.rates("wall"),
            "cpu": self.rates("cpu"),
            "details": [each.details for each in self.rounds if each.details],
        }


def roofline(
    shape: Shape,
    table: dict[str, dict[str, Cell]],
    prefill: Cell,
    machine: dict[str, float],
    clock: str,
    dtype: str,
) -> dict[str, dict[str, float]]:
    """What share of the machine stepscope reaches (a weight and a K/V element have its dtype).

    Prefill: multiplications of the layers for every token and of the head for one token a request;
    attention is left out. Decode: the weights and the K/V that a step must read, and its
    multiplications, by the median decode-only step on the wall. Weights that fit the cache of the
    processor are read faster than memory: a share above 1 is no mistake.
    """
    shares: dict[str, dict[str, float]] = {}
    itemsize, gemm = (4, "fp32_gflops") if dtype == "float32" else (2, "bf16_gflops")
    if prefill.rounds:
        layers = shape.num_layers * shape.num_layer_parameters
        head = shape.num_matmul_parameters - layers
        num_tokens = PREFILL.num_requests * PREFILL.num_prompt_tokens
        flop = 2 * (layers * num_tokens + head * PREFILL.num_requests)
        seconds = min(prefill.times(clock))
        shares["prefill"] = {
            "tokens_per_s": num_tokens / seconds,
            "gemm_share": flop / seconds / 1e9 / machine[gemm],
        }
    for key, cells in table.items():
        point, cell = POINTS[key], cells.get("stepscope")
        if cell is None or not key.startswith("decode"):
            continue
        steps_ms = [each.details["steps"]["decode_step_ms"]["p50"] for each in cell.rounds]
        step_s = min(steps_ms) / 1e3
        context = point.num_prompt_tokens + point.num_output_tokens / 2
        kv_bytes = itemsize * shape.kv_elements_per_token * context * point.num_requests
        num_bytes = itemsize * shape.num_matmul_parameters + kv_bytes
        flop = 2 * shape.num_matmul_parameters * point.num_requests
        shares[key] = {
            "step_ms": step_s * 1e3,
            "read_share": num_bytes / step_s / 1e9 / machine["read_gb_per_s"],
            "gemm_share": flop / step_s / 1e9 / machine[gemm],
        }
    return shares


def show_point(point: Point, cells: dict[str, Cell], clock: str) -> None:
    print(f"  {point}")
    ours = cells.get("stepscope")
    for key, cell in cells.items():
        rates = cell.rates(clock)
        against = ""
        if ours is not None and cell is not ours:
            against = f"stepscope is {ours.rate(clock) / cell.rate(clock):.2f} x"
        print(
            f"    {CONTENDERS[key].name:15}{cell.rate(clock):10,.1f} {f'({max(rates):,.1f})':>11} "
            f"of {len(rates)}  {against:20} {cell.how}"
        )
    if ours is not None:
        steps = ours.rounds[-1].details["steps"]
        shares = ", ".join(f"{name} {share:.1%}" for name, share in steps["shares"].items())
        print(f"      {steps['num_steps']} steps of {steps['mean_batch']:.1f} requests: {shares}")


def show_roofline(shares: dict[str, dict[str, float]]) -> None:
    for key, share in shares.items():
        what = f"{share['step_ms']:.2f} ms a step" if "step_ms" in share else "8 x 512 -> 1"
        if "tokens_per_s" in share:
            what += f", {share['tokens_per_s']:,.0f} tokens/s"
        read = f", {share['read_share']:.0%} of the memory rate" if "read_share" in share else ""
        print(f"  {key:9}{what}: {share['gemm_share']:.0%} of the gemm rate{read}")
