"""What attaching costs vLLM's scheduling thread, in microseconds a step.

One of vLLM's schedulers runs attached, without a model. The column "vLLM" is the processor time of
this thread within vLLM's `schedule` and `update_from_output`; "added" is what the wrapped calls
take beyond it, less what wrappers that do nothing take ("clocks": to read the processor time is a
system call, which costs more after much work of vLLM's). A second scheduler without hooks is no
measure of that: it was slower by up to 4 % than the attached one. "aside" is what our own threads
took meanwhile, to make the records and to send them. In vLLM's environment, with stepscope
installed beside it:

    python tests/bench/bench_attach.py
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import process_time_ns, thread_time_ns
from typing import Any

from common import medians, turns

AIMS_US = {16: 10, 64: 25, 256: 100}  # by running requests
WARM_UP, STEPS, ROUNDS = 50, 400, 5
WRAPPED = ("schedule", "update_from_output")


def main() -> None:
    if find_spec("vllm") is None:
        print("bench_attach needs vLLM: run it with the Python of an environment that has it")
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
    from record_vllm import MODEL
    from vllm import __version__

    print(f"vLLM {__version__}, median of {ROUNDS} rounds of {STEPS} steps, us a step")
    print(f"{'running':>8}{'vLLM':>8}{'clocks':>8}{'added':>8}{'aim':>6}{'aside':>8}")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODEL))
        for num_running, aim_us in AIMS_US.items():
            run = partial(measure, num_running, model)
            found = turns({"bare": partial(run, is_attached=False), "attached": run}, ROUNDS)
            (_, clocks, _), (own, added, aside) = map(medians, found.values())
            print(
                f"{num_running:>8}{own:>8.0f}{clocks:>8.1f}{added - clocks:>8.1f}"
                f"{aim_us:>6}{aside:>8.1f}"
            )


def measure(
    num_running: int, model: Path, *, is_attached: bool = True
) -> tuple[float, float, float]:
    """A step's microseconds: medians in vLLM and around it, the mean on our own threads.

    Args:
        is_attached: False: with wrappers that do nothing, instead of our hooks.
    """
    from record_vllm import make_scheduler

    from stepscope.engine.adapters.vllm.attachment import attach

    sizes = {"max_num_seqs": num_running, "num_blocks": 40 * num_running}
    scheduler = make_scheduler({"max_num_batched_tokens": 8192, **sizes}, model)
    own_ns: list[int] = []
    for name in WRAPPED:
        setattr(scheduler, name, timed(getattr(scheduler, name), own_ns))
    attachment = attach(scheduler, f"ipc://{model}/bench") if is_attached else None
    if attachment is None:
        for name in WRAPPED:
            setattr(scheduler, name, untouched(getattr(scheduler, name)))
    try:
        add_requests(scheduler, num_running)
        times_us: list[tuple[float, float]] = []
        aside_ns = thread_time_ns() - process_time_ns()
        for _ in range(WARM_UP + STEPS):
            own_ns.clear()
            spent_ns = one_step(scheduler)
            times_us.append((sum(own_ns) / 1000, (spent_ns - sum(own_ns)) / 1000))
        aside_ns += process_time_ns() - thread_time_ns()
        assert attachment is None or attachment.is_attached
        assert len(scheduler.running) == num_running
    finally:
        if attachment is not None:
            attachment.close()
    own_us, added_us = (median(column) for column in zip(*times_us[WARM_UP:], strict=True))
    return own_us, added_us, aside_ns / (WARM_UP + STEPS) / 1000


def timed(method: Callable[..., Any], took_ns: list[int]) -> Callable[..., Any]:
    """Wrap a method: append the processor time of each call, in nanoseconds, to `took_ns`."""

    def call(*args: Any, **options: Any) -> Any:
        start = thread_time_ns()
        result = method(*args, **options)
        took_ns.append(thread_time_ns() - start)
        return result

    return call


def untouched(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        return method(*args, **options)

    return call


def add_requests(scheduler: Any, num_running: int) -> None:
    from record_vllm import make_request
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    wanted = {"prompt_len": 32, "output_len": 2 * (WARM_UP + STEPS)}
    for number in range(num_running):
        tokens = list(range(32 * number, 32 * number + 32))
        scheduler.add_request(make_request(number, wanted | {"tokens": tokens}, {}, hasher))


def one_step(scheduler: Any) -> int:
    """Run one step; return its nanoseconds of processor time."""
    from record_vllm import result_of

    start = thread_time_ns()
    output = scheduler.schedule()
    scheduled = thread_time_ns()
    result = result_of(scheduler, output)
    between = thread_time_ns()
    scheduler.update_from_output(output, result)
    return scheduled - start + thread_time_ns() - between


if __name__ == "__main__":
    main()
