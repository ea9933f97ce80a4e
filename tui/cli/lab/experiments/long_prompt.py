"""Claim: a prompt that is too long for one step is computed in chunks."""

from collections.abc import Sequence

from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Experiment, LabFinding


def _judge(runs: Sequence[ArmRun]) -> LabFinding:
    return LabFinding(
        "cannot be tried here",
        "nothing",
        "a recording has no figure of a step's peak memory, and the demo model takes 8K tokens; "
        "it needs a GPU and a model with a context of 64K",
    )


EXPERIMENT = Experiment(
    9,
    "long-prompt",
    "a prompt of 32K or 64K tokens passes in chunks where whole it does not fit",
    "Sarathi-Serve (Agrawal et al., OSDI 2024)",
    (),
    _judge,
)
