"""rocmega: the whole decode step of a language model in one persistent kernel.

    from rocmega import LLM, SamplingParams

Names load on first use, so that importing the package costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocmega.errors import RocmegaError as RocmegaError
    from rocmega.llm import LLM as LLM
    from rocmega.llm import CompletionOutput as CompletionOutput
    from rocmega.llm import RequestOutput as RequestOutput
    from rocmega.llm import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "RocmegaError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rocmega' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("rocmega.errors" if name == "RocmegaError" else "rocmega.llm"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
