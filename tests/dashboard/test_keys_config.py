"""Keys from the config file, what the dashboard writes into it, and `stepscope config`."""

import os
import stat
import string
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.keys import _character_to_key

from stepscope.tui.app.app import Dashboard
from stepscope.tui.cli.dashboards.dashboard import dashboard_options
from stepscope.tui.settings.actions import ACTIONS, BY_ID, Abilities, footer_entries, remapped
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.key_names import KeyNameError, parse, shown, written
from stepscope.tui.settings.preferences import ConfigFileError, Preferences, changed
from stepscope.tui.settings.settings import (
    DashboardSettings,
    config_path,
    load_actions,
    load_settings,
)
from tests.support.screens.palette import offered_in_palette
from tests.support.screens.screen_text import help_lines, line_texts, screen_text
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("STEPSCOPE_CONFIG", raising=False)
    return tmp_path / "config" / "stepscope" / "config.toml"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# Names of keys


def test_key_names_of_printable_characters_equal_those_of_textual() -> None:
    for character in string.printable[:95]:
        key = parse(character)
        assert key == _character_to_key(character)
        assert parse(key) == key
        assert parse(written(key)) == key


@given(st.text(max_size=12))
def test_any_text_parses_as_a_key_or_gets_an_explanation(text: str) -> None:
    try:
        key = parse(text)
    except KeyNameError:
        return
    assert parse(written(key)) == key
    assert shown(key)


@pytest.mark.parametrize(
    ("text", "key", "for_people"),
    [
        ("ctrl+l", "ctrl+l", "^l"),
        ("Shift+Left", "shift+left", "⇧←"),
        ("shift+a", "A", "A"),
        ("PgUp", "pageup", "PgUp"),
        ("question_mark", "question_mark", "?"),
        ("ctrl++", "ctrl+plus", "^+"),
        ("F5", "f5", "F5"),
    ],
)
def test_a_key_may_be_spelled_in_several_ways(text: str, key: str, for_people: str) -> None:
    assert parse(text) == key
    assert shown(key) == for_people


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ctrl+c", "always leaves"),
        ("ctrl+i", "as tab"),
        ("hyper+x", "'hyper' is not a modifier; there are: alt, ctrl, shift"),
        ("spcae", "'spcae' is not a key"),
        ("shift+1", "write the character"),
        ("", "is not a key"),
    ],
)
def test_a_key_that_no_terminal_can_send_is_refused(text: str, said: str) -> None:
    with pytest.raises(KeyNameError, match=said):
        parse(text)


# The section [keys]


def test_the_config_file_remaps_actions_to_other_keys(config_file: Path) -> None:
    write(config_file, '[keys]\npause = "f7"\nzoom_in = ["ctrl+up", "+"]\nmore_frames = []\n')
    actions = {action.id: action for action in load_actions()}
    assert actions["pause"].keys == ("f7",)
    assert actions["zoom_in"].keys == ("ctrl+up", "plus")
    assert actions["more_frames"].keys == ()
    assert actions["more_frames"].shown == "no key"
    unchanged = set(actions) - {"pause", "zoom_in", "more_frames"}
    assert all(actions[name].keys == BY_ID[name].keys for name in unchanged)
    footer = footer_entries(Abilities(actions=remapped({"pause": []})))
    assert "pause" not in {action_id for action_id, *_ in footer}
    swapped = {action.id: action for action in remapped({"pause": "z", "zoom_in": "space"})}
    assert (swapped["pause"].keys, swapped["zoom_in"].keys) == (("z",), ("space",))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('puase = "p"', r"unknown key 'puase' in \[keys\] \(did you mean 'pause'\?\).*config keys"),
        (
            'pause = "spcae"',
            r"\[keys\] pause = 'spcae': 'spcae' is not a key; a key is a character",
        ),
        ("pause = 3", r"\[keys\] pause = 3: write \"p\", or \[\"p\", \"f5\"\]"),
        ('pause = "z"', r"\[keys\] pause = 'z': z is the key of zoom_in .* f2 to f24"),
        ('goto = "f8"\nfilter = "f8"', r"\[keys\] (goto|filter) = 'f8': F8 is the key of"),
        ('pause = "ctrl+c"', r"\[keys\] pause = 'ctrl\+c': ctrl\+c always leaves"),
    ],
)
def test_a_wrong_line_is_reported_with_what_is_allowed(
    config_file: Path, line: str, said: str
) -> None:
    write(config_file, f"[keys]\n{line}\n")
    with pytest.raises(WrongUsage, match=rf"config.toml: {said}") as raised:
        load_settings()
    assert "\n" not in str(raised.value)


async def test_bindings_footer_help_palette_and_hints_show_remapped_keys(still_source: Any) -> None:
    source = still_source()
    actions = remapped(
        {"pause": "f7", "screen_live": "f2", "palette": "f9", "mark": "X", "zoom_in": "Z"}
    )
    app = Dashboard(source, any_terminal=True, fps=1.0, actions=actions)
    async with app.run_test(size=(200, 60)) as pilot:
        footer = screen_text(app).splitlines()[-1]
        assert " F7 Pause" in footer
        assert "Z/x Zoom" in footer
        await pilot.press("space")
        assert app.main.view.live
        await pilot.press("f7")
        assert not app.main.view.live
        await pilot.press("4", "x")
        assert "x does nothing here; F2 is the main screen" in screen_text(app)
        await pilot.press("f2", "apostrophe")
        assert "no mark yet; X sets one" in screen_text(app)
        await pilot.press("ctrl+p")
        assert app.screen is app.main
        await pilot.press("f9", *"pause")
        first = (await offered_in_palette(app))[0]
        assert first.startswith("F7 ")
        assert "stop here" in first
        await pilot.press("enter")
        await until(lambda: app.main.view.live, "it does not go on")
    text = "\n".join(line_texts(help_lines(app.main.session.abilities)))
    assert "(again, or L: back)" in text
    moved = Abilities(has=frozenset({"live"}), actions=remapped({"live": "G"}))
    text = "\n".join(line_texts(help_lines(moved)))
    assert "(again, or G: back)" in text


def test_in_ascii_arrow_keys_are_named_by_words_because_their_signs_are_other_keys() -> None:
    entries = footer_entries(Abilities(has=frozenset({"replay"})).written(ascii_only=True))
    keys = {action_id: key for action_id, key, _ in entries}
    assert keys["step_back"] == "Left/Right"
    assert keys["slower"] == "< >"
    assert all(key.isascii() for key in keys.values())


# What the app writes


def test_writing_a_setting_keeps_the_rest_of_the_config_file(config_file: Path) -> None:
    before = (
        "# mine\n[knobs]\nmax_num_seqs = 8   # few\n\n[dashboard]\n# eyes\n"
        "theme = 'dark'  # night\n\n[keys]\npause = 'f7'\n"
    )
    write(config_file, before)
    config_file.chmod(0o640)
    changed(config_file, "dashboard", {"theme": "light", "fps": 5.0})
    after = config_file.read_text()
    assert after == before.replace("theme = 'dark'", 'theme = "light"').replace(
        "# night\n", "# night\nfps = 5.0\n"
    )
    assert stat.S_IMODE(config_file.stat().st_mode) == 0o640
    assert load_settings()["dashboard"] == {"theme": "light", "fps": 5.0}
    assert [each.name for each in config_file.parent.iterdir()] == ["config.toml"]


def test_a_missing_file_is_created_and_a_link_stays_a_link(
    config_file: Path, tmp_path: Path
) -> None:
    real = tmp_path / "dotfiles" / "stepscope.toml"
    config_file.parent.mkdir(parents=True)
    config_file.symlink_to(real)
    changed(config_file, "dashboard", {"ascii": True})
    assert config_file.is_symlink()
    assert tomllib.loads(real.read_text()) == {"dashboard": {"ascii": True}}


@pytest.mark.parametrize("text", ["[dashboard\n", "dashboard = 3\n"])
def test_a_file_that_cannot_be_parsed_is_left_unchanged(config_file: Path, text: str) -> None:
    write(config_file, text)
    with pytest.raises(ConfigFileError, match=r"config\.toml"):
        changed(config_file, "dashboard", {"theme": "light"})
    assert config_file.read_text() == text
    with pytest.raises(ConfigFileError, match="/proc/stepscope: "):  # where none can be written
        changed(Path("/proc/stepscope/config.toml"), "dashboard", {"theme": "light"})


def test_only_changed_settings_are_written(config_file: Path) -> None:
    began: dict[str, Any] = {"theme": "dark", "ascii": None, "fps": None, "sort": "arrival"}
    preferences = Preferences(config_file, began)
    preferences.set("theme", "light")
    preferences.set("theme", "dark")
    assert preferences.save() is None
    assert not config_file.exists()  # the file is unchanged
    preferences.set("theme", "light")
    preferences.set("ascii", True)
    assert preferences.save() is None
    assert tomllib.loads(config_file.read_text())["dashboard"] == {"theme": "light", "ascii": True}
    config_file.unlink()
    readonly = dashboard_options(DashboardSettings(readonly=True))["preferences"]
    readonly.set("theme", "light")
    assert readonly.save() is None
    assert not config_file.exists()


async def test_settings_changed_by_keys_are_saved_at_the_end(
    still_source: Any, config_file: Path
) -> None:
    write(config_file, "[dashboard]\nslo_itl_ms = 30.0\n")
    source = still_source()
    preferences = Preferences(config_file, dict.fromkeys(("theme", "ascii", "fps", "sort", "axis")))
    app = Dashboard(source, any_terminal=True, fps=1.0, preferences=preferences)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("T", "v", "plus", "o", "t")
    app.close()
    saved = {"theme": "light", "ascii": True, "fps": 2.0, "sort": "state", "axis": "time"}
    assert tomllib.loads(config_file.read_text())["dashboard"] == {"slo_itl_ms": 30.0, **saved}


async def test_settings_that_cannot_be_saved_still_apply_and_are_reported_at_the_end(
    still_source: Any, config_file: Path
) -> None:
    source = still_source()
    write(config_file, "[dashboard\n")
    preferences = Preferences(config_file, {"theme": "dark"})
    app = Dashboard(source, any_terminal=True, fps=20.0, preferences=preferences)
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.press("T")
        assert app.main.skin.mode == "light"
    app.close()
    assert app.last_words()[0].startswith(f"settings are not kept: {config_file} is not TOML")
    assert config_file.read_text() == "[dashboard\n"


# stepscope config


def test_the_config_command_says_where_each_value_comes_from(
    stepscope: Any, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(config_file, '[dashboard]\nfps = 4\ntheme = "light"\n[keys]\npause="f7"\n')
    monkeypatch.setenv("STEPSCOPE_DASHBOARD_THEME", "dark")
    monkeypatch.setenv("STEPSCOPE_HTTP_API_KEY", "very secret")
    code, out, _ = stepscope("config")
    assert code == 0
    pairs = (line.split("#", 1) for line in out.splitlines() if " # " in line)
    assert {name.strip(): origin.strip() for name, origin in pairs}.items() >= {
        ("fps = 4.0", "config.toml"),
        ('theme = "dark"', "STEPSCOPE_DASHBOARD_THEME"),
        ("readonly = false", "default"),
        ('pause = "f7"', "config.toml"),
        ('zoom_in = "z"', "default"),
    }
    assert out.startswith(f"# {config_file}\n")
    assert "very secret" not in out
    assert "# api_key" in out


def test_the_output_of_config_is_a_config_file(stepscope: Any, config_file: Path) -> None:
    _, out, _ = stepscope("config")
    assert "(there is none yet)" in out
    write(config_file, out)
    _, again, _ = stepscope("config")
    stripped = [line.split(" # ")[0].rstrip() for line in out.splitlines()[1:]]
    assert [line.split(" # ")[0].rstrip() for line in again.splitlines()[1:]] == stripped
    assert [action.keys for action in load_actions()] == [action.keys for action in ACTIONS]


def test_the_config_command_shows_alert_rules(stepscope: Any, config_file: Path) -> None:
    assert "# [[alerts]]" in stepscope("config", "alerts")[1]
    rules = ["itl_p99 > 50ms for 30s", "step_in_flight > 5s"]
    write(config_file, "".join(f'[[alerts]]\nwhen = "{rule}"\n' for rule in rules))
    _, out, _ = stepscope("config", "alerts")
    assert tomllib.loads(out) == {"alerts": [{"when": rule} for rule in rules]}
    assert stepscope("config")[1].count("[[alerts]]") == 2
    write(config_file, '[[alerts]]\nwhen = "itl_p98 > 50ms"\n')
    code, _, error = stepscope("config", "alerts")
    assert code == 2
    assert "itl_p98" in error


def test_the_config_command_can_show_one_section(stepscope: Any) -> None:
    assert set(tomllib.loads(stepscope("config", "keys")[1])) == {"keys"}
    code, _, error = stepscope("config", "kyes")
    assert code == 2
    assert "there is no section 'kyes'; there are: serve, " in error


def test_an_environment_variable_names_another_config_file_or_none(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(config_file, "[dashboard]\nfps = 4\n")
    write(tmp_path / "stepscope" / "other.toml", "[dashboard]\nfps = 7\n")
    assert load_settings()["dashboard"] == {"fps": 4}
    monkeypatch.setenv("STEPSCOPE_CONFIG", str(tmp_path / "stepscope" / "other.toml"))
    assert load_settings()["dashboard"] == {"fps": 7}
    monkeypatch.setenv("STEPSCOPE_CONFIG", "none")
    assert load_settings()["dashboard"] == {}
    assert config_path() == Path(os.devnull)
