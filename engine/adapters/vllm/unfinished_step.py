"""`UnfinishedStep`: what `schedule()` decided, until `update_from_output` ends the step."""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec

from stepscope.engine.adapters.vllm.shapes import SchedulerOutput
from stepscope.engine.adapters.vllm.tracked import TrackedRequest
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.telemetry.batch_rows import RowFields

# An ordinary decode is (request, DECODE, start, None); of any other row the phase is None here,
# and all of its fields come last. So the compiled row encoder takes them.
Row: TypeAlias = tuple[TrackedRequest, Phase | None, int, RowFields | None]

_NO_ROWS = msgspec.Raw(b"\x90")


class Taken(NamedTuple):
    """Blocks that a request got; the first `num_hit` of them by their content."""

    request: TrackedRequest
    blocks: list[int]
    num_hit: int


@dataclass(slots=True)
class UnfinishedStep:
    """A step that vLLM scheduled and has not finished.

    Attributes:
        number: None: it runs nothing, and only took blocks from requests.
        admitted: with their cached tokens.
    """

    out: SchedulerOutput
    number: int | None
    start_ns: int
    end_ns: int
    knobs_version: int
    token_budget: int
    num_seats: int
    batch: msgspec.Raw = field(default_factory=lambda: _NO_ROWS)
    rows: list[Row] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    preempted: list[TrackedRequest] = field(default_factory=list)
    admitted: list[tuple[TrackedRequest, int]] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_reasons: dict[str, int] = field(default_factory=dict)
