// What the memory model assumes of MI300X and MI355X: one table, and where each line of it is from. docs/protocol.md has it with
// the instructions that drain(), release_device() and acquire_device() are. The number of XCDs is the launch's.
//
//   [LLVM]   User Guide for AMDGPU Backend, "Memory Model GFX942" (which gfx950 shares):
//            https://llvm.org/docs/AMDGPUUsage.html#memory-model-gfx942
//   [CDNA3]  AMD CDNA 3 Architecture, white paper, "Memory hierarchy"
#pragma once
#include "runtime.h"

namespace host {

constexpr uint32_t LINE = 128 / 4;  // words of an L2's line [CDNA3]
constexpr int WHOLE = 2;  // words that arrive together, of a wider access: atomics have 8 bytes at most [LLVM]

// By Scope. Stores of any may still be on their way after later ones, of the same wave too, until it drains: completion is
// counted per wave, and requests of an L2's channels pass each other [LLVM].
struct ScopeRule {
  const char* name;
  bool in_l2;     // stores stay in their XCD's L2 until it is written back; loads may find what lay there before
  bool to_peers;  // takes part in what other ranks' devices see
};
constexpr ScopeRule SCOPES[] = {
    {"plain", true, false},    // no bits: coherent in a work-group [LLVM, "load/store atomic monotonic"]
    {"device", false, false},  // sc1: agent scope, past the L2s, which are one per XCD [LLVM, the same]
    {"system", false, true},   // sc0 sc1: system scope; a peer is another agent [LLVM, the same]
};

}  // namespace host
