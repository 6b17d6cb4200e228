"""The descriptor parser: what it understands, what it refuses, and that the layout is the compilers' own."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from rocmega.descriptor import Header, layout_source, layout_values, load, parse
from rocmega.errors import ToolchainError
from rocmega.toolchain.compilers import search
from rocmega.toolchain.recipes import flags
from rocmega.toolchain.unit import hip_dir, models_dir

HEADERS = sorted(models_dir().glob("*/descriptor.h"))

SAMPLE = """
#pragma once
#include "platform/types.h"  // u32 and friends
constexpr u32 COUNT = 1'000, BITS = (1u << 4) | 0x3;
inline constexpr int NEGATIVE = -(COUNT / 3) + 07;
enum Kind : u8 { DENSE, MOE = 4, LAST = MOE + BITS, };
enum class Mode : u32 { A = 2, B };
using Tag = u32;
struct Later;
struct alignas(4) Couple { u32 payload, tag; };
struct Inner {
  u8 small;            // padding follows
  f64 wide;
  /* a comment
     of two lines */
  u16 half[3];
};
struct Outer {
  const f32 *a, *const b, c;
  Later* later;
  Inner inner, many[2][3];
  Kind kind;
  Mode mode;
  Tag tag;
  bool flag;
  const char* const* names;
  u32 table[BITS - 18];
  static_assert(sizeof(u32) == 4, "as everywhere");
};
static_assert(sizeof(Couple) == 8);
"""


def test_understands_what_a_descriptor_needs() -> None:
    header = parse(SAMPLE)
    assert header.constants == {"COUNT": 1000, "BITS": 19, "NEGATIVE": -326}
    assert header.enums == {"Kind": {"DENSE": 0, "MOE": 4, "LAST": 23}, "Mode": {"A": 2, "B": 3}}
    assert list(header.structs) == ["Couple", "Inner", "Outer"]
    outer = header.structs["Outer"]()
    outer.a, outer.c, outer.inner.half[2], outer.many[1][2].small = 2**40, 1.5, 7, 9
    assert (outer.a, outer.c, outer.inner.half[2], outer.many[1][2].small) == (2**40, 1.5, 7, 9)
    assert [f[0] for f in header.structs["Outer"]._fields_][:3] == ["a", "b", "c"]


def compiler_layout(header: Header, include: str, folder: Path) -> list[int]:
    found = search("host").found
    if found is None:
        pytest.skip("no host compiler")
    (folder / "layout.cpp").write_text(layout_source(header, include))
    command = [*found.command, *flags("host", found.style), f"-I{folder}", f"-I{hip_dir()}", f"-I{models_dir()}"]
    subprocess.run([*command, "-shared", "layout.cpp", "-o", "layout.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "layout.so"))
    return list((ctypes.c_uint64 * len(layout_values(header))).in_dll(library, "layout"))


def test_layout_equals_the_compilers(tmp_path: Path) -> None:
    (tmp_path / "sample.h").write_text(
        SAMPLE.replace("constexpr u32 COUNT", "using f64 = double;\nconstexpr u32 COUNT")
    )
    header = parse(SAMPLE)
    assert compiler_layout(header, "sample.h", tmp_path) == layout_values(header)


@pytest.mark.parametrize("path", HEADERS, ids=lambda p: p.parent.name)
def test_no_drift(path: Path, tmp_path: Path) -> None:
    """Every field of every descriptor lies where the host compiler puts it."""
    header = load(path)
    assert compiler_layout(header, str(path.relative_to(models_dir())), tmp_path) == layout_values(header)


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("path", HEADERS, ids=lambda p: p.parent.name)
def test_no_drift_on_the_device(path: Path, target: str, tmp_path: Path) -> None:
    found = search(target).found
    if found is None:
        pytest.skip("no compiler for AMD GPUs")
    header = load(path)
    source = layout_source(header, str(path.relative_to(models_dir())))
    asserts = "".join(f"static_assert(layout[{i}] == {v});\n" for i, v in enumerate(layout_values(header)))
    (tmp_path / "layout.hip").write_text(source.replace('extern "C" const', "constexpr") + asserts)
    command = [*found.command, *flags(target, found.style), f"-I{hip_dir()}", f"-I{models_dir()}", "-fsyntax-only"]
    subprocess.run([*command, "layout.hip"], cwd=tmp_path, check=True)


def test_a_drifted_field_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "sample.h").write_text("using u32 = unsigned;\nstruct A { u32 x; u32 extra; u32 y; };")
    header = parse("struct A { u32 x; u32 y; };")
    assert compiler_layout(header, "sample.h", tmp_path) != layout_values(header)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("struct A {\n  u32 x;\n  std::string s;\n};", 3, "std is not known|found '::'"),
        ("struct A {\n  Unknown x;\n};", 2, "the type Unknown is not known"),
        ("struct A {\n  u32 x : 3;\n};", 2, "bit field"),
        ("struct A {\n  u32 f();\n};", 2, "is a function"),
        ("struct A {\n  u32 x = 3;\n};", 2, "expected ';'"),
        ("struct A {\n  u32 x;\n  f32 x;\n};", 3, "A.x is defined twice"),
        ("struct A {\n  unsigned long x;\n};", 2, "write u8, u32"),
        ("struct A {\n  u32 x[N];\n};", 2, "expected an integer constant, found 'N'"),
        ("struct A {\n  u32 x[0];\n};", 2, "an array of 0 elements"),
        ("struct A {\n  u32& x;\n};", 2, "expected a field's name, found '&'"),
        ("struct A {\n};", 1, "has no fields"),
        ("struct alignas(16) A {\n  u32 x;\n};", 1, "alignas"),
        ("struct A : B {\n  u32 x;\n};", 1, "expected '{'"),
        ("struct A {\n  u32 x;\n", 3, "found 'the end of the file'"),
        ("template <class T>\nstruct A {};", 1, "'template' is not understood here"),
        ("#define N 3\n", 1, "directive '#define N 3'"),
        ("\n#if 1\n#endif\n", 2, "directive '#if 1'"),
        ("constexpr u32 A = 3;\nconstexpr u32 A = 4;", 2, "A is defined twice"),
        ("constexpr f32 A = 3;", 1, "constants of type f32"),
        ("constexpr u32 A = 1.5;", 1, "is not understood"),
        ("constexpr u32 A = 1 / 0;", 1, "1 / 0"),
        ("enum { A };", 1, "enums without one"),
        ("enum E : string { A };", 1, "string is not an integer type"),
        ("using A = B;", 1, "the type B is not known"),
        ('struct A {\n  u32 x;\n};\n"text"', 4, "is not understood"),
    ],
)
def test_refuses_with_file_and_line(text: str, line: int, message: str) -> None:
    with pytest.raises(ToolchainError, match=message) as caught:
        parse(text, "models/some/descriptor.h")
    assert str(caught.value).startswith(f"models/some/descriptor.h:{line}: ")


def test_missing_header() -> None:
    with pytest.raises(ToolchainError, match="cannot be read"):
        load("no/such/descriptor.h")


def test_the_same_header_gives_the_same_classes(tmp_path: Path) -> None:
    path = tmp_path / "descriptor.h"
    path.write_text("struct A { u32 x; };")
    assert load(path).structs["A"] is load(path).structs["A"]
    path.write_text("struct A { u32 x, y; };")
    assert len(load(path).structs["A"]._fields_) == 2
