"""How well an autopilot holds an ITL level, beside fixed budgets and a simple rule.

    python tests/bench/bench_autopilot.py [--seconds 180] [--rate 4]

A simulated H100 with an 8B model (roofline, with spread) gets the same requests under each policy:
code completions as in the Azure trace of 2023 (2,048 tokens in, 28 out on average) among chats
(1,155 in, 211 out), in bursts (gaps with a coefficient of variation of 3); in the middle third they
come two and a half times as often. Every policy begins with the budget of 8,192.

`AIMD` looks once a second, as the autopilot does: more than 5 % of the gaps late, half the budget;
else 128 tokens more. Goodput are requests a second that keep both levels (TTFT 2 s), by the mean of
their gaps.
"""

import argparse
import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from simulated_gpu import setup

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.wire import KnobValue, Phase, RowFlag, StepRecord, Telemetry
from stepscope.engine.simulation.virtual.requests import DrawnStepTimes, SimulatedRequest
from stepscope.engine.simulation.virtual.session import SimulatedSession, SimulatedSetup
from stepscope.engine.telemetry.step_draft import StepDraft
from stepscope.recordings.autopilot.load import Load
from stepscope.recordings.autopilot.pilot import BUDGET, Autopilot

START_BUDGET = 8192
ITL_MS, TTFT_MS = 40.0, 2_000.0
TICK_S = 0.25
FIXED = (256, 512, 1024, 2048, 4096, 8192)


class Kind(NamedTuple):
    """A kind of request: mean lengths, and their spread (sigma of the logarithm)."""

    share: float
    num_prompt: float
    num_output: float
    sigma: float


KINDS = (Kind(0.65, 2048, 28, 0.8), Kind(0.35, 1155, 211, 0.9))


class Steps:
    """A sink that keeps steps, and the latencies of their requests."""

    def __init__(self) -> None:
        self.next_sequence = self.num_dropped = 0
        self.new: list[StepRecord] = []
        self.token_ns: dict[int, list[int]] = {}
        self.num_prefill_tokens = self.num_steps = 0

    def publish(self, message: Telemetry) -> None:
        self.next_sequence += 1
        if not isinstance(message, StepDraft):
            return
        step = wire.decode(wire.encode(message))
        assert isinstance(step, StepRecord)
        self.new.append(step)
        self.num_steps += 1
        self.num_prefill_tokens += step.num_prefill_tokens
        for row in step.batch or ():
            if row.flags & RowFlag.LAST_CHUNK:
                self.token_ns.setdefault(row.request_id, []).append(step.tokens_ns)
                assert row.phase in (Phase.PREFILL, Phase.DECODE)

    def drain(self) -> list[StepRecord]:
        taken, self.new = self.new, []
        return taken


class Policy:
    """Leaves the knobs as they are."""

    def apply_step(self, step: StepRecord) -> None:
        return

    def decide(self, now_ns: int, knobs: Mapping[str, KnobValue]) -> dict[str, int]:
        return {}


class AimdPolicy(Policy):
    def __init__(self, itl_ms: float) -> None:
        self._load = Load(round(itl_ms * 1e6))
        self._from_step = self._last_step = 0
        self._next_ns = 0

    def apply_step(self, step: StepRecord) -> None:
        self._load.add(step)
        self._last_step = step.step

    def decide(self, now_ns: int, knobs: Mapping[str, KnobValue]) -> dict[str, int]:
        judged = self._load.judgement(self._from_step)
        if now_ns < self._next_ns or judged is None:
            return {}
        self._next_ns, self._from_step = now_ns + 1_000_000_000, self._last_step + 1
        budget = knobs[BUDGET]
        assert isinstance(budget, int)
        wanted = budget // 2 if judged.late_share > 0.05 else budget + 128
        return {BUDGET: min(START_BUDGET, max(64, wanted))}


class AutopilotPolicy(Policy):
    def __init__(self) -> None:
        start = setup(Knobs(max_num_batched_tokens=START_BUDGET))
        self.pilot = Autopilot(ITL_MS, start.info(0).knobs, start.knobs.as_dict())

    def apply_step(self, step: StepRecord) -> None:
        self.pilot.apply_step(step)
        self._next_step = step.step + 1

    def decide(self, now_ns: int, knobs: Mapping[str, KnobValue]) -> dict[str, int]:
        move = self.pilot.decide(now_ns)
        if move is None:
            return {}
        self.pilot.apply_knobs(knobs | move.changes, self._next_step)
        return move.changes


def requests(seconds: float, rate: float, seed: int) -> list[SimulatedRequest]:
    source = random.Random(seed)
    made, now_s = [], 0.0
    shape = 1 / 3.0**2  # of gaps with a coefficient of variation of 3
    while now_s < seconds:
        busy = 2.5 if seconds / 3 <= now_s < 2 * seconds / 3 else 1.0
        now_s += source.gammavariate(shape, 1 / shape) / (rate * busy)
        kind = KINDS[0] if source.random() < KINDS[0].share else KINDS[1]

        def length(mean: float, kind: Kind = kind) -> int:
            mu = math.log(mean) - kind.sigma**2 / 2
            return max(1, min(6000, round(source.lognormvariate(mu, kind.sigma))))

        made.append(
            SimulatedRequest(round(now_s * 1e9), length(kind.num_prompt), length(kind.num_output))
        )
    return made


def run(made: SimulatedSetup, work: list[SimulatedRequest], policy: Policy) -> Steps:
    sink = Steps()
    drawn = msgspec.structs.replace(made, model=DrawnStepTimes(made.model, 0))
    session = SimulatedSession(drawn, 0, sink)
    knobs, next_ns = made.knobs, 0
    for each in work:
        while next_ns < each.arrival_ns:
            session.run_until(next_ns)
            for step in sink.drain():
                policy.apply_step(step)
            changes = policy.decide(next_ns, knobs.as_dict())
            if changes:
                knobs = knobs.changed(changes, made.limits)
                session.set_knobs(knobs, next_ns)
            next_ns += round(TICK_S * 1e9)
        session.run_until(each.arrival_ns)
        session.submit(each)
    session.run_to_end()
    return sink


def figures(sink: Steps, work: list[SimulatedRequest], itl_ms: float) -> dict[str, float]:
    gaps, num_good = [], 0
    start_ns = 1_000_000_000_000
    end_ns = 0
    for number, times in sink.token_ns.items():
        own = [after - before for before, after in itertools.pairwise(times)]
        ttft_ms = (times[0] - start_ns - work[number].arrival_ns) / 1e6
        mean_ms = (times[-1] - times[0]) / 1e6 / max(1, len(times) - 1)
        gaps += own
        num_good += ttft_ms <= TTFT_MS and mean_ms <= itl_ms
        end_ns = max(end_ns, times[-1])
    seconds = (end_ns - start_ns) / 1e9
    return {
        "late_share": sum(gap > itl_ms * 1e6 for gap in gaps) / len(gaps),
        "goodput_per_s": num_good / seconds,
        "tokens_per_s": (len(gaps) + sink.num_prefill_tokens) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--rate", type=float, default=4.0, help="requests/s, outside the burst")
    args = parser.parse_args()
    work = requests(args.seconds, args.rate, seed=0)
    print(f"{len(work)} requests; levels: ITL {ITL_MS:g} ms, TTFT {TTFT_MS:g} ms")
    print(f"{'policy':<12}{'late gaps':>10}{'goodput/s':>11}{'tokens/s':>10}")
    policies: dict[str, tuple[int, Callable[[], Policy]]] = {
        **{str(budget): (budget, Policy) for budget in FIXED},
        "AIMD": (START_BUDGET, lambda: AimdPolicy(ITL_MS)),
        "autopilot": (START_BUDGET, AutopilotPolicy),
    }
    for name, (budget, make) in policies.items():
        of = figures(run(setup(Knobs(max_num_batched_tokens=budget)), work, make()), work, ITL_MS)
        print(
            f"{name:<12}{of['late_share']:>10.1%}{of['goodput_per_s']:>11.2f}"
            f"{of['tokens_per_s']:>10,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
