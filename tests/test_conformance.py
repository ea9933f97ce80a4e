"""With order=arrival and reserve=prompt, every step is the one vLLM 0.32.0 schedules."""

import json
from pathlib import Path

import msgspec
import pytest

from stepscope.engine.config import ConfigError
from stepscope.engine.schedule import ScheduleLine, load_workload, replay

RECORDED = Path(__file__).parent / "conformance"
WORKLOADS = sorted(path.stem for path in RECORDED.glob("*.json"))


def recorded_steps(name: str) -> list[ScheduleLine]:
    lines = (RECORDED / f"{name}.steps.jsonl").read_text().splitlines()
    return [msgspec.json.decode(line, type=ScheduleLine) for line in lines]


def comparable(line: ScheduleLine) -> dict[str, object]:
    values = msgspec.to_builtins(line)
    values["sched"] = list(line.sched.items())  # the order counts
    values["preempted"] = sorted(line.preempted)  # recorded from a set
    return values


def test_the_recorded_schedules_are_there() -> None:
    assert len(WORKLOADS) >= 7


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_step_is_the_one_vllm_schedules(name: str) -> None:
    ours = list(replay(load_workload(RECORDED / f"{name}.json")))
    theirs = recorded_steps(name)
    for mine, expected in zip(ours, theirs, strict=False):
        assert comparable(mine) == comparable(expected), f"step {expected.step} of {name}"
    assert len(ours) == len(theirs)


def small_workload(**changes: object) -> dict[str, object]:
    request = {"arrival_step": 0, "prompt_len": 10, "output_len": 4}
    return {"num_blocks": 5, "block_size": 4, "requests": [request], **changes}


@pytest.mark.parametrize(
    ("workload", "what"),
    [
        ({"requests": []}, "num_blocks"),
        (small_workload(num_blok=3), "num_blok"),
        (small_workload(num_blocks=1), "num_blocks"),
        (small_workload(max_num_batched_tokens=0), "max_num_batched_tokens"),
        (small_workload(num_blocks=4), "request 0 needs 14 tokens"),
        (
            small_workload(
                requests=[{"arrival_step": 0, "prompt_len": 2, "output_len": 1, "tokens": [1]}]
            ),
            "request 0 has 1 tokens",
        ),
    ],
)
def test_a_broken_workload_is_refused_in_one_line(
    workload: dict[str, object], what: str, tmp_path: Path
) -> None:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(workload))
    with pytest.raises(ConfigError) as refusal:
        load_workload(path)
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_watermark_is_the_share_of_all_blocks_that_vllm_takes(tmp_path: Path) -> None:
    # 0.1 of 100 blocks are 10, of the 99 usable ones only 9: the second prompt takes 89 of the 90
    # that the first leaves, and has to wait.
    requests = [
        {"arrival_step": 0, "prompt_len": 9 * 4, "output_len": 1},
        {"arrival_step": 0, "prompt_len": 81 * 4, "output_len": 1},
    ]
    path = tmp_path / "workload.json"
    workload = small_workload(num_blocks=100, requests=requests)
    path.write_text(json.dumps({**workload, "watermark": 0.1}))
    assert [list(line.sched) for line in replay(load_workload(path))][:2] == [["0"], ["1"]]
    path.write_text(json.dumps({**workload, "watermark": 0.09}))
    assert list(next(replay(load_workload(path))).sched) == ["0", "1"]
