"""The experiments of the lab: claims, the arms that try them, figures of each arm, and judges.

A judge gets the runs, and the values of each column of its experiment by the column's name; both
in the order of the arms.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, get_args

from stepscope.engine.protocol.knobs import Batching
from stepscope.recordings.session.knee import knee_of, newest_columns
from stepscope.recordings.session.steps import StepTable
from stepscope.tui.cli.lab.arms import Arm, ArmRun, Work

Columns = Mapping[str, Sequence[float]]
_SARATHI = "Sarathi-Serve (Agrawal et al., OSDI 2024)"
_WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}


class ArmFigure(NamedTuple):
    """A column in the table of the report; `of` returns a value for each row."""

    name: str
    of: Callable[[Sequence[ArmRun]], Sequence[float]]
    form: str = ",.0f"
    is_drawn: bool = False  # the picture of the experiment shows it too


class LabFinding(NamedTuple):
    """The result of an experiment. A judge leaves out the rows."""

    holds: bool  # whether the claim was reproduced
    measured: str  # in one sentence
    why: str  # it was not reproduced; else empty
    marked: tuple[str, str] | None = None  # an arm to mark in the picture, and the text there
    rows: tuple[tuple[str, *tuple[float, ...]], ...] = ()  # an arm, and a value for each column

    @property
    def verdict(self) -> str:
        return "reproduced" if self.holds else "not here"

    @property
    def text(self) -> str:
        return self.verdict + (f": {self.why}" if self.why else "")


class Experiment(NamedTuple):
    name: str
    claim: str
    source: str
    differ: str  # what the arms differ in, such as "budget": heading of the table's first column
    arms: tuple[Arm, ...]
    columns: tuple[ArmFigure, ...]
    judge: Callable[[Sequence[ArmRun], Columns], LabFinding]

    def finding(self, runs: Sequence[ArmRun]) -> LabFinding:
        columns = {each.name: each.of(runs) for each in self.columns}
        found = self.judge(runs, columns)
        rows = zip([run.name for run in runs], *columns.values(), strict=True)
        return found._replace(why="" if found.holds else found.why, rows=tuple(rows))

    def table(self, finding: LabFinding) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        rows = [
            (name, *(format(v, c.form) for v, c in zip(values, self.columns, strict=True)))
            for name, *values in finding.rows
        ]
        return (self.differ, *(each.name for each in self.columns)), rows


def _works(
    name: str, num: int, at: tuple[float, float], prompt: int, output: int, seed: int, grow: int = 0
) -> tuple[Work, ...]:
    """Requests alike; `at`: seconds until the first, and from one to the next."""
    return tuple(
        Work(f"{name}-{n}", at[0] + at[1] * n, prompt + grow * n, output, seed=seed + n)
        for n in range(num)
    )


def _budget(num_tokens: int) -> dict[str, int]:
    return {"max_num_batched_tokens": num_tokens}


# Columns


def _each(
    name: str, value: Callable[[ArmRun], float], form: str = ",.0f", *, is_drawn: bool = False
) -> ArmFigure:
    return ArmFigure(name, lambda runs: [value(run) for run in runs], form, is_drawn)


def _figure(name: str, key: str, form: str = ",.0f", *, is_drawn: bool = False) -> ArmFigure:
    return _each(name, lambda run: run.decoding.value(key), form, is_drawn=is_drawn)


def _ttft(of: str, prefix: str) -> ArmFigure:
    name = f"TTFT of {of}, ms" if of else "TTFT, ms"
    return _each(name, lambda run: run.ttft_ms(prefix), is_drawn=True)


_ITL_P50 = _figure("ITL p50, ms", "itl_p50", ",.1f")
_ITL_P99 = _figure("ITL p99, ms", "itl_p99", ",.1f", is_drawn=True)
_ITL_MAX = _figure("longest ITL, ms", "itl_max", is_drawn=True)
_OUTPUT = _figure("output tokens/s", "out_tokens_per_s", is_drawn=True)


def _num_equal(runs: Sequence[ArmRun]) -> Sequence[float]:
    """How many of the first arm's tokens each arm gave, until the first other one."""
    whole = runs[0].outputs["one"]
    pairs = [list(zip(run.outputs["one"], whole, strict=False)) for run in runs]
    return [next((n for n, (a, b) in enumerate(each) if a != b), len(each)) for each in pairs]


# The requests of arms

_ONE = (Work("one", 0.0, 300, 32, seed=1),)
# Six long prompts fill the cache, so that the newest request is preempted when they grow.
_CROWDED = (*_works("crowd", 6, (0.0, 0.0), 1700, 300, 100), Work("one", 0.5, 300, 200, seed=1))
_FREEZE = (*_works("chat", 12, (0.0, 0.02), 96, 150, 1), Work("document", 0.6, 4096, 8, seed=99))
_P99 = (
    *_works("chat", 12, (0.0, 0.02), 96, 200, 1),
    *_works("document", 3, (0.4, 1.1), 4096, 8, 99),
)
_KNEE = (
    *_works("chat", 6, (0.0, 0.0), 32, 100, 1),
    *_works("document", 2, (0.3, 0.0), 1024, 4, 99),
)
_CADENCE = (
    *_works("chat", 6, (0.0, 0.0), 32, 160, 1),
    *_works("document", 3, (0.3, 0.7), 1024, 4, 99),
)
_MODES = (
    *(Work(f"chat-{n}", 0.1 * n, 64 + 16 * n, 40 + 8 * n, seed=1 + n) for n in range(8)),
    *_works("document", 2, (0.5, 0.5), 1024, 8, 99),
)
_APART = (
    *_works("chat", 12, (0.0, 0.15), 64, 160, 1, grow=16),
    *_works("document", 5, (0.4, 0.6), 1500, 32, 99),
)


def _shared(seed: int) -> tuple[Work, ...]:
    return (Work("prompt", 0.0, 1024, 4, seed=seed, num_shared=512),)


def _whole_or_chunked(work: tuple[Work, ...]) -> tuple[Arm, ...]:
    return (Arm("whole", _WHOLE, work), Arm("chunks of 256", _budget(256), work))


# Judges


def judge_tokens(runs: Sequence[ArmRun], of: Columns) -> LabFinding:
    num_whole = len(runs[0].outputs["one"])
    num_same = sum(num == num_whole for num in of["equal tokens of 32"])
    missed = "" if of["preempted"][-1] else "; nothing was preempted here"
    return LabFinding(
        num_same == len(runs),
        f"{num_same} of {len(runs)} arms gave the same {num_whole} greedy tokens{missed}",
        "sums in another order round differently, and a near tie between two tokens then falls "
        "the other way",
    )


def judge_freeze(runs: Sequence[ArmRun], of: Columns) -> LabFinding:
    longest = of["longest ITL, ms"]
    spikes = [most / median for most, median in zip(longest, of["ITL p50, ms"], strict=True)]
    return LabFinding(
        spikes[0] >= 10 and spikes[1] <= spikes[0] / 3,
        f"longest ITL {longest[0]:,.0f} ms whole ({spikes[0]:.0f} times the "
        f"median), {longest[1]:,.0f} ms in chunks ({spikes[1]:.0f} times)",
        runs[1].main_cause(),
    )


def judge_p99(runs: Sequence[ArmRun], of: Columns) -> LabFinding:
    itl, output = of["ITL p99, ms"], of["output tokens/s"]
    falls, change = itl[0] / (itl[1] or 1), output[1] / (output[0] or 1) - 1
    return LabFinding(
        falls >= 2 and change >= -0.05,
        f"ITL p99 {itl[0]:,.0f} to {itl[1]:,.0f} ms ({falls:.1f} times less), output "
        f"{output[0]:,.0f} to {output[1]:,.0f} tokens/s ({change:+.1%})",
        runs[1].main_cause(),
    )


def judge_knee(runs: Sequence[ArmRun], of: Columns) -> LabFinding:
    ttft, itl = of["TTFT of documents, ms"], of["ITL p99, ms"]
    steps = StepTable()
    for run in runs:
        run.add_to(steps)
    found = knee_of(newest_columns(steps))
    bound, beyond = "", []
    if found is not None:
        bound = f"; steps are bound by compute from about {found.rounded:,} tokens on"
        beyond = [run.name for run in runs if int(run.name) >= found.tokens]
    falls, rises = ttft[0] > ttft[-1], itl[-1] > itl[0]
    return LabFinding(
        falls and rises,
        f"from a budget of {runs[0].name} to {runs[-1].name} TTFT goes from {ttft[0]:,.0f} to "
        f"{ttft[-1]:,.0f} ms, p99 ITL from {itl[0]:,.0f} to {itl[-1]:,.0f} ms{bound}",
        "here small chunks cost the document no more time than large ones"
        if rises
        else f"larger chunks cost the streams no more: {runs[-1].main_cause()}",
        (beyond[0], "bound by compute from here") if beyond else None,
    )


def judge_cadence(runs: Sequence[ArmRun], of: Columns) -> LabFinding:
    tpot, ttft = of["TPOT p50, ms"], of["TTFT of documents, ms"]
    pairs = ((0, 1), (2, 3))
    return LabFinding(
        all(tpot[b] <= 1.05 * tpot[a] and ttft[b] < 0.95 * ttft[a] for a, b in pairs),
        "; ".join(
            f"{runs[a].name} and {runs[b].name}: TPOT {tpot[a]:,.1f} and {tpot[b]:,.1f} ms, TTFT "
            f"of documents {ttft[a]:,.0f} and {ttft[b]:,.0f}"
            for a, b in pairs
        ),
        "a step takes about as long as its tokens, so both compute as many prompt tokens a second",
    )


def judge_prefix(runs: Sequence[ArmRun], of: Columns) -> LabFinding:
    chunks, cached = of["chunks"], of["cached tokens"]
    [warm] = runs[1].requests("prompt")
    return LabFinding(
        list(chunks) == [4, 2],
        f"{chunks[0]} chunks cold, {chunks[1]} with {cached[1]} of {warm.num_prompt_tokens:,} "
        "tokens cached",
        "the beginning was not in the cache, or the budget was shared",
    )


def judge_modes(runs: Sequence[ArmRun], of: Columns) -> LabFinding:
    longest, rates = of["longest ITL, ms"], of["output tokens/s"]
    names = [run.name for run in runs]
    first, last = names.index("naive"), names.index("chunked")
    behind = [names[n] for n in range(1, len(runs)) if rates[n] < 0.95 * rates[n - 1]]
    return LabFinding(
        rates[last] > rates[first] and not behind,
        f"output {rates[first]:,.0f} tokens/s naive, {rates[last]:,.0f} chunked; longest ITL "
        f"{longest[first]:,.0f} and {longest[last]:,.0f} ms",
        f"fewer tokens a second than the mode before: {', '.join(behind) or 'none'}; "
        f"{runs[last].main_cause()}",
    )


def judge_apart(runs: Sequence[ArmRun], of: Columns) -> LabFinding:
    itl, ttft = of["ITL p99, ms"], of["TTFT of documents, ms"]
    large, small, apart = runs
    missed = []
    if not itl[2] <= 1.1 * itl[1]:
        missed.append(f"ITL: {apart.decoding.main_cause()}")
    if not ttft[2] <= 1.1 * ttft[0]:
        missed.append("TTFT: a prompt has half of the cores, also while nothing is decoded")
    return LabFinding(
        not missed,
        f"p99 ITL {itl[0]:,.0f} ms in {large.name}, {itl[1]:,.0f} in {small.name}, {itl[2]:,.0f} "
        f"apart; TTFT of documents {ttft[0]:,.0f}, {ttft[1]:,.0f} and {ttft[2]:,.0f} ms",
        "; ".join(missed),
    )


EXPERIMENTS = (
    Experiment(
        "tokens",
        "tokens are the same however a prompt is cut into chunks (fp32, greedy)",
        _SARATHI,
        "arm",
        (
            Arm("whole", _budget(8192), _ONE),
            Arm("prefix hit", {}, _ONE, is_warm=True),
            *(Arm(f"chunk {size}", _budget(size), _ONE) for size in (1, 7, 64)),
            Arm("budget changed", _budget(1), _ONE, changes=((0.3, _budget(64)),)),
            Arm("preempted", {**_budget(2048), "reserve": "none"}, _CROWDED),
        ),
        (
            _each("prefill steps", lambda run: run.num_prefill_steps("one")),
            _each("cached", lambda run: run.requests("one")[0].num_cached_tokens or 0),
            _each("preempted", lambda run: run.requests("one")[0].num_preemptions),
            ArmFigure("equal tokens of 32", _num_equal, is_drawn=True),
        ),
        judge_tokens,
    ),
    Experiment(
        "freeze",
        "a prompt of 4K tokens prefilled whole stalls every stream for tens of usual gaps; "
        "in chunks the gap stays small",
        _SARATHI,
        "arm",
        _whole_or_chunked(_FREEZE),
        (_ITL_P50, _ITL_P99._replace(is_drawn=False), _ITL_MAX, _ttft("the document", "document")),
        judge_freeze,
    ),
    Experiment(
        "p99",
        "with chunks the p99 ITL falls several times (50 to 15 ms) at nearly the same throughput",
        _SARATHI,
        "arm",
        _whole_or_chunked(_P99),
        (_ITL_P99, _OUTPUT),
        judge_p99,
    ),
    Experiment(
        "knee",
        "TTFT falls and p99 ITL rises with the budget, with a knee where compute becomes the bound",
        _SARATHI,
        "budget",
        tuple(Arm(f"{size}", _budget(size), _KNEE) for size in (32, 64, 128, 256, 512, 1024)),
        (
            _ttft("documents", "document"),
            _ITL_P99,
            _each(
                "tokens/s in steps with a chunk", ArmRun.tokens_per_s_beside_prefill, is_drawn=True
            ),
        ),
        judge_knee,
    ),
    Experiment(
        "cadence",
        "at the same time per output token, large chunks in every Nth step cost less TTFT than "
        "small chunks in every step",
        "vLLM (pull requests 44558 and 54627); SGLang (pull request 35017)",
        "budget",
        tuple(
            Arm(f"{size} every {n}", {**_budget(size), "prefill_schedule_interval": n}, _CADENCE)
            for n, size in ((1, 64), (4, 256), (1, 128), (4, 512))
        ),
        (
            _figure("TPOT p50, ms", "tpot_p50", ",.1f", is_drawn=True),
            _ttft("documents", "document"),
            _ITL_P50,
            _ITL_P99,
            _OUTPUT._replace(is_drawn=False),
        ),
        judge_cadence,
    ),
    Experiment(
        "prefix",
        "a prefix hit saves whole chunks: four become two",
        "vLLM's automatic prefix caching; SGLang's RadixAttention (Zheng et al., 2023)",
        "arm",
        (
            Arm("cold", _budget(256), _shared(21)),
            Arm("warm", _budget(256), _shared(22), is_warm=True),
        ),
        (
            _each("chunks", lambda run: run.num_prefill_steps("prompt"), is_drawn=True),
            _each("cached tokens", lambda run: run.requests("prompt")[0].num_cached_tokens or 0),
            _ttft("", "prompt"),
        ),
        judge_prefix,
    ),
    Experiment(
        "modes",
        "naive, static, continuous, separate, chunked: each beats the one before on mixed traffic",
        "Orca (Yu et al., OSDI 2022); Sarathi-Serve (Agrawal et al., OSDI 2024)",
        "mode",
        tuple(Arm(mode, {"batching": mode, **_budget(256)}, _MODES) for mode in get_args(Batching)),
        (
            _each("TTFT p50, ms", lambda run: run.ttft_ms(""), is_drawn=True),
            _figure("ITL p99, ms", "itl_p99"),
            _ITL_MAX,
            _OUTPUT,
            _figure("goodput, requests/s", "goodput_per_s", ".2f", is_drawn=True),
            _each("padded tokens", lambda run: run.side.sums().num_padded_tokens),
        ),
        judge_modes,
    ),
    Experiment(
        "apart",
        "prefill and decode in two engines have the TTFT of large chunks and the ITL of small ones "
        "at once",
        "DistServe (Zhong et al., OSDI 2024); Splitwise (Patel et al., ISCA 2024)",
        "arm",
        (
            Arm("chunks of 256", _budget(256), _APART),
            Arm("chunks of 64", _budget(64), _APART),
            Arm("apart", _budget(2048), _APART, is_apart=True),
        ),
        (
            _ITL_P50,
            _ITL_P99,
            _ITL_MAX,
            _ttft("chats", "chat"),
            _ttft("documents", "document"),
            _each("output tokens/s", lambda run: run.tokens_out_per_s, is_drawn=True),
        ),
        judge_apart,
    ),
)
