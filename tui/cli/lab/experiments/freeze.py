"""Claim: a long prompt that is prefilled in one step stalls the streams of all other requests."""

from collections.abc import Sequence

from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Arm, ArmFigure, Experiment, LabFinding, Work

_CHATS = tuple(Work(f"chat-{n}", 0.02 * n, 96, 150, seed=1 + n) for n in range(12))
_DOCUMENT = (Work("document", 0.6, 4096, 8, seed=99),)
_WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}


def _judge(runs: Sequence[ArmRun]) -> LabFinding:
    whole, chunked = runs
    spikes = [run.value("itl_max") / run.value("itl_p50") for run in runs]
    holds = spikes[0] >= 10 and spikes[1] <= spikes[0] / 3
    return LabFinding(
        "reproduced" if holds else "not here",
        f"longest ITL {whole.value('itl_max'):,.0f} ms whole ({spikes[0]:.0f} times the "
        f"median), {chunked.value('itl_max'):,.0f} ms in chunks ({spikes[1]:.0f} times)",
        "" if holds else chunked.main_cause(),
        "arm",
        (
            ArmFigure("ITL p50, ms", ",.1f"),
            ArmFigure("ITL p99, ms", ",.1f"),
            ArmFigure("longest ITL, ms", is_drawn=True),
            ArmFigure("TTFT of the document, ms", is_drawn=True),
        ),
        tuple(
            (
                run.name,
                run.value("itl_p50"),
                run.value("itl_p99"),
                run.value("itl_max"),
                (run.requests("document")[0].ttft_ns or 0) / 1e6,
            )
            for run in runs
        ),
    )


EXPERIMENT = Experiment(
    2,
    "freeze",
    "a prompt of 4K tokens prefilled whole stalls every stream for tens of usual gaps; "
    "in chunks the gap stays small",
    "Sarathi-Serve (Agrawal et al., OSDI 2024)",
    (
        Arm("whole", _WHOLE, (*_CHATS, *_DOCUMENT)),
        Arm("chunks of 256", {"max_num_batched_tokens": 256}, (*_CHATS, *_DOCUMENT)),
    ),
    _judge,
)
