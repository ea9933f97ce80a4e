"""What the step at the cursor did and cost: a panel, and lines that the step's page has, too.

Of an engine that publishes only totals once a second, not each step: what these are and leave out,
and how to see more of it.
"""

from collections import Counter
from itertools import pairwise
from statistics import median

from stepscope.engine.protocol import wire
from stepscope.recordings.attribution.causes import hold_up_text, queue_texts
from stepscope.recordings.attribution.queue import beneficiaries
from stepscope.recordings.session.steps import StepSummary
from stepscope.recordings.state.events import request_event
from stepscope.recordings.state.ranks import late_rank, names, rank_sizes
from stepscope.recordings.state.session import SessionState, request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import bar, cells_by_share
from stepscope.tui.views.lines import (
    Field,
    Line,
    Run,
    clean,
    facts,
    first_fitting,
    framed,
    length_of,
    titled,
    whole,
)
from stepscope.tui.views.panels.session_events import ICONS

_MAX_TEXT = 48
_NO_STATE = SessionState()  # the texts of most events need none
_PARTS = (("s", "schedule", "cached"), ("l", "launch", "muted"), ("━", "model", "decode"))
_MORE = {
    "vllm": (
        "to see every step: install stepscope in vLLM's environment, then",
        "STEPSCOPE_ENDPOINT=vllm-0 vllm serve ..., then: stepscope top vllm-0",
    ),
    "sglang": (
        "to see every step: install stepscope in SGLang's environment, then",
        "STEPSCOPE_ENDPOINT=sglang-0 sglang serve ..., then: stepscope top sglang-0",
    ),
    "stepscope": (
        "to see every step: stepscope top NAME,",
        "with the name or address of the engine behind this server",
    ),
}
_NO_MORE = ("stepscope sees single steps of vLLM, SGLang and its own engine only",)


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    title = titled(f"{frame.unit} {fmt.count(frame.cursor)}", " (follows cursor)")
    return framed(_body(frame, height - 2, width - 2), width, height, title)


def _body(frame: Frame, num_rows: int, width: int) -> list[Line]:
    record, summary = frame.record, frame.summary
    if record is None or summary is None:
        return [missing(frame)]
    if record.totals is not None and frame.is_summed_up:
        return totals(record)
    lines = costs(frame, record, summary, width)
    prefills = [row for row in record.batch or () if row.phase != wire.Phase.DECODE]
    for row in sorted(prefills, key=lambda row: -row.num_tokens):
        is_again = row.phase == wire.Phase.RECOMPUTE  # of the prompt and the output it had
        what = "recompute" if is_again else "prefill"
        view = frame.state.requests.get(row.request_id)
        prompt = None if view is None or is_again else view.num_prompt_tokens
        of = f"/{prompt:,}" if prompt else ""
        end = f"{row.start:,}→{row.start + row.num_tokens:,}{of}"
        lines.append(((f" {what} {request_name(row.request_id)} {end}", "prefill"),))
    lines += event_lines(record)
    if len(lines) > num_rows:
        lines[num_rows - 1 :] = [facts(f" and {len(lines) - num_rows + 1} more lines")]
    return lines


def missing(frame: Frame) -> Line:
    return facts(" no step yet" if frame.cursor is None else " the record of this step was lost")


def costs(frame: Frame, record: wire.StepRecord, summary: StepSummary, width: int) -> list[Line]:
    """Return lines on the time, budget, seats and KV blocks that a step took, and what held it."""
    budget, padded = record.token_budget, record.num_padded_tokens or 0
    spent = record.num_prefill_tokens + record.num_decode_tokens + padded
    # `num_running` no longer counts those whose last step it was.
    seats, most = max(record.num_running, len(record.batch or ())), record.max_num_seqs
    bar_width, info = max(4, min(24, width - 44)), frame.history.info
    used = bar(spent / budget if budget else None, bar_width, "prefill")
    taken = bar(seats / most if most else None, bar_width, "decode")
    return [
        _timing(record, width),
        _times(record, width),
        *rank_lines(record, info, width),
        *hold_up_lines(record, width),
        (*facts(" budget  ", (f"{spent:>7,} of {fmt.count(budget):<7}", "strong")), *used),
        _spent(record, summary, width),
        *draft_lines(record),
        (*facts(" seats   ", (f"{seats:>7,} of {fmt.count(most):<7}", "strong")), *taken),
        _kv(record, bar_width, width),
        *_waiting(record, width),
        *_prepared(record, None if info is None else info.overlap),
    ]


def _timing(record: wire.StepRecord, width: int) -> Line:
    """Return the step's time, and a bar of what it was spent on, as the host saw it."""
    took_ms = max(1, record.tokens_ns - record.schedule_start_ns) / 1e6
    room, known = max(8, width - 16), [ns for ns in _parts_ns(record) if ns is not None]
    took: Run = (f" {fmt.milliseconds(took_ms):>6} ms ", "strong")
    if len(known) < len(_PARTS):
        return (took, ("━" * room, "decode"))
    parts = zip(_PARTS, cells_by_share(known, room), strict=True)
    return (took, *((glyph * cells, style) for (glyph, _, style), cells in parts))


def _parts_ns(record: wire.StepRecord) -> list[int | None]:
    at_ns = (record.schedule_start_ns, record.schedule_end_ns, record.launch_ns, record.tokens_ns)
    return [None if a is None or b is None else b - a for a, b in pairwise(at_ns)]


def _times(record: wire.StepRecord, width: int) -> Line:
    """Return how many ms each part of a step took: the legend of the bar, if all are known."""
    known = _parts_ns(record)
    forms: list[Line] = []
    for gap, most in (("  ", 8), (" ", 3)):
        line: list[Run] = []
        for (glyph, name, style), ns in zip(_PARTS, known, strict=True):
            line += [(gap if line else " ", "muted")]
            line += [(f"{glyph} ", style)] if None not in known else []
            line += facts(f"{name[:most]} ", fmt.milliseconds(None if ns is None else ns / 1e6))
        device_ms = None if record.device_ns is None else record.device_ns / 1e6
        forms.append((*line, *facts(f"{gap}device ", fmt.milliseconds(device_ms))))
    return first_fitting(forms, width)


def _spent(record: wire.StepRecord, summary: StepSummary, width: int) -> Line:
    padded = record.num_padded_tokens or 0
    decode: Run = (f"{record.num_decode_tokens:,}", "decode")
    prefill: Run = (f"{record.num_prefill_tokens:,}", "prefill")
    fields = (
        Field(0, facts("   decode ", decode, "  prefill ", prefill)),
        Field(2, facts("  cached, not spent ", (fmt.count(summary.num_cached_tokens), "cached"))),
        Field(1, facts("  padding ", (f"{padded:,}", "caution")) if padded else ()),
    )
    return whole(fields, width)


def _kv(record: wire.StepRecord, bar_width: int, width: int) -> Line:
    kv = record.kv
    if kv is None:
        return facts(" KV      ", ("the engine does not report its blocks", "muted"))
    total = kv.num_blocks
    figures = facts(" KV      ", (f"{kv.used:>7,} of {total:<7,}", "strong"))
    evicted: Line = ((f"  {kv.evicted:,} evicted", "caution"),) if kv.evicted else ()
    fields = (Field(1, facts(f"  {kv.cached:,} cached")), Field(0, evicted))
    rest = whole(fields, width - length_of(figures) - 2)
    room = max(2, width - length_of(figures) - length_of(rest))
    used = bar(kv.used / total if total else None, min(bar_width, room), "kv_used")
    return (*figures, *used, *rest)


def _waiting(record: wire.StepRecord, width: int) -> list[Line]:
    if not record.num_waiting:
        return [facts(" none waiting")]
    fields = [Field(0, ((f" {record.num_waiting} wait", "text"),))]
    for number, text in enumerate(queue_texts(record.waiting_reasons)):
        fields.append(Field(1 + number, facts(f"{', ' if number else ': '}{text}")))
    return [whole(fields, width)]


def draft_lines(record: wire.StepRecord) -> list[Line]:
    """Return lines on speculative decoding: accepted draft tokens, and budget lost on others."""
    if not record.drafts:
        return []
    drafted = sum(draft.num_drafted for draft in record.drafts)
    accepted = sum(draft.num_accepted for draft in record.drafts)
    lost = f", {drafted - accepted:,} tokens of budget wasted" if drafted > accepted else ""
    used = (f"{accepted:>7,} of {drafted:,} accepted", "multi")
    return [facts(" drafts  ", used, (lost, "caution"))]


def hold_up_lines(record: wire.StepRecord, width: int) -> list[Line]:
    """Return lines on the three longest things that held up the step, or the time before it."""
    alike: Counter[tuple[str, str]] = Counter()
    for row in record.hold_ups or ():
        alike[row.kind, row.detail] += row.ns
    lines: list[Line] = []
    for (kind, detail), ns in alike.most_common(3):
        took = f"{fmt.milliseconds(ns / 1e6)} ms"
        text = hold_up_text(kind, clean(detail, _MAX_TEXT))
        shown = fmt.whole_words(text, width - len(f" held up {took}: "))
        lines.append(facts(" held up ", (took, "caution"), (f": {shown}", "text")))
    return lines


def _prepared(record: wire.StepRecord, overlap: bool | None) -> list[Line]:
    before, hidden = f"step {record.step - 1:,}", ""
    how: Run = (f"after {before} had ended", "text")
    if record.hidden_ns is not None:
        how = (f"while {before} ran", "good")
        hidden = f", {fmt.milliseconds(record.hidden_ns / 1e6)} ms hidden"
    elif record.step == 0:
        how = ("as the first step", "text")
    elif overlap is None:
        how = ("— (the engine does not report)", "muted")
    wasted = f", {record.num_wasted_tokens:,} wasted" if record.num_wasted_tokens else ""
    kept = ", kept free of prefills" if record.held_prefills else ""
    lines = [facts(" prepared ", how, (hidden, "text"), (wasted, "caution"), (kept, "muted"))]
    if record.cuda_graph is not None:
        padding = record.num_graph_padding
        filled = f", filled up with {fmt.plural(padding, 'token')}" if padding else ""
        lines.append(facts(" CUDA graph ", record.cuda_graph, filled))
    if record.hidden_ns is not None and record.device_ns is not None:
        gap_ns = max(0, record.tokens_ns - record.schedule_start_ns - record.device_ns)
        gap = f"{fmt.milliseconds(gap_ns / 1e6)} ms"
        lines.append(facts(" host's gap ", gap, ": the device was idle"))
    if record.token_limit is not None:
        held = fmt.plural(record.token_limit, "token")
        lines.append(((f" held to {held}: device memory", "caution"),))
    return lines


def event_lines(record: wire.StepRecord, before: SessionState | None = None) -> list[Line]:
    """Return a line per event; the state `before` tells who got a preempted one's blocks."""
    takers = {} if before is None else beneficiaries(record, before)
    resumed = {row.request_id for row in record.batch or () if row.flags & wire.RowFlag.RESUMED}
    lines: list[Line] = []
    for event in record.events:
        icon, text = _event(event, event.request_id in resumed)
        taker = takers.get(event.request_id) if isinstance(event, wire.Preempted) else None
        if before is not None and taker is not None:
            whom = "itself" if taker == event.request_id else request_name(taker)
            view = before.requests.get(event.request_id)
            lost = fmt.count(None if view is None else view.num_computed_tokens)
            text = f"{request_name(event.request_id)} preempted for {whom}: {lost} tokens lost"
        lines.append(((" ", "text"), icon, (f" {clean(text, _MAX_TEXT)}", "text")))
    return lines


def _event(event: wire.RequestEvent, is_resumed: bool) -> tuple[Run, str]:
    name = request_name(event.request_id)
    if isinstance(event, wire.Arrived):
        origin = "" if event.origin is None else f", handed over by {event.origin.engine}"
        return ("→", "muted"), f"{name} arrived, {event.num_prompt_tokens:,} prompt tokens{origin}"
    if isinstance(event, wire.Admitted):
        how, still = ("resumed", "still ") if is_resumed else ("admitted", "")
        text = f"{name} {how}, {event.num_cached_tokens:,} tokens {still}cached"
        if event.num_loaded_tokens:
            took = f" in {event.load_ns / 1e6:.1f} ms" if event.load_ns else ""
            text += f", {event.num_loaded_tokens:,} loaded{took}"
        return ("▲", "good"), text
    if isinstance(event, wire.FirstToken):
        return ("━", "decode"), f"{name} first token"
    said = request_event(event, _NO_STATE, 0, 0)
    assert said is not None
    return ICONS[said.kind], said.text


_MOST_NAMED = 4


def rank_lines(record: wire.StepRecord, info: wire.EngineInfo | None, width: int) -> list[Line]:
    """Return a line, and one more on the stages of a pipeline; none for an engine of one rank."""
    if not (ranks := record.ranks):
        unknown = facts(" ranks   unknown: not all of them told")
        return [] if rank_sizes(info) == (1, 1) else [unknown]
    ms = [each.work_ns / 1e6 for each in ranks]
    each = [f"{name} {fmt.milliseconds(t)} ms" for name, t in zip(names(ranks), ms, strict=True)]
    slowest, middle, spread = map(fmt.milliseconds, (max(ms), median(ms), max(ms) - min(ms)))
    of_many = f"slowest of {len(ms)} {slowest} ms, median {middle}, spread {spread}"
    said, style = [", about even", ""], "muted"
    if (late := late_rank(record)) is not None:
        waited = f"{fmt.milliseconds(late[1] / 1e6)} ms"
        said, style = [f": {late[0]} was waited for, {waited}", f": {late[0]} +{waited}"], "caution"
    head = " ranks   " if info is None or info.device in (None, "cpu") else " launch  "
    times = [of_many] if len(ms) > _MOST_NAMED else [", ".join(each), of_many]
    forms = [facts(head, text, (end, style)) for text in times for end in said]
    empty: dict[str, float | None] = {}
    for rank in ranks:
        ns = rank.empty_ns
        empty[f"pp{rank.stage}"] = None if ns is None else ns / max(1, ns + rank.work_ns)
    stages = ", ".join(f"{stage} {fmt.percent(share)}" for stage, share in empty.items())
    lines: list[Line] = [first_fitting(forms, width), facts(" empty   ", stages)]
    return lines if len(empty) > 1 else lines[:1]


def lacks(frame: Frame) -> list[str]:
    """Return lines on what a source does not tell; none for an engine that publishes each step."""
    info = frame.state.info
    if info is None:
        return []
    if info.imported is not None:
        return [f"read from {info.imported}: what it does not tell is unknown"]
    if info.totals_every_s is None:
        return []
    return [
        "metrics are totals: who ran, and in which step, is unknown",
        "a column is what the counters gained in one second",
        "latencies (≈) are estimates from the buckets of histograms",
        *how_to_see_steps(info.engine),
    ]


def how_to_see_steps(engine: str | None) -> tuple[str, ...]:
    return _MORE.get(engine or "", _NO_MORE)


def totals(record: wire.StepRecord) -> list[Line]:
    found = record.totals
    if found is None:
        return []
    load = (record.num_running, record.num_waiting) if found.is_load_known else (None, None)
    seconds = (record.tokens_ns - record.schedule_start_ns) / 1e9
    values = {
        "seconds summed up": f"{seconds:.2f}",
        "forward steps": fmt.count(found.num_steps),
        "requests that run": fmt.count(load[0]),
        "requests that wait": fmt.count(load[1]),
        "KV cache used": fmt.percent(found.kv_used),
        "prompt tokens": fmt.count(found.num_prompt_tokens),
        "tokens found in the prefix cache": fmt.count(found.num_cached_tokens),
        "output tokens": fmt.count(found.num_output_tokens),
        "preemptions": fmt.count(found.num_preempted),
        "requests that finished": fmt.count(found.num_finished),
    }
    return [facts(f" {name:<34}", f"{value:>9}") for name, value in values.items()]
