"""`Submissions`: checks and tokenises prompts, and puts them into the engine's inbox.

Short prompts are tokenised at once. Long prompts take up to seconds, so other threads tokenise
them, because the control thread has to send all replies meanwhile.
"""

import logging
from collections.abc import Callable

from stepscope.engine.control.intake import Intake, num_chars
from stepscope.engine.control.long_prompts import LongPrompts
from stepscope.engine.control.remote_client import RemoteClient
from stepscope.engine.loop.inbox import Call, Inbox, Refusal
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Error
from stepscope.engine.protocol.settings.knobs import ConfigError

log = logging.getLogger("stepscope.engine")

LONG_TEXT = 16_384  # characters; tokenising this many takes some 10 ms
_TURN_CHARS = 64  # a turn of a conversation counts as its text and this many characters


class Submissions:
    """Accepts prompts (`Submit` commands) of all clients.

    Args:
        inbox: the engine's inbox.
        intake: checks and tokenises a prompt.
        clock: the engine's clock, in nanoseconds.
        charge_text: called with the client and the number of characters that were tokenised on the
            control thread, for the client's rate limit.
    """

    def __init__(
        self,
        inbox: Inbox,
        intake: Intake,
        clock: Callable[[], int],
        charge_text: Callable[[bytes, int], None],
    ) -> None:
        self._inbox = inbox
        self._intake = intake
        self._clock = clock
        self._charge_text = charge_text
        self._long = LongPrompts(self._prepare_long)

    def close(self) -> None:
        """Drop all prompts that wait to be tokenised, and end the threads."""
        self._long.close()

    def take(self, command: Submit, client: RemoteClient) -> None:
        """Accept a prompt.

        Raises:
            ConfigError: the prompt is invalid, or too many bytes of prompts wait already.
        """
        size = num_chars(command) + _TURN_CHARS * len(command.messages or ())
        if size <= LONG_TEXT:
            self._charge_text(client.account, size)
            self._inbox.put(self._prepared(command, client))
        else:
            self._long.take(command, client, size)

    def withdraw(self, identity: bytes, command_id: bytes) -> bool:
        """Cancel a prompt that waits to be tokenised. Returns False if no such prompt waits."""
        client = self._long.withdraw(identity, command_id)
        if client is None:
            return False
        client.reply(Error(code="withdrawn", message="the prompt was withdrawn by its client"))
        return True

    def forget(self, identity: bytes) -> None:
        """Drop the waiting prompts of a client that is gone."""
        self._long.forget(identity)

    def _prepared(self, command: Submit, client: RemoteClient) -> Call:
        try:
            token_ids = self._intake.prepare(command)
        except ConfigError as error:
            self._inbox.put(Refusal(command.client_id, str(error), lane=client.account))
            raise
        command = self._intake.fitted(command, len(token_ids))
        stop_text = self._intake.stop_text(command.sampling)
        prompt_text = self._intake.prompt_text(token_ids)
        call = Call(command, client, token_ids, stop_text, prompt_text, lane=client.account)
        call.arrival_ns = self._clock()
        return call

    def _prepare_long(self, command: Submit, client: RemoteClient) -> Callable[[], None]:
        try:
            call = self._prepared(command, client)
        except ConfigError as error:
            answer = Error(code=error.code, message=str(error))
        except Exception:
            log.exception("a long prompt could not be tokenised")
            answer = Error(code="internal", message="the engine failed; its log says why")
        else:
            return lambda: self._inbox.put(call)
        return lambda: client.reply(answer)
