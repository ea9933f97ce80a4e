"""Changes the knobs of several engines that serve together: on all of them, or on none."""

import contextlib
from collections.abc import Mapping, Sequence

import msgspec

from stepscope.engine.client.client import (
    CommandRefused,
    ControlClient,
    EngineUnreachable,
    NoAnswer,
)
from stepscope.engine.protocol.commands import SetKnobs
from stepscope.engine.protocol.replies import Ack
from stepscope.engine.protocol.wire import KnobValue, Snapshot


def set_on_all(
    clients: Sequence[ControlClient], changes: Mapping[str, KnobValue], who: str
) -> tuple[list[Snapshot], list[Ack]]:
    """Change the knobs of all engines, or of none.

    A dry run first asks every engine whether it accepts the change. If an engine still refuses the
    change later, or is gone, the other engines get their old values back.

    Returns the engines' states before the change, and their answers, in the order of `clients`.

    Raises CommandRefused: an engine refuses the change. The message names the engine.
    """
    before = [client.snapshot() for client in clients]
    states = list(zip(clients, before, strict=True))
    for client, state in states:
        _set(client, changes, who, state.knobs_version, dry_run=True)
    acks: list[Ack] = []
    try:
        for client, state in states:
            acks.append(_set(client, changes, who, state.knobs_version))
    except (CommandRefused, EngineUnreachable) as error:
        _put_back(clients, before, acks, changes, who)
        if isinstance(error, NoAnswer):
            client, state = states[len(acks)]
            _undo_later(client, state, changes, who)
        raise
    return before, acks


def ask_with_siblings(
    client: ControlClient, siblings: Sequence[ControlClient], command: SetKnobs
) -> Ack:
    """Change the knobs of all data-parallel ranks of one engine, or of none.

    Returns the answer of the rank that was asked. Its `detail` says from which steps on the
    siblings have the change.

    Raises CommandRefused: a rank refuses the change. If it is a sibling, the message names it.
    """
    client.ask(msgspec.structs.replace(command, dry_run=True))
    who, changes = command.who, command.changes
    before, acks = set_on_all(siblings, changes, who)
    try:
        reply = client.ask(command)
    except NoAnswer:
        raise  # the rank may still apply the change
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
    for client, state, ack in zip(clients, before, acks, strict=False):
        old = {name: state.knobs[name] for name in changes}
        # Skip an engine that is gone, or that another client has changed since.
        with contextlib.suppress(CommandRefused, EngineUnreachable):
            _set(client, old, who, ack.version)


def _undo_later(
    client: ControlClient, before: Snapshot, changes: Mapping[str, KnobValue], who: str
) -> None:
    """Send the old values, without waiting, to an engine that did not answer a change in time.

    An engine handles the commands of a client in order. So if it still applies the change, it
    restores the old values right after it. If another client has changed the knobs meanwhile, the
    expected version no longer fits, and the engine refuses to restore the old values.
    """
    undo = SetKnobs(
        changes={name: before.knobs[name] for name in changes},
        who=who,
        expected_version=before.knobs_version + 1,
        reason="the group was not changed",
    )
    with contextlib.suppress(CommandRefused, EngineUnreachable):
        client.send(undo)


def _set(
    client: ControlClient,
    changes: Mapping[str, KnobValue],
    who: str,
    version: int | None,
    dry_run: bool = False,
) -> Ack:
    """Change the knobs of one engine of a group. If it refuses, the error names the engine."""
    try:
        return client.set_knobs(changes, who, expected_version=version, dry_run=dry_run)
    except CommandRefused as error:
        text = f"{client.endpoint.name}: {error.message}; no engine of the group is changed"
        raise CommandRefused(error.code, text) from None
