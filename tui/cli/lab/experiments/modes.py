"""Claim: on mixed traffic, each generation of batching beats the generation before it."""

from collections.abc import Sequence
from typing import get_args

from stepscope.engine.protocol.settings.knobs import Batching
from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Arm, ArmFigure, Experiment, LabFinding, Work

_CHATS = tuple(Work(f"chat-{n}", 0.1 * n, 64 + 16 * n, 40 + 8 * n, seed=1 + n) for n in range(8))
_DOCUMENTS = tuple(Work(f"document-{n}", 0.5 + 0.5 * n, 1024, 8, seed=99 + n) for n in range(2))


def _judge(runs: Sequence[ArmRun]) -> LabFinding:
    rates = [run.value("out_tokens_per_s") for run in runs]
    waits = [run.value("itl_max") for run in runs]
    names = [run.name for run in runs]
    first, last = names.index("naive"), names.index("chunked")
    behind = [
        after
        for (before, a), (after, b) in zip(
            zip(names[:-1], rates[:-1], strict=True), zip(names[1:], rates[1:], strict=True),
            strict=True,
        )
        if b < 0.95 * a
    ]  # fmt: skip
    holds = rates[last] > rates[first] and not behind
    return LabFinding(
        "reproduced" if holds else "not here",
        f"output {rates[first]:,.0f} tokens/s naive, {rates[last]:,.0f} chunked; longest ITL "
        f"{waits[first]:,.0f} and {waits[last]:,.0f} ms",
        ""
        if holds
        else f"fewer tokens a second than the mode before: {', '.join(behind) or 'none'}; "
        f"{runs[last].main_cause()}",
        "mode",
        (
            ArmFigure("TTFT p50, ms", is_drawn=True),
            ArmFigure("ITL p99, ms"),
            ArmFigure("longest ITL, ms", is_drawn=True),
            ArmFigure("output tokens/s", is_drawn=True),
            ArmFigure("goodput, requests/s", ".2f", is_drawn=True),
            ArmFigure("padded tokens"),
        ),
        tuple(
            (
                run.name,
                run.ttft_ms(""),
                run.value("itl_p99"),
                wait,
                rate,
                run.value("goodput_per_s"),
                run.side.sums().num_padded_tokens,
            )
            for run, rate, wait in zip(runs, rates, waits, strict=True)
        ),
    )


EXPERIMENT = Experiment(
    10,
    "modes",
    "naive, static, continuous, separate, chunked: each beats the one before on mixed traffic",
    "Orca (Yu et al., OSDI 2022); Sarathi-Serve (Agrawal et al., OSDI 2024)",
    tuple(
        Arm(mode, {"batching": mode, "max_num_batched_tokens": 256}, (*_CHATS, *_DOCUMENTS))
        for mode in get_args(Batching)
    ),
    _judge,
)
