// A stand-in for libamdhip64.so: enough for the driver's tests, which read what it prints.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
static int arch_at;
void stub_arch_at(int offset) { arch_at = offset; }
int hipGetDeviceCount(int* n) {
  *n = 2;
  return 0;
}
int hipSetDevice(int d) {
  printf("set %d\n", d);
  return 0;
}
int hipGetDevicePropertiesR0600(char* p, int d) {
  strcpy(p, "Stub MI300X");
  strcpy(p + arch_at, "gfx942:sramecc+");
  return 0;
}
int hipDeviceGetAttribute(int* v, int a, int d) {
  *v = 8;
  printf("attr %d %d\n", a, d);
  return 0;
}
int hipMalloc(void** p, size_t n) {
  *p = malloc(n);
  return 0;
}
int hipExtMallocWithFlags(void** p, size_t n, unsigned f) {
  printf("flags %u\n", f);
  *p = malloc(n);
  return 0;
}
int hipFree(void* p) {
  free(p);
  return 0;
}
int hipHostMalloc(void** p, size_t n, unsigned f) {
  printf("host memory %x\n", f);
  *p = malloc(n);
  return 0;
}
int hipHostGetDevicePointer(void** d, void* p, unsigned f) {
  *d = (char*)p + 64;
  return 0;
}
int hipHostFree(void* p) {
  free(p);
  return 0;
}
int hipMemset(void* p, int v, size_t n) {
  memset(p, v, n);
  return 0;
}
int hipDeviceSynchronize() { return 0; }
int hipModuleLoadData(void** m, const void* image) {
  printf("image %.5s\n", (const char*)image);
  *m = (void*)77;
  return 0;
}
int hipModuleUnload(void* m) {
  printf("unload %ld\n", (long)m);
  return 0;
}
int hipModuleGetFunction(void** f, void* m, const char* name) {
  if (strcmp(name, "decode")) return 500;
  *f = (void*)4711;
  return 0;
}
int hipFuncSetAttribute(const void* f, int a, int v) {
  printf("lds %ld %d %d\n", (long)f, a, v);
  return 0;
}
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void* f, int t, size_t l) {
  *n = 1;
  printf("occupancy %ld %d %zu\n", (long)f, t, l);
  return 0;
}
int hipModuleLaunchCooperativeKernel(void* f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g,
                                     unsigned l, void* s, void** params) {
  printf("launch %ld %u %u %u %u %u %u %u stream %ld argument %lx\n", (long)f, a, b, c, d, e, g, l, (long)s,
         *(unsigned long*)params[0]);
  return 0;
}
typedef struct {
  char r[64];
} H;
int hipIpcGetMemHandle(H* h, void* p) {
  memset(h, 7, 64);
  memcpy(h, &p, 8);
  return 0;
}
int hipIpcOpenMemHandle(void** p, H h, unsigned f) {
  memcpy(p, &h, 8);
  printf("open %u last %d\n", f, h.r[63]);
  return 0;
}
int hipIpcCloseMemHandle(void* p) {
  printf("close\n");
  return 0;
}
const char* hipGetErrorString(int e) { return "stub error"; }
}
