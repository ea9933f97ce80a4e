"""Settings of this process that make a model run faster. Imports no large packages."""

import contextlib
import ctypes
import os

from stepscope.engine.protocol.settings.engine_config import EngineConfig


def num_threads(config: EngineConfig) -> int:
    """Return the number of CPU threads for the model."""
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
