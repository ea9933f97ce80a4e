"""Changes the knobs of several engines that do one work: all of them, or none."""

import contextlib
from collections.abc import Mapping, Sequence

import msgspec

from stepscope.engine.client.client import ControlClient
from stepscope.engine.client.errors import CommandRefused, EngineUnreachable, NoAnswer
from stepscope.engine.protocol.commands import SetKnobs
from stepscope.engine.protocol.replies import Ack
from stepscope.engine.protocol.wire import KnobValue, Snapshot


def set_on_all(
    clients: Sequence[ControlClient], changes: Mapping[str, KnobValue], who: str
) -> tuple[list[Snapshot], list[Ack]]:
    """The state just before the change, and the answers, both in the order of `clients`.

    Every engine is asked first whether it would take the change. If one refuses it after all, or
    is gone, those that have taken it get their old values back.

    Raises:
        CommandRefused: one engine does not take it; the message names the engine.
        EngineUnreachable: one does not answer.
    """
    before = [client.snapshot() for client in clients]
    states = list(zip(clients, before, strict=True))
    for client, state in states:
        _set(client, changes, who, state.knobs_version, dry_run=True)
    acks: list[Ack] = []
    try:
        for client, state in states:
            acks.append(_set(client, changes, who, state.knobs_version))
    except (CommandRefused, EngineUnreachable):
        _put_back(clients, before, acks, changes, who)
        raise
    return before, acks


def ask_with_siblings(
    client: ControlClient, siblings: Sequence[ControlClient], command: SetKnobs
) -> Ack:
    """Change the knobs of a rank and of its siblings: of all of them, or of none.

    The answer is that of the rank itself, and says from which steps the siblings have the change.

    Raises:
        CommandRefused: one rank does not take it; the message of a sibling names it.
        EngineUnreachable: one does not answer.
    """
    client.ask(msgspec.structs.replace(command, dry_run=True))
    who, changes = command.who, command.changes
    before, acks = set_on_all(siblings, changes, who)
    try:
        reply = client.ask(command)
    except NoAnswer:
        raise  # it may still take the change
    except (CommandRefused, EngineUnreachable):
        _put_back(siblings, before, acks, changes, who)
        raise
    steps = (
        f"{each.endpoint.name} from step {ack.effective_step:,}"
        for each, ack in zip(siblings, acks, strict=True)
    )
    assert isinstance(reply, Ack), "a change that is not refused is acknowledged"
    return msgspec.structs.replace(reply, detail=", ".join(steps))


def _put_back(
    clients: Sequence[ControlClient],
    before: Sequence[Snapshot],
    acks: Sequence[Ack],
    changes: Mapping[str, KnobValue],
    who: str,
) -> None:
    """Give those that have taken the changes, the first of `clients`, their old values."""
    for client, state, ack in zip(clients, before, acks, strict=False):
        old = {name: state.knobs[name] for name in changes}
        # An engine that is gone, or that another client changed since, keeps its values.
        with contextlib.suppress(CommandRefused, EngineUnreachable):
            _set(client, old, who, ack.version)


def _set(
    client: ControlClient,
    changes: Mapping[str, KnobValue],
    who: str,
    version: int | None,
    dry_run: bool = False,
) -> Ack:
    """Raises what `set_on_all` does."""
    try:
        return client.set_knobs(changes, who, expected_version=version, dry_run=dry_run)
    except CommandRefused as error:
        text = f"{client.endpoint.name}: {error.message}; no engine of the group is changed"
        raise CommandRefused(error.code, text) from None
