"""Keeps libzmq's I/O threads from slowing the engine's thread."""

import contextlib
import os
from typing import Any

import zmq


def stand_back(context: "zmq.Context[Any]") -> None:
    """Keep the I/O threads of a context from interrupting the engine's thread.

    The message of each step wakes the I/O threads, and Linux would let them interrupt the thread
    that has just sent it. With five subscribers that cost the engine more time than all other work
    for telemetry. With SCHED_BATCH the I/O threads interrupt no thread: they use a free core, or
    else wait a few milliseconds at most. Call it before the context's first socket is made.
    """
    with contextlib.suppress(AttributeError, zmq.ZMQError):  # Linux only
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
