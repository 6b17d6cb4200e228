"""Every way to give prompts, made one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from rocmega.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several, as a list of prompts. A list of numbers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed = list(prompts)
    if not listed:
        raise RequestError("There is no prompt: give text or token ids.")
    several = [hasattr(item, "__len__") for item in listed]
    if any(several) and not all(several):
        raise RequestError("Prompts are mixed with single token ids: give a list of prompts, or the ids of one prompt.")
    return listed if all(several) else [listed]


def token_ids(name: str, prompt: Any) -> list[int]:
    """The ids of a prompt that is not text; `name` says which prompt."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids")
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise RequestError(f"{name} is neither text nor a list of token ids.") from None
