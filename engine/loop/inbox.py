"""What waits for the engine's thread: commands, and who is to be answered.

Any thread, and a signal handler too, may put something in; only the engine's thread takes it out.
"""

import queue
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from stepscope.engine.protocol.asker import Asker
from stepscope.engine.protocol.commands import AnyReply, Command
from stepscope.engine.text.stop_strings import StopText


class Client(Protocol):
    """Whoever asked. `reply` is called on the engine's thread and must not wait."""

    def reply(self, message: AnyReply) -> None: ...


@dataclass(slots=True)
class Call:
    """One command in the inbox.

    `asker` is None where the command itself says who asks. A `Submit` comes with its prompt as
    `token_ids` and, if it has stop strings, a `stop_text`; `arrival_ns` says when it was put here,
    for it may lie here as long as a step takes. None: it arrives when it is taken out.
    """

    command: Command
    client: Client
    token_ids: list[int] | None = None
    stop_text: StopText | None = None
    prompt_text: str | None = None  # for telemetry, where it is to be told
    asker: Asker | None = None
    arrival_ns: int | None = None  # by the engine's clock


@dataclass(slots=True)
class Refusal:
    """A `Submit` that never became a request, for the record."""

    client_id: str
    reason: str


@dataclass(slots=True)
class Denial:
    """Commands that never got as far as the engine's thread, for the audit trail."""

    asker: Asker
    command: str  # name of its type; "" for several kinds
    code: str
    message: str
    count: int = 1


@dataclass(slots=True)
class Departure:
    """The client of a request is gone: it ends."""

    request_id: int


Item: TypeAlias = Call | Refusal | Denial | Departure
Inbox: TypeAlias = queue.SimpleQueue[Item]
