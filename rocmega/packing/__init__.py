"""Packs: a checkpoint's weights as one rank's kernels read them, on disk.

`pack_checkpoint` makes them, `find` and `open_pack` load them. Names load on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocmega.packing.loader import Pack as Pack
    from rocmega.packing.loader import find as find
    from rocmega.packing.loader import is_pack as is_pack
    from rocmega.packing.loader import open_pack as open_pack
    from rocmega.packing.writer import pack_checkpoint as pack_checkpoint

__all__ = ["Pack", "find", "is_pack", "open_pack", "pack_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rocmega.packing' has no attribute {name!r}")
    from importlib import import_module

    module = "writer" if name == "pack_checkpoint" else "loader"
    return getattr(import_module(f"rocmega.packing.{module}"), name)
