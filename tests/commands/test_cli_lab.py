"""What `stepscope lab` lists and refuses, and how it judges recordings."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.recordings.samples import shipped
from stepscope.tui.cli.lab import judges
from stepscope.tui.cli.lab.arms import ArmRun
from stepscope.tui.cli.lab.experiments import EXPERIMENTS
from stepscope.tui.cli.lab.lab import draw, lines, markdown


def test_lab_lists_every_experiment_with_its_source(stepscope: Callable[..., Any]) -> None:
    done = stepscope("lab")
    assert done.exit_code == 0, done.stderr
    for each in EXPERIMENTS:
        assert each.name in done.stdout
        assert each.claim in done.stdout
        assert each.source in done.stdout
    names = [each.name for each in EXPERIMENTS]
    assert len(set(names)) == len(names)


def test_an_unknown_experiment_gives_a_one_line_error_with_the_known_names(
    stepscope: Callable[..., Any],
) -> None:
    for arguments in (("alchemy",), ("freeze", "--all")):
        done = stepscope("lab", *arguments)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        assert "there are: tokens, freeze" in done.stderr


def test_the_shipped_samples_reproduce_the_freeze_experiment_of_the_lab(tmp_path: Path) -> None:
    paths = shipped()
    runs = [ArmRun(name, paths[name], {}) for name in ("freeze", "chunked")]
    experiment = next(each for each in EXPERIMENTS if each.name == "freeze")
    finding = experiment.finding(runs)
    assert finding.verdict == "reproduced"
    assert finding.measured.startswith("longest ITL 837 ms whole")
    printed = "\n".join(lines(experiment, finding, runs))
    assert "verdict   reproduced" in printed
    assert "freeze.mcap (freeze: 454 steps)" in printed
    assert "| reproduced |" in markdown([(experiment, finding)], "this machine")
    draw(experiment, finding, tmp_path / "freeze.svg")
    assert "<svg" in (tmp_path / "freeze.svg").read_text()


def test_the_knee_of_the_lab_is_that_of_the_steps_of_all_arms() -> None:
    paths = shipped()
    values = {
        "TTFT of documents, ms": [900.0, 800.0],
        "ITL p99, ms": [90.0, 770.0],
    }
    runs = [ArmRun("16", paths["chunked"], {}), ArmRun("256", paths["freeze"], {})]
    finding = judges.knee(runs, values)
    assert finding.holds
    told = re.search(r"; steps are bound by compute from about (\d+) tokens on$", finding.measured)
    assert told is not None
    assert 16 < int(told[1]) < 35
    assert finding.marked == ("256", "bound by compute from here")
    unknown = judges.knee([ArmRun("16", paths["vllm"], {})] * 2, values)
    assert unknown.measured.endswith("to 770 ms")
    assert unknown.marked is None
