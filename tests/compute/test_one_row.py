"""How a weight multiplies one row on a GPU is chosen: the fastest product that is right."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.kernels.dispatch import linear
from stepscope.kernels.dispatch.linear import fastest, one_row_product


class Clock:
    """Gives the time by which product was called last."""

    def __init__(self, **ms: float) -> None:
        self._ms = ms
        self.last = ""

    def product(self, name: str, change: float = 0.0) -> Callable[..., torch.Tensor]:
        def multiply(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            self.last = name
            return F.linear(x, weight, bias) + change

        return multiply

    def __call__(self, run: Callable[[], object], num_products: int) -> float:
        assert num_products == 2
        run()
        return self._ms[self.last]


def chosen(clock: Clock, **changes: float) -> str | None:
    """The name of the product chosen, if each kernel is wrong by so much; None: plain torch's."""
    x = torch.full((1, 4), 1.0)
    inputs = [(x, torch.full((3, 4), 0.5), None)] * 2
    kernels = {name: clock.product(name, change) for name, change in changes.items()}
    found = fastest(clock.product("plain"), kernels, inputs, clock)
    return next((name for name, each in kernels.items() if each is found), None)


def test_the_fastest_kernel_is_chosen_and_plain_torch_where_none_is_faster() -> None:
    assert chosen(Clock(plain=3, slow=2, fast=1), slow=0, fast=0) == "fast"
    assert chosen(Clock(plain=3, slow=4, same=3), slow=0, same=0) is None


@pytest.mark.parametrize("change", [0.1, float("nan"), float("inf")])
def test_a_wrong_kernel_is_refused_however_fast_it_is(
    change: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "stepscope.kernels"):
        assert chosen(Clock(plain=3, good=2, wrong=1), wrong=change, good=0.01) == "good"
    assert "wrong is wrong here" in caplog.text


def test_where_the_trial_fails_torch_multiplies(caplog: pytest.LogCaptureFixture) -> None:
    weight = SimpleNamespace(
        is_cuda=True,
        is_contiguous=lambda: True,
        itemsize=2,
        nbytes=2 << 20,
        shape=torch.Size((1024, 1024)),
        dtype=torch.bfloat16,
        device=torch.device("meta"),  # has no random numbers
    )
    with caplog.at_level(logging.WARNING, "stepscope.kernels"):
        assert one_row_product(cast(torch.Tensor, weight), None, is_gated=False) is None
    assert "torch takes its place" in caplog.text


def test_weights_on_a_cpu_are_not_tried() -> None:
    weight = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    assert one_row_product(weight, None, is_gated=False) is None


def test_only_one_row_is_multiplied_by_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(weight: torch.Tensor, bias: Any, *, is_gated: bool) -> Callable[..., torch.Tensor]:
        return lambda x: torch.full((1, 1), 7.0)

    monkeypatch.setattr(linear, "one_row_product", choose)
    monkeypatch.setattr(linear, "is_usable", lambda weight: False)
    product = linear.Linear(torch.ones(3, 4))
    assert product(torch.ones(1, 4)).tolist() == [[7.0]]
    assert product(torch.ones(2, 4)).tolist() == [[4.0] * 3] * 2
