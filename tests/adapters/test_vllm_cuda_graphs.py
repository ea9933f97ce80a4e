"""The CUDA graph and the padding of a step, as vLLM reports them with `--cudagraph-metrics`."""

from types import SimpleNamespace

import pytest

from stepscope.engine.protocol.wire import StepRecord
from tests.adapters.conftest import Attach, published
from tests.adapters.played_vllm import PlayedScheduler


def records(attach: Attach, model_output: object) -> list[StepRecord]:
    """The steps of a played session whose worker returns this for each of them."""
    scheduler = PlayedScheduler("0.32.0", "chunked")
    scheduler.model_output = model_output
    attachment = attach(scheduler)
    for _ in scheduler.play():
        pass
    with attachment.notes.done():
        found = [each for _, each in published(attachment) if isinstance(each, StepRecord)]
    attachment.close()
    assert len(found) > 10
    return found


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_steps_name_the_cuda_graph_and_padding_that_vllm_reports(attach: Attach, mode: str) -> None:
    stats = SimpleNamespace(runtime_mode=mode, num_paddings=5)
    found = records(attach, SimpleNamespace(cudagraph_stats=stats))
    assert {(each.cuda_graph, each.num_padded_tokens) for each in found} == {(mode.lower(), 5)}


@pytest.mark.parametrize("output", [object(), SimpleNamespace(cudagraph_stats=None)])
def test_graph_and_padding_are_unknown_without_vllms_graph_metrics(
    attach: Attach, output: object
) -> None:
    found = records(attach, output)
    assert {(each.cuda_graph, each.num_padded_tokens) for each in found} == {(None, None)}
