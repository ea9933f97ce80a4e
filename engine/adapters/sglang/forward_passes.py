"""A forward pass as SGLang publishes it, and its conversion to a step record.

The format is that of `srt/observability/forward_pass_metrics.py` in SGLang 0.5.23. A message has
three frames: an empty topic, a counter (u64, big-endian) and a msgpack map. The counter counts sent
messages. So a message lost on the way leaves a gap in the counter. A message that SGLang dropped
before sending leaves no gap.
"""

from dataclasses import dataclass

import msgspec
from msgspec import Struct

from stepscope.engine.protocol.settings.knobs import WrongValue
from stepscope.engine.protocol.wire import StepRecord, Totals

PREFIX = "sglang+"  # before the ZeroMQ address, on a command line
VERSION = 1
_MAX_SECONDS = 3600.0


class ScheduledRequests(Struct, frozen=True):
    """Totals over the requests in the forward pass."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    sum_prefill_kv_tokens: int = 0  # prompt tokens from the prefix cache or computed before
    num_decode_requests: int = 0


class QueuedRequests(Struct, frozen=True):
    """Totals over the requests that wait."""

    num_prefill_requests: int = 0
    num_decode_requests: int = 0


class ForwardPass(Struct, frozen=True):
    """One message of SGLang's stream: a forward pass, or a heartbeat while no pass runs.

    `wall_time` is the time on the GPU in seconds, 0 in a heartbeat.
    """

    version: int = VERSION
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float = 0.0
    scheduled_requests: ScheduledRequests = ScheduledRequests()
    queued_requests: QueuedRequests = QueuedRequests()

    @property
    def is_idle(self) -> bool:
        scheduled = self.scheduled_requests
        return not (scheduled.num_prefill_requests or scheduled.num_decode_requests)

    @property
    def num_waiting(self) -> int:
        queued = self.queued_requests
        return max(0, queued.num_prefill_requests + queued.num_decode_requests)


@dataclass(frozen=True, slots=True)
class ForwardPassAddress:
    """The address of SGLang's stream: `sglang+ipc:///tmp/fpm.0` or `sglang+tcp://HOST:PORT`.

    `control`: as typed on a command line; `name`: its last part, for lists.
    """

    socket: str

    @property
    def control(self) -> str:
        return PREFIX + self.socket

    @property
    def name(self) -> str:
        return self.socket.rpartition("/")[2]

    @classmethod
    def parse(cls, text: str) -> "ForwardPassAddress":
        """Parse an address, with or without `sglang+`. Raises WrongValue: `text` is none."""
        socket = text.strip().removeprefix(PREFIX)
        scheme, _, rest = socket.partition("://")
        if scheme not in ("ipc", "tcp") or not rest:
            said = f"{text!r} is not sglang+ipc://PATH or sglang+tcp://HOST:PORT"
            raise WrongValue("bad_endpoint", said)
        return cls(socket)


_decoder = msgspec.msgpack.Decoder(ForwardPass)


def decode(payload: bytes) -> ForwardPass:
    """Decode a message. Raises msgspec.DecodeError if it is not of the known version."""
    found = _decoder.decode(payload)
    if found.version != VERSION:
        said = f"forward-pass metrics of version {found.version}, not {VERSION}"
        raise msgspec.ValidationError(f"{said}: a newer stepscope may read them")
    if not 0 <= found.wall_time < _MAX_SECONDS:
        raise msgspec.ValidationError(f"a forward pass of {found.wall_time} s")
    return found


def record_of(passed: ForwardPass, step: int, now_ns: int, last_ns: int) -> StepRecord:
    """Return the step record of a forward pass.

    SGLang reports how long the pass took on the GPU, but not when it ran. So the record says that
    the pass ended at `now_ns`, when the message arrived, and did not begin before `last_ns`, when
    the one before did. Running requests outside the pass are unknown.
    """
    scheduled = passed.scheduled_requests
    device_ns = round(passed.wall_time * 1e9)
    return StepRecord(
        step=step,
        schedule_start_ns=min(now_ns, max(last_ns, now_ns - device_ns)),
        tokens_ns=now_ns,
        device_ns=device_ns,
        num_prefill_tokens=max(0, scheduled.sum_prefill_tokens),
        num_decode_tokens=max(0, scheduled.num_decode_requests),
        num_running=max(0, scheduled.num_prefill_requests + scheduled.num_decode_requests),
        num_waiting=passed.num_waiting,
        totals=Totals(is_load_known=False),
    )
