"""Claim: decodes in the same steps cost prefill little throughput."""

from collections.abc import Sequence

from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Arm, ArmFigure, Experiment, LabFinding, Work

_PROMPTS = tuple(Work(f"prompt-{n}", 0.5, 1024, 1, seed=50 + n) for n in range(6))
_CHATS = tuple(Work(f"chat-{n}", 0.0, 32, 120, seed=1 + n) for n in range(8))
_KNOBS = {"max_num_batched_tokens": 256}


def _judge(runs: Sequence[ArmRun]) -> LabFinding:
    alone = runs[0].tokens_per_s(lambda step: step.num_prefill_tokens > 0)
    mixed = runs[1].tokens_per_s(
        lambda step: step.num_prefill_tokens > 0 and step.num_decode_tokens > 0
    )
    change = mixed / alone - 1 if alone else float("nan")
    holds = change >= -0.05
    return LabFinding(
        "reproduced" if holds else "not here",
        f"{alone:,.0f} tokens/s in steps of prefill alone, {mixed:,.0f} in mixed steps "
        f"({change:+.1%})",
        "" if holds else runs[1].main_cause(),
        "arm",
        (ArmFigure("tokens a second of step time", is_drawn=True), ArmFigure("mixed steps", ".0%")),
        tuple(
            (run.name, rate, run.value("mixed_steps"))
            for run, rate in zip(runs, (alone, mixed), strict=True)
        ),
    )


EXPERIMENT = Experiment(
    4,
    "mixed",
    "the throughput of mixed steps is within 5 % of prefill alone",
    "Sarathi-Serve (Agrawal et al., OSDI 2024)",
    (
        Arm("prefill alone", _KNOBS, _PROMPTS),
        Arm("with 8 decodes", _KNOBS, (*_CHATS, *_PROMPTS)),
    ),
    _judge,
)
