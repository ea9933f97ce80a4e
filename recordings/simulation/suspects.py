"""`SUSPECTS`: a table of the settings that may hold an engine back.

Each says what of the records speaks for or against it, and yields changes (remedies), which a
simulation tries.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from stepscope.engine.protocol.knobs import ConfigError, Knobs
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.simulation.step_time import StepShape, StepTime, StepTimeModel
from stepscope.engine.simulation.virtual_session import SimulatedSetup
from stepscope.recordings.compare.advice import MIN_LATE_SHARE
from stepscope.recordings.compare.side import Side
from stepscope.recordings.simulation.basis import WhatIfBasis
from stepscope.recordings.state.audit_text import typed_text
from stepscope.recordings.state.limits import Limit

_MIN_SHARE = 0.02  # of the steps: a limit that held fewer of them is no bottleneck


class Remedy(NamedTuple):
    """A change of knobs or of the engine's setup that lifts a limit."""

    text: str  # arguments for 'stepscope set', or in words
    setup: SimulatedSetup  # the changed engine, with the recorded knobs
    changes: Mapping[str, KnobValue]
    is_live: bool  # whether a running engine can be changed so


class Seen(NamedTuple):
    basis: WhatIfBasis
    shares: Mapping[Limit, float]  # of the steps whose limit is known, those that it held back
    prefill_late_share: float  # of gaps: late mainly due to prefills of others


class Suspect(NamedTuple):
    """A setting that may hold the engine back.

    `told_by`: what of the records speaks for it: how many steps a limit held, or how many gaps were
    late beside prompts of others; None: nothing does, and each of its remedies is tried.
    `remedies`: yields the changes of a setup that may help.
    """

    name: str
    told_by: Limit | Literal["late"] | None
    remedies: Callable[[SimulatedSetup], Iterator[Remedy]]

    def is_likely(self, seen: Seen) -> bool:
        if self.told_by == "late":
            return seen.prefill_late_share >= MIN_LATE_SHARE
        return self.told_by is None or seen.shares[self.told_by] >= _MIN_SHARE

    def evidence(self, seen: Seen) -> str:
        if self.told_by == "late":
            late = seen.prefill_late_share
            return f": {late:.1%} of the gaps between tokens were late beside prompts of others"
        limit = self.told_by
        return "" if limit is None else f": it limited {seen.shares[limit]:.0%} of the steps"


def seen_of(side: Side, basis: WhatIfBasis) -> Seen:
    num_known = max(1, side.sums().num_known_limits)
    shares = {limit: each.num_records / num_known for limit, each in side.limited.items()}
    return Seen(basis, shares, side.share_late_beside_prefill)


def chunks_for(knobs: Knobs) -> Iterator[dict[str, KnobValue]]:
    """Yield changes that cut prompts into chunks beside decodes; none if they are cut already."""
    if knobs.batching == "chunked" and knobs.enable_chunked_prefill:
        return
    chunks: dict[str, KnobValue] = {"batching": "chunked", "enable_chunked_prefill": True}
    recorded = knobs.as_dict()
    for budget in (256, 128, 512, 2048):  # among equals the first is named, as in the advice
        changes = {**chunks, "max_num_batched_tokens": budget}
        yield {name: value for name, value in changes.items() if value != recorded[name]}


# Remedies for simulations


def _live(setup: SimulatedSetup, **changes: KnobValue) -> Iterator[Remedy]:
    """Yield a remedy with these knobs, or nothing if they are incompatible or unchanged."""
    values = setup.knobs.as_dict()
    if all(values[name] == value for name, value in changes.items()):
        return
    try:
        setup.knobs.changed(changes, setup.limits)
    except ConfigError:
        return
    text = " ".join(f"{name}={typed_text(value)}" for name, value in changes.items())
    yield Remedy(text, setup, changes, is_live=True)


def _scaled(name: str, setup: SimulatedSetup) -> Iterator[Remedy]:
    """Beyond the value with which an engine was started, a remedy needs a restart."""
    for times in (2, 4):
        value = times * getattr(setup.knobs, name)
        most = getattr(setup.limits, name)
        if value <= most:
            yield from _live(setup, **{name: value})
            continue
        limits = msgspec.structs.replace(setup.limits, **{name: value})
        larger = msgspec.structs.replace(setup, limits=limits)
        text = f"{name}={value} (a restart: {most} is its start value)"
        yield Remedy(text, larger, {name: value}, is_live=False)


def _values(name: str, values: Sequence[KnobValue], setup: SimulatedSetup) -> Iterator[Remedy]:
    for value in values:
        yield from _live(setup, **{name: value})


def _budget_parts(name: str, parts: Sequence[int], setup: SimulatedSetup) -> Iterator[Remedy]:
    budget = setup.knobs.max_num_batched_tokens
    return _values(name, [budget // part for part in parts], setup)


def _chunked(setup: SimulatedSetup) -> Iterator[Remedy]:
    for changes in chunks_for(setup.knobs):
        yield from _live(setup, **changes)


def _more_kv(setup: SimulatedSetup) -> Iterator[Remedy]:
    for times in (2, 4):
        larger = msgspec.structs.replace(setup, num_blocks=times * setup.num_blocks)
        words = {2: "twice", 4: "four times"}[times]
        text = f"{words} the KV blocks (a restart with more memory, or a smaller KV dtype)"
        yield Remedy(text, larger, {}, is_live=False)


def _no_host(setup: SimulatedSetup) -> Iterator[Remedy]:
    faster = msgspec.structs.replace(setup, model=_WithoutHost(setup.model))
    text = "the host's work hidden (overlap, or a faster CPU)"
    yield Remedy(text, faster, {}, is_live=False)


class _WithoutHost(NamedTuple):
    """A `StepTimeModel` with the times of another model, but no CPU time between steps."""

    model: StepTimeModel

    def step_time(self, shape: StepShape) -> StepTime:
        return self.model.step_time(shape)._replace(host_s=0.0)


SUSPECTS = (
    Suspect("batching", None, _chunked),
    Suspect("seats (max_num_seqs)", "seats", partial(_scaled, "max_num_seqs")),
    Suspect("small token budget", "budget", partial(_scaled, "max_num_batched_tokens")),
    Suspect(
        "large token budget", "late", partial(_budget_parts, "max_num_batched_tokens", (2, 4, 8))
    ),
    Suspect(
        "limit for one prompt (long_prefill_token_threshold)",
        "threshold",
        partial(_values, "long_prefill_token_threshold", (0,)),
    ),
    Suspect(
        "prefill cadence (prefill_schedule_interval)",
        "late",
        partial(_values, "prefill_schedule_interval", (1, 2, 4, 8)),
    ),
    Suspect(
        "long prompts ahead of short ones",
        None,
        partial(_budget_parts, "long_prefill_token_threshold", (2, 4)),
    ),
    Suspect("KV memory", "kv", _more_kv),
    Suspect("KV reservation", None, partial(_values, "reserve", ("none", "prompt", "output"))),
    Suspect("prefix cache", None, partial(_values, "enable_prefix_caching", (True,))),
    Suspect("host time between steps", None, _no_host),
)
