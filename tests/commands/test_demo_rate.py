"""What `stepscope demo --rate` accepts, and how the audit trail describes a workload change."""

import pytest
from msgspec.structs import replace

from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import Audited
from stepscope.engine.workload.arrivals import describe
from stepscope.recordings.state.audit_text import change_text
from stepscope.tui.cli.dashboards.demo_engine import WORKLOAD, workload_of, workload_text
from stepscope.tui.settings.cli_errors import WrongUsage


@pytest.mark.parametrize("text", ["0", "-1", "much", "inf", "nan", "10001", ""])
def test_an_invalid_demo_rate_is_refused_with_the_allowed_range(text: str) -> None:
    with pytest.raises(WrongUsage, match="--rate: expected a number above 0 and of at most 10000"):
        workload_of(text)


def test_without_a_rate_the_demo_keeps_its_default_workload() -> None:
    assert workload_of(None) == WORKLOAD
    assert workload_of("0.5") == replace(WORKLOAD, rate=0.5)


def test_a_closed_loop_is_told_by_how_many_are_under_way_and_not_by_its_rate() -> None:
    assert workload_text(WORKLOAD).startswith("up to 12 requests under way at once: chats of 96 ")
    assert workload_text(workload_of("0.5")).startswith("at most 12 under way, 0.5 requests/s: ")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (None, WORKLOAD, f"started a workload of {describe(WORKLOAD)}"),
        (WORKLOAD, None, f"stopped the workload of {describe(WORKLOAD)}"),
        (None, None, "stopped the workload, but none was running"),
        (WORKLOAD, WORKLOAD, f"started the same workload anew: {describe(WORKLOAD)}"),
        (
            WORKLOAD,
            replace(WORKLOAD, rate=0.5),
            "changed the workload: 100 requests/s→0.5 requests/s",
        ),
        (
            WORKLOAD,
            replace(WORKLOAD, max_concurrency=None, output_tokens=9),
            "changed the workload: at most 12 under way, outputs of 300→outputs of 9",
        ),
        (
            WORKLOAD,
            replace(WORKLOAD, max_concurrency=None),
            "changed the workload: no longer at most 12 under way",
        ),
        (
            replace(WORKLOAD, document_share=0.0),
            WORKLOAD,
            "changed the workload: now also 70% documents of 896",
        ),
    ],
)
def test_the_audit_trail_names_the_fields_that_a_workload_change_changed(
    old: WorkloadSpec | None, new: WorkloadSpec | None, said: str
) -> None:
    """A full description of a mix is longer than its line."""
    before, after = ("none" if each is None else describe(each) for each in (old, new))
    entry = Audited(
        number=2,
        command="SetWorkload",
        who="stepscope demo",
        time_ns=1,
        old={"workload": before},
        new={"workload": after},
    )
    assert change_text(entry) == said
