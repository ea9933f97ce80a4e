"""`OutputText`: adds the text to the outputs of one request, on the control thread.

All text is made here, so that no step waits for it, except for requests with stop strings. Their
text was already made by the engine's thread (`stop_strings`) and is passed on as it is.
"""

import msgspec

from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Output, PositionLogprobs, TokenLogprob
from stepscope.engine.text.tokenizer import TextStream, Tokenizer


class OutputText:
    """Makes the text of the outputs of one `Submit`, if the client wants text.

    Args:
        tokenizer: None if the engine has none; outputs then have no text.
        submit: says whether the client wants text.
    """

    def __init__(self, tokenizer: Tokenizer | None, submit: Submit) -> None:
        self._tokenizer = tokenizer if submit.with_text else None
        self._include_stop = submit.sampling.include_stop
        self._stream: TextStream | None = None  # made for the first token

    def complete(self, output: Output) -> Output:
        """Return `output` with its text, and with the texts of the tokens in its logprobs.

        Call it for each output of the request, in order.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            return output if output.text is None else msgspec.structs.replace(output, text=None)
        text = output.text
        if text is None:
            text = self._decode(output, tokenizer)
        logprobs = output.logprobs
        if logprobs is not None:
            logprobs = [_spelled(position, tokenizer) for position in logprobs]
        return msgspec.structs.replace(output, text=text, logprobs=logprobs)

    def _decode(self, output: Output, tokenizer: Tokenizer) -> str:
        if self._stream is None:
            self._stream = tokenizer.text_stream()
        token_ids = output.token_ids
        if output.finish_reason == "stop" and not self._include_stop:
            token_ids = token_ids[:-1]  # the token that ended the request is not in its text
        text = self._stream.push(token_ids)
        if output.finish_reason is not None:
            text += self._stream.finish()
        return text


def _spelled(position: PositionLogprobs, tokenizer: Tokenizer) -> PositionLogprobs:
    def named(token: TokenLogprob) -> TokenLogprob:
        return TokenLogprob(token.token_id, token.logprob, tokenizer.token_text(token.token_id))

    return PositionLogprobs(
        named(position.chosen), position.rank, [named(token) for token in position.top]
    )
