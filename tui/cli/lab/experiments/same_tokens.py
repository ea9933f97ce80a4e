"""Claim: the output tokens are the same however a prompt is cut into chunks."""

from collections.abc import Sequence

from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Arm, ArmChange, ArmFigure, Experiment, LabFinding, Work

_NAME = "one"
_WORK = (Work(_NAME, 0.0, 300, 32, seed=1),)
# Six long prompts fill the cache, so that the newest request is preempted when they grow.
_CROWD = tuple(Work(f"crowd-{n}", 0.0, 1700, 300, seed=100 + n) for n in range(6))
_LAST = (Work(_NAME, 0.5, 300, 200, seed=1),)

_ARMS = (
    Arm("whole", {"max_num_batched_tokens": 8192}, _WORK),
    Arm("prefix hit", {}, _WORK, is_warm=True),
    Arm("chunk 1", {"max_num_batched_tokens": 1}, _WORK),
    Arm("chunk 7", {"max_num_batched_tokens": 7}, _WORK),
    Arm("chunk 64", {"max_num_batched_tokens": 64}, _WORK),
    Arm(
        "budget changed",
        {"max_num_batched_tokens": 1},
        _WORK,
        changes=(ArmChange(0.3, {"max_num_batched_tokens": 64}),),
    ),
    Arm("preempted", {"max_num_batched_tokens": 2048, "reserve": "none"}, (*_CROWD, *_LAST)),
)


def _judge(runs: Sequence[ArmRun]) -> LabFinding:
    whole = list(runs[0].outputs[_NAME])
    rows = []
    num_same = 0
    for run in runs:
        mine = list(run.outputs[_NAME])[: len(whole)]
        num = next(
            (n for n, (a, b) in enumerate(zip(mine, whole, strict=False)) if a != b), len(mine)
        )
        is_same = mine == whole
        num_same += is_same
        [request] = run.requests(_NAME)
        rows.append(
            (
                run.name,
                run.num_prefill_steps(_NAME),
                request.num_cached_tokens or 0,
                request.num_preemptions,
                num,
            )
        )
    missed = "" if runs[-1].requests(_NAME)[0].num_preemptions else "; nothing was preempted here"
    return LabFinding(
        "reproduced" if num_same == len(runs) else "not here",
        f"{num_same} of {len(runs)} arms gave the same {len(whole)} greedy tokens{missed}",
        ""
        if num_same == len(runs)
        else "sums in another order round differently, and a near "
        "tie between two tokens then falls the other way",
        "arm",
        (
            ArmFigure("prefill steps"),
            ArmFigure("cached"),
            ArmFigure("preempted"),
            ArmFigure(f"equal tokens of {len(whole)}", is_drawn=True),
        ),
        tuple(rows),
    )


EXPERIMENT = Experiment(
    1,
    "tokens",
    "tokens are the same however a prompt is cut into chunks (fp32, greedy)",
    "Sarathi-Serve (Agrawal et al., OSDI 2024)",
    _ARMS,
    _judge,
)
