"""Changes the knobs of several engines that serve together: on all of them, or on none."""

import contextlib
from collections.abc import Mapping, Sequence

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
    clients: Sequence[ControlClient],
    changes: Mapping[str, KnobValue],
    who: str,
    version: int | None = None,
) -> tuple[list[Snapshot], list[Ack]]:
    """Change the knobs of all engines, or of none.

    A dry run first asks every engine whether it accepts the change. If an engine still refuses the
    change later, or is gone, the other engines get their old values back.

    `version`: of the first engine's knobs, as far as the operator has seen them; None: the newest.

    Returns the engines' states before the change, and their answers, in the order of `clients`.

    Raises CommandRefused: an engine refuses the change. The message names the engine.
    """
    before = [client.snapshot() for client in clients]
    versions = [state.knobs_version for state in before]
    if version is not None:
        versions[0] = version

    def set_on(at: int, *, dry_run: bool) -> Ack:
        client, known = clients[at], versions[at]
        try:
            return client.set_knobs(changes, who, expected_version=known, dry_run=dry_run)
        except CommandRefused as error:
            text = f"{client.endpoint.name}: {error.message}; no engine of the group is changed"
            raise CommandRefused(error.code, text) from None

    for at in range(len(clients)):
        set_on(at, dry_run=True)
    acks: list[Ack] = []
    try:
        for at in range(len(clients)):
            acks.append(set_on(at, dry_run=False))
    except (CommandRefused, EngineUnreachable) as error:
        olds = [{name: state.knobs[name] for name in changes} for state in before]
        for client, old, ack in zip(clients, olds, acks, strict=False):
            # Skip an engine that is gone, or that another client has changed since.
            with contextlib.suppress(CommandRefused, EngineUnreachable):
                client.set_knobs(old, who, ack.version)
        if isinstance(error, NoAnswer):
            # An engine handles the commands of a client in order. So if it still applies the
            # change, it restores the old values right after it, unless another client has changed
            # the knobs meanwhile: then the expected version does not fit.
            reason = "the group was not changed"
            undo = SetKnobs(
                changes=olds[at], who=who, expected_version=versions[at] + 1, reason=reason
            )
            with contextlib.suppress(CommandRefused, EngineUnreachable):
                clients[at].send(undo)
        raise
    return before, acks
