"""Turns the one device source into something a driver loads: a shared object, a code object or a cubin."""

from rocmega.toolchain.build import Artifact, assembly, compile
from rocmega.toolchain.compilers import TARGETS, Compiler, Search, find, search
from rocmega.toolchain.unit import Unit

__all__ = ["TARGETS", "Artifact", "Compiler", "Search", "Unit", "assembly", "compile", "find", "search"]
