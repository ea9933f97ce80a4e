"""`stepscope config`: every setting and where it comes from; its output is a valid config file."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import tomlkit

from stepscope.tui.cli.shared.options import argument, command
from stepscope.tui.cli.shared.output import say
from stepscope.tui.settings import settings
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.key_names import written
from stepscope.tui.settings.setting_values import base_and_meta, settled

_SECRET = frozenset({"api_key"})
_COMMENT_COLUMN = 44


@command("stepscope config", "stepscope config dashboard")
def config(
    section: str | None = argument("SECTION", "show only this section (default: all)"),
) -> None:
    """Show the settings, and where each of them comes from."""
    path = settings.config_path()
    names = [*settings.SECTIONS, settings.KEYS, settings.ALERTS]
    if section is not None and section not in names:
        raise WrongUsage(f"there is no section {section!r}; there are: {', '.join(names)}")
    unknown = settings.unknown_variables()
    say(
        f"# {path}" + ("" if path.exists() else " (there is none yet)"),
        *(f"# {each} is set, but no setting has this name" for each in unknown),
    )
    for name in settings.SECTIONS:
        if section in (None, name):
            say("", f"[{name}]", *_section(name))
    if section in (None, settings.KEYS):
        say("", f"[{settings.KEYS}]")
        changed = settings.load_settings()[settings.KEYS]
        for action in settings.load_actions():
            keys = [written(key) for key in action.keys]
            origin = path.name if action.id in changed else "default"
            say(_line(f"{action.id} = {_toml(keys[0] if len(keys) == 1 else keys)}", origin))
    if section in (None, settings.ALERTS):
        rules, heading = settings.load_alerts(), f"[[{settings.ALERTS}]]"
        if not rules:
            say("", _line(f"# {heading}", 'none; like when = "itl_p99 > 50ms for 30s"'))
        for rule in rules:
            say("", heading, _line(f"when = {_toml(rule.text)}", path.name))


def _section(section: settings.Section) -> Iterator[str]:
    kind = settings.SECTIONS[section]
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, (value, origin) in settled(kind, section, {}).items():
        about = origin or "default"
        if value is None:
            text = base_and_meta(fields[name])[1].description or ""
            described = re.search(r"\((default: [^)]*)\)", text)
            yield _line(f"# {name}", described[1] if described and not origin else about)
        elif name in _SECRET:
            yield _line(f"# {name}", f"{about}, {'not shown' if value else 'not set'}")
        else:
            yield _line(f"{name} = {_toml(value)}", about)


def _line(text: str, comment: str) -> str:
    return f"{text:<{_COMMENT_COLUMN}} # {comment}"


def _toml(value: Any) -> str:
    plain = msgspec.to_builtins(value)
    if isinstance(plain, dict):
        table = tomlkit.inline_table()
        table.update(plain)
        return table.as_string()
    return str(tomlkit.item(plain).as_string())
