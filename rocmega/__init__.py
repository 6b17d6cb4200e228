"""rocmega: the whole decode step of a language model in one persistent kernel.

    from rocmega import LLM, SamplingParams

Names load on first use, so that importing the package costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocmega.engine import Engine as Engine
    from rocmega.engine import Request as Request
    from rocmega.errors import RocmegaError as RocmegaError
    from rocmega.llm import LLM as LLM
    from rocmega.outputs import CompletionOutput as CompletionOutput
    from rocmega.outputs import RequestOutput as RequestOutput
    from rocmega.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"
_HOMES = {
    "CompletionOutput": "outputs",
    "Engine": "engine",
    "LLM": "llm",
    "Request": "engine",
    "RequestOutput": "outputs",
    "RocmegaError": "errors",
    "SamplingParams": "sampling",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rocmega' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"rocmega.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
