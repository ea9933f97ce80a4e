"""Claim: with chunked prefill, the p99 ITL falls at nearly the same throughput."""

from collections.abc import Sequence

from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Arm, ArmFigure, Experiment, LabFinding, Work

_CHATS = tuple(Work(f"chat-{n}", 0.02 * n, 96, 200, seed=1 + n) for n in range(12))
_DOCUMENTS = tuple(Work(f"document-{n}", 0.4 + 1.1 * n, 4096, 8, seed=99 + n) for n in range(3))
_WORK = (*_CHATS, *_DOCUMENTS)


def _judge(runs: Sequence[ArmRun]) -> LabFinding:
    found = runs[0].against(runs[1])
    itl, out = found.figure("itl_p99"), found.figure("out_tokens_per_s")
    falls = (itl.a or 0) / (itl.b or 1)
    change = (out.b or 0) / (out.a or 1) - 1
    holds = falls >= 2 and change >= -0.05
    return LabFinding(
        "reproduced" if holds else "not here",
        f"ITL p99 {itl.a:,.0f} to {itl.b:,.0f} ms ({falls:.1f} times less), output "
        f"{out.a:,.0f} to {out.b:,.0f} tokens/s ({change:+.1%})",
        "" if holds else runs[1].main_cause(),
        "arm",
        (
            ArmFigure("ITL p99, ms", ",.1f", is_drawn=True),
            ArmFigure("output tokens/s", is_drawn=True),
        ),
        tuple((run.name, run.value("itl_p99"), run.value("out_tokens_per_s")) for run in runs),
    )


EXPERIMENT = Experiment(
    3,
    "p99",
    "with chunks the p99 ITL falls several times (50 to 15 ms) at nearly the same throughput",
    "Sarathi-Serve (Agrawal et al., OSDI 2024)",
    (
        Arm(
            "whole",
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192},
            _WORK,
        ),
        Arm("chunks of 256", {"max_num_batched_tokens": 256}, _WORK),
    ),
    _judge,
)
