"""`AwayRequest`: a request that continues in the decode engine, with its client in this engine.

Until the request ends or comes back, only the thread of `DecodeLink` may use it. The engine's
thread asks that thread.
"""

from stepscope.engine.loop.delivery import output_of
from stepscope.engine.loop.inbox import Client
from stepscope.engine.protocol.commands import HandedOver, KVTicket, Submit
from stepscope.engine.protocol.replies import Output
from stepscope.engine.scheduling.request import Request


class AwayRequest:
    """A request in the decode engine, its client, and the ticket for its keys and values."""

    def __init__(
        self, request: Request, client: Client, submit: Submit, handed_over: HandedOver
    ) -> None:
        self.request = request
        self.client = client
        self.submit = submit
        self.handed_over = handed_over
        # Identifies the copy of the keys and values. None once the decode engine has loaded them.
        # Use it on the engine's thread only.
        self.ticket: KVTicket | None = handed_over.kv
        # The decode engine's id for the request. None until known.
        self.remote_id: int | None = None
        self.is_aborted = False  # whether the client has aborted the request

    def pass_on(self, output: Output, now_ns: int) -> None:
        """Forward an output of the decode engine to the client, as if it came from this engine."""
        request, reason = self.request, output.finish_reason
        for token_id in output.token_ids:
            request.token_ids.append(token_id)
            request.finish_reason_after(token_id)  # also updates the text for stop strings
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
        """Tell the client that the request was aborted, without another token."""
        request = self.request
        if request.stop_text is not None:
            request.stop_text.finish(armed=False)
        token_ids = [] if self.submit.stream else request.output_token_ids
        self.client.reply(output_of(request, token_ids, "abort"))
