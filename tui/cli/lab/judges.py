"""`LabFinding`, and the judges of the experiments: whether a claim holds, by the runs of all arms.

A judge gets the runs, and the values of each column of its experiment by the column's name; both
in the order of the arms.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from stepscope.recordings.session.knee import knee_of, newest_columns
from stepscope.recordings.session.steps import StepTable
from stepscope.tui.cli.lab.arms import ArmRun

Runs: TypeAlias = Sequence[ArmRun]
Columns: TypeAlias = Mapping[str, Sequence[float]]


class LabFinding(NamedTuple):
    """The result of an experiment. A judge leaves out the rows."""

    holds: bool  # whether the claim was reproduced
    measured: str  # in one sentence
    why: str  # it was not reproduced; else empty
    marked: tuple[str, str] | None = None  # an arm to mark in the picture, and the text there
    rows: tuple[tuple[str, *tuple[float, ...]], ...] = ()  # an arm, and a value for each column

    @property
    def verdict(self) -> str:
        return "reproduced" if self.holds else "not here"

    @property
    def text(self) -> str:
        return self.verdict + (f": {self.why}" if self.why else "")


def tokens(runs: Runs, of: Columns) -> LabFinding:
    num_whole = len(runs[0].outputs["one"])
    num_same = sum(num == num_whole for num in of["equal tokens of 32"])
    missed = "" if of["preempted"][-1] else "; nothing was preempted here"
    return LabFinding(
        num_same == len(runs),
        f"{num_same} of {len(runs)} arms gave the same {num_whole} greedy tokens{missed}",
        "sums in another order round differently, and a near tie between two tokens then falls "
        "the other way",
    )


def freeze(runs: Runs, of: Columns) -> LabFinding:
    longest = of["longest ITL, ms"]
    spikes = [most / median for most, median in zip(longest, of["ITL p50, ms"], strict=True)]
    return LabFinding(
        spikes[0] >= 10 and spikes[1] <= spikes[0] / 3,
        f"longest ITL {longest[0]:,.0f} ms whole ({spikes[0]:.0f} times the "
        f"median), {longest[1]:,.0f} ms in chunks ({spikes[1]:.0f} times)",
        runs[1].main_cause(),
    )


def p99(runs: Runs, of: Columns) -> LabFinding:
    itl, output = of["ITL p99, ms"], of["output tokens/s"]
    falls, change = itl[0] / (itl[1] or 1), output[1] / (output[0] or 1) - 1
    return LabFinding(
        falls >= 2 and change >= -0.05,
        f"ITL p99 {itl[0]:,.0f} to {itl[1]:,.0f} ms ({falls:.1f} times less), output "
        f"{output[0]:,.0f} to {output[1]:,.0f} tokens/s ({change:+.1%})",
        runs[1].main_cause(),
    )


def mixed(runs: Runs, of: Columns) -> LabFinding:
    alone, mixed = of["tokens a second of step time"]
    change = mixed / alone - 1 if alone else float("nan")
    return LabFinding(
        change >= -0.05,
        f"{alone:,.0f} tokens/s in steps of prefill alone, {mixed:,.0f} in mixed steps "
        f"({change:+.1%})",
        runs[1].main_cause(),
    )


def knee(runs: Runs, of: Columns) -> LabFinding:
    ttft, itl = of["TTFT of documents, ms"], of["ITL p99, ms"]
    steps = StepTable()
    for run in runs:
        run.add_to(steps)
    found = knee_of(newest_columns(steps))
    bound, beyond = "", []
    if found is not None:
        bound = f"; steps are bound by compute from about {found.rounded:,} tokens on"
        beyond = [run.name for run in runs if int(run.name) >= found.tokens]
    falls, rises = ttft[0] > ttft[-1], itl[-1] > itl[0]
    return LabFinding(
        falls and rises,
        f"from a budget of {runs[0].name} to {runs[-1].name} TTFT goes from {ttft[0]:,.0f} to "
        f"{ttft[-1]:,.0f} ms, p99 ITL from {itl[0]:,.0f} to {itl[-1]:,.0f} ms{bound}",
        "here small chunks cost the document no more time than large ones"
        if rises
        else f"larger chunks cost the streams no more: {runs[-1].main_cause()}",
        (beyond[0], "bound by compute from here") if beyond else None,
    )


def cadence(runs: Runs, of: Columns) -> LabFinding:
    tpot, ttft = of["TPOT p50, ms"], of["TTFT of documents, ms"]
    pairs = ((0, 1), (2, 3))
    return LabFinding(
        all(tpot[b] <= 1.05 * tpot[a] and ttft[b] < 0.95 * ttft[a] for a, b in pairs),
        "; ".join(
            f"{runs[a].name} and {runs[b].name}: TPOT {tpot[a]:,.1f} and {tpot[b]:,.1f} ms, TTFT "
            f"of documents {ttft[a]:,.0f} and {ttft[b]:,.0f}"
            for a, b in pairs
        ),
        "a step takes about as long as its tokens, so both compute as many prompt tokens a second",
    )


def chunk_cost(runs: Runs, of: Columns) -> LabFinding:
    times, reread = of["seconds of prefill"], of["tokens of K/V read again"]
    computed = {sum(row.num_tokens for _, row in run.rows_of("document")) for run in runs}
    return LabFinding(
        len(computed) == 1 and list(reread) == sorted(reread, reverse=True) and reread[-1] == 0,
        f"{', '.join(f'{each:,}' for each in sorted(computed))} tokens are computed in every arm "
        f"(the same products); {reread[0]:,} cached tokens are read again a layer at chunks of "
        f"{runs[0].name}, none whole; {times[0]:.2f} s against {times[-1]:.2f} s. The time of "
        "writing K/V is in no record: that part is not tried",
        "the arms did not compute the same tokens",
    )


def prefix(runs: Runs, of: Columns) -> LabFinding:
    chunks, cached = of["chunks"], of["cached tokens"]
    [warm] = runs[1].requests("prompt")
    return LabFinding(
        list(chunks) == [4, 2],
        f"{chunks[0]} chunks cold, {chunks[1]} with {cached[1]} of {warm.num_prompt_tokens:,} "
        "tokens cached",
        "the beginning was not in the cache, or the budget was shared",
    )


def paged(runs: Runs, of: Columns) -> LabFinding:
    [empty] = of.values()
    info = runs[0].side.info
    assert info is not None
    rows = [row for step in runs[0].steps for row in step.batch or ()]
    mean = sum(row.start + row.num_tokens for row in rows) / max(1, len(rows))
    return LabFinding(
        empty[0] < 0.04 and empty[1] >= 0.6,
        f"{empty[0]:.1%} of the tokens in blocks of {info.block_size} are empty, "
        f"{empty[1]:.0%} where each request reserves {info.max_model_len:,} "
        "(counted of the same steps)",
        f"a request has {mean:,.0f} tokens on average",
    )


def modes(runs: Runs, of: Columns) -> LabFinding:
    longest, rates = of["longest ITL, ms"], of["output tokens/s"]
    names = [run.name for run in runs]
    first, last = names.index("naive"), names.index("chunked")
    behind = [names[n] for n in range(1, len(runs)) if rates[n] < 0.95 * rates[n - 1]]
    return LabFinding(
        rates[last] > rates[first] and not behind,
        f"output {rates[first]:,.0f} tokens/s naive, {rates[last]:,.0f} chunked; longest ITL "
        f"{longest[first]:,.0f} and {longest[last]:,.0f} ms",
        f"fewer tokens a second than the mode before: {', '.join(behind) or 'none'}; "
        f"{runs[last].main_cause()}",
    )


def apart(runs: Runs, of: Columns) -> LabFinding:
    itl, ttft = of["ITL p99, ms"], of["TTFT of documents, ms"]
    large, small, apart = runs
    missed = []
    if not itl[2] <= 1.1 * itl[1]:
        missed.append(f"ITL: {apart.decoding.main_cause()}")
    if not ttft[2] <= 1.1 * ttft[0]:
        missed.append("TTFT: a prompt has half of the cores, also while nothing is decoded")
    return LabFinding(
        not missed,
        f"p99 ITL {itl[0]:,.0f} ms in {large.name}, {itl[1]:,.0f} in {small.name}, {itl[2]:,.0f} "
        f"apart; TTFT of documents {ttft[0]:,.0f}, {ttft[1]:,.0f} and {ttft[2]:,.0f} ms",
        "; ".join(missed),
    )
