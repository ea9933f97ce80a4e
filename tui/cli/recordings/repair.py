"""`stepscope verify --repair`: makes a complete recording from one that was cut off or damaged."""

from pathlib import Path

from stepscope.recordings.check.repair import RepairReport, default_output, repair, what_is_wrong
from stepscope.recordings.check.strip import strip
from stepscope.recordings.file.chunk_cache import REPAIR_HINT
from stepscope.recordings.file.losses import Loss
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.tui.cli.shared.errors import say
from stepscope.tui.cli.shared.output_path import output_path
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.recording_path import find_recording
from stepscope.tui.views.format import file_size


def repair_file(file: str, output: str | None = None, strip_tokens: bool = False) -> None:
    """Write a repaired copy of a recording, if anything is wrong with it.

    With `strip_tokens`, write a copy without prompts and outputs instead.

    Raises:
        CommandFailed, RecordingError: nothing can be saved, the copy cannot be written, or the
            recording is still being written.
    """
    path = Path(file)
    part = path.with_name(path.name + PART_SUFFIX)
    path = part if part.exists() and not path.exists() else find_recording(file)
    chosen = None if output is None else output_path(output, is_new=True)
    if strip_tokens:
        _strip(path, chosen)
        return
    with Progress() as progress:
        wrong = what_is_wrong(path, lambda share: progress(f"reading {path.name}", share))
        if wrong is None:
            say(f"{path} is whole: nothing to repair")
            return
        target = chosen or default_output(path)
        report = repair(path, target, lambda share: progress(f"repairing {path.name}", share))
    say(wrong.replace(REPAIR_HINT, ""), *summary(report, target))


def _strip(path: Path, output: Path | None) -> None:
    whole = path.with_name(path.name.removesuffix(PART_SUFFIX))
    target = output or whole.with_name(f"{whole.stem}-stripped{whole.suffix}")
    with Progress() as progress:
        done = strip(path, target, lambda share: progress(f"stripping {path.name}", share))
    what = "without the prompts and outputs" if done.had_tokens else "it held none to remove"
    say(f"{target}: {done.num_messages:,} messages, {file_size(done.num_bytes)}, {what}")


def summary(report: RepairReport, target: Path) -> list[str]:
    """Return lines on what was kept and what was lost."""
    steps = "no steps"
    if report.first_step is not None and report.last_step is not None:
        steps = f"{report.num_steps:,} steps ({report.first_step:,} to {report.last_step:,})"
    chunks = f"{report.num_whole:,} of {report.num_chunks:,} chunks whole"
    if report.num_in_part:
        chunks += f", {report.num_in_part:,} in part"
    if report.num_lost:
        chunks += f", {report.num_lost:,} lost"
    lines = [f"kept: {steps}, {report.num_messages:,} messages; {chunks}"]
    lines += [f"lost: {_loss(loss)}" for loss in report.losses]
    if report.num_lost_bytes:
        lines.append(f"lost: {file_size(report.num_lost_bytes)} outside of any chunk")
    return [*lines, f"{target}: {file_size(report.num_bytes)}"]


def _loss(loss: Loss) -> str:
    if loss.before_step is None:
        end = "from the first step on" if loss.after_step is None else _after(loss.after_step)
        what = "whatever came" if loss.num_steps is None else f"{loss.num_steps:,} steps"
        return f"{what} {end}"
    upto = ""
    if loss.after_step is not None:
        first = loss.after_step + 1
    elif loss.num_steps is not None:
        first = loss.before_step - loss.num_steps
    else:  # the first step is unknown: a recording may begin at any step of its engine
        first, upto = 0, "up to "
    num_steps = loss.before_step - first
    if num_steps <= 0:
        return f"no step, but messages before step {loss.before_step:,}"
    return f"{upto}{num_steps:,} steps ({first:,} to {loss.before_step - 1:,})"


def _after(step: int) -> str:
    return f"after step {step:,}"
