"""Reads a descriptor header into ctypes structures that have the same layout."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocmega.descriptor.tokens import Tokens, expression
from rocmega.errors import ToolchainError

# Pointers are addresses on the device: plain integers, for ctypes' own pointer types invite dereferencing them.
POINTER = ctypes.c_uint64
SCALARS: dict[str, Any] = {
    "u8": ctypes.c_uint8,
    "i8": ctypes.c_int8,
    "u16": ctypes.c_uint16,
    "i16": ctypes.c_int16,
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
    "u64": ctypes.c_uint64,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
    "bool": ctypes.c_bool,
    "char": ctypes.c_char,
    "int": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


@dataclass
class Header:
    """What a descriptor header defines."""

    structs: dict[str, type[ctypes.Structure]] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)


def load(path: Path | str) -> Header:
    """Reads a header file. Raises ToolchainError, with file and line, for anything it does not understand."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ToolchainError(f"The descriptor header {path} cannot be read: {error}.") from error
    return _load(text, str(path))


@functools.lru_cache(maxsize=32)
def _load(text: str, origin: str) -> Header:
    return parse(text, origin)


def parse(text: str, origin: str = "descriptor") -> Header:
    """Reads the text of a header; origin is its name in errors."""
    return _Parser(Tokens.of(text, origin)).header()


class _Parser:
    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.result = Header()
        self.types: dict[str, Any] = dict(SCALARS)  # what may be a field by value
        self.known: dict[str, int] = {}  # what may stand in an expression
        self.taken: set[str] = set()

    def header(self) -> Header:
        tokens = self.tokens
        while tokens.peek.kind != "end":
            word = tokens.next()
            if word.text in ("inline", "static") and tokens.peek.text == "constexpr":
                word = tokens.next()
            if word.text == "constexpr":
                self.constant()
            elif word.text == "enum":
                self.enum()
            elif word.text == "struct":
                self.struct()
            elif word.text == "using":
                self.alias()
            elif word.text == "static_assert":
                self.skip_statement()
            elif word.text != ";":
                raise tokens.error(word.line, f"{word.text!r} is not understood here")
        return self.result

    def skip_statement(self) -> None:
        while self.tokens.peek.kind != "end" and not self.tokens.take(";"):
            self.tokens.next()

    def new_name(self, what: str) -> str:
        line = self.tokens.peek.line
        name = self.tokens.name(what)
        if name in self.taken:
            raise self.tokens.error(line, f"{name} is defined twice")
        self.taken.add(name)
        return name

    def constant(self) -> None:
        type_name = self.tokens.name("an integer type")
        if type_name not in self.types or type_name in ("f32", "f64", "float", "double"):
            raise self.tokens.fail(f"constants of type {type_name} are not understood")
        while True:
            name = self.new_name("the constant's name")
            self.tokens.expect("=")
            self.result.constants[name] = self.known[name] = expression(self.tokens, self.known)
            if not self.tokens.take(","):
                return self.tokens.expect(";")

    def enum(self) -> None:
        scoped = self.tokens.take("class") or self.tokens.take("struct")
        name = self.new_name("the enum's name (enums without one are not understood)")
        underlying = self.types[self.scalar_name()] if self.tokens.take(":") else ctypes.c_int32
        self.types[name] = underlying
        self.tokens.expect("{")
        values: dict[str, int] = {}
        value = -1
        while not self.tokens.take("}"):
            word = self.tokens.name("an enumerator") if scoped else self.new_name("an enumerator")
            value = expression(self.tokens, {**self.known, **values}) if self.tokens.take("=") else value + 1
            values[word] = value
            if not self.tokens.take(",") and self.tokens.peek.text != "}":
                raise self.tokens.fail(f"expected ',' or '}}', found {self.tokens.peek.text!r}")
        self.tokens.expect(";")
        self.result.enums[name] = values
        if not scoped:
            self.known.update(values)

    def scalar_name(self) -> str:
        name = self.tokens.name("an integer type")
        if name not in SCALARS:
            raise self.tokens.fail(f"{name} is not an integer type")
        return name

    def alias(self) -> None:
        name = self.new_name("the alias's name")
        self.tokens.expect("=")
        target = self.tokens.name("a type")
        if target not in self.types:
            raise self.tokens.fail(f"the type {target} is not known")
        self.tokens.expect(";")
        self.types[name] = self.types[target]

    def struct(self) -> None:
        line = self.tokens.peek.line
        aligned = 0
        if self.tokens.take("alignas"):
            self.tokens.expect("(")
            aligned = expression(self.tokens, self.known)
            self.tokens.expect(")")
        name = self.tokens.name("the struct's name")
        if self.tokens.take(";"):
            return  # a forward declaration: pointers to anything are understood without it
        if name in self.taken:
            raise self.tokens.error(line, f"{name} is defined twice")
        self.taken.add(name)
        self.tokens.expect("{")
        fields: list[tuple[str, Any]] = []
        while not self.tokens.take("}"):
            if self.tokens.take("static_assert"):
                self.skip_statement()
            else:
                self.fields(name, fields)
        self.tokens.expect(";")
        if not fields:
            raise self.tokens.error(line, f"struct {name} has no fields")
        made = type(name, (ctypes.Structure,), {"_fields_": fields})
        if aligned > ctypes.alignment(made):
            raise self.tokens.error(
                line, f"alignas({aligned}) of {name} is more than its fields have, and not understood"
            )
        self.result.structs[name] = self.types[name] = made

    def fields(self, struct: str, fields: list[tuple[str, Any]]) -> None:
        """One declaration, `const f32* a, b[4];`, appended as (name, type)."""
        tokens, line = self.tokens, self.tokens.peek.line
        tokens.take("const")
        tokens.take("struct")
        type_name = tokens.name("a field's type")
        if type_name in ("const", "volatile", "unsigned", "long") and tokens.peek.text in ("char", "int", "long"):
            raise tokens.error(line, f"write u8, u32, i64 ... instead of '{type_name} {tokens.peek.text}'")
        while True:
            pointer = False
            while tokens.peek.text in ("*", "const"):
                pointer |= tokens.next().text == "*"
            name = tokens.name("a field's name")
            if any(name == other for other, _ in fields):
                raise tokens.error(line, f"{struct}.{name} is defined twice")
            if not pointer and type_name not in self.types:
                raise tokens.error(line, f"{struct}.{name}: the type {type_name} is not known")
            kind = POINTER if pointer else self.types[type_name]
            sizes = []
            while tokens.take("["):
                sizes.append(expression(tokens, self.known))
                tokens.expect("]")
                if sizes[-1] <= 0:
                    raise tokens.error(line, f"{struct}.{name} is an array of {sizes[-1]} elements")
            for size in reversed(sizes):
                kind = kind * size
            fields.append((name, kind))
            if not tokens.take(","):
                break
        if tokens.peek.text == "(":
            raise tokens.error(line, f"{struct}.{name} is a function; a descriptor struct holds data only")
        if tokens.peek.text == ":":
            raise tokens.error(line, f"{struct}.{name} is a bit field, which compilers lay out differently")
        tokens.expect(";")


def layout_source(header: Header, include: str) -> str:
    """C++ that reports the compiler's own layout, to be compared with ctypes'.

    `extern "C" const unsigned long long layout[]` holds, for every struct in order, its size, and for every field its
    offset and size.
    """
    lines = [f'#include "{include}"', 'extern "C" const unsigned long long layout[] = {']
    for name, struct in header.structs.items():
        lines.append(f"    sizeof({name}),")
        for item in struct._fields_:
            lines.append(f"    __builtin_offsetof({name}, {item[0]}), sizeof((({name}*)0)->{item[0]}),")
    return "\n".join([*lines, "};", ""])


def layout_values(header: Header) -> list[int]:
    """The same numbers as ctypes has them."""
    values: list[int] = []
    for struct in header.structs.values():
        values.append(ctypes.sizeof(struct))
        for item in struct._fields_:
            place = getattr(struct, item[0])
            values += [place.offset, place.size]
    return values
