"""Claim: prefill and decode in two engines (half the cores each) do not wait for each other."""

from collections.abc import Sequence

from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Arm, ArmFigure, Experiment, LabFinding, Work

_CHATS = tuple(Work(f"chat-{n}", 0.15 * n, 64 + 16 * n, 160, seed=1 + n) for n in range(12))
_DOCUMENTS = tuple(Work(f"document-{n}", 0.4 + 0.6 * n, 1500, 32, seed=99 + n) for n in range(5))
_WORK = (*_CHATS, *_DOCUMENTS)


def _is_no_worse(value: float, than: float) -> bool:
    return value <= 1.1 * than


def _judge(runs: Sequence[ArmRun]) -> LabFinding:
    large, small, apart = runs
    itl = [run.decoding.value("itl_p99") for run in runs]
    ttft = [run.ttft_ms("document") for run in runs]
    has_itl, has_ttft = _is_no_worse(itl[2], itl[1]), _is_no_worse(ttft[2], ttft[0])
    missed = []
    if not has_itl:
        missed.append(f"ITL: {apart.decoding.main_cause()}")
    if not has_ttft:
        missed.append("TTFT: a prompt has half of the cores, also while nothing is decoded")
    return LabFinding(
        "not here" if missed else "reproduced",
        f"p99 ITL {itl[0]:,.0f} ms in {large.name}, {itl[1]:,.0f} in {small.name}, {itl[2]:,.0f} "
        f"apart; TTFT of documents {ttft[0]:,.0f}, {ttft[1]:,.0f} and {ttft[2]:,.0f} ms",
        "; ".join(missed),
        "arm",
        (
            ArmFigure("ITL p50, ms", ",.1f"),
            ArmFigure("ITL p99, ms", ",.1f", is_drawn=True),
            ArmFigure("longest ITL, ms", is_drawn=True),
            ArmFigure("TTFT of chats, ms", is_drawn=True),
            ArmFigure("TTFT of documents, ms", is_drawn=True),
            ArmFigure("output tokens/s", is_drawn=True),
        ),
        tuple(
            (
                run.name,
                run.decoding.value("itl_p50"),
                run.decoding.value("itl_p99"),
                run.decoding.value("itl_max"),
                run.ttft_ms("chat"),
                run.ttft_ms("document"),
                run.tokens_out_per_s,
            )
            for run in runs
        ),
    )


EXPERIMENT = Experiment(
    12,
    "apart",
    "prefill and decode in two engines have the TTFT of large chunks and the ITL of small ones at "
    "once",
    "DistServe (Zhong et al., OSDI 2024); Splitwise (Patel et al., ISCA 2024)",
    (
        Arm("chunks of 256", {"max_num_batched_tokens": 256}, _WORK),
        Arm("chunks of 64", {"max_num_batched_tokens": 64}, _WORK),
        Arm("apart", {"max_num_batched_tokens": 2048}, _WORK, is_apart=True),
    ),
    _judge,
)
