"""`anchored`: relates the engine's monotonic clock to the wall clock, for `EngineInfo`."""

import time

import msgspec

from stepscope.engine.protocol.wire import EngineInfo

_CLOCKS_MOVED_NS = 50_000_000


def anchored(info: EngineInfo) -> EngineInfo:
    """Return `info` with current values of both clocks, if their difference has changed."""
    monotonic_ns, wall_ns = time.monotonic_ns(), time.time_ns()
    moved_ns = (wall_ns - monotonic_ns) - (info.wall_ns - info.monotonic_ns)
    if abs(moved_ns) < _CLOCKS_MOVED_NS:
        return info
    return msgspec.structs.replace(info, monotonic_ns=monotonic_ns, wall_ns=wall_ns)
