"""One table of fields makes the options; flags win over the environment, that over the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.tui.cli.shared.options import command as made_by
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings


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
    for text, value in (("true", True), ("0", False), ("1", True)):
        monkeypatch.setenv("STEPSCOPE_KNOBS_ENABLE_CHUNKED_PREFILL", text)
        assert resolve(Knobs, "knobs", {}).enable_chunked_prefill is value
    own = {"max_num_seqs": 8, "long_prefill_token_threshold": 64}  # a command's own defaults
    knobs = resolve(Knobs, "knobs", {}, own)
    assert (knobs.max_num_seqs, knobs.long_prefill_token_threshold) == (2, 64)


def test_an_error_about_a_value_says_where_the_value_was_set(
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


def test_every_setting_is_a_command_line_option_with_a_description() -> None:
    taken: dict[str, Any] = {}

    @made_by(sections=("serve", "knobs", "load", "dashboard"))
    def command(own: str = "", *, flags: dict[str, Any]) -> None:
        taken.update(own=own, flags=flags)

    parameters = {each.name: each for each in command.parameters()}
    kinds = (EngineConfig, Knobs, WorkloadSpec, DashboardSettings)
    names = {field.name for kind in kinds for field in msgspec.structs.fields(kind)}
    assert set(parameters) == {"own"} | names
    for name in names:
        assert parameters[name].annotation.__metadata__[0].help
    command.run({**dict.fromkeys(parameters, None), "own": "x", "model": "m", "rate": "2"})
    assert taken == {"own": "x", "flags": {"model": "m", "rate": "2"}}


def test_a_service_level_without_a_unit_is_in_milliseconds(stepscope: Callable[..., Any]) -> None:
    for text in ("20ms", "0.02s", "20"):
        found = resolve(DashboardSettings, "dashboard", {"slo_itl_ms": text})
        assert found.slo_itl_ms == 20.0, text
    done = stepscope("stats", "freeze", "--slo-itl", "soon")
    assert done.exit_code == 2
    assert done.stderr.endswith("--slo-itl: expected a duration such as 50ms or 0.5s, got 'soon'\n")
