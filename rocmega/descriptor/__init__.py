"""The kernels' argument block in Python, read from the header that defines it.

header = load(path)                        # models/<family>/descriptor.h
args = header.structs["DecodeArgs"]()      # a ctypes.Structure: fields by name, pointers as addresses
args.version = header.constants["DESCRIPTOR_VERSION"]
"""

from rocmega.descriptor.layout import Header, layout_source, layout_values, load, parse

__all__ = ["Header", "layout_source", "layout_values", "load", "parse"]
