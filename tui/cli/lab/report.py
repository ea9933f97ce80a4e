"""Reports what experiments found: on a terminal, as Markdown, and as a picture for each claim."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from stepscope.recordings.export.output import missing
from stepscope.tui.cli.lab.arm_run import ArmRun
from stepscope.tui.cli.lab.experiment import Experiment, LabFinding
from stepscope.tui.cli.shared.output import text_table


def lines(experiment: Experiment, finding: LabFinding, runs: Sequence[ArmRun]) -> Iterator[str]:
    """Yield the report of one experiment as lines for a terminal."""
    yield f"{experiment.name}: {experiment.claim}"
    yield f"  source    {experiment.source}"
    yield f"  measured  {finding.measured}"
    for run in runs:
        yield f"  by        {run.path.name} ({run.name}: {run.side.points.num_steps:,} steps)"
    yield f"  verdict   {finding.verdict}{f': {finding.why}' if finding.why else ''}"
    if finding.rows:
        sides = "<" + ">" * len(experiment.columns)
        yield from (f"  {line}" for line in text_table(*experiment.table(finding), sides))


def markdown(found: Sequence[tuple[Experiment, LabFinding]], machine: str) -> str:
    """Return a Markdown report: a table of all claims, then the measurements of each experiment."""
    text = ["# What the lab measured\n", f"{machine}\n"]
    text += ["| claim | source | measured | verdict |", "|---|---|---|---|"]
    for experiment, finding in found:
        verdict = finding.verdict + (f": {finding.why}" if finding.why else "")
        text.append(
            f"| `{experiment.name}`: {experiment.claim} | {experiment.source} "
            f"| {finding.measured} | {verdict} |"
        )
    for experiment, finding in found:
        if finding.rows:
            head, rows = experiment.table(finding)
            text += [f"\n### {experiment.name}\n", f"| {' | '.join(head)} |"]
            text.append("|---" + "|---:" * len(experiment.columns) + "|")
            text += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(text) + "\n"


def draw(experiment: Experiment, finding: LabFinding, path: Path) -> None:
    """Draw an SVG with a bar for each arm, for every figure of the finding that is `is_drawn`.

    Draws nothing if no figure is.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing("matplotlib", "the pictures of the lab") from error
    drawn = [n for n, column in enumerate(experiment.columns, 1) if column.is_drawn]
    if not drawn:
        return
    names = [row[0] for row in finding.rows]
    height = 0.9 + 0.34 * len(names)
    figure = Figure(figsize=(2.0 + 2.4 * len(drawn), height), layout="constrained")
    panels = figure.subplots(1, len(drawn), sharey=True, squeeze=False)[0]
    for panel, place in zip(panels, drawn, strict=True):
        column = experiment.columns[place - 1]
        bars = panel.barh(names, [row[place] for row in finding.rows], color="#4c8fbd")
        panel.bar_label(bars, fmt=f"{{:{column.form}}}", padding=3)
        panel.margins(x=0.3)
        panel.set_xlabel(column.name)
        panel.tick_params(bottom=False, labelbottom=False)
        if finding.marked is not None:
            panel.axhline(names.index(finding.marked[0]) - 0.5, color="#c0504d", lw=1, ls="--")
    panels[0].invert_yaxis()
    panels[0].set_ylabel(experiment.differ)
    title = f"{experiment.name}: {finding.verdict}"
    if finding.marked is not None:
        title += f" ({finding.marked[0]}: {finding.marked[1]})"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    with matplotlib.rc_context({"svg.hashsalt": experiment.name}):  # the same file each time
        figure.savefig(path, metadata={"Date": None})
