"""Text for the model of a session, so that nobody takes a simulated engine for a real one."""

from stepscope.engine.protocol.wire import EngineInfo

SIMULATED = "simulated"


def model_text(info: EngineInfo) -> str:
    """The model name, marked as simulated if the steps were simulated."""
    return info.model if info.simulated is None else f"{info.model}, {SIMULATED}"
