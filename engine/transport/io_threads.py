"""How libzmq's I/O threads share the processor with the engine's."""

import contextlib
import os
from typing import Any

import zmq


def stand_back(context: "zmq.Context[Any]") -> None:
    """Have the I/O threads of a context take a core that is free, or wait for their turn.

    Each step's message wakes them, and Linux would let them interrupt the very thread that has
    just sent it: with five subscribers that took more of it than everything else telemetry does.
    As SCHED_BATCH they never interrupt anybody; on a machine without a free core they wait some
    milliseconds at most. To be called before the context's first socket is made.
    """
    with contextlib.suppress(AttributeError, zmq.ZMQError):  # Linux only
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
