"""Output tokens a second of a real vLLM server, attached and not, in turns.

    VLLM_ENVIRONMENTS=/path python tests/bench/bench_attach_server.py [--unobserved] [0.32.0]

Two servers with the same tiny model, one with STEPSCOPE_ENDPOINT and a recorder that listens (with
`--unobserved` nobody does), one without; `make test-vllm` makes the environment. The model's steps
take a few milliseconds, so the cost of attaching weighs more than beside any model that people
serve. Without that environment it says so and ends.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from stepscope.engine.bench.throughput import describe_machine
from tests.attached.real_server import VllmServer, write_model
from tests.attached.run_vllm import ENVIRONMENTS, Load, record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release", nargs="?", default="0.32.0")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--unobserved", action="store_true", help="nobody listens")
    options = parser.parse_args()
    python = ENVIRONMENTS / options.release / "bin" / "python"
    if not python.exists():
        print(f"no vLLM {options.release} at {python}: make test-vllm installs it")
        return
    machine = describe_machine()
    print(f"vLLM {options.release}, {machine.num_cores} cores of {machine.cpu}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        write_model(folder / "model")
        endpoint = f"ipc://{folder}/vllm"
        servers = {
            "attached": VllmServer(
                python, folder / "model", folder / "on", {"STEPSCOPE_ENDPOINT": endpoint}
            ),
            "alone": VllmServer(python, folder / "model", folder / "off", {}),
        }
        recorder = None if options.unobserved else record(endpoint, folder / "run.mcap")
        try:
            measure(servers, options.rounds)
        finally:
            if recorder is not None:
                recorder.terminate()
                recorder.wait()
            for server in servers.values():
                server.stop()


def measure(servers: dict[str, VllmServer], num_rounds: int) -> None:
    for server in servers.values():  # the first requests compile and fill caches
        Load(server, 24).wait()
    rates: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(num_rounds):
        names = list(servers)
        for name in names if number % 2 else reversed(names):
            start = time.perf_counter()
            answers = Load(servers[name]).wait()
            seconds = time.perf_counter() - start
            rates[name].append(sum(each.num_output_tokens for each in answers) / seconds)
        shown = "  ".join(f"{name} {rates[name][-1]:.0f}" for name in names)
        print(f"round {number + 1}: tokens/s  {shown}", flush=True)
    ratios = [on / off for on, off in zip(rates["attached"], rates["alone"], strict=True)]
    print(
        f"attached / alone: median {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
