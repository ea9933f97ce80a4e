"""Settings of this process that make a model run faster. Imports no large packages.

`ThreadChoice`: chooses one thread or all of them for each step on a CPU, by trying both. If each of
two threads has a core, they finish a prefill chunk in half the time. But a decode step of a small
model ends before a second thread has started. And if other programs use the same cores, each of the
hundred matrix products of a step waits for the thread that is not running: two threads then take up
to four times as long as one. Which is faster cannot be known beforehand, and changes while the
engine runs. So steps of similar size are timed with the number of threads in use, and the other
number is tried now and then.
"""

import contextlib
import ctypes
import os
import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field

from stepscope.engine.protocol.engine_config import EngineConfig


def num_threads(config: EngineConfig) -> int:
    if config.threads:
        return config.threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare_environment(config: EngineConfig) -> None:
    """Set the variables that libraries read at import, if unset. Call it before `import torch`."""
    wanted = {
        # OpenMP workers that wait long must sleep, not spin. So a dashboard on the same cores slows
        # the model down by half as much (215 us per matrix product instead of 379 to 569).
        "OMP_WAIT_POLICY": "PASSIVE",
        # ... but they stay awake between two products of a step, a few microseconds apart, because
        # waking a worker costs more than a small product. A chain of 24 products takes 1.5 ms
        # instead of 2.9 with one row, and 2.3 instead of 4.0 with 16 (2 cores). With a neighbour
        # that uses a third of a core it takes 1.8 and 2.4. In GNU's runtime, this many spins are
        # about 0.1 ms.
        "GOMP_SPINCOUNT": "3000",
        "OMP_NUM_THREADS": str(num_threads(config)),
        # oneDNN and torch each cache primitives by number of rows, 1,024 by default. With the demo
        # model in fp32 these caches grow by 170 MB in 1,200 requests of different lengths, without
        # being faster (62 requests per second with these limits, 61 without).
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        "LRU_CACHE_CAPACITY": "16",
        # Models are on this machine's disk. Without this, a look-up may wait for the network.
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the next step instead of returning it to the system.

    A step frees and allocates megabytes of activations many times. Memory that was returned to the
    system causes a page fault per page when allocated again. On the demo model that is 4,700 to
    20,000 faults per step, 5 to 9 % of the time of a prefill chunk (a quarter with low thresholds).
    Without glibc this does nothing.
    """
    trim_threshold, mmap_threshold = -1, -3  # of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(trim_threshold, 1 << 30)
        # Some versions refuse more than 32 MiB, and the threshold would stay at 128 KiB.
        if not mallopt(mmap_threshold, 1 << 30):
            mallopt(mmap_threshold, 1 << 25)


FIRST_TRIAL = 4  # the other way is tried in this step of a size, then when the count has doubled,
LAST_TRIAL = 128  # ... and from this step on, always after so many
REMEMBERED = 5  # latest times to keep, of each way
# Larger steps always get all threads: trying one with a single thread would stall the engine.
LARGEST_TRIED = 256
CLEARLY = 0.95  # a winner takes at most this share of the other's time


@dataclass
class _Size:
    best: int  # number of threads
    num_steps: int = 0
    times_ns: defaultdict[int, deque[int]] = field(  # by number of threads
        default_factory=lambda: defaultdict(lambda: deque(maxlen=REMEMBERED))
    )


class ThreadChoice:
    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_tokens: int) -> int:
        """Return the number of threads for a step of `num_tokens`. `note` must follow."""
        if num_tokens > LARGEST_TRIED:
            return self._num_threads
        size = self._size(num_tokens)
        size.num_steps += 1
        count = size.num_steps
        is_power = count & (count - 1) == 0
        is_trial = count >= FIRST_TRIAL and (is_power or count % LAST_TRIAL == 0)
        return self._other(size.best) if is_trial else size.best

    def note(self, num_tokens: int, threads: int, elapsed_ns: int) -> None:
        """Record how long the step took for which `choose` returned `threads`."""
        if num_tokens > LARGEST_TRIED:
            return
        size = self._size(num_tokens)
        size.times_ns[threads].append(elapsed_ns)
        other = self._other(size.best)
        if len(size.times_ns) == 2:
            ours, theirs = (statistics.median(size.times_ns[n]) for n in (size.best, other))
            if theirs < CLEARLY * ours:
                size.best = other

    def _other(self, threads: int) -> int:
        return 1 if threads != 1 else self._num_threads

    def _size(self, num_tokens: int) -> _Size:
        return self._sizes.setdefault(num_tokens.bit_length(), _Size(self._num_threads))
