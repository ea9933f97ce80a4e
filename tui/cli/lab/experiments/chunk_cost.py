"""Claim: computing a prompt in chunks takes no more FLOPs, but reads the KV cache again."""

from collections.abc import Sequence

from stepscope.tui.cli.lab.arm_run import ArmRun, seconds
from stepscope.tui.cli.lab.experiment import Arm, ArmFigure, Experiment, LabFinding, Work

_WORK = (Work("document", 0.0, 2048, 1, seed=7),)
_CHUNKS = (64, 128, 256, 512, 1024)


def _judge(runs: Sequence[ArmRun]) -> LabFinding:
    rows, times, computed, reread = [], [], set(), []
    for run in runs:
        mine = list(run.rows_of("document"))
        times.append(sum(seconds(step) for step, _ in mine))
        computed.add(sum(row.num_tokens for _, row in mine))
        reread.append(sum(row.start for _, row in mine))  # K/V of earlier chunks, in tokens
        rows.append((run.name, len(mine), times[-1], reread[-1]))
    holds = len(computed) == 1 and reread == sorted(reread, reverse=True) and reread[-1] == 0
    return LabFinding(
        "reproduced" if holds else "not here",
        f"{', '.join(f'{each:,}' for each in sorted(computed))} tokens are computed in every arm "
        f"(the same products); {reread[0]:,} cached tokens are read again a layer at chunks of "
        f"{_CHUNKS[0]}, none whole; {times[0]:.2f} s against {times[-1]:.2f} s. The time of "
        "writing K/V is in no record: that part is not tried",
        "" if holds else "the arms did not compute the same tokens",
        "chunk",
        (
            ArmFigure("steps"),
            ArmFigure("seconds of prefill", ".2f", is_drawn=True),
            ArmFigure("tokens of K/V read again", is_drawn=True),
        ),
        tuple(rows),
    )


EXPERIMENT = Experiment(
    6,
    "chunk-cost",
    "chunks add no FLOPs, and reading K/V again grows with the number of chunks",
    "Sarathi-Serve (Agrawal et al., OSDI 2024)",
    (
        *(Arm(f"{size}", {"max_num_batched_tokens": size}, _WORK) for size in _CHUNKS),
        Arm("whole", {"max_num_batched_tokens": 8192}, _WORK),
    ),
    _judge,
)
