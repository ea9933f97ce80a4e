"""What experiments found, for a terminal, as Markdown, and as one picture a claim."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepscope.recordings.export.output import missing
from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Experiment, LabFinding
from stepscope.tui.cli.shared.text_table import text_table


def lines(experiment: Experiment, finding: LabFinding, runs: Sequence[ArmRun]) -> Iterator[str]:
    """For a terminal."""
    yield f"{experiment.name}: {experiment.claim}"
    yield f"  source    {experiment.source}"
    yield f"  measured  {finding.measured}"
    for run in runs:
        yield f"  by        {run.path} ({run.name}: {run.side.totals.num_steps:,} steps)"
    yield f"  verdict   {finding.verdict}{f': {finding.why}' if finding.why else ''}"
    if finding.rows:
        sides = "<" + ">" * (len(finding.columns) - 1)
        yield from (f"  {line}" for line in text_table(finding.columns, finding.rows, sides))


def markdown(found: Sequence[tuple[Experiment, LabFinding]], machine: str) -> str:
    """A table of claims, and below it what was measured of each."""
    text = [f"{machine}\n", "| claim | source | measured | verdict |", "|---|---|---|---|"]
    for experiment, finding in found:
        verdict = finding.verdict + (f": {finding.why}" if finding.why else "")
        text.append(
            f"| `{experiment.name}`: {experiment.claim} | {experiment.source} "
            f"| {finding.measured} | {verdict} |"
        )
    for experiment, finding in found:
        if finding.rows:
            text += [f"\n### {experiment.name}\n", f"| {' | '.join(finding.columns)} |"]
            text.append("|---" * len(finding.columns) + "|")
            text += [f"| {' | '.join(row)} |" for row in finding.rows]
    return "\n".join(text) + "\n"


def draw(experiment: Experiment, finding: LabFinding, path: Path) -> None:
    """A bar an arm, as SVG. Raises MissingPackage without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing("matplotlib", "the pictures of the lab") from error
    figure = Figure(figsize=(6.4, 0.9 + 0.34 * len(finding.chart)), layout="constrained")
    panel = figure.add_subplot()
    names = [name for name, _ in finding.chart]
    bars = panel.barh(names, [value for _, value in finding.chart], color="#4c8fbd")
    panel.bar_label(bars, fmt="%.3g", padding=3)
    panel.invert_yaxis()
    panel.margins(x=0.15)
    panel.set_xlabel(finding.unit)
    panel.set_title(f"{experiment.name}: {finding.verdict}", loc="left", fontsize=10)
    if finding.marked is not None:
        at, text = names.index(finding.marked[0]), finding.marked[1]
        panel.axhline(at, color="#c0504d", linewidth=1, linestyle="--")
        panel.annotate(text, (0.98, at), xycoords=("axes fraction", "data"), ha="right",
                       va="bottom", color="#c0504d", fontsize=8)  # fmt: skip
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    path.write_bytes(stream.getvalue())
