"""`stepscope stats`: prints all figures of a recording or an engine, as a table or as JSON."""

from stepscope.recordings.compare.side.advice import advice
from stepscope.recordings.figures.bounds import value_text
from stepscope.recordings.figures.table import FIGURES, KINDS, RANKS, latency_name
from stepscope.recordings.file.service_levels import levels_of, levels_text
from stepscope.tui.cli.recordings.measured import MeasuredSession, measure
from stepscope.tui.cli.shared.errors import say, write_json
from stepscope.tui.cli.shared.levels import level_flags
from stepscope.tui.cli.shared.limits_text import advice_lines
from stepscope.tui.cli.shared.options import AsJson, LastSeconds, SloItl, SloTtft, Target, command
from stepscope.tui.cli.shared.text_table import text_table
from stepscope.tui.views import format as fmt


@command(
    "stepscope stats freeze",
    "stepscope stats engine-0 --seconds 10 --json | jq .figures.itl_p99",
    takes_key=True,
)
def stats(
    target: Target = None,
    *,
    seconds: LastSeconds = None,
    slo_itl: SloItl = None,
    slo_ttft: SloTtft = None,
    as_json: AsJson = False,
) -> None:
    """Print all figures of a recording, an engine or /metrics."""
    found = measure(target, seconds, level_flags(slo_itl, slo_ttft), "stats")
    if as_json:
        said = [each._asdict() for each in advice(found.side)]
        write_json({**found.document(), "advice": said})
        return
    say(*_lines(found))


def _lines(found: MeasuredSession) -> list[str]:
    seconds, steps = found.figures["seconds"] or 0.0, found.figures["steps"] or 0
    rows = [
        [label, *(fmt.milliseconds(found.figures[latency_name(kind, rank)]) for rank in RANKS)]
        for kind, label in KINDS.items()
    ]
    latencies = {latency_name(kind, rank) for kind in KINDS for rank in RANKS}
    others = [
        [spec.name, value_text(spec, found.figures[name]), spec.meaning]
        for name, spec in FIGURES.items()
        if name not in latencies and name not in ("steps", "seconds")
    ]
    return [
        f"{found.name}: {steps:,.0f} steps in {seconds:,.1f} s; levels "
        f"{levels_text(levels_of(found.slo))}",
        "",
        *text_table(["ms", *RANKS.values()], rows, "<" + ">" * len(RANKS)),
        "",
        *text_table(["", "", ""], others, "<><")[1:],
        *_after_a_space(advice_lines(found.side)),
    ]


def _after_a_space(lines: list[str]) -> list[str]:
    return ["", *lines] if lines else []
