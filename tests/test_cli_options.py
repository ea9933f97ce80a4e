"""One table of fields makes the options; flags win over the environment, that over the file."""

import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.commands import WorkloadSpec
from stepscope.engine.config import EngineConfig, Knobs
from stepscope.tui.commands.errors import WrongUsage
from stepscope.tui.commands.options import resolve, with_options
from stepscope.tui.settings import DashboardSettings


@pytest.fixture(autouse=True)
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "stepscope" / "config.toml"
    path.parent.mkdir()
    return path


def test_flags_win_over_the_environment_and_the_environment_over_the_file(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve(Knobs, "knobs", {}) == Knobs()
    config_file.write_text("[knobs]\nmax_num_seqs = 1\nmax_num_batched_tokens = 1\nwatermark = 0.1")
    monkeypatch.setenv("STEPSCOPE_KNOBS_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("STEPSCOPE_KNOBS_MAX_NUM_BATCHED_TOKENS", "2")
    knobs = resolve(Knobs, "knobs", {"max_num_seqs": "3"})
    assert knobs == Knobs(max_num_seqs=3, max_num_batched_tokens=2, watermark=0.1)


def test_a_commands_own_defaults_give_way_to_everything_else(config_file: Path) -> None:
    defaults = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
    config_file.write_text("[knobs]\nmax_num_seqs = 5\n")
    knobs = resolve(Knobs, "knobs", {}, defaults)
    assert (knobs.max_num_batched_tokens, knobs.max_num_seqs) == (256, 5)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("0", False), ("1", True)])
def test_switches_in_the_environment_are_words_or_digits(
    monkeypatch: pytest.MonkeyPatch, text: str, value: bool
) -> None:
    monkeypatch.setenv("STEPSCOPE_KNOBS_ENABLE_CHUNKED_PREFILL", text)
    assert resolve(Knobs, "knobs", {}).enable_chunked_prefill is value


def test_a_wrong_value_is_blamed_on_where_it_came_from(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WrongUsage, match=r"^--block-size: expected a whole number of at least 1 "):
        resolve(EngineConfig, "serve", {"block_size": "0"})
    monkeypatch.setenv("STEPSCOPE_LOAD_RATE", "-1")
    with pytest.raises(WrongUsage, match=r"^STEPSCOPE_LOAD_RATE: expected a number above 0 "):
        resolve(WorkloadSpec, "load", {})
    config_file.write_text("[dashboard]\ntheme = 'pink'\n")
    with pytest.raises(WrongUsage, match=r"config.toml: \[dashboard\] theme = 'pink'"):
        resolve(DashboardSettings, "dashboard", {})


def test_every_field_is_an_option_with_a_description() -> None:
    taken: dict[str, Any] = {}

    @with_options("serve", "knobs", "load", "dashboard")
    def command(own: str = "", *, flags: dict[str, Any]) -> None:
        taken.update(own=own, flags=flags)

    parameters = inspect.signature(command).parameters
    kinds = (EngineConfig, Knobs, WorkloadSpec, DashboardSettings)
    names = {field.name for kind in kinds for field in msgspec.structs.fields(kind)}
    assert set(parameters) == {"own"} | names
    for name in names:
        assert parameters[name].annotation.__metadata__[0].help
    arguments = dict.fromkeys(parameters, None)
    command(**{**arguments, "own": "x", "model": "m", "rate": "2"})
    assert taken == {"own": "x", "flags": {"model": "m", "rate": "2"}}
