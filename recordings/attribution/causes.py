"""`Late`: a wait for a token that was too long, divided into `Piece`s with one cause each.

Everything is derived from the records. Durations are nanoseconds of engine time.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.state.session import request_name

Cause: TypeAlias = Literal[
    "queued",  # waited for admission
    "prompt",  # its own prompt was computed
    "prefill",  # its step also computed prompts of other requests
    "budget",  # not in a step because the token budget was spent
    "left_out",  # not in a step for another reason: whole prompts, the prefill cadence
    "preempted",  # lost its blocks and waited to be admitted again
    "recompute",  # tokens computed before the preemption were computed again
    "transfer",  # its keys and values, or another's, came from elsewhere
    "front_end",  # the front end had it: HTTP and tokenising
    "delivery",  # the front end had not yet written its last tokens out
    "paused",  # the operator had paused the engine
    "between",  # the engine had work and was between two steps
    "idle",  # the engine had nothing to run
    "step",  # an ordinary step of decodes alone
    "stopped",  # the engine's process was stopped, or its memory had to be read from the disk
    "descheduled",  # the engine waited for a processor
    "gc",  # Python's garbage collector ran
    "jit",  # a kernel was compiled
    "rank",  # the other ranks waited for one of them
    "held_up",  # a slow step: far above its baseline, and none of those says why
    "unknown",  # the records of that time are missing, or not in memory
]

# In sums by cause, the first counts as the second: they occur together.
_TOGETHER: dict[Cause, Cause] = {"recompute": "preempted"}

_SHOWN_NS = 50_000

QUEUE_REASONS = {
    "seats": "for a seat (max_num_seqs)",
    "budget": "for token budget",
    "kv_blocks": "for KV blocks",
    "preemption": "because a step preempted",
    "batch": "for the batch before it to end",
    "decode_engine": "for room in the decode engine",
    "transfer": "for the keys and values of others to be loaded",
    "paused": "because the engine admits nobody (paused)",
    "cadence": "for a step that takes prefills (prefill_schedule_interval)",
    "encoder": "for encoder budget",
    "lora": "for a LoRA slot (max_loras)",
    "grammar": "for a grammar to be compiled",
    "remote_kv": "for keys and values from elsewhere",
    "input": "for more input from its client",
    "priority": "because later requests of higher priority went ahead",
    "deferred": "because the engine holds it back",
    "queued": "behind others",
    "step": "for the step under way to end",
    "": "for an unknown reason",
}


# What a `HoldUp` of the engine says, as causes.
HOLD_UPS: dict[str, Cause] = {
    "stopped": "stopped",
    "descheduled": "descheduled",
    "gc": "gc",
    "gc_elsewhere": "gc",
    "jit": "jit",
}

# Each is a request's own reason, and holds back nobody behind it.
HELD_FOR = frozenset({"lora", "grammar", "remote_kv", "input", "deferred"})


def queue_reason_text(reason: str) -> str:
    """What a request in the queue waits for, in words; after a colon, who has it."""
    kind, _, holders = reason.partition(": ")
    text = QUEUE_REASONS.get(kind, f"for {kind}")
    return f"{text}, held by {holders}" if holders else text


def queue_texts(reasons: Mapping[str, int] | None) -> list[str]:
    """Return how many requests wait for what, in words, a text each."""
    counted = (reasons or {}).items()
    return [f"{n} {queue_reason_text(reason).partition(' (')[0]}" for reason, n in counted]


class Piece(NamedTuple):
    """A part of a wait with one cause; if it is of several steps, `step` is the first."""

    cause: Cause
    start_ns: int
    ns: int
    step: int  # the first step of this time; for time between steps, the next step
    num_steps: int = 0  # 0: between steps
    # queued, preempted: what was waited for; left_out: "prompts", "cadence" or "";
    # unknown: "forgotten" (may be somewhere, but is not in memory), "unrecorded" (was before the
    # recording), "untold" (of a client's result) or "" (was lost);
    # stopped: pages read from the disk; gc: which generation; jit: the kernel
    # transfer: "room", "way", "load" or "lost"; recompute: why it was preempted, if not for blocks;
    # rank: its name
    detail: str = ""
    request_id: int | None = None  # the request with the largest prefill, or that was loaded
    num_tokens: int = 0  # of that prefill, of its own prompt, or recomputed
    num_other_tokens: int = 0  # prefill tokens of further requests in these steps
    # held_up: the duration of these steps and their baseline; `ns` is the difference
    took_ns: int = 0
    baseline_ns: int = 0

    @property
    def text(self) -> str:
        """The cause in words, without the duration."""
        words, told = WORDS[self.cause], _OF_DETAIL.get((self.cause, self.detail))
        return (words.text if told is None else told[0]).format(self)

    @property
    def short(self) -> str:
        words, told = WORDS[self.cause], _OF_DETAIL.get((self.cause, self.detail))
        if self.request_id is not None:
            return f"{words.beside} {request_name(self.request_id)} {self.num_tokens} tok"
        return ((words.short or words.label) if told is None else told[1]).format(self)

    @property
    def steps(self) -> str:
        return f"{self.num_steps:,} step" + ("" if self.num_steps == 1 else "s")

    @property
    def whose(self) -> str:
        if self.request_id is None:
            return "others"
        text = f"{self.num_tokens:,} prefill tokens of {self.owner}"
        others = f" (and {self.num_other_tokens:,} of others)" if self.num_other_tokens else ""
        return text + others

    @property
    def spent_on(self) -> str:
        return "" if self.request_id is None else f": {self.whose}"

    @property
    def owner(self) -> str:
        return "" if self.request_id is None else request_name(self.request_id)

    @property
    def reason(self) -> str:
        return queue_reason_text(self.detail)

    @property
    def in_steps(self) -> str:
        return f", {self.steps}" if self.num_steps else ""

    @property
    def why(self) -> str:
        return self.detail and f": {self.detail}"

    @property
    def usual(self) -> str:
        work = "its work" if self.num_steps == 1 else "their work"
        return f"as is usual for {work} ({self.baseline_ns / 1e6:,.1f} ms)"

    @property
    def times(self) -> float:
        """How many times as long as usual the slow steps took."""
        return self.took_ns / max(1, self.baseline_ns)


class CauseWords(NamedTuple):
    """All words for a cause.

    `text`, `short`: of a piece, without its duration, as a format; `short` is empty if `label` is.
    """

    name: str  # in tables of causes
    label: str  # in legends and short lines
    text: str
    short: str = ""
    beside: str = "given to"  # before the request that had the time
    queue: str = ""  # what a request in the queue waited for meanwhile


WORDS: Mapping[Cause, CauseWords] = {
    "queued": CauseWords("waited in the queue", "queued",
                         "waited in the queue {0.reason}{0.in_steps}", "queued {0.reason}"),
    "prompt": CauseWords("its own prompt", "own prompt",
                         "its own prompt, {0.num_tokens:,} tokens in {0.steps}",
                         "own prompt {0.num_tokens} tok"),
    "prefill": CauseWords("shared a step with a prefill", "beside a prefill",
                          "shared {0.steps} with {0.whose}", beside="prefill"),
    "budget": CauseWords("left out, budget spent", "budget spent",
                         "left out of {0.steps}, the budget was spent{0.spent_on}",
                         beside="budget spent on"),
    "left_out": CauseWords("left out of a step", "left out",
                           "left out of {0.steps} given to {0.whose}"),
    "preempted": CauseWords("preempted, out", "preempted",
                            "preempted, waited {0.reason}, {0.steps}",
                            "preempted, waited {0.reason}"),
    "recompute": CauseWords("preempted, recomputed", "recomputed",
                            "recomputed {0.num_tokens:,} tokens in {0.steps}{0.why}",
                            "preempted, {0.num_tokens} tok again"),
    "transfer": CauseWords("KV transfer, own or another's", "handed over",
                           "on its way from the prefill engine", beside="loading"),
    "front_end": CauseWords("front end: HTTP, tokenising", "front end",
                            "HTTP and tokenising, in the front end"),
    "delivery": CauseWords("delivery by the front end", "delivery",
                           "from the engine through the front end to HTTP"),
    "paused": CauseWords("engine paused by the operator", "paused",
                         "the operator had paused the engine", "engine paused",
                         queue="engine paused"),
    "between": CauseWords("between steps", "between steps",
                          "between steps (update, record, publish)",
                          queue="the next step to begin"),
    "idle": CauseWords("engine idle", "engine idle", "the engine had been idle",
                       queue="an idle engine to begin"),
    "step": CauseWords("steps of decodes alone", "decode", "{0.steps} of decodes alone",
                       "decodes alone"),
    "stopped": CauseWords(
        "engine's process stopped", "stopped",
        "the engine's process stood still, and read {0.detail} of its memory from the disk",
        "process stopped", queue="the engine's process, which was stopped",
    ),
    "descheduled": CauseWords("no processor for the engine", "no processor",
                              "the engine waited for a processor",
                              queue="a processor for the engine"),
    "gc": CauseWords("Python's garbage collector", "garbage",
                     "Python collected garbage ({0.detail})", "Python's garbage collector",
                     queue="Python's garbage collector"),
    "jit": CauseWords("kernel compiled while serving", "compiling",
                      "the kernel {0.detail} was compiled", "compiled {0.detail}",
                      queue="a kernel to be compiled"),
    "rank": CauseWords("waited for a slow rank", "slow rank",
                       "waited for rank {0.detail} in {0.steps}", "waited for rank {0.detail}",
                       queue="a step that waited for a rank"),
    "held_up": CauseWords(
        "machine or engine held up", "held up",
        "the machine or the engine was held up: {0.steps} took {0.times:.0f}x as long {0.usual}",
        "held up ({0.times:.0f}x as long as usual)", queue="a step that was held up",
    ),
    "unknown": CauseWords("unknown, no records of it", "unknown", "records are missing",
                          "records missing"),
}  # fmt: skip
# Of some details: text and short.
_OF_DETAIL: Mapping[tuple[Cause, str], tuple[str, str]] = {
    ("left_out", "cadence"): (
        "left out of {0.steps} without prefills (prefill_schedule_interval)",
        "held by prefill_schedule_interval",
    ),
    ("preempted", "preemption"): ("preempted, its blocks were taken, {0.steps}", "preempted"),
    ("transfer", "room"): (
        "waited in the prefill engine until the decode engine had room", "no room to decode",
    ),
    ("transfer", "lost"): (
        "the decode engine was gone, until the prefill engine took it back", "decode engine gone",
    ),
    ("transfer", "load"): ("{0.num_tokens:,} tokens of {0.owner} were loaded", "handed over"),
    ("stopped", ""): (
        "the engine's process was stopped (SIGSTOP, or its host froze it)", "process stopped",
    ),
    ("unknown", "forgotten"): ("before the first step in memory", "not in memory"),
    ("unknown", "unrecorded"): ("before the recording began", "records missing"),
    ("unknown", "untold"): ("only its engine knows", "only its engine knows"),
}  # fmt: skip


class Late(NamedTuple):
    """A late token: the wait from the token before it, or from the arrival of the request.

    `pieces` are the parts of the wait with one cause each, in order of time. Parts with the same
    cause and details are merged. Their durations sum to `gap_ns`.
    """

    request_id: int
    client_id: str
    token_idx: int  # 0: the first token of the request
    step: int  # the step that brought the token
    start_ns: int
    end_ns: int
    bound_ns: int
    pieces: tuple[Piece, ...]

    @property
    def gap_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def kind(self) -> Literal["TTFT", "ITL"]:
        return "ITL" if self.token_idx else "TTFT"

    @property
    def paused_ns(self) -> int:
        """How much of the wait was a pause by an operator."""
        return sum(piece.ns for piece in self.pieces if piece.cause == "paused")

    @property
    def is_excused(self) -> bool:
        """Whether it is late only by an operator's pause; then it breaks no service level."""
        return self.gap_ns - self.paused_ns <= self.bound_ns

    @property
    def cause(self) -> Cause:
        """The cause that took the most time. Recomputing counts as part of the preemption."""
        totals = by_cause(self.pieces)
        return max(totals, key=totals.__getitem__, default="unknown")

    @property
    def main(self) -> Piece | None:
        """The longest of the pieces whose cause is `cause`."""
        cause = self.cause
        return max(
            (piece for piece in self.pieces if _TOGETHER.get(piece.cause, piece.cause) == cause),
            key=lambda piece: piece.ns,
            default=None,
        )

    @property
    def text(self) -> str:
        """One short line: the step of the token, the cause, and the length of the wait."""
        why = "" if self.main is None else f" {self.main.short}"
        again = sum(piece.num_tokens for piece in self.pieces if piece.cause == "recompute")
        if self.cause == "preempted" and again:
            why = f" {request_name(self.request_id)} preempted, {again:,} tok again"
        return f"step {self.step:,}{why} → {self.kind} {self.gap_ns / 1e6:.0f} ms"

    @property
    def shown_pieces(self) -> list[Piece]:
        """The longest piece first, without pieces below 0.05 ms."""
        parts = sorted(self.pieces, key=lambda piece: -piece.ns)
        return [piece for piece in parts if piece.ns >= _SHOWN_NS] or parts[:1]

    @property
    def explanation(self) -> str:
        return "; ".join(f"{each.ns / 1e6:,.1f} ms {each.text}" for each in self.shown_pieces)


def known_apart(pieces: Iterable[Piece], begin_ns: int, why: str) -> tuple[Piece, ...]:
    """Mark unknown time before `begin_ns` with `why`, to tell it from lost messages."""
    return tuple(
        piece._replace(detail=why)
        if piece.cause == "unknown" and piece.start_ns < begin_ns
        else piece
        for piece in pieces
    )


def hold_up_text(kind: str, detail: str) -> str:
    return Piece(HOLD_UPS[kind], 0, 0, 0, detail=detail).text if kind in HOLD_UPS else kind


def by_cause(pieces: Iterable[Piece]) -> dict[Cause, int]:
    """Nanoseconds per cause. Recomputing counts as part of a preemption."""
    totals: dict[Cause, int] = {}
    for piece in pieces:
        cause = _TOGETHER.get(piece.cause, piece.cause)
        totals[cause] = totals.get(cause, 0) + piece.ns
    return totals


def merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Merge pieces of a wait with the same cause and details, in order of first occurrence."""
    alike: dict[tuple[Cause, str, int | None], list[Piece]] = {}
    for piece in pieces:
        alike.setdefault((piece.cause, piece.detail, piece.request_id), []).append(piece)
    return tuple([each[0] if len(each) == 1 else _sum(each) for each in alike.values()])


def _sum(pieces: Sequence[Piece]) -> Piece:
    return pieces[0]._replace(
        ns=sum([piece.ns for piece in pieces]),
        num_steps=sum([piece.num_steps for piece in pieces]),
        num_tokens=sum([piece.num_tokens for piece in pieces]),
        num_other_tokens=sum([piece.num_other_tokens for piece in pieces]),
        took_ns=sum([piece.took_ns for piece in pieces]),
        baseline_ns=sum([piece.baseline_ns for piece in pieces]),
    )
