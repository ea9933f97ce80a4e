"""`stepscope set`: changes knobs of a running engine."""

from contextlib import ExitStack

from stepscope.engine.client.client import CommandRefused, ControlClient
from stepscope.engine.client.group import set_on_all
from stepscope.engine.protocol.knobs import typed
from stepscope.engine.protocol.replies import Ack
from stepscope.engine.protocol.wire import KnobSpec, KnobValue, Snapshot
from stepscope.engine.transport.endpoints import ranks_of
from stepscope.recordings.state.audit_text import typed_text
from stepscope.tui.cli.shared.arguments import knob_texts
from stepscope.tui.cli.shared.connect import choose, connect
from stepscope.tui.cli.shared.options import argument, command, flag
from stepscope.tui.cli.shared.output import say
from stepscope.tui.session.who import who
from stepscope.tui.settings.cli_errors import WrongUsage

_TRIES = 5
_EXAMPLE = "for example: stepscope set max_num_batched_tokens=512"


@command(
    "stepscope set max_num_batched_tokens=512 order=arrival",
    "stepscope set engine-0 max_num_batched_tokens=512 --dry-run",
    takes_key=True,
)
def set_knobs(
    assignments: list[str] = argument(
        "[ENDPOINT] KNOB=VALUE",
        "one change of one or more knobs; put the engine first if there are several",
        default=...,
    ),
    dry_run: bool = flag("only check whether the engine would accept it", "--dry-run"),
) -> None:
    """Change knobs of a running engine; print the step of effect."""
    first, *rest = assignments
    target = first if rest and ("=" not in first or "://" in first) else None
    words = assignments if target is None else rest
    texts = knob_texts(words, f"an engine comes first; {_EXAMPLE}")
    for name, text in texts.items():
        if "," in text:
            raise WrongUsage(
                f"{name}={text}: an engine holds one value at a time; 'stepscope what-if' tries "
                "several on a recording"
            )
    ranks = [choose(None, "stepscope set {} KNOB=VALUE")] if target is None else ranks_of(target)
    is_group = len(ranks) > 1
    if dry_run and is_group:
        names = ", ".join(rank.name for rank in ranks)
        raise WrongUsage(f"--dry-run is for one engine; name one rank: {names}")
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(rank)) for rank in ranks]
        specs = {spec.name: spec for spec in clients[0].info().knobs}
        changes = {name: _value(specs.get(name), text) for name, text in texts.items()}
        found = (
            zip(*set_on_all(clients, changes, who()), strict=True)
            if is_group
            else [_apply(clients[0], changes, dry_run)]
        )
    for rank, (before, ack) in zip(ranks, found, strict=True):
        prefix, old = f"{rank.name}: " if is_group else "", before.knobs
        for name, value in changes.items():
            say(f"{prefix}{name}: {typed_text(old.get(name))} -> {typed_text(value)}")
        if dry_run:
            say(f"dry run: would hold from step {ack.effective_step:,}; nothing was changed")
        elif all(old.get(name) == value for name, value in changes.items()):
            say(f"{prefix}nothing to change: the knobs already have these values")
        else:
            say(f"{prefix}holds from step {ack.effective_step:,} (knobs version {ack.version})")


def _apply(
    client: ControlClient, changes: dict[str, KnobValue], dry_run: bool
) -> tuple[Snapshot, Ack]:
    """Change the knobs; return the state just before the change, and the engine's answer."""
    for _ in range(_TRIES):
        snapshot = client.snapshot()
        # The expected version ties the change to the values just read, so "old -> new" is true.
        version = snapshot.knobs_version
        try:
            ack = client.set_knobs(changes, who(), expected_version=version, dry_run=dry_run)
        except CommandRefused as error:
            if error.code != "conflict":
                raise
        else:
            return snapshot, ack
    raise CommandRefused("conflict", "someone else keeps changing the knobs; try again")


def _value(spec: KnobSpec | None, text: str) -> KnobValue:
    """Convert text to the type of the knob. What does not fit is kept: the engine refuses it."""
    try:
        return text if spec is None else typed(spec, text)
    except ValueError:
        return text
