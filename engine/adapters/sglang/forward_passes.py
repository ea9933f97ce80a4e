"""A forward pass as SGLang publishes it, and the step record that it makes.

The format is `srt/observability/forward_pass_metrics.py` of SGLang 0.5.23: three frames, an empty
topic, a counter (u64, big-endian) and a msgpack map. SGLang counts what it sends, so that a message
that was lost on the way leaves a gap, and one that SGLang dropped before sending does not.
"""

from dataclasses import dataclass

import msgspec
from msgspec import Struct

from stepscope.engine.protocol.settings.config_error import WrongValue
from stepscope.engine.protocol.wire import StepRecord, Totals

PREFIX = "sglang+"  # before the ZeroMQ address, on a command line
VERSION = 1
_MAX_SECONDS = 3600.0


class ScheduledRequests(Struct, frozen=True):
    """Those in the pass."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    sum_prefill_kv_tokens: int = 0  # of their prompts, found in the prefix cache or computed before
    num_decode_requests: int = 0


class QueuedRequests(Struct, frozen=True):
    """Those that wait."""

    num_prefill_requests: int = 0
    num_decode_requests: int = 0


class ForwardPass(Struct, frozen=True):
    """`wall_time` is the time on the GPU in seconds; 0 in a sign of life between passes."""

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
    """Where SGLang publishes: `sglang+ipc:///tmp/fpm.0` or `sglang+tcp://HOST:PORT`."""

    socket: str

    @property
    def control(self) -> str:
        """How a command line names it."""
        return PREFIX + self.socket

    @property
    def name(self) -> str:
        """What to call it in a list."""
        return self.socket.rpartition("/")[2]

    @classmethod
    def parse(cls, text: str) -> "ForwardPassAddress":
        """Raises WrongValue where it is no such address."""
        socket = text.strip().removeprefix(PREFIX)
        scheme, _, rest = socket.partition("://")
        if scheme not in ("ipc", "tcp") or not rest:
            raise WrongValue(
                "bad_endpoint", f"{text!r} is not sglang+ipc://PATH or sglang+tcp://HOST:PORT"
            )
        return cls(socket)


_decoder = msgspec.msgpack.Decoder(ForwardPass)


def decode(payload: bytes) -> ForwardPass:
    """Raises msgspec.DecodeError if this is no forward pass of a known version."""
    found = _decoder.decode(payload)
    if found.version != VERSION:
        raise msgspec.ValidationError(
            f"forward-pass metrics of version {found.version}, not {VERSION}: "
            "a newer stepscope may read them"
        )
    if not 0 <= found.wall_time < _MAX_SECONDS:
        raise msgspec.ValidationError(f"a forward pass of {found.wall_time} s")
    return found


def record_of(passed: ForwardPass, step: int, now_ns: int, last_ns: int) -> StepRecord:
    """The step that a forward pass was.

    SGLang says how long it took on the GPU, not when it was: it ended when we heard of it. How many
    requests run beside those in the pass is unknown.

    Args:
        now_ns: when the message came.
        last_ns: when the one before it did; no step begins earlier.
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
