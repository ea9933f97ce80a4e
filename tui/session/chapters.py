"""`CHAPTERS`: the text of each chapter of the guided tour, and what the tour does to the engine.

A text has at most three lines of 78 characters. `{id}` stands for the key of the action with that
id.
"""

from typing import Literal, NamedTuple, TypeAlias

from stepscope.engine.protocol.commands import Command, SetKnobs, SetWorkload
from stepscope.engine.protocol.workload_spec import WorkloadSpec


class SendPrompt(NamedTuple):
    """Act of the tour: send a prompt of made-up tokens; equal seeds make equal prompts."""

    name: str
    num_tokens: int
    seed: int
    max_tokens: int = 12
    waits: bool = False  # whether the next act waits for the last token


class TimedAct(NamedTuple):
    """Act of the demo: a command, or a hint to show, `at_s` seconds after the first act."""

    at_s: float
    command: Command | None = None
    hint: str = ""


Act: TypeAlias = SetWorkload | SetKnobs | SendPrompt | TimedAct


class Chapter(NamedTuple):
    """One chapter of the tour, in three parts: before, question, answer.

    The first of `panels` that is on the screen is highlighted. `is_held`: the picture stops where
    the last prompt ended, for a closer look.
    """

    title: str
    before: str  # text on what will happen
    acts: tuple[Act, ...]  # what the tour then does to the engine
    question: str  # text on where to look, and what to find out
    answer: str  # text with the answer, and what to try
    panels: tuple[str, ...] = ("lanes",)
    page: Literal["live", "kv", "latency"] = "live"  # the page to show; by default the main page
    is_held: bool = False


WHO = "tour"
SMALL, LARGE = 64, 1024  # token budgets
_LONG = 900  # tokens of a long prompt


def _budget(num_tokens: int) -> SetKnobs:
    return SetKnobs(changes={"max_num_batched_tokens": num_tokens}, who=WHO)


def _chats(number: int) -> SetWorkload:
    spec = WorkloadSpec(
        rate=100.0, document_share=0.0, chat_tokens=32, output_tokens=200, max_concurrency=number
    )
    return SetWorkload(workload=spec, who=WHO)


_DOCUMENTS = SetWorkload(
    workload=WorkloadSpec(
        rate=100.0,
        document_share=0.7,
        chat_tokens=96,
        document_tokens=_LONG,
        output_tokens=300,
        max_concurrency=14,
    ),
    who=WHO,
)

CHAPTERS = (
    Chapter(
        "A step",
        "An engine works in steps. In each step the model runs once, for all requests together. "
        "Next: two short chats at a time; when one ends, another begins.",
        (_budget(SMALL), _chats(2)),
        "Each row is a request, each column a step, each ━ a token. "
        "Question: how many steps does the engine make in a second?",
        "steps/s stands beside LIVE. Try: {pause} holds the picture, {step_back} and "
        "{step_forward} go from step to step, {live} follows the engine again.",
    ),
    Chapter(
        "The batch",
        "The requests of one step are its batch. Next: six chats at a time.",
        (_budget(SMALL), _chats(6)),
        "In every step each running request gets one token. "
        "Question: how many tokens does one step make now? Compare steps/s with before.",
        "Six: one for each running request (RUN). Steps are a little longer, but make three times "
        "the tokens: one pass over the weights serves all. Try: {lane_down} selects a request, "
        "{inspect} shows its life, {back} returns.",
    ),
    Chapter(
        "The budget",
        "A step computes at most max_num_batched_tokens tokens: its budget, 64 here. "
        "Next: a prompt of 900 tokens joins the chats.",
        (_budget(SMALL), _chats(6), SendPrompt("long", _LONG, seed=3, waits=True)),
        "▓ and ▒, in turns, are its chunks. Decodes come first; the prompt gets what they leave of "
        "each budget. "
        "Question: over how many steps is it spread?",
        "About 900 / (64 - 6) = 16 steps. Try: {live} follows the engine again; {budget} opens "
        "the budget: type 128 and press Enter. At 128 it would be 8 steps.",
        ("chart", "lanes"),
        is_held=True,
    ),
    Chapter(
        "A freeze",
        "A budget of 1,024 lets the whole prompt into one step. "
        "Next: that budget, and another prompt of 900 tokens.",
        (_budget(LARGE), _chats(6), SendPrompt("whole", _LONG, seed=4, waits=True)),
        "The prompt needs one long step, and all chats wait for it. "
        "Question: which mark under the chart says that their tokens came late?",
        "The !: a token of that step broke its service level. Try: {axis} makes columns equal in "
        "time, and each chat has a gap. {worst} goes to the worst stall in memory.",
        ("chart", "lanes"),
        is_held=True,
    ),
    Chapter(
        "Chunks",
        "With a small budget the prompt is cut into chunks. "
        "Next: budget 64 again, and another prompt of 900 tokens.",
        (_budget(SMALL), _chats(6), SendPrompt("chunked", _LONG, seed=5, waits=True)),
        "The chats go on beside the chunks: each column has their ━. "
        "Question: what does the prompt pay for that?",
        "Its first token comes later: {inspect} shows its TTFT. In return no chat waits long "
        "(ITL). Every budget is such a trade. Try: {live} follows the engine again, {budget} "
        "sets another budget.",
        is_held=True,
    ),
    Chapter(
        "The knee",
        "Which budget is good? Next: three prompts of 900 tokens, with budgets of 32, 64 and 256. "
        "It takes some seconds.",
        (
            _chats(6),
            _budget(32),
            SendPrompt("budget-32", _LONG, seed=6, max_tokens=2, waits=True),
            _budget(64),
            SendPrompt("budget-64", _LONG, seed=7, max_tokens=2, waits=True),
            _budget(256),
            SendPrompt("budget-256", _LONG, seed=8, max_tokens=2, waits=True),
            _budget(SMALL),
        ),
        "◆ marks each change of the budget. "
        "Question: how many steps does each of the three prompts take, and how long are they?",
        "About 35, 16 and 4. Small chunks waste the fixed cost of a step. Beyond the knee, larger "
        "ones only make it longer. Try: {axis} makes columns equal in time.",
        ("chart", "lanes"),
        is_held=True,
    ),
    Chapter(
        "KV blocks",
        "The keys and values of all tokens stay in memory, in blocks of 16 tokens. "
        "Next: the map of all blocks, while six chats and a long prompt run.",
        (_budget(SMALL), _chats(6), SendPrompt("blocks", _LONG, seed=9, waits=True)),
        "Each cell stands for some blocks: used, cached or empty. "
        "Question: how many blocks does the prompt of 900 tokens fill?",
        "900 / 16: 57, and one more after each 16 tokens of its answer. "
        "Try: {sort} shows which request owns which blocks.",
        ("page",),
        "kv",
        is_held=True,
    ),
    Chapter(
        "Prefix hits",
        "Blocks of an ended request stay in the cache until others need them. "
        "Next: one prompt of 900 tokens, and then the same prompt again.",
        (
            _budget(SMALL),
            _chats(4),
            SendPrompt("first", _LONG, seed=10, max_tokens=4, waits=True),
            SendPrompt("again", _LONG, seed=10, waits=True),
        ),
        "░ are prompt tokens that the cache had. The second prompt is the selected row. "
        "Question: how many of its tokens were computed?",
        "Only the 4 after its 56 full blocks: its first token comes almost at once. "
        "Try: {inspect} shows its life, with its TTFT.",
        is_held=True,
    ),
    Chapter(
        "Preemption",
        "If no block is free, a running request gives up its blocks and waits. "
        "Next: more long documents than the memory holds.",
        (_budget(SMALL), _DOCUMENTS),
        "Watch KV fill up; then ✗ marks a preempted request. It takes some seconds. "
        "Question: what must it do when it comes back?",
        "Compute its prompt and its output again. No stream gets a token from that. "
        "Try: {previous_preemption} goes to a preemption, {live} follows the engine again.",
    ),
    Chapter(
        "Why was this token late?",
        "Each late token has a cause. "
        "Next: the list of all tokens that came later than their service level.",
        (_budget(SMALL), _DOCUMENTS),
        "A row is a late token: its step, its request, how long it took, and why. "
        "Question: which cause is the most frequent?",
        "A prompt beside it, the queue, or a preemption: you saw each of them happen. "
        "Try: {lane_down} selects a row, {inspect} goes to its step.",
        ("page",),
        "latency",
    ),
)
