"""How many kernels a piece of PyTorch launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Allocate, rename memory, or move a value to Python: no kernel.
_FREE = ("_unsafe_view", "empty", "new_empty", "detach", "lift_fresh", "_local_scalar_dense", "is_same_size", "sym_")


def count(work: Callable[[], Any], device: Any) -> tuple[int, str]:
    """Runs `work` once. Returns the number of launches and how they were counted.

    On a GPU torch.profiler counts kernels. On a CPU nothing is launched; there every operator that computes counts as
    one, which is what a GPU would launch at least. (The profiler's list of CPU operators would not do: it holds views,
    allocations, and operators within operators.)
    """
    if device.type == "cpu":
        return _operators(work), "operators that compute; on the CPU nothing is launched"
    return _kernels(work), "kernels, by torch.profiler"


def _kernels(work: Callable[[], Any]) -> int:
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    on_device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_device)


def _operators(work: Callable[[], Any]) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            with self:  # an operator that is only a recipe counts as its parts
                parts = operator.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            self.total += _computes(operator)
            return operator(*args, **kwargs)

    with Counter() as counter:
        work()
    return counter.total


def _computes(operator: Any) -> bool:
    """Whether an operator writes memory; views return aliases of what they were given."""
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns)
    return not views and not operator._schema.name.removeprefix("aten::").startswith(_FREE)
