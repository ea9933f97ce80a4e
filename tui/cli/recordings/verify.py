"""`stepscope verify`: checks a recording from its bytes to its KV accounting, and repairs it."""

from pathlib import Path
from typing import Any

import msgspec

from stepscope.recordings.check.repair import RepairReport, default_output, repair, what_is_wrong
from stepscope.recordings.check.strip import strip
from stepscope.recordings.check.verify import Check, VerifyReport, verify
from stepscope.recordings.file.chunk_cache import REPAIR_HINT
from stepscope.recordings.file.losses import Loss
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.file.service_levels import levels_text
from stepscope.tui.cli.shared.options import RecordingFile, command, flag, option
from stepscope.tui.cli.shared.output import Progress, say
from stepscope.tui.cli.shared.paths import find_recording, output_path
from stepscope.tui.settings.cli_errors import DONE, FAILED, WrongUsage
from stepscope.tui.views.format import file_size


@command(
    "stepscope verify session.mcap",
    "stepscope verify f.mcap --json",
    "stepscope verify session.mcap.part --repair",
    "stepscope verify session.mcap --strip-tokens -o shared.mcap",
)
def verify_file(
    file: RecordingFile,
    repair: bool = flag(
        "write a whole recording from one that is cut or damaged, if it is", "--repair"
    ),
    strip_tokens: bool = flag(
        "write a recording without the prompts and outputs of this one", "--strip-tokens"
    ),
    output: str | None = option(
        "FILE", "with these: the file to write (default: named after the old one)", "--output", "-o"
    ),
    as_json: bool = flag("as one JSON document", "--json"),
) -> int:
    """Check a recording from its bytes to its KV accounting.

    Checksums, lost messages, the order of steps and their times; then the moves of KV blocks are
    replayed, and every count and reference is checked against them. Ends with 1 when anything is
    wrong. A file that is still being written is not an error.

    --repair only reads the old file; the new one has a new index. It says what was kept and what
    was lost, and leaves a file alone that is still being written (exit code 1): its recorder
    completes it.
    """
    if repair or strip_tokens:
        if as_json:
            raise WrongUsage("--json: not with --repair or --strip-tokens, which check nothing")
        repair_file(file, output, strip_tokens)
        return DONE
    if output is not None:
        raise WrongUsage("--output: only with --repair or --strip-tokens")
    path = find_recording(file)
    with Progress() as progress:
        report = verify(path, lambda share: progress(f"verifying {path.name}", share))
    if as_json:
        say(msgspec.json.format(msgspec.json.encode(as_document(report)), indent=2).decode())
    else:
        say(*table(report))
    return DONE if report.is_good else FAILED


def as_document(report: VerifyReport) -> dict[str, Any]:
    """Return the result of a check as a document for JSON."""
    return {
        "file": str(report.path),
        "ok": report.is_good,
        "is_being_written": report.is_being_written,
        "num_bytes": report.num_bytes,
        "num_chunks": report.num_chunks,
        "num_messages": report.num_messages,
        "num_lost_messages": report.num_lost_messages,
        "num_steps": report.num_steps,
        "first_step": report.first_step,
        "last_step": report.last_step,
        "with_tokens": report.with_tokens,
        "service_levels": report.levels,
        "left_out_by_repair": [loss._asdict() for loss in report.losses],
        "checks": [
            {
                "name": check.name,
                "ok": check.is_good,
                "unit": check.unit,
                "num_checked": check.num_checked,
                "num_problems": check.num_problems,
                "problems": check.problems,
            }
            for check in report.checks
        ],
    }


def table(report: VerifyReport) -> list[str]:
    """Return the result of a check as lines of text."""
    steps = "no steps"
    if report.first_step is not None and report.last_step is not None:
        steps = f"{report.num_steps:,} steps ({report.first_step:,} to {report.last_step:,})"
    lines = [
        f"{report.path}: {file_size(report.num_bytes)}, {report.num_messages:,} messages, {steps}"
    ]
    if report.is_being_written:
        lines.append("  it is being written right now: its end is not in it yet")
    if report.with_tokens:
        lines.append(
            "  it holds prompts and outputs ('stepscope verify --strip-tokens' takes them out)"
        )
    if report.levels:
        lines.append(f"  service levels it was recorded with: {levels_text(report.levels)}")
    for check in report.checks:
        lines.append(f"  {check.name:18} {check.num_checked:>12,} {check.unit:10} {_result(check)}")
        lines += [f"      {problem}" for problem in check.problems]
        if check.num_problems > len(check.problems):
            lines.append(f"      ... and {check.num_problems - len(check.problems):,} more")
    well = "all is well" if report.num_steps else "nothing is wrong, but it holds no steps"
    if report.losses:
        well = f"whole but for {left_out(report.losses)}, repaired"
    if report.is_being_written:
        well += " so far"
    lines.append(well if report.is_good else "something is wrong")
    return lines


def left_out(losses: list[Loss]) -> str:
    """Say which steps a repair could not save: 312 steps and whatever came after step 4,000."""
    num_steps = sum(loss.num_known or 0 for loss in losses)
    parts = [f"{num_steps:,} step{'' if num_steps == 1 else 's'}"]
    for loss in losses:
        if loss.num_known is not None:
            continue
        if loss.after_step is not None:
            parts.append(f"whatever came after step {loss.after_step:,}")
        elif loss.before_step is not None:
            parts.append(f"whatever came before step {loss.before_step:,}")
        else:
            parts.append("whatever steps it had")
    if len(parts) > 1 and not num_steps:
        del parts[0]
    return " and ".join(parts)


def _result(check: Check) -> str:
    if not check.is_good:
        return f"{check.num_problems:,} problem{'s' if check.num_problems > 1 else ''}"
    return "ok" if check.num_checked else "nothing to check"


def repair_file(file: str, output: str | None = None, strip_tokens: bool = False) -> None:
    """Write a repaired copy of a recording, if anything is wrong with it.

    With `strip_tokens`, write a copy without prompts and outputs instead.
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
