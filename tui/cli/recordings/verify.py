"""`stepscope verify`: checks a recording from its bytes to its KV accounting, and repairs it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stepscope.recordings.check.rewrite import RewriteReport, default_output, rewrite, what_is_wrong
from stepscope.recordings.check.verify import VerifyReport, verify
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.file.reader import REPAIR_HINT
from stepscope.recordings.file.service_levels import levels_text
from stepscope.tui.cli.shared.arguments import find_recording, output_path
from stepscope.tui.cli.shared.options import RecordingFile, command, flag, option
from stepscope.tui.cli.shared.output import Progress, say, told, write_json
from stepscope.tui.settings.cli_errors import DONE, FAILED, WrongUsage
from stepscope.tui.views.format import file_size, plural


@command(
    "stepscope verify session.mcap",
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

    --repair only reads the old file, and says what was kept and what was lost. A file that is still
    being written it leaves to its recorder (exit code 1).
    """
    if repair or strip_tokens:
        if as_json:
            raise WrongUsage("--json: not with --repair or --strip-tokens, which check nothing")
        rewrite_file(file, output, strip_tokens)
        return DONE
    if output is not None:
        raise WrongUsage("--output: only with --repair or --strip-tokens")
    path = find_recording(file, foreign=False)
    with Progress() as progress:
        report = verify(path, lambda share: progress(f"verifying {path.name}", share))
    if as_json:
        write_json(
            {
                "file": str(report.path),
                "ok": report.is_good,
                **told(report, "is_being_written", "num_bytes", "num_chunks", "num_messages"),
                **told(report, "num_lost_messages", "num_steps", "first_step", "last_step"),
                "with_tokens": report.with_tokens,
                "service_levels": report.levels,
                "left_out_by_repair": [msgspec.structs.asdict(loss) for loss in report.losses],
                "checks": [{"ok": check.is_good, **told(check)} for check in report.checks],
            }
        )
    else:
        say(*_lines(report))
    return DONE if report.is_good else FAILED


def _lines(report: VerifyReport) -> Iterator[str]:
    size = file_size(report.num_bytes)
    yield f"{report.path}: {size}, {report.num_messages:,} messages, {_steps(report)}"
    if report.is_being_written:
        yield "  it is being written right now: its end is not in it yet"
    if report.with_tokens:
        yield "  it holds prompts and outputs ('stepscope verify --strip-tokens' takes them out)"
    if report.levels:
        yield f"  service levels it was recorded with: {levels_text(report.levels)}"
    for check in report.checks:
        result = "ok" if check.num_checked else "nothing to check"
        if not check.is_good:
            result = plural(check.num_problems, "problem")
        yield f"  {check.name:18} {check.num_checked:>12,} {check.unit:10} {result}"
        yield from (f"      {problem}" for problem in check.problems)
        if check.num_problems > len(check.problems):
            yield f"      ... and {check.num_problems - len(check.problems):,} more"
    well = "all is well" if report.num_steps else "nothing is wrong, but it holds no steps"
    if report.losses:
        well = f"whole but for {' and '.join(loss.text for loss in report.losses)}, repaired"
    so_far = " so far" if report.is_being_written else ""
    yield f"{well}{so_far}" if report.is_good else "something is wrong"


def rewrite_file(file: str, output: str | None, strip_tokens: bool) -> None:
    """Write a copy of a recording, repaired if it must be, or without prompts and outputs."""
    path = Path(file)
    part = path.with_name(path.name + PART_SUFFIX)
    path = part if part.exists() and not path.exists() else find_recording(file, foreign=False)
    chosen = None if output is None else output_path(output, is_new=True)
    with Progress() as progress:

        def shown(what: str) -> Callable[[float], None]:
            return lambda share: progress(f"{what} {path.name}", share)

        if strip_tokens:
            target = chosen or default_output(path, "stripped")
            done = rewrite(path, target, shown("stripping"), without_tokens=True)
            what = "without the prompts and outputs" if done.had_tokens else "it held none"
            say(f"{target}: {done.num_messages:,} messages, {file_size(done.num_bytes)}, {what}")
            return
        wrong = what_is_wrong(path, shown("reading"))
        if wrong is None:
            say(f"{path} is whole: nothing to repair")
            return
        target = chosen or default_output(path, "repaired")
        report = rewrite(path, target, shown("repairing"))
    chunks = f"of {report.num_chunks:,} chunks {report.num_whole:,} whole"
    chunks += f", {report.num_in_part:,} in part, {report.num_lost:,} lost"
    say(
        wrong.replace(REPAIR_HINT, ""),
        f"kept: {_steps(report)}, {report.num_messages:,} messages; {chunks}",
        *(f"lost: {loss.text}" for loss in report.losses),
    )
    if report.num_lost_bytes:
        say(f"lost: {file_size(report.num_lost_bytes)} outside of any chunk")
    say(f"{target}: {file_size(report.num_bytes)}")


def _steps(report: VerifyReport | RewriteReport) -> str:
    if report.first_step is None or report.last_step is None:
        return "no steps"
    return f"{report.num_steps:,} steps ({report.first_step:,} to {report.last_step:,})"
