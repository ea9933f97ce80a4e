"""`stepscope set`: changes knobs of a running engine."""

import contextlib

from stepscope.engine.client.client import ControlClient
from stepscope.engine.client.errors import CommandRefused
from stepscope.engine.client.group import set_on_all
from stepscope.engine.protocol.replies import Ack
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.wire import KnobSpec, KnobValue
from stepscope.engine.transport.endpoints import Endpoint, find_local, ranks_of
from stepscope.recordings.state.audit_text import typed_text
from stepscope.tui.cli.shared.connect import choose, connect
from stepscope.tui.cli.shared.knob_words import knob_texts
from stepscope.tui.cli.shared.options import As, argument, command, flag, option
from stepscope.tui.cli.shared.output import say
from stepscope.tui.session.control.who import call_me, who
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
    endpoint: str | None = option("ENDPOINT", "the engine, if it is not the first argument"),
    dry_run: bool = flag("only check whether the engine would accept it", "--dry-run"),
    name: As = None,
) -> None:
    """Change knobs of a running engine; print the step of effect."""
    call_me(name)
    named, assignments = _engine_in(assignments)
    if named is not None and endpoint is not None:
        raise WrongUsage(f"one engine at a time: got {named!r} and --endpoint {endpoint!r}")
    texts = _texts(assignments)
    target = named or endpoint
    if target is not None and len(ranks := ranks_of(target)) > 1:
        _set_group(ranks, texts, dry_run)
        return
    with connect(choose(target, "stepscope set {} KNOB=VALUE")) as client:
        specs = {spec.name: spec for spec in client.info().knobs}
        changes = {name: _value(specs.get(name), text) for name, text in texts.items()}
        old, ack = _apply(client, changes, dry_run)
    for name, value in changes.items():
        say(f"{name}: {typed_text(old.get(name))} -> {typed_text(value)}")
    if dry_run:
        say(f"dry run: would hold from step {ack.effective_step:,}; nothing was changed")
    elif all(old.get(name) == value for name, value in changes.items()):
        say("nothing to change: the knobs already have these values")
    else:
        say(f"holds from step {ack.effective_step:,} (knobs version {ack.version})")


def _set_group(ranks: list[Endpoint], texts: dict[str, str], dry_run: bool) -> None:
    if dry_run:
        names = ", ".join(rank.name for rank in ranks)
        raise WrongUsage(f"--dry-run is for one engine; name one rank: {names}")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(rank)) for rank in ranks]
        specs = {spec.name: spec for spec in clients[0].info().knobs}
        changes = {name: _value(specs.get(name), text) for name, text in texts.items()}
        before, acks = set_on_all(clients, changes, who())
    for rank, old, ack in zip(ranks, before, acks, strict=True):
        for name, value in changes.items():
            say(f"{rank.name}: {name}: {typed_text(old.knobs.get(name))} -> {typed_text(value)}")
        say(f"{rank.name}: holds from step {ack.effective_step:,} (knobs version {ack.version})")


def _apply(
    client: ControlClient, changes: dict[str, KnobValue], dry_run: bool
) -> tuple[dict[str, KnobValue], Ack]:
    """Change the knobs; return their values just before the change, and the engine's answer."""
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
            return snapshot.knobs, ack
    raise CommandRefused("conflict", "someone else keeps changing the knobs; try again")


def _engine_in(words: list[str]) -> tuple[str | None, list[str]]:
    """Split the words into the engine's name, which may come first, and KNOB=VALUE."""
    first, *rest = words
    is_knob = "=" in first and "://" not in first
    if is_knob or _as_knob(first) is not None or not rest or any("=" not in each for each in rest):
        return None, words
    return first, rest


def _texts(assignments: list[str]) -> dict[str, str]:
    for place, assignment in enumerate(assignments):
        if "=" not in assignment:
            hint = _hint(assignment, assignments[:place] + assignments[place + 1 :])
            raise WrongUsage(f"expected KNOB=VALUE, got {assignment!r}{hint}; {_EXAMPLE}")
    texts = knob_texts(assignments, _EXAMPLE)
    for name, text in texts.items():
        if "," in text:
            raise WrongUsage(
                f"{name}={text}: an engine holds one value at a time; 'stepscope what-if' tries "
                "several on a recording"
            )
    return texts


def _hint(word: str, others: list[str]) -> str:
    """Return a hint for a word that is not KNOB=VALUE; empty if its meaning is unclear."""
    if (name := _as_knob(word)) is not None:
        value = next((each for each in others if "=" not in each), "VALUE")
        return f"; write {name}={value}"
    is_address = "/" in word or any(each.name == word for each in find_local())
    if is_address or any("=" in each for each in others):
        return f"; the engine comes first: stepscope set {word} KNOB=VALUE"
    return ""


def _as_knob(word: str) -> str | None:
    name = word.replace("-", "_")
    return name if name in Knobs.__struct_fields__ else None


def _value(spec: KnobSpec | None, text: str) -> KnobValue:
    """Convert text to the type of the knob. What does not fit is kept: the engine refuses it."""
    kind = spec.kind if spec is not None else "choice"
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except ValueError:
        return text
    if kind == "bool":
        return {"true": True, "on": True, "false": False, "off": False}.get(text.lower(), text)
    return text
