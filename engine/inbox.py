"""What waits for the engine's thread: commands, and who is to be answered.

Any thread, and a signal handler too, may put something in; only the engine's thread takes it out.
"""

import queue
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from stepscope.engine.commands import AnyCommand, AnyReply
from stepscope.engine.stop_strings import StopText


class Client(Protocol):
    """Whoever asked. `reply` is called on the engine's thread and must not wait."""

    def reply(self, message: AnyReply) -> None: ...


@dataclass(slots=True)
class Call:
    """One command in the inbox.

    A `Submit` comes with its prompt as `token_ids` and, if it has stop strings, a `stop_text`.
    """

    command: AnyCommand
    client: Client
    token_ids: list[int] | None = None
    stop_text: StopText | None = None


@dataclass(slots=True)
class Refusal:
    """A `Submit` that never became a request, for the record."""

    client_id: str
    reason: str


Inbox: TypeAlias = "queue.SimpleQueue[Call | Refusal]"
