"""Claim: paged KV blocks waste little of the cache; reserving it for whole requests wastes most."""

from collections.abc import Sequence

from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Arm, ArmFigure, Experiment, LabFinding, Work

_LENGTHS = (120, 900, 300, 1800, 450, 700, 220, 1300)
_WORK = tuple(
    Work(f"request-{n}", 0.05 * n, length, 60, seed=1 + n) for n, length in enumerate(_LENGTHS)
)


def _judge(runs: Sequence[ArmRun]) -> LabFinding:
    [run] = runs
    info = run.side.info
    if info is None or info.block_size is None or info.max_model_len is None:
        return LabFinding("cannot be tried here", "", "the engine does not publish its block size")
    used = paged = reserved = num_rows = 0
    for step in run.steps:
        for row in step.batch or ():
            used += row.start + row.num_tokens
            paged += row.num_blocks * info.block_size
            reserved += info.max_model_len
            num_rows += 1
    waste_paged, waste_reserved = 1 - used / paged, 1 - used / reserved
    holds = waste_paged < 0.04 and waste_reserved >= 0.6
    return LabFinding(
        "reproduced" if holds else "not here",
        f"{waste_paged:.1%} of the tokens in blocks of {info.block_size} are empty, "
        f"{waste_reserved:.0%} where each request reserves {info.max_model_len:,} "
        "(counted of the same steps)",
        "" if holds else f"a request has {used / max(1, num_rows):,.0f} tokens on average",
        "way",
        (ArmFigure("share of reserved tokens that is empty", ".1%", is_drawn=True),),
        (("paged blocks", waste_paged), ("reserved rows", waste_reserved)),
    )


EXPERIMENT = Experiment(
    8,
    "paged",
    "paged blocks waste under 4 % where reserved rows waste 60 to 80 %",
    "PagedAttention (Kwon et al., SOSP 2023)",
    (Arm("mixed lengths", {"max_num_batched_tokens": 512}, _WORK),),
    _judge,
)
