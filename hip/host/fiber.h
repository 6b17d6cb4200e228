// A context switch without a system call: push the callee-saved registers, swap the stack pointer, pop. The floating
// point control words are left alone: kernels do not change them.
#pragma once
#include <stdint.h>

extern "C" __attribute__((visibility("hidden"))) void fiber_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
.text
.weak fiber_switch
.hidden fiber_switch
.type fiber_switch, @function
fiber_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size fiber_switch, .-fiber_switch
)");
constexpr int SAVED_WORDS = 6, RETURN_WORD = 6, FRAME_WORDS = 8;  // 8: the stack is 16-byte aligned before the "call"
#elif defined(__aarch64__)                                        // assembled, never run
asm(R"(
.text
.weak fiber_switch
.hidden fiber_switch
.type fiber_switch, %function
fiber_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]; stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]; ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size fiber_switch, .-fiber_switch
)");
constexpr int SAVED_WORDS = 20, RETURN_WORD = 11, FRAME_WORDS = 20;
#else
#error "write fiber_switch for this processor"
#endif

// A stack that, switched to, enters `entry`, which must never return.
inline void* fiber_stack(char* top, void (*entry)()) {
  uint64_t* frame = (uint64_t*)((uintptr_t)top & ~(uintptr_t)15) - FRAME_WORDS;
  for (int i = 0; i < FRAME_WORDS; ++i) frame[i] = 0;
  frame[RETURN_WORD] = (uint64_t)entry;
  return frame;
}
