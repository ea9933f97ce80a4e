from collections.abc import Callable

from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow

def encode_batch(
    rows: list[ScheduledRow],
    ordinary: Phase | None,
    request_type: type[Request],
    describe: Callable[[ScheduledRow], tuple[int, int, int, int, int, int, int]],
    /,
) -> bytes: ...
def drain_moves(
    changed: dict[int, None],
    published: bytearray,
    ref_counts: list[int],
    owners: list[int],
    digests: list[bytes | int | None],
    /,
) -> bytes: ...
def ends_of_runs(published: bytearray, /) -> list[int]: ...
