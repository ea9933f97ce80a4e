"""How waits and throughput depend on order within a step, scheduling policy and number of seats."""

from collections.abc import Sequence

from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Arm, ArmFigure, Experiment, LabFinding, Work

_CHATS = tuple(Work(f"chat-{n}", 0.02 * n, 96, 60, seed=1 + n) for n in range(10))
_DOCUMENTS = tuple(Work(f"document-{n}", 0.2, 1024, 8, seed=99 + n) for n in range(2))
_URGENT = tuple(Work(f"urgent-{n}", 0.6, 32, 8, seed=70 + n, priority=-1) for n in range(2))
_WORK = (*_CHATS, *_DOCUMENTS, *_URGENT)
_KNOBS = {"max_num_batched_tokens": 128, "max_num_seqs": 16}


def _judge(runs: Sequence[ArmRun]) -> LabFinding:
    fcfs, priority = runs[2], runs[3]
    urgent = fcfs.ttft_ms("urgent"), priority.ttft_ms("urgent")
    seats = runs[0].value("out_tokens_per_s"), fcfs.value("out_tokens_per_s")
    holds = urgent[1] < urgent[0] and seats[1] < seats[0]
    return LabFinding(
        "reproduced" if holds else "not here",
        f"with 4 seats urgent requests wait {urgent[0]:,.0f} ms by arrival and {urgent[1]:,.0f} ms "
        f"by priority; 4 seats in place of 16 take output from {seats[0]:,.0f} to "
        f"{seats[1]:,.0f} tokens/s",
        "" if holds else f"{priority.main_cause()}",
        "arm",
        (
            ArmFigure("ITL p99, ms"),
            ArmFigure("TTFT of urgent requests, ms", is_drawn=True),
            ArmFigure("TTFT of all, ms"),
            ArmFigure("output tokens/s", is_drawn=True),
        ),
        tuple(
            (
                run.name,
                run.value("itl_p99"),
                run.ttft_ms("urgent"),
                run.ttft_ms(""),
                run.value("out_tokens_per_s"),
            )
            for run in runs
        ),
    )


EXPERIMENT = Experiment(
    11,
    "order",
    "priority brings urgent requests forward, and fewer seats cost throughput",
    "vLLM's scheduler (policy, max_num_seqs); Sarathi-Serve (Agrawal et al., OSDI 2024)",
    (
        Arm("decodes first", _KNOBS, _WORK),
        Arm("by arrival", _KNOBS | {"order": "arrival"}, _WORK),
        Arm("4 seats, fcfs", _KNOBS | {"max_num_seqs": 4}, _WORK),
        Arm("4 seats, priority", _KNOBS | {"max_num_seqs": 4, "policy": "priority"}, _WORK),
    ),
    _judge,
)
