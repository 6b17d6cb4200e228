"""What the inspection reports, on kernels that have each property and on ones that do not."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from rocmega.errors import ToolchainError
from rocmega.inspect import KernelReport, inspect_code_object, report, table
from rocmega.inspect.assembly import count, functions
from rocmega.inspect.elf import Elf, unpack
from rocmega.inspect.kernels import sass_names, waves_per_simd
from rocmega.toolchain import Unit

AMD = pytest.mark.parametrize("target", ["gfx942", "gfx950"])
KERNEL = 'extern "C" __attribute__((global)) void '

CLEAN = """
typedef __bf16 bf16x4 __attribute__((ext_vector_type(4)));
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
__attribute__((shared)) unsigned words[1024];
KERNEL __attribute__((amdgpu_flat_work_group_size(256, 256))) clean(const f32x4* in, unsigned* flag, f32x4* out) {
  unsigned i = __builtin_amdgcn_workitem_id_x();
  words[i] = flag[i];
  __builtin_amdgcn_s_barrier();
  s16x4 a = {1, 2, 3, (short)words[255 - i]};
  f32x4 acc = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, a, in[i], 0, 0, 0);
  out[i] = acc;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  __hip_atomic_store(flag + i, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  while (__hip_atomic_load(flag + i + 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) == 0) {}
  __hip_atomic_fetch_add(flag + i + 2, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
""".replace("KERNEL ", KERNEL.replace("void", "")).replace(") clean", ") void clean")

SCRATCH = (
    KERNEL + "scratchy(int* p, int n) { int a[64]; for (int i = 0; i < n; i++) a[p[i] & 63] = i; p[0] = a[n & 63]; }"
)

SPILLS = (
    'extern "C" __attribute__((global, amdgpu_num_vgpr(24))) void spills(float* p) {\n'
    "  float* q = p + __builtin_amdgcn_workitem_id_x();\n"
    + "".join(f"  float a{i} = q[{i * 64}];\n" for i in range(64))
    + "  __builtin_amdgcn_s_barrier();\n"
    + "".join(f"  q[{i * 64}] = a{i} * a{(i * 7 + 5) % 64};\n" for i in range(64))
    + "}\n"
)

CALLS = (
    "__attribute__((device, noinline)) float helper(const float* p, int n)"
    " { float s = 0; for (int i = 0; i < n; i++) s += p[i] * s; return s; }\n"
    "__attribute__((device, noinline)) void unused(float* p) { p[0] = p[1]; }\n"
    + KERNEL
    + "second(float* p) { p[0] = p[1]; }\n"
    + KERNEL
    + "caller(float* p, int n) { p[0] = helper(p, n); p[1] = helper(p + 2, n); }"
)


@AMD
def test_a_clean_kernel(build, target: str) -> None:
    artifact = build(CLEAN, target)
    (kernel,) = inspect_code_object(artifact)
    assert (kernel.name, kernel.arch, kernel.threads) == ("clean", target, 256)
    assert (kernel.scratch_bytes, kernel.scratch_accesses, kernel.vgpr_spills, kernel.sgpr_spills) == (0, 0, 0, 0)
    assert kernel.lds_bytes == 4096
    assert kernel.lds_limit == {"gfx942": 65536, "gfx950": 163840}[target]
    assert 4 < kernel.vgpr < 64
    assert kernel.sgpr > 4
    assert kernel.waves_per_simd == 8
    assert kernel.blocks_per_cu == 8
    assert kernel.mfma == {"v_mfma_f32_16x16x16_bf16": 1}
    assert kernel.load_widths["global_load_dwordx4"] == 1
    assert kernel.scoped["global_store_dword sc1"] == 1
    assert kernel.scoped["global_load_dword sc1"] >= 1
    assert kernel.scoped["global_atomic_add sc1"] == 1
    assert kernel.scoped["buffer_wbl2 sc1"] == kernel.wbl2 == kernel.wbl2_waited == 1
    assert kernel.flat_accesses == 0
    assert kernel.lds_widths
    assert 100 < kernel.code_bytes < 4096
    assert 4 * kernel.instructions <= kernel.code_bytes <= 8 * kernel.instructions


@AMD
def test_agrees_with_the_compilers_own_words(build, target: str) -> None:
    for source in (CLEAN, SCRATCH, SPILLS):
        artifact = build(source, target)
        text = artifact.assembly_path.read_text()
        (kernel,) = inspect_code_object(artifact, text)

        def said(what: str, text: str = text) -> int:
            return int(re.search(rf"^; {what}: (\d+)", text, re.MULTILINE)[1])

        assert kernel.vgpr == said("NumVgprs")
        assert kernel.agpr == said("NumAgprs")
        assert kernel.sgpr == said("TotalNumSgprs")
        assert kernel.scratch_bytes == said("ScratchSize")
        assert kernel.lds_bytes == said("LDSByteSize")
        assert kernel.waves_per_simd == said("Occupancy") or kernel.lds_bytes
        assert kernel.code_bytes == int(re.search(r"codeLenInByte = (\d+)", text)[1])


@AMD
def test_scratch_is_seen(build, target: str) -> None:
    (kernel,) = inspect_code_object(build(SCRATCH, target))
    # gfx950 may put the array into LDS instead, unasked; that is seen too.
    assert kernel.scratch_bytes >= 256 or kernel.lds_bytes >= 256
    if target == "gfx942":
        assert kernel.scratch_bytes >= 256
        assert kernel.scratch_accesses > 0


@AMD
def test_spills_are_seen(build, target: str) -> None:
    (kernel,) = inspect_code_object(build(SPILLS, target))
    assert kernel.vgpr_spills > 0
    assert kernel.scratch_bytes > 0 or kernel.agpr > 0


@AMD
def test_functions_that_are_called_count(build, target: str) -> None:
    second, caller = inspect_code_object(build(CALLS, target))
    assert second.functions == ["second"]
    assert [f for f in caller.functions if "helper" in f]
    assert not [f for f in caller.functions if "unused" in f]
    assert caller.code_bytes > second.code_bytes
    assert caller.instructions > sum(caller.load_widths.values()) >= 1


def test_a_dropped_wait_is_seen(build) -> None:
    """A store that does not wait for the write-back (clang 22 makes such code) is reported with its line."""
    artifact = build(CLEAN, "gfx942")
    lines = artifact.assembly_path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith("buffer_wbl2"))
    assert "vmcnt(0)" in lines.pop(at + 1)
    (kernel,) = inspect_code_object(artifact, "\n".join(lines))
    assert (kernel.wbl2, kernel.wbl2_waited, kernel.unwaited_lines) == (1, 0, [at + 1])


@pytest.mark.parametrize(
    ("following", "waited"),
    [
        ("s_waitcnt vmcnt(0)", True),
        ("s_waitcnt vmcnt(0) lgkmcnt(0)", True),
        ("s_waitcnt 0", True),
        ("; a comment\n.LBB0_2:\n\ts_waitcnt vmcnt(0)", True),
        ("s_waitcnt vmcnt(1)", False),
        ("s_waitcnt lgkmcnt(0)", False),
        ("global_store_dword v0, v1, s[0:1] sc1\n\ts_waitcnt vmcnt(0)", False),
        ("s_nop 0", False),
    ],
)
def test_what_counts_as_a_wait(following: str, waited: bool) -> None:
    text = f"\t.type k,@function\nk: ; @k\n\tbuffer_wbl2 sc1\n\t{following}\n\ts_endpgm\n.Lfunc_end0:\n\ts_nop 0\n"
    bodies = functions(text)
    assert bodies["k"][-1].name == "s_endpgm"
    counts = count([bodies["k"]])
    assert (counts.wbl2, counts.wbl2_waited) == (1, int(waited))


def test_a_wait_at_the_very_end() -> None:
    counts = count([functions("\t.type k,@function\nk:\n\tbuffer_wbl2 sc1\n")["k"]])
    assert (counts.wbl2, counts.wbl2_waited) == (1, 0)


def test_waves_by_registers() -> None:
    assert [waves_per_simd(v, 32) for v in (1, 64, 65, 128, 129, 168, 170, 256, 257, 512)] == [
        8, 8, 7, 4, 3, 3, 2, 2, 1, 1,
    ]  # fmt: skip
    assert waves_per_simd(32, 106) == 7


def test_json_has_the_promised_fields(build) -> None:
    kernels = [k.to_json() for k in inspect_code_object(build(CLEAN, "gfx950"))]
    promised = (
        "name arch vgpr agpr sgpr lds_bytes scratch_bytes vgpr_spills sgpr_spills waves_per_simd mfma load_widths"
    )
    assert set(promised.split()) | {"code_bytes"} <= set(json.loads(json.dumps(kernels))[0])


def test_the_table_marks_what_is_wrong() -> None:
    bad = KernelReport("k", "gfx942", scratch_bytes=64, lds_bytes=2**17, wbl2=2, wbl2_waited=1, unwaited_lines=[41])
    nvidia = KernelReport("n", "sm_90", vgpr=120)
    console = Console(width=120, file=io.StringIO(), color_system="standard", force_terminal=True)
    console.print(table([bad, nvidia]))
    text = console.file.getvalue()
    assert "\x1b[31m64 bytes a lane" in text
    assert "\x1b[31m131072 of 65536 bytes" in text
    assert "\x1b[31m1 of 2 waited for at once; not those on lines 41" in text
    assert "registers a thread" in text


def test_report_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build) -> None:
    source = build(CLEAN, "gfx942").path  # skips without a compiler
    assert source.is_file()
    monkeypatch.setenv("ROCMEGA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "k.hip").write_text(CLEAN)
    (kernel,) = report(Unit("k", tmp_path / "k.hip"), "gfx950")
    assert kernel.name == "clean"


def test_nvidia(build) -> None:
    (kernel,) = inspect_code_object(build('extern "C" __global__ void k(float* p) { p[threadIdx.x] *= 2; }', "sm_90"))
    assert (kernel.name, kernel.arch, kernel.scratch_bytes, kernel.vgpr_spills) == ("k", "sm_90", 0, 0)
    assert kernel.vgpr > 2
    assert kernel.code_bytes > 64


def test_sass() -> None:
    text = """
\t.section\t.text.other,"ax",@progbits
.text.other:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t.section\t.text.k,"ax",@progbits
k:
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/              @!P0 LDG.E.128.STRONG.GPU R4, desc[UR4][R2.64] ;
        /*0020*/             @!UP1 HMMA.16816.F32.BF16 R4, R4, R6, R8 ;
        /*0030*/                   LDG.E.128.STRONG.GPU R4, desc[UR4][R2.64] ;
"""
    assert sass_names(text, "k") == {"LDC": 1, "LDG.E.128.STRONG.GPU": 2, "HMMA.16816.F32.BF16": 1}


def test_refuses_what_is_no_code_object(tmp_path: Path, build) -> None:
    path = tmp_path / "k.hsaco"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ToolchainError, match="does not begin like"):
        Elf(path)
    path.write_bytes(build(CLEAN, "gfx942").path.read_bytes()[:1000])
    with pytest.raises(ToolchainError, match="not a complete code object"):
        Elf(path)
    with pytest.raises(ToolchainError, match="not a complete code object"):
        Elf(tmp_path / "missing")


def test_msgpack() -> None:
    assert unpack(b"\x82\xa1a\x93\x01\xff\xc3\xa1b\xcd\x01\x02", 0)[0] == {"a": [1, -1, True], "b": 258}
    assert unpack(b"\xd9\x02hi", 0)[0] == "hi"
    assert unpack(b"\xde\x00\x01\xc0\xdc\x00\x01\xd0\xfe", 0)[0] == {None: [-2]}
    with pytest.raises(ToolchainError, match="msgpack"):
        unpack(b"\xc1", 0)
