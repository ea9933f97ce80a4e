"""Settings of this process that a model runs better with. Imports nothing heavy."""

import contextlib
import ctypes
import os

from stepscope.engine.protocol.settings.engine_config import EngineConfig


def num_threads(config: EngineConfig) -> int:
    """CPU threads for the model: what was asked for, else the cores this process may use."""
    if config.threads:
        return config.threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare_environment(config: EngineConfig) -> None:
    """Set what torch, transformers and tokenizers read from the environment at import.

    A variable that is already set is left alone: it is the user's word. Call this before the first
    `import torch`; later it does no harm and has no effect.
    """
    wanted = {
        # OpenMP workers that wait for long sleep instead of spinning: a dashboard on the same cores
        # costs the model half as much (215 us a matrix product against 379 to 569).
        "OMP_WAIT_POLICY": "PASSIVE",
        # ... but between two products of a step, a few microseconds apart, they stay awake: waking
        # one costs more than a small product. A chain of 24 products takes 1.5 ms instead of 2.9
        # with one row, 2.3 instead of 4.0 with 16 (2 cores), and beside a neighbour that takes a
        # third of a core 1.8 and 2.4. This many turns (of GNU's runtime) are about 0.1 ms.
        "GOMP_SPINCOUNT": "3000",
        "OMP_NUM_THREADS": str(num_threads(config)),
        # oneDNN and torch each keep what they made for a number of rows, 1,024 of them by default:
        # on the demo model in fp32 that grows by 170 MB in 1,200 requests of different lengths, and
        # serves them no faster (62 requests a second with these, 61 without).
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        "LRU_CACHE_CAPACITY": "16",
        # Models come from this machine's disk; without this, a look-up may wait for the network.
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the next step instead of giving it back.

    A step's activations are megabytes that are freed and asked for again many times; given back,
    each page is faulted in anew. On the demo model that is 4,700 to 20,000 faults a step, 5 to 9 %
    of the time of a prefill chunk (a quarter with thresholds held low). Does nothing elsewhere.
    """
    trim_threshold, mmap_threshold = -1, -3  # of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(trim_threshold, 1 << 30)
        # Some versions take no more than 32 MiB; refused, it would stay at 128 KiB for good.
        if not mallopt(mmap_threshold, 1 << 30):
            mallopt(mmap_threshold, 1 << 25)
