"""The README tells the truth about keys and knobs."""

from pathlib import Path

import pytest

from stepscope.engine.config import Knobs
from stepscope.tui.actions import key_table

README = Path(__file__).parent.parent / "README.md"


def test_the_key_table_is_the_action_table() -> None:
    text = README.read_text()
    table = text.split("<!-- keys -->\n")[1].split("\n<!-- /keys -->")[0]
    assert table == key_table(), f"put this between the key markers:\n{key_table()}"


@pytest.mark.parametrize(("name", "value"), Knobs().as_dict().items())
def test_every_knob_is_described_with_its_default(name: str, value: object) -> None:
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    assert f"| `{name}` | {shown} |" in README.read_text()
