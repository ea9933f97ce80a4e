"""Claim: the token budget trades TTFT against ITL, and the curve has a knee."""

from collections.abc import Sequence

from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Arm, ArmFigure, Experiment, LabFinding, Work

_BUDGETS = (32, 64, 128, 256, 512, 1024)
_CHATS = tuple(Work(f"chat-{n}", 0.0, 32, 100, seed=1 + n) for n in range(6))
_DOCUMENTS = tuple(Work(f"document-{n}", 0.3, 1024, 4, seed=99 + n) for n in range(2))
_CLOSE = 0.8  # share of the best rate that marks the knee: larger steps gain little beyond it


def _judge(runs: Sequence[ArmRun]) -> LabFinding:
    ttft = [run.ttft_ms("document") for run in runs]
    itl = [run.value("itl_p99") for run in runs]
    rates = [run.tokens_per_s(lambda step: step.num_prefill_tokens > 0) for run in runs]
    knee = next(n for n, rate in enumerate(rates) if rate >= _CLOSE * max(rates))
    falls, rises = ttft[0] > ttft[-1], itl[-1] > itl[0]
    holds = falls and rises
    return LabFinding(
        "reproduced" if holds else "not here",
        f"from a budget of {_BUDGETS[0]} to {_BUDGETS[-1]} TTFT goes from {ttft[0]:,.0f} to "
        f"{ttft[-1]:,.0f} ms, p99 ITL from {itl[0]:,.0f} to {itl[-1]:,.0f} ms; steps are bound "
        f"by compute from about {_BUDGETS[knee]} tokens on",
        ""
        if holds
        else "here small chunks cost the document no more time than large ones"
        if rises
        else f"larger chunks cost the streams no more: {runs[-1].main_cause()}",
        "budget",
        (
            ArmFigure("TTFT of documents, ms", is_drawn=True),
            ArmFigure("ITL p99, ms", ",.1f", is_drawn=True),
            ArmFigure("tokens/s in steps with a chunk", is_drawn=True),
        ),
        tuple(zip((run.name for run in runs), ttft, itl, rates, strict=True)),
        (runs[knee].name, "bound by compute from here"),
    )


EXPERIMENT = Experiment(
    5,
    "knee",
    "TTFT falls and p99 ITL rises with the budget, with a knee where compute becomes the bound",
    "Sarathi-Serve (Agrawal et al., OSDI 2024)",
    tuple(
        Arm(f"{budget}", {"max_num_batched_tokens": budget}, (*_CHATS, *_DOCUMENTS))
        for budget in _BUDGETS
    ),
    _judge,
)
