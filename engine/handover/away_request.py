"""`AwayRequest`: a request that goes on in the decode engine, and its way back to the client.

While it is away it belongs to the link's thread; what the engine's thread asks of it goes there.
"""

from stepscope.engine.loop.delivery import output_of
from stepscope.engine.loop.inbox import Client
from stepscope.engine.protocol.commands import HandedOver, KVTicket, Submit
from stepscope.engine.protocol.replies import Output
from stepscope.engine.scheduling.request import Request


class AwayRequest:
    """One request, its client, and where its keys and values lie.

    Attributes:
        ticket: None: they were loaded. Belongs to the engine's thread.
        remote_id: the decode engine's number for it, once it has one.
        is_aborted: its client wants no more of it.
    """

    def __init__(
        self, request: Request, client: Client, submit: Submit, handed_over: HandedOver
    ) -> None:
        self.request = request
        self.client = client
        self.submit = submit
        self.handed_over = handed_over
        self.ticket: KVTicket | None = handed_over.kv
        self.remote_id: int | None = None
        self.is_aborted = False

    def pass_on(self, output: Output, now_ns: int) -> None:
        """Give the client what the decode engine says, as if it came from here."""
        request, reason = self.request, output.finish_reason
        for token_id in output.token_ids:
            request.token_ids.append(token_id)
            request.finish_reason_after(token_id)  # makes the text of one with stop strings
        if output.token_ids:
            request.last_token_ns = now_ns
        if output.logprobs:
            request.logprobs += output.logprobs
        if reason == "abort":
            self.end()
        elif self.submit.stream or reason is not None:
            token_ids = output.token_ids if self.submit.stream else request.output_token_ids
            self.client.reply(output_of(request, token_ids, reason))

    def end(self) -> None:
        """It ends without another token."""
        request = self.request
        if request.stop_text is not None:
            request.stop_text.finish(armed=False)
        token_ids = [] if self.submit.stream else request.output_token_ids
        self.client.reply(output_of(request, token_ids, "abort"))
