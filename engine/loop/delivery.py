"""`Delivery`: new tokens to whoever submitted their requests. Runs on the engine's thread."""

from collections.abc import Sequence

from stepscope.engine.loop.inbox import Client
from stepscope.engine.protocol.commands import Output, Submit
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow, StepResult


class Delivery:
    """Owns who is to be told of which unfinished request, and how they want it."""

    def __init__(self) -> None:
        self._clients: dict[int, tuple[Client, Submit]] = {}

    def expect(self, request: Request, client: Client, submit: Submit) -> None:
        """Outputs of `request` go to `client` from now on."""
        self._clients[request.request_id] = (client, submit)

    def deliver(self, rows: Sequence[ScheduledRow], result: StepResult) -> None:
        """The tokens of a step, after the scheduler has taken them in."""
        now_ns = result.tokens_ns
        for index, (row, token_id) in enumerate(zip(rows, result.token_ids, strict=True)):
            if token_id is None:
                continue
            request = row.request
            if result.logprobs and (logprobs := result.logprobs.get(index)) is not None:
                request.logprobs.append(logprobs)
            if request.first_token_ns is None:
                request.first_token_ns = now_ns
            request.last_token_ns = now_ns
            reason = request.finish_reason
            if reason is not None:
                client, submit = self._clients.pop(request.request_id)
            else:
                client, submit = self._clients[request.request_id]
            if submit.stream or reason is not None:
                token_ids = [token_id] if submit.stream else request.output_token_ids
                client.reply(_output(request, token_ids, reason))

    def abort(self, request: Request) -> None:
        """The last output of a request that was ended from outside."""
        client, submit = self._clients.pop(request.request_id)
        if request.stop_text is not None:
            request.stop_text.finish(armed=False)
        client.reply(_output(request, [] if submit.stream else request.output_token_ids, "abort"))


def _output(request: Request, token_ids: list[int], finish_reason: str | None) -> Output:
    """What is due to the client; text only where it had to be made to find a stop string."""
    logprobs = None
    if request.sampling.logprobs is not None:
        logprobs, request.logprobs = request.logprobs, []
    return Output(
        request_id=request.request_id,
        token_ids=token_ids,
        text=request.stop_text.take() if request.stop_text is not None else None,
        finish_reason=finish_reason,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
        logprobs=logprobs,
        stop=request.stop,
    )
