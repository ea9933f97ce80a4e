"""`stepscope watch`: checks alert rules about an engine, without a screen, and for Prometheus."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from prometheus_client import start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from stepscope.engine.http.settings import Address, parse_address
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.alerts.judge import WINDOW_S, Judge, Meter, RuleWatch
from stepscope.recordings.alerts.rule import Rule
from stepscope.recordings.figures import value_text
from stepscope.recordings.file.service_levels import levels_said
from stepscope.recordings.history.history import History
from stepscope.recordings.history.verdict import verdict_of
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.shared.connect import choose, connect, wait_for_any
from stepscope.tui.cli.shared.levels import chosen_levels, chosen_rules, note_own
from stepscope.tui.cli.shared.options import EngineName, Wait, command, flag, option, seconds_option
from stepscope.tui.cli.shared.output import say, write_json_line
from stepscope.tui.cli.shared.process import StopSignals, running
from stepscope.tui.settings import cli_errors

TICK_S = 0.25
MAX_STEPS = 20_000
MAX_BYTES = 64 * 1024 * 1024


class _RuleGauges(Collector):
    def __init__(self, engine: str, watches: Sequence[RuleWatch]) -> None:
        self._engine = engine
        self._watches = watches

    def collect(self) -> Iterator[GaugeMetricFamily]:
        firing = GaugeMetricFamily(
            "stepscope_alert_firing", "1 while a rule fires, else 0.", labels=("engine", "rule")
        )
        value = GaugeMetricFamily(
            "stepscope_alert_value",
            "The figure of a rule over the last ten seconds.",
            labels=("engine", "rule", "figure", "unit"),
        )
        for each in self._watches:
            labels = (self._engine, each.rule.text)
            if (state := each.state) != "unknown":
                firing.add_metric(labels, float(state == "firing"))
            if (measured := each.value) is not None:
                figure = each.rule.bound.figure
                value.add_metric((*labels, figure.name, figure.unit), measured)
        yield from (firing, value)


@contextmanager
def judged_rules(endpoint: Endpoint, rules: Sequence[Rule]) -> Iterator[list[Collector]]:
    """Judge rules about an engine, which may restart; yield their Prometheus collectors."""
    if not rules:
        yield []
        return
    source = Subscriber(endpoint, History(chosen_levels({}), MAX_STEPS, MAX_BYTES), past_s=WINDOW_S)
    judge, meter, is_over = Judge(rules), Meter(source), threading.Event()

    def look() -> None:
        while not is_over.wait(TICK_S):
            judge.apply(meter.measure(), time.monotonic())

    thread = threading.Thread(target=look, name="rules", daemon=True)
    with running(source):
        thread.start()
        try:
            yield [_RuleGauges(source.name, judge.watches)]
        finally:
            is_over.set()
            thread.join()


@contextmanager
def serve_alert_metrics(
    address: Address, engine: str, watches: Sequence[RuleWatch]
) -> Iterator[None]:
    """Answer GET /metrics at `address` until the end of the block."""
    registry = CollectorRegistry()
    registry.register(_RuleGauges(engine, watches))
    try:
        server, thread = start_http_server(address.port, address.host, registry)
    except OSError as error:
        raise cli_errors.CommandFailed(f"--metrics: {address.text}: {error.strerror}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_UNKNOWN_S = 15.0  # how long `--once` waits for a rule whose state is unknown


@command(
    "stepscope watch --when 'itl_p99 > 50ms for 30s' --when 'step_in_flight > 5s'",
    "stepscope watch engine-0 --once --json --when 'queue_age > 5s'",
    sections=("levels",),
    takes_key=True,
)
def watch(
    endpoint: EngineName = None,
    *,
    when: list[str] | None = option(
        "RULE", "FIGURE COMPARISON VALUE [for TIME]; may be repeated (default: [[alerts]])"
    ),
    once: bool = flag("print the state of each rule once, as soon as it is known", "--once"),
    seconds: float | None = seconds_option("how long (default: until Ctrl-C)"),
    metrics: str | None = option("HOST:PORT", "answer Prometheus here with how the rules stand"),
    wait: Wait = True,
    as_json: bool = flag("a JSON document a line", "--json"),
    flags: dict[str, Any],
) -> int:
    """Watch an engine by rules: a line when one fires or ends.

    Figures are those of the last ten seconds. A rule that fires ends when it has not held for its
    own 'for', ten seconds at least. Ends with 1 if a rule fired; with --once 3 if none fires and
    one is unknown.
    """
    rules = chosen_rules(when or ())
    if not rules:
        raise cli_errors.WrongUsage(
            "no rule: give watch --when 'itl_p99 > 50ms for 30s', or [[alerts]] in the config file"
        )
    served_at = None if metrics is None else parse_address(metrics)
    levels = chosen_levels(flags)
    chosen = choose(endpoint, "stepscope watch {}")
    wait_for_any(lambda: [chosen], wait and not once)
    with connect(chosen) as client:
        note_own(levels, levels_said(client.info()))
    source = Subscriber(chosen, History(levels, MAX_STEPS, MAX_BYTES), past_s=WINDOW_S)
    judge, meter = Judge(rules), Meter(source)
    out = partial(_print, source, as_json)
    has_fired = False
    with StopSignals() as stop, ExitStack() as served:
        if served_at is not None:
            served.enter_context(serve_alert_metrics(served_at, source.name, judge.watches))
        served.enter_context(running(source))
        for elapsed_s in stop.ticks(TICK_S, seconds):
            changes = judge.apply(meter.measure(), time.monotonic())
            has_fired = has_fired or any(change.is_firing for change in changes)
            stands = {each.rule: each.state for each in judge.watches}
            states = set(stands.values())
            is_unknown = "unknown" in states
            if once and "pending" not in states and not (is_unknown and elapsed_s <= _UNKNOWN_S):
                for each in judge.watches:
                    out(each.rule, each.state, each.value, each.rule.said(each.value))
                if "firing" in states:
                    return cli_errors.FAILED
                return cli_errors.TOO_LITTLE_DATA if is_unknown else cli_errors.DONE
            for change in () if once else changes:
                out(change.rule, stands[change.rule], change.value, change.text)
    return cli_errors.FAILED if has_fired else cli_errors.DONE


def _print(
    source: Subscriber, as_json: bool, rule: Rule, state: str, value: float | None, text: str
) -> None:
    verdict, figure = verdict_of(source.history), rule.bound.figure
    if not as_json:
        if state == "firing" and verdict.trouble:
            text += f"; {verdict.trouble}"
        say(f"{time.strftime('%H:%M:%S')} {state.upper():<7} {text}")
        return
    write_json_line(
        engine=source.name,
        rule=rule.text,
        state=state,
        figure=figure.name,
        value=value,
        unit=figure.unit,
        shown=value_text(figure, value),
        verdict=verdict.text,
    )
