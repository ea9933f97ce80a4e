"""`SUSPECTS`: a table of the settings that may hold an engine back.

Each entry has two functions. One looks for evidence in the step records; the other yields changes
of the setting (remedies), which a simulation tries.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import msgspec

from stepscope.engine.protocol.settings.knobs import ConfigError, Knobs
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.simulation.step_time import StepShape, StepTime, StepTimeModel
from stepscope.engine.simulation.virtual.session import SimulatedSetup
from stepscope.recordings.compare.side.advice import MIN_LATE_SHARE
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.session.sums import Sums
from stepscope.recordings.simulation.basis import WhatIfBasis
from stepscope.recordings.state.audit_text import typed_text
from stepscope.recordings.state.series.limits import Limit

_MIN_SHARE = 0.02  # least share of steps, tokens or time to be a likely bottleneck
_MIN_HOST_SHARE = 0.05  # the same for host time in a step
_LONG = 4  # a prompt of so many medians is long


class Evidence(NamedTuple):
    """What the step records say for or against a suspect."""

    is_likely: bool  # if False, it is not simulated
    text: str


class Remedy(NamedTuple):
    """A change of knobs or of the engine's setup that lifts a limit."""

    text: str  # arguments for 'stepscope set', or in words
    setup: SimulatedSetup  # the changed engine, with the recorded knobs
    changes: Mapping[str, KnobValue]
    is_live: bool  # whether a running engine can be changed so


class Seen(NamedTuple):
    """What is known of a recorded session, from which evidence is drawn."""

    basis: WhatIfBasis
    figures: Mapping[str, float | None]
    limited: Mapping[Limit, Sums]
    num_known: int  # steps whose limit is known
    prefill_late_share: float  # of gaps: late mainly due to prefills of others

    def share(self, limit: Limit) -> float:
        """Share of the steps that this limit held back, among those whose limit is known."""
        return self.limited[limit].num_records / max(1, self.num_known)

    def figure(self, name: str) -> float:
        """The value of a figure; 0 if unknown."""
        return self.figures[name] or 0.0


class Suspect(NamedTuple):
    """One setting that may be the bottleneck."""

    name: str
    look: Callable[[Seen], Evidence]  # finds the evidence
    # Yields the changes that would lift the limit of a setup.
    remedies: Callable[[SimulatedSetup], Iterator[Remedy]]


def seen_of(side: Side, basis: WhatIfBasis) -> Seen:
    """Sum up a recording."""
    return Seen(
        basis, side.figures(), side.limited, side.sums().num_known_limits,
        side.share_late_beside_prefill,
    )  # fmt: skip


# Evidence in the records


def _limit(limit: Limit, seen: Seen) -> Evidence:
    """Evidence on a limit: the share of steps it held back, and what was free in them."""
    share, steps = seen.share(limit), seen.limited[limit]
    text = f"limited {share:.0%} of the steps"
    free = []
    if limit != "budget" and steps.budget_used is not None:
        free.append(f"{1 - steps.budget_used:.0%} of their token budget")
    if limit != "kv" and steps.kv_used is not None:
        free.append(f"{1 - steps.kv_used:.0%} of the KV blocks")
    if free and share >= _MIN_SHARE:
        text += f", with {' and '.join(free)} free"
    return Evidence(share >= _MIN_SHARE, text)


def _large_budget(seen: Seen) -> Evidence:
    share = seen.prefill_late_share
    text = f"{share:.1%} of the gaps between tokens were late beside prompts of others"
    return Evidence(share >= MIN_LATE_SHARE, text)


def _mode(seen: Seen) -> Evidence:
    knobs = seen.basis.setup.knobs
    if not any(chunks_for(knobs)):
        return Evidence(False, "prompts are cut into chunks, which share steps with decodes")
    if knobs.batching != "chunked":
        return Evidence(True, f"batching={knobs.batching}; {_limit('mode', seen).text}")
    late = seen.prefill_late_share
    text = f"prompts are prefilled whole, and {late:.1%} of the gaps were late beside them"
    return Evidence(True, text)


def chunks_for(knobs: Knobs) -> Iterator[dict[str, KnobValue]]:
    """Yield changes that cut prompts into chunks beside decodes; none if they are cut already."""
    if knobs.batching == "chunked" and knobs.enable_chunked_prefill:
        return
    chunks: dict[str, KnobValue] = {"batching": "chunked", "enable_chunked_prefill": True}
    recorded = knobs.as_dict()
    for budget in (256, 128, 512, 2048):  # among equals the first is named, as in the advice
        changes = {**chunks, "max_num_batched_tokens": budget}
        yield {name: value for name, value in changes.items() if value != recorded[name]}


def _threshold(seen: Seen) -> Evidence:
    if not seen.basis.setup.knobs.long_prefill_token_threshold:
        return Evidence(False, "no limit for a single prompt")
    return _limit("threshold", seen)


def _cadence(seen: Seen) -> Evidence:
    is_on = seen.basis.setup.knobs.prefill_schedule_interval > 1
    return _limit("cadence", seen) if is_on else _large_budget(seen)


def _long_prompts(seen: Seen) -> Evidence:
    prompts = sorted(each.num_prompt_tokens for each in seen.basis.work.requests)
    median, long = prompts[len(prompts) // 2], prompts[round(0.95 * (len(prompts) - 1))]
    late = 1 - (seen.figures["ttft_within_slo"] or 0.0)
    text = (
        f"one prompt in twenty has {long:,} tokens or more, the median {median:,}; {late:.0%} of "
        "the first tokens were late"
    )
    return Evidence(long >= _LONG * median and late >= _MIN_SHARE, text)


def _kv(seen: Seen) -> Evidence:
    found = _limit("kv", seen)
    preemptions = seen.figure("preemptions")
    text = (
        f"{found.text}, at most {seen.figure('kv_peak'):.0%} of the blocks in use, "
        f"{preemptions:,.0f} preemptions"
    )
    return Evidence(found.is_likely or preemptions > 0, text)


def _reservation(seen: Seen) -> Evidence:
    steps = seen.limited["kv"]
    reserve = seen.basis.setup.knobs.reserve
    if reserve == "output":
        used = steps.kv_used or 0.0
        text = f"reserve={reserve}: {_limit('kv', seen).text}, {used:.0%} of the blocks in use"
        return Evidence(seen.share("kv") >= _MIN_SHARE, text)
    tax = seen.figure("recompute_tax")
    text = f"reserve={reserve}: {tax:.0%} of the time went into recomputing after preemptions"
    return Evidence(tax >= _MIN_SHARE, text)


def _prefix_cache(seen: Seen) -> Evidence:
    if seen.basis.setup.knobs.enable_prefix_caching:
        return Evidence(False, f"on, {seen.figure('prefix_hit_rate'):.0%} hits")
    work = seen.basis.work
    known: set[int] = set()
    num_shared = num_tokens = 0
    for each in work.requests:
        num_same = sum(block in known for block in each.prefix)
        num_shared += min(each.num_prompt_tokens, num_same * each.prefix_tokens)
        num_tokens += each.num_prompt_tokens
        known.update(each.prefix)
    if not known:
        return Evidence(False, "off, and the records do not say which prompts begin alike")
    share = num_shared / num_tokens
    text = f"off, and {share:.0%} of the prompt tokens are the beginning of an earlier prompt"
    return Evidence(share >= _MIN_SHARE, text)


def _host(seen: Seen) -> Evidence:
    host_ms, step_ms = seen.basis.model.host_s * 1e3, seen.figure("step_p50")
    if not host_ms or not step_ms:
        return Evidence(False, "the records do not say what the host does between steps")
    share = min(1.0, host_ms / step_ms)
    text = f"the host takes {host_ms:.3g} of the {step_ms:.3g} ms of a step, {share:.0%}"
    return Evidence(share >= _MIN_HOST_SHARE, text)


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
    """Yield remedies with 2 and 4 times the value of a knob.

    A running engine cannot go beyond the value with which it was started: such a remedy needs a
    restart.
    """
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


def _less_budget(setup: SimulatedSetup) -> Iterator[Remedy]:
    for share in (2, 4, 8):
        yield from _live(setup, max_num_batched_tokens=setup.knobs.max_num_batched_tokens // share)


def _chunked(setup: SimulatedSetup) -> Iterator[Remedy]:
    for changes in chunks_for(setup.knobs):
        yield from _live(setup, **changes)


def _other_cadence(setup: SimulatedSetup) -> Iterator[Remedy]:
    for interval in (1, 2, 4, 8):
        yield from _live(setup, prefill_schedule_interval=interval)


def _short_chunks(setup: SimulatedSetup) -> Iterator[Remedy]:
    for share in (2, 4):
        value = setup.knobs.max_num_batched_tokens // share
        yield from _live(setup, long_prefill_token_threshold=value)


def _more_kv(setup: SimulatedSetup) -> Iterator[Remedy]:
    for times in (2, 4):
        larger = msgspec.structs.replace(setup, num_blocks=times * setup.num_blocks)
        words = {2: "twice", 4: "four times"}[times]
        text = f"{words} the KV blocks (a restart with more memory, or a smaller KV dtype)"
        yield Remedy(text, larger, {}, is_live=False)


def _other_reservation(setup: SimulatedSetup) -> Iterator[Remedy]:
    for reserve in ("none", "prompt", "output"):
        yield from _live(setup, reserve=reserve)


def _no_host(setup: SimulatedSetup) -> Iterator[Remedy]:
    faster = msgspec.structs.replace(setup, model=_WithoutHost(setup.model))
    text = "the host's work hidden (overlap, or a faster CPU)"
    yield Remedy(text, faster, {}, is_live=False)


class _WithoutHost:
    """A `StepTimeModel` with the times of another model, but no CPU time between steps."""

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model

    def step_time(self, shape: StepShape) -> StepTime:
        return self._model.step_time(shape)._replace(host_s=0.0)


SUSPECTS = (
    Suspect("batching", _mode, _chunked),
    Suspect("seats (max_num_seqs)", partial(_limit, "seats"), partial(_scaled, "max_num_seqs")),
    Suspect(
        "small token budget", partial(_limit, "budget"), partial(_scaled, "max_num_batched_tokens")
    ),
    Suspect("large token budget", _large_budget, _less_budget),
    Suspect(
        "limit for one prompt (long_prefill_token_threshold)",
        _threshold,
        partial(_live, long_prefill_token_threshold=0),
    ),
    Suspect("prefill cadence (prefill_schedule_interval)", _cadence, _other_cadence),
    Suspect("long prompts ahead of short ones", _long_prompts, _short_chunks),
    Suspect("KV memory", _kv, _more_kv),
    Suspect("KV reservation", _reservation, _other_reservation),
    Suspect("prefix cache", _prefix_cache, partial(_live, enable_prefix_caching=True)),
    Suspect("host time between steps", _host, _no_host),
)
