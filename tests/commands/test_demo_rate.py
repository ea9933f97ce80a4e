"""What `stepscope demo --rate` takes, and what the audit trail says of two workloads."""

import pytest
from msgspec.structs import replace

from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import Audited
from stepscope.engine.workload.arrivals import describe
from stepscope.recordings.state.audit_text import change_text
from stepscope.tui.cli.dashboards.demo import WORKLOAD, workload_of
from stepscope.tui.settings.cli_errors import WrongUsage


@pytest.mark.parametrize("text", ["0", "-1", "much", "inf", "nan", "10001", ""])
def test_a_rate_that_is_none_is_refused_with_what_would_be_one(text: str) -> None:
    with pytest.raises(WrongUsage, match="--rate: expected a number above 0 and of at most 10000"):
        workload_of(text, WORKLOAD)


def test_a_rate_may_be_left_out() -> None:
    assert workload_of(None, WORKLOAD) == WORKLOAD
    assert workload_of("0.5", WORKLOAD) == replace(WORKLOAD, rate=0.5)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (None, WORKLOAD, f"started a workload of {describe(WORKLOAD)}"),
        (WORKLOAD, None, f"stopped the workload of {describe(WORKLOAD)}"),
        (None, None, "stopped the workload: there was none"),
        (WORKLOAD, WORKLOAD, f"started the same workload anew: {describe(WORKLOAD)}"),
        (
            WORKLOAD,
            replace(WORKLOAD, rate=0.5),
            "changed the workload: 100 requests/s→0.5 requests/s",
        ),
        (
            WORKLOAD,
            replace(WORKLOAD, max_concurrency=None, output_tokens=9),
            "changed the workload: outputs of 300, at most 12 under way→outputs of 9",
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
def test_the_trail_says_of_two_workloads_what_they_differ_in(
    old: WorkloadSpec | None, new: WorkloadSpec | None, said: str
) -> None:
    """A mix is longer than the line it stands in."""
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
