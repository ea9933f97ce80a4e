"""Sample recordings that are shipped with stepscope, and what each of them shows.

May import: nothing of ours.
A new sample is a `.mcap` file here, a line in `SHOWS` and a paragraph in `README.md`.
"""

from collections.abc import Mapping
from pathlib import Path

# Name -> what it shows, in the order in which they are best viewed.
SHOWS: Mapping[str, str] = {
    "freeze": "long prompts prefilled whole: every chat stands still for most of a second",
    "chunked": "the same prompts in chunks of 256 tokens: the chats go on beside them",
    "vllm": "an unmodified vLLM 0.32 whose token budget is turned from 1,024 to 256",
    "h200": "Qwen3-8B on an H200: long prompts in chunks of 2,048 tokens beside 64 streams",
    "speculation": "a model that guesses ahead: copies take several tokens a step, chats do not",
}
# Those that show how long something takes: best viewed on the axis of time.
ABOUT_TIME = frozenset({"freeze", "chunked"})


def shipped() -> dict[str, Path]:
    """Name -> path of each sample: first those of `SHOWS`, in that order."""
    found = {each.stem: each for each in sorted(Path(__file__).parent.glob("*.mcap"))}
    known = {name: found.pop(name) for name in SHOWS if name in found}
    return known | found
