"""How well an autopilot holds an ITL level on the CPU engine, beside fixed budgets and a rule.

    python tests/bench/bench_autopilot_cpu.py [--seconds 60] [--itl-ms 60] [--rate 1] [--rounds 2]

A fresh `stepscope serve` (the demo model) gets the requests of `bench_autopilot.py` under each
policy, their lengths scaled to what the demo model can hold, and the policies take turns. The
figures are those of the client (`stepscope load`). A machine that does other work meanwhile makes
all of them worse.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bench_autopilot import AimdPolicy, requests

from stepscope.engine.client.client import ControlClient, EngineUnreachable
from stepscope.engine.protocol.commands import Shutdown
from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.autopilot.live_pilot import LivePilot
from stepscope.recordings.autopilot.pilot import BUDGET, StepFeed
from stepscope.recordings.live.subscriber import Subscriber

START_BUDGET = 2048  # of the policies that move it
FIXED = (64, 128, 256, 512, 2048)
TTFT_MS = 3_000.0
TICK_S = 0.25
SHOWN = {
    "ITL kept": ("itl_within_slo", "{:>8.1%}"),
    "ITL p95 ms": ("itl_p95", "{:>10.1f}"),
    "TTFT p95 ms": ("ttft_p95", "{:>11,.0f}"),
    "goodput /s": ("goodput_per_s", "{:>10.2f}"),
    "tokens /s": ("out_tokens_per_s", "{:>9.1f}"),
}


def write_trace(path: Path, seconds: float, rate: float, scale: float) -> int:
    work = requests(seconds, rate, seed=0)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for each in work:
        when = start + timedelta(microseconds=each.arrival_ns / 1e3)
        num_prompt = max(8, round(each.num_prompt_tokens * scale))
        lines.append(f"{when:%Y-%m-%d %H:%M:%S.%f},{num_prompt},{each.num_output_tokens}")
    path.write_text("\n".join(lines))
    return len(work)


def serve(endpoint: str, budget: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stepscope.tui.cli", "serve", "--endpoint", endpoint]
    command += ["--max-num-batched-tokens", str(budget), "--device", "cpu"]
    quiet = subprocess.DEVNULL
    engine = subprocess.Popen(command, stdout=quiet, stderr=quiet, text=True)
    while True:
        try:
            with ControlClient(endpoint, 2.0) as client:
                client.info()
            return engine
        except EngineUnreachable:
            if engine.poll() is not None:
                raise SystemExit("the engine did not start") from None
            time.sleep(0.2)


def drive_aimd(endpoint: str, itl_ms: float, load: subprocess.Popen[str]) -> None:
    feed = StepFeed()
    source = Subscriber(endpoint, feed)
    source.start()
    policy = AimdPolicy(itl_ms)
    with ControlClient(endpoint, 30.0) as client:
        knobs = client.snapshot().knobs
        while load.poll() is None:
            time.sleep(TICK_S)
            for message in feed.drain():
                if isinstance(message, StepRecord):
                    policy.apply_step(message)
            changes = policy.decide(time.monotonic_ns(), knobs)
            if changes and changes[BUDGET] != knobs[BUDGET]:
                client.set_knobs(changes, "aimd")
                knobs |= changes
    source.stop()


def drive_autopilot(endpoint: str, itl_ms: float, load: subprocess.Popen[str]) -> None:
    with ControlClient(endpoint) as client:
        chosen = client.endpoint
    pilot = LivePilot(chosen, itl_ms, "bench")
    while load.poll() is None:
        time.sleep(TICK_S)
        pilot.tick(time.monotonic())
    assert pilot.ended is None, pilot.ended
    pilot.close()


def run(policy: str, trace: Path, itl_ms: float) -> dict[str, float]:
    budget = int(policy) if policy.isdigit() else START_BUDGET
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/engine"
        engine = serve(endpoint, budget)
        command = [sys.executable, "-m", "stepscope.tui.cli", "load", endpoint, "--json"]
        command += ["--trace", str(trace)]
        levels = {
            "STEPSCOPE_DASHBOARD_SLO_ITL_MS": f"{itl_ms:g}",
            "STEPSCOPE_DASHBOARD_SLO_TTFT_MS": f"{TTFT_MS:g}",
        }
        load = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **levels},
        )  # fmt: skip
        if policy == "AIMD":
            drive_aimd(endpoint, itl_ms, load)
        elif policy == "autopilot":
            drive_autopilot(endpoint, itl_ms, load)
        said, error = load.communicate()
        with ControlClient(endpoint, 30.0) as client:
            client.ask(Shutdown(who="bench"))
        engine.wait(30)
    if load.returncode:
        raise SystemExit(f"stepscope load: {error}")
    found: dict[str, float] = json.loads(said)
    return found.get("figures", found)  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=1.0, help="requests/s, outside the burst")
    parser.add_argument("--itl-ms", type=float, default=60)
    parser.add_argument("--scale", type=float, default=0.5, help="of the prompts' lengths")
    parser.add_argument("--policies", nargs="*", help="of 64, 128, ..., AIMD, autopilot")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    policies = args.policies or [*map(str, FIXED), "AIMD", "autopilot"]
    found: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        number = write_trace(trace, args.seconds, args.rate, args.scale)
        levels = f"ITL {args.itl_ms:g} ms, TTFT {TTFT_MS:g} ms"
        print(f"{number} requests in {args.seconds:g} s; {levels}")
        print(f"{'policy':<11}", *SHOWN)
        for count in range(args.rounds):
            for policy in policies:
                print(f"\r{policy} ({count + 1} of {args.rounds})", end="", file=sys.stderr)
                found[policy].append(run(policy, trace, args.itl_ms))
    print("\r", end="", file=sys.stderr)
    for policy, rounds in found.items():
        cells = [
            form.format(statistics.median(each[figure] for each in rounds))
            for figure, form in SHOWN.values()
        ]
        print(f"{policy:<11}", *cells)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
