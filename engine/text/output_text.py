"""`OutputText`: adds the text to the outputs of one request, on the control thread.

All text is made here, so that no step waits for it, except for requests with stop strings. Their
text was already made by the engine's thread (`stop_strings`) and is passed on as it is.
"""

import msgspec

from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Output, PositionLogprobs, TokenLogprob
from stepscope.engine.text.text_stream import REPLACEMENT, TextStream
from stepscope.engine.text.tokenizer import Tokenizer


class OutputText:
    """Makes the text of the outputs of one `Submit`, if the client wants text."""

    def __init__(self, tokenizer: Tokenizer | None, submit: Submit) -> None:
        self._tokenizer = tokenizer if submit.with_text else None
        self._include_stop = submit.sampling.include_stop
        self._stream: TextStream | None = None  # made for the first token

    def complete(self, output: Output) -> Output:
        """Return `output` with its text, and with the texts of the tokens in its logprobs."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return output if output.text is None else msgspec.structs.replace(output, text=None)
        if output.text is not None and output.logprobs is None:
            return output
        if self._stream is None:
            self._stream = tokenizer.text_stream()
        stream, token_ids, logprobs = self._stream, output.token_ids, output.logprobs
        if output.text is None and output.finish_reason == "stop" and not self._include_stop:
            token_ids = token_ids[:-1]  # the token that ended the request is not in its text
        if logprobs is None:
            text = stream.push(token_ids)
        else:
            pieces = [stream.push_token(token_id) for token_id in token_ids]
            text = "".join(piece for piece, _ in pieces)
            begins = [*(begin for _, begin in pieces), stream.num_chars]
            logprobs = [
                _spelled(position, begin, tokenizer)
                for position, begin in zip(logprobs, begins, strict=False)
            ]
        if output.finish_reason is not None:
            text += stream.finish()
        if output.text is not None:
            text = output.text
        return msgspec.structs.replace(output, text=text, logprobs=logprobs)


def _spelled(position: PositionLogprobs, begin: int, tokenizer: Tokenizer) -> PositionLogprobs:
    def named(token: TokenLogprob) -> TokenLogprob:
        text = tokenizer.token_text(token.token_id)
        utf8 = tokenizer.token_bytes(token.token_id) if REPLACEMENT in text else None
        return TokenLogprob(token.token_id, token.logprob, text, utf8)

    return PositionLogprobs(
        named(position.chosen), position.rank, [named(token) for token in position.top], begin
    )
