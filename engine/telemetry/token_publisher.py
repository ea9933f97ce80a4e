"""`TokenPublisher`: puts prompts and outputs into telemetry, with `--with-tokens`.

Without that option (the default) telemetry has no token ids and no text. The published text is that
of all tokens; a client may get less, because a stop string cut it off.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stepscope.engine.protocol.wire import Transcript
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow
from stepscope.engine.text.text_stream import TextStream

# Rough limit of all transcripts in one snapshot; those that do not fit are left out.
SNAPSHOT_BYTES = 4 * 1024 * 1024
_TOKEN_BYTES = 4


@dataclass(slots=True)
class _PublishedText:
    request: Request
    prompt_text: str | None
    stream: TextStream | None
    pieces: list[str] = field(default_factory=list)


class TokenPublisher:
    """Keeps the published texts of unfinished requests, for the engine's thread."""

    def __init__(self, text_stream: Callable[[], TextStream] | None) -> None:
        self._text_stream = text_stream
        self._published: dict[int, _PublishedText] = {}  # of unfinished requests

    def arrived(self, request: Request, prompt_text: str | None) -> None:
        stream = None if self._text_stream is None else self._text_stream()
        published = self._published[request.request_id] = _PublishedText(
            request, prompt_text, stream
        )
        if stream is not None and request.num_output_tokens:  # it comes from another engine
            published.pieces.append(stream.push(request.output_token_ids))

    def ended(self, request_id: int) -> None:
        """Forget a request that ended outside of a step; `texts` forgets all others."""
        self._published.pop(request_id, None)

    def texts(
        self,
        rows: Sequence[ScheduledRow],
        token_ids: Sequence[int | None],
        bursts: Mapping[int, list[int]],
    ) -> list[str | None] | None:
        """Return for each row of a step the text that is now certain; None: it got no token.

        Without a tokenizer None in all. Call it after `Scheduler.update`. `bursts`: all tokens of
        each row with drafts, by row index.
        """
        texts = [
            None if token_id is None else self._text(row.request, bursts.get(index, [token_id]))
            for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
        ]
        return None if self._text_stream is None else texts

    def _text(self, request: Request, token_ids: list[int]) -> str:
        published = self._published[request.request_id]
        text = ""
        if published.stream is not None:
            text = published.stream.push(token_ids)
            if request.finish_reason is not None:
                text += published.stream.finish()
            published.pieces.append(text)
        if request.finish_reason is not None:
            del self._published[request.request_id]
        return text

    def transcripts(self) -> list[Transcript]:
        """Return prompt and output so far of unfinished requests, oldest first."""
        found: list[Transcript] = []
        left = SNAPSHOT_BYTES
        for request_id, published in self._published.items():
            request = published.request
            output_text = "".join(published.pieces)
            left -= request.num_tokens * _TOKEN_BYTES
            left -= len(published.prompt_text or "") + len(output_text)
            if left < 0:
                break
            has_text = published.stream is not None
            found.append(
                Transcript(
                    request_id=request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    prompt_text=published.prompt_text,
                    output_token_ids=request.output_token_ids,
                    output_text=output_text if has_text else None,
                )
            )
        return found
