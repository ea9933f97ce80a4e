"""How well an autopilot holds an ITL level on the CPU engine, beside fixed budgets and a rule.

    python tests/bench/bench_autopilot_cpu.py [--seconds 60] [--itl-ms 60] [--rate 1]

A fresh `stepscope serve` (the demo model) gets the requests of `bench_autopilot.py` under each
policy, their prompts halved so that the demo model can hold them. The figures are those of the
client (`stepscope load`). A machine that does other work meanwhile makes all of them worse.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bench_autopilot import AimdPolicy, requests
from served import serving

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.autopilot.live_pilot import LivePilot
from stepscope.recordings.autopilot.pilot import BUDGET, StepFeed
from stepscope.recordings.live.subscriber import Subscriber

START_BUDGET = 2048  # of the policies that move it
POLICIES = ("64", "128", "256", "512", "2048", "AIMD", "autopilot")
TTFT_MS = 3_000.0
TICK_S = 0.25
SHOWN = {
    "ITL kept": ("itl_within_slo", "{:>8.1%}"),
    "ITL p95 ms": ("itl_p95", "{:>10.1f}"),
    "TTFT p95 ms": ("ttft_p95", "{:>11,.0f}"),
    "goodput /s": ("goodput_per_s", "{:>10.2f}"),
    "tokens /s": ("out_tokens_per_s", "{:>9.1f}"),
}


def write_trace(path: Path, seconds: float, rate: float) -> int:
    work = requests(seconds, rate, seed=0)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for each in work:
        when = start + timedelta(microseconds=each.arrival_ns / 1e3)
        num_prompt = max(8, round(each.num_prompt_tokens / 2))
        lines.append(f"{when:%Y-%m-%d %H:%M:%S.%f},{num_prompt},{each.num_output_tokens}")
    path.write_text("\n".join(lines))
    return len(work)


def drive_aimd(endpoint: str, itl_ms: float, load: "subprocess.Popen[str]") -> None:
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


def drive_autopilot(endpoint: str, itl_ms: float, load: "subprocess.Popen[str]") -> None:
    with ControlClient(endpoint) as client:
        pilot = LivePilot(client.endpoint, itl_ms, "bench")
    while load.poll() is None:
        time.sleep(TICK_S)
        pilot.tick(time.monotonic())
    assert pilot.ended is None, pilot.ended
    pilot.close()


def run(policy: str, trace: Path, itl_ms: float) -> dict[str, float]:
    budget = policy if policy.isdigit() else str(START_BUDGET)
    levels = {
        "STEPSCOPE_DASHBOARD_SLO_ITL_MS": f"{itl_ms:g}",
        "STEPSCOPE_DASHBOARD_SLO_TTFT_MS": f"{TTFT_MS:g}",
    }
    with serving("--max-num-batched-tokens", budget, "--device", "cpu") as engine:
        command = [sys.executable, "-m", "stepscope.tui.cli", "load", engine.endpoint, "--json"]
        load = subprocess.Popen(
            [*command, "--trace", str(trace)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **levels},
        )  # fmt: skip
        if policy == "AIMD":
            drive_aimd(engine.endpoint, itl_ms, load)
        elif policy == "autopilot":
            drive_autopilot(engine.endpoint, itl_ms, load)
        said, error = load.communicate()
    if load.returncode:
        raise SystemExit(f"stepscope load: {error}")
    found: dict[str, float] = json.loads(said)
    return found.get("figures", found)  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=1.0, help="requests/s, outside the burst")
    parser.add_argument("--itl-ms", type=float, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        number = write_trace(trace, args.seconds, args.rate)
        levels = f"ITL {args.itl_ms:g} ms, TTFT {TTFT_MS:g} ms"
        print(f"{number} requests in {args.seconds:g} s; {levels}")
        print(f"{'policy':<11}", *SHOWN)
        for policy in POLICIES:
            found = run(policy, trace, args.itl_ms)
            cells = [form.format(found[figure]) for figure, form in SHOWN.values()]
            print(f"{policy:<11}", *cells, flush=True)


if __name__ == "__main__":
    main()
