"""`stepscope lab`: lists the experiments, and runs them."""

import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.wire import EngineInfo, KnobValue
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.tui.cli.lab.bench import LabBench
from stepscope.tui.cli.lab.experiment import Experiment, LabFinding, all_experiments
from stepscope.tui.cli.lab.report import draw, lines, markdown
from stepscope.tui.cli.shared.engine_process import EngineProcess
from stepscope.tui.cli.shared.errors import say
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.settings.cli_errors import WrongUsage

# Room for the largest prompts whole.
_OPTIONS: Mapping[str, KnobValue] = {"max_num_batched_tokens": 8192, "max_num_seqs": 16}
# Of the demo model: a cache that a few long requests fill.
_DEMO_OPTIONS: Mapping[str, KnobValue] = {"kv_memory": "64MB"}


def show() -> None:
    """The list of experiments."""
    for each in all_experiments():
        say(f"{each.name:<12} {each.claim}", f"{'':12} {each.source}; {len(each.arms)} arms", "")
    say("stepscope lab run NAME runs one, stepscope lab run --all runs all of them")


def run(names: Sequence[str], runs_all: bool, model: str, engine: str | None, folder: str) -> None:
    """Run some experiments or all, and print what each found.

    Raises:
        WrongUsage: no such experiment.
        CommandFailed: the engine cannot start, or an arm did not end.
    """
    chosen = _chosen(names, runs_all)
    with ExitStack() as stack, Progress() as progress:
        kept = folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="stepscope-lab-"))
        target = Path(kept)
        target.mkdir(parents=True, exist_ok=True)
        endpoint, info = stack.enter_context(_engine(model, engine, progress))
        bench = stack.enter_context(LabBench(endpoint, target))
        found = []
        for place, experiment in enumerate(chosen):
            finding = _try(experiment, bench, progress, (place, len(chosen)))
            found.append((experiment, finding))
            if folder:
                draw(experiment, finding, target / f"{experiment.name}.svg")
        progress.close()
        if folder:
            (target / "report.md").write_text(markdown(found, _machine(info)), "utf-8")
            say(f"{target}: report.md, a picture of each claim, and the recordings")
        else:
            say("the recordings are gone; -o FOLDER keeps them")


def _chosen(names: Sequence[str], runs_all: bool) -> list[Experiment]:
    known = {each.name: each for each in all_experiments()}
    if runs_all and not names:
        return list(known.values())
    if runs_all or not names or not set(names) <= set(known):
        raise WrongUsage(f"expected names of experiments, or --all; there are: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def _try(
    experiment: Experiment, bench: LabBench, progress: Progress, place: tuple[int, int]
) -> LabFinding:
    runs = []
    for number, arm in enumerate(experiment.arms):
        what = f"{experiment.name}: {arm.name}"

        def on_share(share: float, number: int = number, what: str = what) -> None:
            part = (number + share) / len(experiment.arms)
            progress(what, (place[0] + part) / place[1])

        on_share(0.0)
        runs.append(bench.run(experiment.name, arm, on_share))
    finding = experiment.judge(runs)
    progress.close()
    say(*lines(experiment, finding, runs), "")
    return finding


@contextmanager
def _engine(
    model: str, engine: str | None, progress: Progress
) -> Iterator[tuple[Endpoint, EngineInfo]]:
    """An engine that runs already, or one of our own that ends with us."""
    if engine is not None:
        endpoint = Endpoint.parse(engine)
        with ControlClient(endpoint) as client:
            info = client.info()
        yield endpoint, info
        return
    progress("starting the engine", None)
    options = {**_OPTIONS, "model": model, **(_DEMO_OPTIONS if model == "demo" else {})}
    with EngineProcess(options, lambda line: progress(line, None)) as process:
        yield process.endpoint, process.wait_until_ready()


def _machine(info: EngineInfo) -> str:
    day = datetime.now(UTC).date()
    what: Sequence[str | None] = (info.model, info.dtype, info.device, info.attention_backend)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    known = ", ".join(each for each in what if each)
    return f"Measured on {day}: {known}; {platform.machine()}, {cores} cores."
