"""With order=arrival and reserve=prompt, every step is the one vLLM 0.32.0 schedules.

The steps are those of the public command `stepscope simulate WORKLOAD.json --steps`.
"""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.simulation.dry_run import ScheduleLine, ScheduleReplay, parse_workload
from stepscope.tui.cli.__main__ import main

RECORDED = Path(__file__).parents[1] / "conformance"
WORKLOADS = sorted(path.stem for path in RECORDED.glob("*.json"))


def lines_of(text: str) -> list[ScheduleLine]:
    return [msgspec.json.decode(line, type=ScheduleLine) for line in text.splitlines()]


def comparable(line: ScheduleLine) -> dict[str, object]:
    values = msgspec.to_builtins(line)
    values["sched"] = list(line.sched.items())  # the order counts
    values["preempted"] = sorted(line.preempted)  # recorded from a set
    return values


def schedule(workload: dict[str, object]) -> list[ScheduleLine]:
    data = json.dumps({"order": "arrival", **workload}).encode()  # as in vLLM
    return list(ScheduleReplay(parse_workload(data, "here")).lines())


def test_the_recorded_vllm_schedules_are_found() -> None:
    assert len(WORKLOADS) >= 19


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_step_equals_the_one_vllm_schedules(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(RECORDED / f"{name}.json")
    monkeypatch.setattr(
        sys, "argv", ["stepscope", "simulate", path, "--steps", "--order", "arrival"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    ours = lines_of(capsys.readouterr().out)
    theirs = lines_of((RECORDED / f"{name}.steps.jsonl").read_text())
    for mine, expected in zip(ours, theirs, strict=False):
        assert comparable(mine) == comparable(expected), f"step {expected.step} of {name}"
    assert len(ours) == len(theirs)


def small_workload(**changes: object) -> dict[str, object]:
    request = {"arrival_step": 0, "prompt_len": 10, "output_len": 4}
    return {"num_blocks": 5, "block_size": 4, "requests": [request], **changes}


def one_request(**changes: object) -> dict[str, object]:
    request = {"arrival_step": 0, "prompt_len": 2, "output_len": 1, **changes}
    return small_workload(requests=[request])


@pytest.mark.parametrize(
    ("workload", "what"),
    [
        ({"requests": []}, "num_blocks"),
        (small_workload(num_blok=3), "num_blok: unknown field"),
        (small_workload(num_blocks=1), "num_blocks: expected an integer >= 2"),
        (
            small_workload(max_num_batched_tokens=0),
            "max_num_batched_tokens: expected an integer >= 1",
        ),
        (small_workload(batching="dynamic"), "batching: invalid enum value 'dynamic'"),
        (small_workload(budget={"x": 3}), "budget: expected an integer, got a string"),
        (small_workload(budget={"-3": 3}), "budget: steps count from 0"),
        (small_workload(num_blocks=4), "request 0 can never finish: it needs the KV of 13 tokens"),
        (small_workload(max_model_len=13), "request 0 has 14 tokens"),
        (one_request(tokens=[1]), "request 0 has 1 tokens, its prompt_len says 2"),
        (one_request(tokens=[1, -1]), "requests[0].tokens[1]: expected an integer >= 0"),
        (one_request(arrival_step=-1), "requests[0].arrival_step: expected an integer >= 0"),
        (one_request(prompt=[1, 2]), "requests[0].prompt: unknown field"),
        (
            small_workload(enable_chunked_prefill=False, budget={"7": 12}),
            "13 tokens may have to be computed in one step, and the budget is 12 from step 7 on",
        ),
    ],
)
def test_an_invalid_workload_is_refused_in_one_line(workload: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        schedule(workload)
    assert what in str(refusal.value)
    assert str(refusal.value).startswith("here: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"a":' * 5000, b'"x"'])
def test_a_workload_that_is_no_json_object_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^here: .") as refusal:
        parse_workload(data, "here")
    assert "\n" not in str(refusal.value)


def test_a_request_that_fills_every_block_to_the_last_token_is_admitted() -> None:
    # The last of its 17 tokens is never computed: 16 have to find room, in 4 blocks of 4.
    lines = schedule(one_request(prompt_len=12, output_len=5))
    assert [line.free_blocks for line in lines] == [1, 0, 0, 0, 0, 4]


def test_without_chunked_prefill_a_prompt_waits_until_the_budget_is_raised_to_hold_it() -> None:
    workload = small_workload(
        enable_chunked_prefill=False, max_num_batched_tokens=9, budget={"3": 13}
    )
    assert [line.total for line in schedule(workload)] == [0, 0, 0, 10, 1, 1, 1, 0]


def test_prompts_without_given_tokens_share_no_prefix() -> None:
    requests = [
        {"arrival_step": 0, "prompt_len": 4, "output_len": 1, "tokens": [0, 0, 0, 0]},
        {"arrival_step": 1, "prompt_len": 5, "output_len": 1},
        {"arrival_step": 2, "prompt_len": 5, "output_len": 1},
    ]
    totals = [line.total for line in schedule(small_workload(requests=requests))]
    assert totals == [4, 5, 5, 0]


def test_the_watermark_is_a_share_of_all_blocks_as_in_vllm() -> None:
    # 0.1 of 100 blocks are 10, of the 99 usable ones only 9: the second prompt takes 89 of the 90
    # that the first leaves, and has to wait.
    requests = [
        {"arrival_step": 0, "prompt_len": 9 * 4, "output_len": 1},
        {"arrival_step": 0, "prompt_len": 81 * 4, "output_len": 1},
    ]
    for watermark, admitted in ((0.1, [["0"], ["1"]]), (0.09, [["0", "1"], []])):
        workload = small_workload(num_blocks=100, requests=requests, watermark=watermark)
        assert [list(line.sched) for line in schedule(workload)][:2] == admitted
