"""`stepscope lab`: lists the experiments, or runs them and reports what was found."""

import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from stepscope.engine.execution.environment import num_threads
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.export.output import MissingPackage
from stepscope.tui.cli.lab.arms import ArmRun, run_arm
from stepscope.tui.cli.lab.experiments import EXPERIMENTS, Experiment, LabFinding
from stepscope.tui.cli.shared.engine_process import EngineProcess
from stepscope.tui.cli.shared.options import argument, command, flag, option
from stepscope.tui.cli.shared.output import Progress, model_on_text, say, text_table
from stepscope.tui.settings.cli_errors import WrongUsage

# The largest prompts must fit into one step.
_OPTIONS: Mapping[str, KnobValue] = {"max_num_batched_tokens": 8192, "max_num_seqs": 16}
# For the demo model: a cache that a few long requests fill, and a dtype in which tokens do not
# depend on the chunks, even on a CPU with matrix instructions.
_DEMO_OPTIONS: Mapping[str, KnobValue] = {"kv_memory": "64MB", "dtype": "float32"}


@command("stepscope lab", "stepscope lab freeze", "stepscope lab --all -o lab/")
def lab(
    names: list[str] | None = argument("NAME...", "the experiments (default: list them)"),
    runs_all: bool = flag("run all of them", "--all"),
    model: str = option("TEXT", "the model, as in 'stepscope serve'", default="demo"),
    folder: str = option(
        "FOLDER", "keep recordings, report and pictures here", "--output", "-o", default=""
    ),
) -> None:
    """Try what the literature claims on this machine.

    Each arm of an experiment is a run of the same engine with other knobs, which is recorded; the
    recordings say whether the claim holds here.
    """
    if not names and not runs_all:
        for each in EXPERIMENTS:
            say(f"{each.name:<12} {each.claim}", f"{'':12} {each.source}", "")
        say("stepscope lab NAME runs one, stepscope lab --all runs all of them")
        return
    chosen = _chosen(names or (), runs_all)
    with ExitStack() as stack, Progress() as progress:
        kept = folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="stepscope-lab-"))
        target = Path(kept)
        target.mkdir(parents=True, exist_ok=True)
        engine = stack.enter_context(EngineProcess(_options(model), progress))
        found, num_done, num_arms = [], 0, sum(len(each.arms) for each in chosen)
        for experiment in chosen:
            runs = []
            for arm in experiment.arms:
                what = f"{experiment.name}: {arm.name}"
                shown = partial(_show, progress, what, num_done, num_arms)
                num_done += 1
                shown(0.0)
                path = target / f"{experiment.name}-{arm.name}.mcap".replace(" ", "-")
                alone = nullcontext([engine.endpoint])
                with _pair(model, progress) if arm.is_apart else alone as endpoints:
                    runs.append(run_arm(endpoints, path, arm, shown))
            progress.close()  # what reads the recordings has its own
            finding = experiment.finding(runs)
            found.append((experiment, finding))
            say(*lines(experiment, finding, runs), "")
            if folder:
                draw(experiment, finding, target / f"{experiment.name}.svg")
        if folder:
            machine = f"{platform.machine()}, {num_threads(EngineConfig())} cores"
            on = f"Measured on {datetime.now(UTC).date()}: {model_on_text(engine.info)}; {machine}."
            (target / "report.md").write_text(markdown(found, on), "utf-8")
            say(f"{target}: report.md, a picture of each claim, and the recordings")
        else:
            say("the recordings are gone; -o FOLDER keeps them")


def _show(progress: Progress, what: str, num_done: int, num_arms: int, share: float) -> None:
    progress(what, (num_done + share) / num_arms)


def _chosen(names: Sequence[str], runs_all: bool) -> list[Experiment]:
    known = {each.name: each for each in EXPERIMENTS}
    if runs_all and not names:
        return list(known.values())
    if runs_all or not names or not set(names) <= set(known):
        raise WrongUsage(f"expected names of experiments, or --all; there are: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


@contextmanager
def _pair(model: str, progress: Progress) -> Iterator[Sequence[Endpoint]]:
    """Start a prefill and a decode engine, with half of the cores each."""
    num_cores = num_threads(EngineConfig())
    half: Mapping[str, KnobValue] = {**_options(model), "threads": max(1, num_cores // 2)}
    with EngineProcess({**half, "role": "decode"}, progress, name="decode") as decode:
        roles = {"role": "prefill", "decode_to": decode.endpoint.control}
        with EngineProcess({**half, **roles}, progress, name="prefill") as prefill:
            yield prefill.endpoint, decode.endpoint


def _options(model: str) -> Mapping[str, KnobValue]:
    return {**_OPTIONS, "model": model, **(_DEMO_OPTIONS if model == "demo" else {})}


# The report


def lines(experiment: Experiment, finding: LabFinding, runs: Sequence[ArmRun]) -> Iterator[str]:
    yield f"{experiment.name}: {experiment.claim}"
    yield f"  source    {experiment.source}"
    yield f"  measured  {finding.measured}"
    for run in runs:
        yield f"  by        {run.path.name} ({run.name}: {run.side.sums().num_records:,} steps)"
    yield f"  verdict   {finding.text}"
    if finding.rows:
        yield from (f"  {line}" for line in text_table(*experiment.table(finding)))


def markdown(found: Sequence[tuple[Experiment, LabFinding]], machine: str) -> str:
    text = ["# What the lab measured\n", f"{machine}\n"]
    text += ["| claim | source | measured | verdict |", "|---|---|---|---|"]
    for experiment, finding in found:
        text.append(
            f"| `{experiment.name}`: {experiment.claim} | {experiment.source} "
            f"| {finding.measured} | {finding.text} |"
        )
    for experiment, finding in found:
        if finding.rows:
            head, rows = experiment.table(finding)
            text += [f"\n### {experiment.name}\n", f"| {' | '.join(head)} |"]
            text.append("|---" + "|---:" * len(experiment.columns) + "|")
            text += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(text) + "\n"


def draw(experiment: Experiment, finding: LabFinding, path: Path) -> None:
    """Draw an SVG with a bar for each arm, for every figure that is `is_drawn`, if any is."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage("matplotlib", "the pictures of the lab") from error
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
