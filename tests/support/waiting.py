"""Waiting for another thread or process, so long that only a fault can time out."""

import asyncio
import time
from collections.abc import Callable

WAIT_S = 60.0


def wait_for(
    condition: Callable[[], bool], what: str = "it happens", timeout_s: float = WAIT_S
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.005)


async def until(condition: Callable[[], bool], what: str | Callable[[], str]) -> None:
    """Like `wait_for`, if a dashboard runs in this thread."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what if isinstance(what, str) else what()}"
        await asyncio.sleep(0.01)
