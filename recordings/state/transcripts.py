"""The prompt and output of a request, if its engine publishes them (`--with-tokens`)."""

from typing import NamedTuple

from stepscope.engine.protocol import wire


class Said(NamedTuple):
    """One output token, or several that are attributed to the same step.

    `text` is None if the engine has no tokenizer.
    """

    step: int  # -1: before the first message
    token_ids: tuple[int, ...]
    text: str | None


class KnownText(NamedTuple):
    """Prompt and output, as far as they were received."""

    prompt_token_ids: tuple[int, ...] | None  # None if the request arrived before the first message
    prompt_text: str | None
    said: tuple[Said, ...]

    def output_text(self, last_step: float) -> str:
        return "".join(each.text or "" for each in self.said if each.step <= last_step)


class TranscriptReader:
    """Collects the prompt and output of one request from the messages of a session, in order."""

    def __init__(self, request_id: int, known: wire.Transcript | None) -> None:
        self._request_id = request_id
        self._prompt_token_ids: tuple[int, ...] | None = None
        self._prompt_text: str | None = None
        self._said: list[Said] = []
        if known is not None:
            self._begin_from(known, -1)

    def take(self, message: wire.Telemetry) -> None:
        if isinstance(message, wire.StepRecord | wire.EngineStatus):
            for event in message.events:
                if isinstance(event, wire.Arrived) and event.request_id == self._request_id:
                    if event.prompt_token_ids is not None:
                        self._prompt_token_ids = tuple(event.prompt_token_ids)
                    self._prompt_text = event.prompt_text
            if isinstance(message, wire.StepRecord) and message.token_ids is not None:
                self._take_row(message, message.token_ids)
        elif isinstance(message, wire.Snapshot):
            for known in message.transcripts or ():
                if known.request_id == self._request_id:
                    self._begin_from(known, message.step)

    def known_text(self) -> KnownText | None:
        """The text so far; None if the engine published no text."""
        if self._prompt_token_ids is None and not self._said:
            return None
        return KnownText(self._prompt_token_ids, self._prompt_text, tuple(self._said))

    def _take_row(self, record: wire.StepRecord, token_ids: list[int | None]) -> None:
        for place, row in enumerate(record.batch or ()):
            if row.request_id == self._request_id:
                token_id = token_ids[place] if place < len(token_ids) else None
                if token_id is not None:
                    texts = record.texts
                    text = texts[place] if texts is not None and place < len(texts) else None
                    # Accepted drafts precede the last token of the step.
                    drafts = {each.request_id: each.token_ids for each in record.drafts or ()}
                    said = (*(drafts.get(row.request_id) or ()), token_id)
                    self._said.append(Said(record.step, said, text))
                return

    def _begin_from(self, known: wire.Transcript, step: int) -> None:
        """Restart from a snapshot, which holds the whole text."""
        self._prompt_token_ids = tuple(known.prompt_token_ids or ())
        self._prompt_text = known.prompt_text
        self._said = [Said(step, tuple(known.output_token_ids or ()), known.output_text)]
