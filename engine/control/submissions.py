"""`Submissions`: prompts on their way from the control socket to the core's inbox.

Short ones are tokenised at once. Long ones take seconds, and all replies go through the control
thread, so they get a thread of their own.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from stepscope.engine.control.intake import Intake, num_chars
from stepscope.engine.control.remote_client import RemoteClient
from stepscope.engine.loop.inbox import Call, Inbox, Refusal
from stepscope.engine.protocol.commands import Error, Submit
from stepscope.engine.protocol.config import ConfigError

log = logging.getLogger("stepscope.engine")

LONG_TEXT = 16_384  # characters; so many are tokenised in some 10 ms
MAX_LONG_TEXTS = 64


class Submissions:
    """Checks and tokenises.

    Args:
        inbox: of the core.
        intake: knows the model's tokenizer and limits.
        clock: the engine's.
    """

    def __init__(self, inbox: Inbox, intake: Intake, clock: Callable[[], int]) -> None:
        self._inbox = inbox
        self._intake = intake
        self._clock = clock
        # One thread: the tokenizer lets others run meanwhile, and cores are for the model.
        self._tokenising = ThreadPoolExecutor(1, thread_name_prefix="tokenising")
        self._long_texts = threading.Semaphore(MAX_LONG_TEXTS)  # that wait for it or are in it

    def close(self) -> None:
        """Give up what waits to be tokenised."""
        self._tokenising.shutdown(wait=False, cancel_futures=True)

    def take(self, command: Submit, client: RemoteClient) -> None:
        """Raises ConfigError when the prompt cannot be taken, or not now."""
        if num_chars(command) <= LONG_TEXT:
            self._prepare(command, client)
        elif self._long_texts.acquire(blocking=False):
            self._tokenising.submit(self._prepare_long, command, client)
        else:
            raise ConfigError(
                "queue_full",
                f"{MAX_LONG_TEXTS} long prompts wait to be tokenised already; try again later",
            )

    def _prepare(self, command: Submit, client: RemoteClient) -> None:
        try:
            token_ids = self._intake.prepare(command)
        except ConfigError as error:
            self._inbox.put(Refusal(command.client_id, str(error)))
            raise
        command = self._intake.fitted(command, len(token_ids))
        stop_text = self._intake.stop_text(command.sampling)
        prompt_text = self._intake.prompt_text(token_ids)
        self._inbox.put(
            Call(command, client, token_ids, stop_text, prompt_text, arrival_ns=self._clock())
        )

    def _prepare_long(self, command: Submit, client: RemoteClient) -> None:
        try:
            self._prepare(command, client)
        except ConfigError as error:
            client.reply(Error(code=error.code, message=str(error)))
        except Exception:
            log.exception("a long prompt could not be tokenised")
            client.reply(Error(code="internal", message="the engine failed; its log says why"))
        finally:
            self._long_texts.release()
