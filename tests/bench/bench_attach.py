"""What attaching costs vLLM's scheduling thread, in microseconds a step.

vLLM's own scheduler runs alone, without a model: two of them with the same requests, one of them
attached, take turns at every step. Only the processor time of this thread within `schedule` and
`update_from_output` counts; beside it stands what our own threads took meanwhile, to make the
records and to send them. In vLLM's environment, with stepscope installed beside it:

    python tests/bench/bench_attach.py
"""

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import process_time_ns, thread_time_ns
from typing import Any

AIMS_US = {16: 10, 64: 25, 256: 100}  # by running requests
WARM_UP, STEPS, ROUNDS = 50, 400, 5


def main() -> int:
    if find_spec("vllm") is None:
        print("bench_attach needs vLLM: run it with the Python of an environment that has it")
        return 0
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
    import json

    from record_vllm import MODEL
    from vllm import __version__

    print(f"vLLM {__version__}, median of {ROUNDS} rounds of {STEPS} steps, us a step")
    print(f"{'running':>8}{'vLLM alone':>12}{'attached':>10}{'added':>8}{'aim':>6}{'aside':>8}")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODEL))
        for num_running, aim_us in AIMS_US.items():
            rounds = [measure(num_running, model) for _ in range(ROUNDS)]
            alone, attached, aside = (median(each) for each in zip(*rounds, strict=True))
            added = median(attached - alone for alone, attached, _ in rounds)
            print(
                f"{num_running:>8}{alone:>12.0f}{attached:>10.0f}{added:>8.1f}{aim_us:>6}"
                f"{aside:>8.1f}"
            )
    return 0


def measure(num_running: int, model: Path) -> tuple[float, float, float]:
    """Medians of a step alone and of one attached, and a step's mean on other threads."""
    from stepscope.engine.adapters.vllm.attachment import attach

    schedulers = [filled(num_running, model) for _ in range(2)]
    attachment = attach(schedulers[1], f"ipc://{model}/bench")
    try:
        for scheduler in schedulers:
            add(scheduler, num_running)
        took_us: list[list[float]] = [[], []]
        aside_ns = thread_time_ns() - process_time_ns()
        for step in range(WARM_UP + STEPS):
            for i in (0, 1) if step % 2 else (1, 0):
                spent = one_step(schedulers[i])
                if step >= WARM_UP:
                    took_us[i].append(spent)
        aside_ns += process_time_ns() - thread_time_ns()
        assert attachment.is_attached
        assert len(schedulers[1].running) == num_running
    finally:
        attachment.close()
    alone, attached = map(median, took_us)
    return alone, attached, aside_ns / (WARM_UP + STEPS) / 1000


def filled(num_running: int, model: Path) -> Any:
    from record_vllm import make_scheduler

    return make_scheduler(
        {
            "max_num_batched_tokens": 8192,
            "max_num_seqs": num_running,
            "num_blocks": 40 * num_running,
        },
        model,
    )


def add(scheduler: Any, num_running: int) -> None:
    from record_vllm import make_request
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    wanted = {"prompt_len": 32, "output_len": 2 * (WARM_UP + STEPS)}
    for number in range(num_running):
        tokens = list(range(32 * number, 32 * number + 32))
        scheduler.add_request(make_request(number, wanted | {"tokens": tokens}, {}, hasher))


def one_step(scheduler: Any) -> float:
    """Run one step; return its microseconds of processor time."""
    from record_vllm import result_of

    start = thread_time_ns()
    output = scheduler.schedule()
    scheduled = thread_time_ns()
    result = result_of(scheduler, output)
    between = thread_time_ns()
    scheduler.update_from_output(output, result)
    return (scheduled - start + thread_time_ns() - between) / 1000


if __name__ == "__main__":
    sys.exit(main())
