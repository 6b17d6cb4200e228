"""Launches Triton kernels, or writes down what would be launched and compiles it for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
_ALIGNED = [["tt.divisibility", 16]]
_OPTIONS = {"enable_fp_fusion": True}  # newer releases of Triton no longer fuse products and sums unless told to


@dataclass(frozen=True)
class Launch:
    """A launch that was written down.

    Fields:
        kernel: the Triton function.
        arguments: by name: tensors and numbers.
        constants: what is compiled in, by name.
        warps: of a program; a wave of AMD's counts as one.
    """

    kernel: Any
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int

    def key(self) -> tuple[Any, ...]:
        """Equal for launches of one binary."""
        kinds = ((name, self._type(value)) for name, value in self.arguments.items())
        return (self.kernel, *kinds, *self.constants.items(), self.warps)

    def compile(self, arch: str) -> Any:
        """Triton's compiled kernel for "gfx942", "gfx950" or "sm_90", specialized as a launch would be."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
        ones = {name: value for name, value in self.arguments.items() if type(value) is int and value == 1}
        signature = {name: self._type(value) for name, value in self.arguments.items()}
        signature |= dict.fromkeys([*ones, *self.constants], "constexpr")
        aligned = {
            (number,): _ALIGNED
            for number, name in enumerate(self.kernel.arg_names)
            if name in self.arguments and name not in ones and self._aligned(self.arguments[name])
        }
        source = ASTSource(self.kernel, signature, {**self.constants, **ones}, aligned)
        return triton.compile(source, target=target, options={"num_warps": self.warps, **_OPTIONS})

    @staticmethod
    def _type(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return _TYPES[value.dtype]
        return "i32" if isinstance(value, int) else "fp32"

    @staticmethod
    def _aligned(value: Any) -> bool:
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        return isinstance(number, int) and number % 16 == 0


_written: ContextVar[list[Launch] | None] = ContextVar("launches", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 4, **constants: Any) -> None:
    """Runs a kernel on the current stream: arguments in the kernel's order, then its constants by name."""
    written = _written.get()
    if written is None:
        kernel[grid](*arguments, num_warps=warps, **_OPTIONS, **constants)
    else:
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        written.append(Launch(kernel, named, constants, warps))


@contextmanager
def written_down() -> Iterator[list[Launch]]:
    """Inside, nothing is launched: the list says what would have been."""
    launches: list[Launch] = []
    token = _written.set(launches)
    try:
        yield launches
    finally:
        _written.reset(token)
