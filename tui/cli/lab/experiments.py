"""The experiments of the lab: claims, the arms that try them, the figures of each arm."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, get_args

from stepscope.engine.protocol.settings.knobs import Batching
from stepscope.engine.protocol.wire import StepRecord
from stepscope.tui.cli.lab import judges
from stepscope.tui.cli.lab.arms import Arm, ArmChange, ArmRun, Work, seconds
from stepscope.tui.cli.lab.judges import LabFinding

Values = Sequence[float]
_SARATHI = "Sarathi-Serve (Agrawal et al., OSDI 2024)"
_WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}


class ArmFigure(NamedTuple):
    """A column in the table of the report; `of` returns a value for each row."""

    name: str
    of: Callable[[Sequence[ArmRun]], Sequence[float]]
    form: str = ",.0f"
    is_drawn: bool = False  # the picture of the experiment shows it too


class Experiment(NamedTuple):
    name: str
    claim: str
    source: str
    differ: str  # what the arms differ in, such as "budget": heading of the table's first column
    arms: tuple[Arm, ...]
    columns: tuple[ArmFigure, ...]
    # Gets the runs of all arms in their order, and the values of each column by its name.
    judge: Callable[[Sequence[ArmRun], Mapping[str, Sequence[float]]], LabFinding]
    rows: tuple[str, ...] = ()  # names of the table's rows, if they are not the arms

    def finding(self, runs: Sequence[ArmRun]) -> LabFinding:
        columns = {each.name: each.of(runs) for each in self.columns}
        found = self.judge(runs, columns)
        rows = zip(self.rows or [run.name for run in runs], *columns.values(), strict=False)
        return found._replace(why="" if found.holds else found.why, rows=tuple(rows))

    def table(self, finding: LabFinding) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the table of arms as text: (heading, rows)."""
        rows = [
            (name, *(format(v, c.form) for v, c in zip(values, self.columns, strict=True)))
            for name, *values in finding.rows
        ]
        return (self.differ, *(each.name for each in self.columns)), rows


def _works(
    name: str, num: int, at: tuple[float, float], prompt: int, output: int, seed: int, grow: int = 0
) -> tuple[Work, ...]:
    """Requests alike: the first one arrives `at[0]` seconds after the arm begins.

    `at`: seconds until the first, and from one to the next.
    """
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


def _ttft(of: str, prefix: str, *, is_drawn: bool = True) -> ArmFigure:
    name = f"TTFT of {of}, ms" if of else "TTFT, ms"
    return _each(name, lambda run: run.ttft_ms(prefix), is_drawn=is_drawn)


_ITL_P50 = _figure("ITL p50, ms", "itl_p50", ",.1f")
_ITL_P99 = _figure("ITL p99, ms", "itl_p99", ",.1f", is_drawn=True)
_ITL_MAX = _figure("longest ITL, ms", "itl_max", is_drawn=True)
_OUTPUT = _figure("output tokens/s", "out_tokens_per_s", is_drawn=True)


def _mixed_rates(runs: Sequence[ArmRun]) -> Values:
    def is_mixed(step: StepRecord) -> bool:
        return step.num_prefill_tokens > 0 and step.num_decode_tokens > 0

    alone, mixed = runs
    return [
        alone.tokens_per_s(lambda step: step.num_prefill_tokens > 0),
        mixed.tokens_per_s(is_mixed),
    ]


def _num_equal(runs: Sequence[ArmRun]) -> Values:
    """How many of the first arm's tokens each arm gave, until the first other one."""
    whole = runs[0].outputs["one"]
    pairs = [list(zip(run.outputs["one"], whole, strict=False)) for run in runs]
    return [next((n for n, (a, b) in enumerate(each) if a != b), len(each)) for each in pairs]


def _empty_shares(runs: Sequence[ArmRun]) -> Values:
    """Share of the cache that is empty: in blocks, and with rows for whole requests reserved."""
    info = runs[0].side.info
    assert info is not None
    assert info.block_size is not None
    assert info.max_model_len is not None
    rows = [row for step in runs[0].steps for row in step.batch or ()]
    used = sum(row.start + row.num_tokens for row in rows)
    paged = sum(row.num_blocks for row in rows) * info.block_size
    return [1 - used / paged, 1 - used / (len(rows) * info.max_model_len)]


# The requests of arms

_ONE = (Work("one", 0.0, 300, 32, seed=1),)
# Six long prompts fill the cache, so that the newest request is preempted when they grow.
_CROWDED = (*_works("crowd", 6, (0.0, 0.0), 1700, 300, 100), Work("one", 0.5, 300, 200, seed=1))
_FREEZE = (*_works("chat", 12, (0.0, 0.02), 96, 150, 1), Work("document", 0.6, 4096, 8, seed=99))
_P99 = (
    *_works("chat", 12, (0.0, 0.02), 96, 200, 1),
    *_works("document", 3, (0.4, 1.1), 4096, 8, 99),
)
_PROMPTS = _works("prompt", 6, (0.5, 0.0), 1024, 1, 50)
_KNEE = (
    *_works("chat", 6, (0.0, 0.0), 32, 100, 1),
    *_works("document", 2, (0.3, 0.0), 1024, 4, 99),
)
_CADENCE = (
    *_works("chat", 6, (0.0, 0.0), 32, 160, 1),
    *_works("document", 3, (0.3, 0.7), 1024, 4, 99),
)
_LONG = (Work("document", 0.0, 2048, 1, seed=7),)
_LENGTHS = (120, 900, 300, 1800, 450, 700, 220, 1300)
_MIXED_LENGTHS = tuple(
    Work(f"request-{n}", 0.05 * n, length, 60, seed=1 + n) for n, length in enumerate(_LENGTHS)
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


def _budgets(work: tuple[Work, ...], *budgets: int) -> tuple[Arm, ...]:
    return tuple(Arm(f"{each}", _budget(each), work) for each in budgets)


def _whole_or_chunked(work: tuple[Work, ...]) -> tuple[Arm, ...]:
    return (Arm("whole", _WHOLE, work), Arm("chunks of 256", _budget(256), work))


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
            Arm("budget changed", _budget(1), _ONE, changes=(ArmChange(0.3, _budget(64)),)),
            Arm("preempted", {**_budget(2048), "reserve": "none"}, _CROWDED),
        ),
        (
            _each("prefill steps", lambda run: run.num_prefill_steps("one")),
            _each("cached", lambda run: run.requests("one")[0].num_cached_tokens or 0),
            _each("preempted", lambda run: run.requests("one")[0].num_preemptions),
            ArmFigure("equal tokens of 32", _num_equal, is_drawn=True),
        ),
        judges.tokens,
    ),
    Experiment(
        "freeze",
        "a prompt of 4K tokens prefilled whole stalls every stream for tens of usual gaps; "
        "in chunks the gap stays small",
        _SARATHI,
        "arm",
        _whole_or_chunked(_FREEZE),
        (_ITL_P50, _ITL_P99._replace(is_drawn=False), _ITL_MAX, _ttft("the document", "document")),
        judges.freeze,
    ),
    Experiment(
        "p99",
        "with chunks the p99 ITL falls several times (50 to 15 ms) at nearly the same throughput",
        _SARATHI,
        "arm",
        _whole_or_chunked(_P99),
        (_ITL_P99, _OUTPUT),
        judges.p99,
    ),
    Experiment(
        "mixed",
        "the throughput of mixed steps is within 5 % of prefill alone",
        _SARATHI,
        "arm",
        (
            Arm("prefill alone", _budget(256), _PROMPTS),
            Arm(
                "with 8 decodes",
                _budget(256),
                (*_works("chat", 8, (0.0, 0.0), 32, 120, 1), *_PROMPTS),
            ),
        ),
        (
            ArmFigure("tokens a second of step time", _mixed_rates, is_drawn=True),
            _figure("mixed steps", "mixed_steps", ".0%"),
        ),
        judges.mixed,
    ),
    Experiment(
        "knee",
        "TTFT falls and p99 ITL rises with the budget, with a knee where compute becomes the bound",
        _SARATHI,
        "budget",
        _budgets(_KNEE, 32, 64, 128, 256, 512, 1024),
        (
            _ttft("documents", "document"),
            _ITL_P99,
            _each(
                "tokens/s in steps with a chunk",
                lambda run: run.tokens_per_s(lambda step: step.num_prefill_tokens > 0),
                is_drawn=True,
            ),
        ),
        judges.knee,
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
        judges.cadence,
    ),
    Experiment(
        "chunk-cost",
        "chunks add no FLOPs, and reading K/V again grows with the number of chunks",
        _SARATHI,
        "chunk",
        (*_budgets(_LONG, 64, 128, 256, 512, 1024), Arm("whole", _budget(8192), _LONG)),
        (
            _each("steps", lambda run: sum(1 for _ in run.rows_of("document"))),
            _each(
                "seconds of prefill",
                lambda run: sum(seconds(step) for step, _ in run.rows_of("document")),
                ".2f",
                is_drawn=True,
            ),
            _each(
                "tokens of K/V read again",  # those of earlier chunks
                lambda run: sum(row.start for _, row in run.rows_of("document")),
                is_drawn=True,
            ),
        ),
        judges.chunk_cost,
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
        judges.prefix,
    ),
    Experiment(
        "paged",
        "paged blocks waste under 4 % where reserved rows waste 60 to 80 %",
        "PagedAttention (Kwon et al., SOSP 2023)",
        "way",
        (Arm("mixed lengths", _budget(512), _MIXED_LENGTHS),),
        (ArmFigure("share of reserved tokens that is empty", _empty_shares, ".1%", is_drawn=True),),
        judges.paged,
        rows=("paged blocks", "reserved rows"),
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
        judges.modes,
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
        judges.apart,
    ),
)
