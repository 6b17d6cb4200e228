"""What the compiler made of a kernel: registers, scratch, instructions, memory accesses and their cache bits."""

from rocmega.inspect.kernels import INSTRUCTION_CACHE, LDS_BYTES, KernelReport, inspect_code_object, report
from rocmega.inspect.table import table

__all__ = ["INSTRUCTION_CACHE", "LDS_BYTES", "KernelReport", "inspect_code_object", "report", "table"]
