"""What a session is of, in words: nobody is to take a simulated engine for a real one."""

from stepscope.engine.protocol.wire import EngineInfo

SIMULATED = "simulated"


def model_text(info: EngineInfo) -> str:
    """The model, and whether its steps only were simulated."""
    return info.model if info.simulated is None else f"{info.model}, {SIMULATED}"
