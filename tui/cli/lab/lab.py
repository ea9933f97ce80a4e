"""`stepscope lab`: lists the experiments, and runs them."""

import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import typer

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.wire import EngineInfo, KnobValue
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.tui.cli.lab.bench import LabBench
from stepscope.tui.cli.lab.experiment import Experiment, LabFinding
from stepscope.tui.cli.lab.experiments import EXPERIMENTS
from stepscope.tui.cli.lab.report import draw, lines, markdown
from stepscope.tui.cli.shared.engine_process import EngineProcess
from stepscope.tui.cli.shared.options import argument, command, command_group, example, flag, option
from stepscope.tui.cli.shared.output import Progress, say
from stepscope.tui.settings.cli_errors import WrongUsage

# The largest prompts must fit into one step.
_OPTIONS: Mapping[str, KnobValue] = {"max_num_batched_tokens": 8192, "max_num_seqs": 16}
# For the demo model: a cache that a few long requests fill, and a dtype in which tokens do not
# depend on the chunks, even on a CPU with matrix instructions.
_DEMO_OPTIONS: Mapping[str, KnobValue] = {"kv_memory": "64MB", "dtype": "float32"}


@command(
    "stepscope lab run freeze",
    "stepscope lab run prefix freeze --model smollm2",
    "stepscope lab run knee --engine engine-0",
    "stepscope lab run --all -o lab/",
)
def run(
    names: list[str] | None = argument("NAME...", "the experiments"),
    runs_all: bool = flag("run all of them", "--all"),
    model: str = option("TEXT", "the model, as in 'stepscope serve'", default="demo"),
    engine: str | None = option(
        "ENDPOINT", "use an engine that runs and has nothing else to do, in place of one of its own"
    ),
    folder: str = option(
        "FOLDER",
        "keep the recordings, a report (Markdown) and a picture of each claim",
        "--output",
        "-o",
        default="",
    ),
) -> None:
    """Run experiments: record each arm, and say whether the claim holds here.

    Each arm is a run of the same engine with other knobs. Figures come from the recordings.
    """
    chosen = _chosen(names or (), runs_all)
    with ExitStack() as stack, Progress() as progress:
        kept = folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="stepscope-lab-"))
        target = Path(kept)
        target.mkdir(parents=True, exist_ok=True)
        endpoint, info = stack.enter_context(_engine(model, engine, progress))
        pair = None if engine is not None else partial(_pair, model, progress)
        bench = stack.enter_context(LabBench(endpoint, target, pair))
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
    known = {each.name: each for each in EXPERIMENTS}
    if runs_all and not names:
        return list(known.values())
    if runs_all or not names or not set(names) <= set(known):
        raise WrongUsage(f"expected names of experiments, or --all; there are: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def _try(
    experiment: Experiment, bench: LabBench, progress: Progress, place: tuple[int, int]
) -> LabFinding:
    if not bench.can_try(experiment.arms):
        finding = LabFinding(
            "cannot be tried here", "nothing", "it starts engines of its own: leave out --engine"
        )
        say(*lines(experiment, finding, []), "")
        return finding
    runs = []
    for number, arm in enumerate(experiment.arms):
        what = f"{experiment.name}: {arm.name}"

        def on_share(share: float, number: int = number, what: str = what) -> None:
            part = (number + share) / len(experiment.arms)
            progress(what, (place[0] + part) / place[1])

        on_share(0.0)
        runs.append(bench.run(experiment.name, arm, on_share))
    finding = experiment.finding(runs)
    progress.close()
    say(*lines(experiment, finding, runs), "")
    return finding


@contextmanager
def _engine(
    model: str, engine: str | None, progress: Progress
) -> Iterator[tuple[Endpoint, EngineInfo]]:
    """Yield the engine that the user named, or one started for the lab until the block ends."""
    if engine is not None:
        endpoint = Endpoint.parse(engine)
        with ControlClient(endpoint) as client:
            info = client.info()
        yield endpoint, info
        return
    progress("starting the engine", None)
    with EngineProcess(_options(model), lambda line: progress(line, None)) as process:
        yield process.endpoint, process.wait_until_ready()


@contextmanager
def _pair(model: str, progress: Progress) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Start a prefill and a decode engine, with half of the cores each."""

    def on_line(line: str) -> None:
        progress(line, None)

    half: Mapping[str, KnobValue] = {**_options(model), "threads": max(1, _num_cores() // 2)}
    with EngineProcess({**half, "role": "decode"}, on_line, name="decode") as decode:
        decode.wait_until_ready()
        roles = {"role": "prefill", "decode_to": decode.endpoint.control}
        with EngineProcess({**half, **roles}, on_line, name="prefill") as prefill:
            prefill.wait_until_ready()
            yield prefill.endpoint, decode.endpoint


def _options(model: str) -> Mapping[str, KnobValue]:
    return {**_OPTIONS, "model": model, **(_DEMO_OPTIONS if model == "demo" else {})}


def _num_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _machine(info: EngineInfo) -> str:
    day = datetime.now(UTC).date()
    what: Sequence[str | None] = (info.model, info.dtype, info.device, info.attention_backend)
    known = ", ".join(each for each in what if each)
    return f"Measured on {day}: {known}; {platform.machine()}, {_num_cores()} cores."


def lab(context: typer.Context) -> None:
    """List the experiments: what is claimed, and by whom."""
    if context.invoked_subcommand is None:
        for each in EXPERIMENTS:
            say(
                f"{each.name:<12} {each.claim}", f"{'':12} {each.source}; {len(each.arms)} arms", ""
            )
        say("stepscope lab run NAME runs one, stepscope lab run --all runs all of them")


commands = command_group(
    "lab",
    "Try what the literature claims on this machine.",
    run,
    alone=lab,
    epilog=example("stepscope lab", "stepscope lab run freeze"),
)
