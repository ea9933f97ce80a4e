"""What has to be set before torch is imported. Imports nothing heavy, changes only this process."""

import os

from stepscope.engine.config import EngineConfig


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
        # OpenMP workers that wait sleep instead of spinning: a dashboard on the same cores costs
        # the model half as much (215 us a matrix product against 379 to 569).
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(num_threads(config)),
        # Models come from this machine's disk; without this, a look-up may wait for the network.
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
