"""Removes prompts and outputs from messages.

Everything else stays, such as steps, client ids and marks. Messages of unknown kinds are dropped,
because they may contain tokens.
"""

import msgspec

from stepscope.engine.protocol import wire

STRIPPED = "tokens_taken_out"  # key in the metadata, if prompts and outputs were removed


def holds_tokens(message: wire.Telemetry) -> bool:
    if isinstance(message, wire.StepRecord):
        drafted = any(draft.token_ids for draft in message.drafts or ())
        if message.token_ids or message.texts or drafted:
            return True
    if isinstance(message, wire.StepRecord | wire.EngineStatus):
        arrivals = [each for each in message.events if isinstance(each, wire.Arrived)]
        return any((each.prompt_token_ids, each.prompt_text) != (None, None) for each in arrivals)
    return isinstance(message, wire.Snapshot) and bool(message.transcripts)


def stripped(message: wire.Telemetry) -> wire.Telemetry:
    """The message as an engine without `--with-tokens` would send it."""
    replace = msgspec.structs.replace
    if isinstance(message, wire.StepRecord | wire.EngineStatus):
        events = [
            replace(event, prompt_token_ids=None, prompt_text=None)
            if isinstance(event, wire.Arrived)
            else event
            for event in message.events
        ]
        if isinstance(message, wire.EngineStatus):
            return replace(message, events=events)
        drafts = message.drafts and [replace(draft, token_ids=None) for draft in message.drafts]
        return replace(message, events=events, token_ids=None, texts=None, drafts=drafts)
    if isinstance(message, wire.EngineInfo):
        return replace(message, with_tokens=False)
    if isinstance(message, wire.Snapshot):
        return replace(message, transcripts=None, info=replace(message.info, with_tokens=False))
    return message
