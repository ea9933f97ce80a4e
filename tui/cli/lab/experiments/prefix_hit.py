"""Claim: a prefix hit saves whole chunks of prefill."""

from collections.abc import Sequence

from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Arm, ArmFigure, Experiment, LabFinding, Work

_KNOBS = {"max_num_batched_tokens": 256}


def _judge(runs: Sequence[ArmRun]) -> LabFinding:
    num_steps = [run.num_prefill_steps("prompt") for run in runs]
    [cold], [warm] = (run.requests("prompt") for run in runs)
    holds = num_steps == [4, 2]
    return LabFinding(
        "reproduced" if holds else "not here",
        f"{num_steps[0]} chunks cold, {num_steps[1]} with {warm.num_cached_tokens or 0} of "
        f"{warm.num_prompt_tokens:,} tokens cached",
        "" if holds else "the beginning was not in the cache, or the budget was shared",
        "arm",
        (
            ArmFigure("chunks", is_drawn=True),
            ArmFigure("cached tokens"),
            ArmFigure("TTFT, ms", is_drawn=True),
        ),
        tuple(
            (run.name, num, each.num_cached_tokens or 0, (each.ttft_ns or 0) / 1e6)
            for run, num, each in zip(runs, num_steps, (cold, warm), strict=True)
        ),
    )


EXPERIMENT = Experiment(
    7,
    "prefix",
    "a prefix hit saves whole chunks: four become two",
    "vLLM's automatic prefix caching; SGLang's RadixAttention (Zheng et al., 2023)",
    (
        Arm("cold", _KNOBS, (Work("prompt", 0.0, 1024, 4, seed=21, num_shared=512),)),
        Arm("warm", _KNOBS, (Work("prompt", 0.0, 1024, 4, seed=22, num_shared=512),), is_warm=True),
    ),
    _judge,
)
