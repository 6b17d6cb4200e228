"""rocmega: one persistent kernel per decode step ("mega-task") for large language models on AMD GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocmega.llm import LLM as LLM
    from rocmega.llm import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, and `rocmega --help` should not wait for it.
    if name in ("LLM", "SamplingParams"):
        from rocmega import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'rocmega' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
