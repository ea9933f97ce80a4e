"""How far forecasts of `what-if` are from real runs, and how often their intervals cover them.

    python tests/bench/bench_what_if.py [DIR] [--rounds 4] [--times 2]

The demo model runs on one core and gets the same seeded load five times a round, about 15 s each,
from another core: once with a budget that is varied, and with a budget of 256, 1024, 256 and 1024
tokens. Each round has another load. Rounds are added to those in DIR; `--rounds 0` only reports.
"""

import argparse
import os
import tempfile
import threading
import time
from itertools import cycle
from pathlib import Path

from served import serving
from what_if_report import forecasts, report

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import ResetPrefixCache
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.workload.arrivals import Corpus, PromptWriter, synthetic
from stepscope.engine.workload.load import LoadGenerator
from stepscope.recordings.history.history import History
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber

BUDGETS = (256, 1024)
BUDGET = "max_num_batched_tokens"
WHO = "bench_what_if"
SEND_S = 12.5
VARIED = (256, 512, 1024)
VARY_S = 2.25  # between two moves of the budget, each for a third of that
RATES = (2.5, 3.0, 3.5, 4.0)  # requests a second of a slow core
_SETTLE_S = 0.4


def spec_of(number: int, times: float) -> WorkloadSpec:
    """The load of a round."""
    return WorkloadSpec(
        rate=times * RATES[number % len(RATES)],
        document_share=0.15,
        chat_tokens=80,
        document_tokens=1024,
        output_tokens=32,
        seed=number,
    )


def record(folder: Path, num_rounds: int, times: float) -> None:
    """Add rounds to those in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    first = len(list(folder.glob("*-varied.mcap")))
    os.sched_setaffinity(0, {0})  # the engine inherits it
    options = ("--threads", "1", "--model", "demo")
    with serving(*options) as engine, ControlClient(engine.endpoint) as client:
        os.sched_setaffinity(0, {1})
        warm_up(client)
        for number in range(first, first + num_rounds):
            spec, varied_from = spec_of(number, times), BUDGETS[number % 2]
            record_run(client, folder / f"{number:03}-varied.mcap", spec, varied_from, True)
            for again in "ab":
                for budget in BUDGETS:
                    path = folder / f"{number:03}-{budget}-{again}.mcap"
                    record_run(client, path, spec, budget, False)


def warm_up(client: ControlClient) -> None:
    send(client, WorkloadSpec(rate=4, num_requests=16, seed=1_000, document_tokens=1024), None)


def record_run(
    client: ControlClient, path: Path, spec: WorkloadSpec, budget: int, is_varied: bool
) -> None:
    client.ask(ResetPrefixCache(who=WHO))
    client.set_knobs({BUDGET: budget}, WHO)
    source = Subscriber(client.endpoint, History())
    recorder = Recorder(source, path)
    source.start()
    while source.status != "live":
        time.sleep(0.05)
    time.sleep(_SETTLE_S)
    done = threading.Event()
    varying = threading.Thread(target=vary, args=(client.endpoint, done))
    if is_varied:
        varying.start()
    send(client, spec, SEND_S)
    done.set()
    if is_varied:
        varying.join()
    time.sleep(_SETTLE_S)
    source.stop()
    recorder.stop()
    print(f"{path.name}: {recorder.num_steps} steps", flush=True)


def vary(endpoint: Endpoint, done: threading.Event) -> None:
    with ControlClient(endpoint) as client:
        own = client.snapshot().knobs[BUDGET]
        others = cycle(budget for budget in VARIED if budget != own)
        while not done.wait(VARY_S):
            client.set_knobs({BUDGET: next(others)}, WHO)
            done.wait(VARY_S / 3)
            client.set_knobs({BUDGET: own}, WHO)


def send(client: ControlClient, spec: WorkloadSpec, seconds: float | None) -> None:
    info = client.info()
    writer = PromptWriter(Corpus.english(), info.chars_per_token or 4.0)
    generator = LoadGenerator(client, synthetic(spec, writer, info.max_model_len), seconds=seconds)
    generator.run()
    assert not generator.report.num_errors, generator.report.errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--times", type=float, default=1.0, help="the load, on a faster core")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        if args.rounds:
            record(folder, args.rounds, args.times)
        print(*report(forecasts(folder, BUDGET, BUDGETS), BUDGETS), sep="\n")


if __name__ == "__main__":
    main()
