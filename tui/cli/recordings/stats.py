"""`stepscope stats`: prints all figures of a recording or an engine, as a table or as JSON."""

from typing import Any

from stepscope.recordings.figures.table import FIGURES, KINDS, RANKS, latency_name, value_text
from stepscope.recordings.file.service_levels import levels_of, levels_text
from stepscope.tui.cli.recordings.measured import measure
from stepscope.tui.cli.shared.levels import advice_lines, limits_document
from stepscope.tui.cli.shared.options import AsJson, LastSeconds, Target, command
from stepscope.tui.cli.shared.output import say, text_table, write_json
from stepscope.tui.views import format as fmt


@command(
    "stepscope stats freeze",
    "stepscope stats engine-0 --seconds 10 --json | jq .figures.itl_p99",
    sections=("levels",),
    takes_key=True,
)
def stats(
    target: Target = None,
    *,
    seconds: LastSeconds = None,
    as_json: AsJson = False,
    flags: dict[str, Any],
) -> None:
    """Print all figures of a recording, an engine or /metrics."""
    found = measure(target, seconds, flags, "stats")
    if as_json:
        write_json({**found.document(), "advice": limits_document(found.run)["advice"]})
        return
    latencies = {kind: [latency_name(kind, rank) for rank in RANKS] for kind in KINDS}
    rows = [
        [label, *(fmt.milliseconds(found.figures[name]) for name in latencies[kind])]
        for kind, label in KINDS.items()
        if not kind.startswith("served") or found.figures[latencies[kind][0]] is not None
    ]
    left_out = {"steps", "seconds", *(name for names in latencies.values() for name in names)}
    others = [
        [name, value_text(spec, found.figures[name]), spec.meaning]
        for name, spec in FIGURES.items()
        if name not in left_out
    ]
    advised = advice_lines(found.run)
    say(
        f"{found.text}; levels {levels_text(levels_of(found.slo))}",
        "",
        *text_table(["ms", *RANKS.values()], rows),
        "",
        *text_table(["", "", ""], others, "<><")[1:],
        *([""] if advised else []),
        *advised,
    )
