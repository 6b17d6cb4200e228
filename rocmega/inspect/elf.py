"""As much of ELF and msgpack as code objects need: section sizes, symbols, and AMD's metadata note."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocmega.errors import ToolchainError

NT_AMDGPU_METADATA = 32
SHT_SYMTAB, SHT_NOTE, SHT_NOBITS = 2, 7, 8


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    address: int
    offset: int
    size: int
    link: int


class Elf:
    """A 64-bit little-endian ELF file. Raises ToolchainError if it is not one, or is cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.data = path.read_bytes()
            self.sections = self._sections()
        except (OSError, struct.error, UnicodeDecodeError, IndexError) as error:
            raise ToolchainError(f"{path} is not a complete code object: {error}.") from error

    def _sections(self) -> list[Section]:
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise ToolchainError(f"{self.path} is not a code object: it does not begin like a 64-bit ELF file.")
        (start,) = struct.unpack_from("<Q", self.data, 0x28)
        size, count, names = struct.unpack_from("<3H", self.data, 0x3A)
        raw = [struct.unpack_from("<2I4Q2I", self.data, start + i * size) for i in range(count)]
        strings = raw[names][4]
        return [Section(self._text(strings + r[0]), r[1], r[3], r[4], r[5], r[6]) for r in raw]

    def _text(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode()

    def symbols(self) -> dict[str, tuple[int, int]]:
        """Name -> (address, size), of the full symbol table."""
        found: dict[str, tuple[int, int]] = {}
        for section in self.sections:
            if section.kind == SHT_SYMTAB:
                strings = self.sections[section.link].offset
                for at in range(section.offset, section.offset + section.size, 24):
                    name, _, _, _, value, size = struct.unpack_from("<IBBHQQ", self.data, at)
                    found[self._text(strings + name)] = (value, size)
        return found

    def amd_metadata(self) -> dict[str, Any]:
        """The `amdhsa` metadata: target and kernels."""
        for section in self.sections:
            if section.kind == SHT_NOTE:
                at = section.offset
                while at < section.offset + section.size:
                    name_size, size, kind = struct.unpack_from("<3I", self.data, at)
                    content = at + 12 + (name_size + 3) // 4 * 4
                    if kind == NT_AMDGPU_METADATA and self.data[at + 12 :].startswith(b"AMDGPU\0"):
                        value, _ = unpack(self.data[content : content + size], 0)
                        return dict(value)
                    at = content + (size + 3) // 4 * 4
        raise ToolchainError(f"{self.path} has no AMDGPU metadata: it is not a linked AMD code object.")


NUMBERS = {0xCC: "B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: "b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
           0xCA: ">f", 0xCB: ">d"}  # fmt: skip
LENGTHS = {0xC4: "B", 0xC5: ">H", 0xC6: ">I", 0xD9: "B", 0xDA: ">H", 0xDB: ">I",
           0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}  # fmt: skip


def unpack(data: bytes, at: int) -> tuple[Any, int]:
    """One msgpack value at a place, and where the next begins."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if tag in NUMBERS:
        (number,) = struct.unpack_from(NUMBERS[tag], data, at)
        return number, at + struct.calcsize(NUMBERS[tag])
    if tag < 0xC0:
        count = tag & 0x1F if tag >= 0xA0 else tag & 0x0F
    elif tag in LENGTHS:
        (count,) = struct.unpack_from(LENGTHS[tag], data, at)
        at += struct.calcsize(LENGTHS[tag])
    else:
        raise ToolchainError(f"The code object's metadata has a msgpack value of an unknown kind ({tag:#x}).")
    if 0xA0 <= tag < 0xC0 or tag in (0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB):
        raw = data[at : at + count]
        return (raw if tag in (0xC4, 0xC5, 0xC6) else raw.decode()), at + count
    items = []
    is_map = tag < 0x90 or tag in (0xDE, 0xDF)
    for _ in range(count * 2 if is_map else count):
        item, at = unpack(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if is_map else items), at
