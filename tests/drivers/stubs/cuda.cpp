// A stand-in for libcuda.so.1: enough for the driver's tests, which read what it prints.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
typedef unsigned long long P;
int cuInit(unsigned f) { return 0; }
int cuDeviceGetCount(int* n) {
  *n = 2;
  return 0;
}
int cuDeviceGet(int* d, int o) {
  *d = o;
  return 0;
}
int cuDeviceGetAttribute(int* v, int a, int d) {
  *v = a == 75 ? 9 : a == 76 ? 0 : 8;
  return 0;
}
int cuDeviceGetName(char* p, int n, int d) {
  strcpy(p, "Stub H200");
  return 0;
}
int cuDeviceTotalMem_v2(size_t* n, int d) {
  *n = 12345;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** c, int d) {
  *c = (void*)55;
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int d) {
  printf("release %d\n", d);
  return 0;
}
int cuCtxSetCurrent(void* c) {
  printf("context %ld\n", (long)c);
  return 0;
}
int cuMemAlloc_v2(P* p, size_t n) {
  *p = (P)malloc(n);
  return 0;
}
int cuMemFree_v2(P p) {
  free((void*)p);
  return 0;
}
int cuMemHostAlloc(void** p, size_t n, unsigned f) {
  printf("host memory %x\n", f);
  *p = malloc(n);
  return 0;
}
int cuMemHostGetDevicePointer_v2(P* d, void* p, unsigned f) {
  *d = (P)p + 64;
  return 0;
}
int cuMemFreeHost(void* p) {
  free(p);
  return 0;
}
int cuMemsetD8_v2(P p, unsigned char v, size_t n) {
  memset((void*)p, v, n);
  return 0;
}
int cuCtxSynchronize() { return 0; }
int cuModuleLoadData(void** m, const void* image) {
  printf("image %.5s\n", (const char*)image);
  *m = (void*)77;
  return 0;
}
int cuModuleUnload(void* m) {
  printf("unload %ld\n", (long)m);
  return 0;
}
int cuModuleGetFunction(void** f, void* m, const char* name) {
  if (strcmp(name, "decode")) return 500;
  *f = (void*)4711;
  return 0;
}
int cuFuncSetAttribute(void* f, int a, int v) {
  printf("lds %ld %d %d\n", (long)f, a, v);
  return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void* f, int t, size_t l) {
  *n = 1;
  printf("occupancy %ld %d %zu\n", (long)f, t, l);
  return 0;
}
int cuLaunchCooperativeKernel(void* f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g,
                              unsigned l, void* s, void** params) {
  printf("launch %ld %u %u %u %u %u %u %u stream %ld argument %lx\n", (long)f, a, b, c, d, e, g, l, (long)s,
         *(unsigned long*)params[0]);
  return 0;
}
typedef struct {
  char r[64];
} H;
int cuIpcGetMemHandle(H* h, P p) {
  memset(h, 7, 64);
  memcpy(h, &p, 8);
  return 0;
}
int cuIpcOpenMemHandle_v2(P* p, H h, unsigned f) {
  memcpy(p, &h, 8);
  printf("open %u last %d\n", f, h.r[63]);
  return 0;
}
int cuIpcCloseMemHandle(P p) {
  printf("close\n");
  return 0;
}
int cuGetErrorString(int e, const char** s) {
  *s = "stub error";
  return 0;
}
int cuGetProcAddress_v2(const char* name, void** f, int version, unsigned long long flags, int* status) {
  char longer[256];
  snprintf(longer, sizeof longer, "%s_v2", name);
  void* self = dlopen(getenv("STUB"), RTLD_LAZY);
  *f = dlsym(self, longer);
  if (!*f) *f = dlsym(self, name);
  if (status) *status = *f ? 0 : 1;
  return *f ? 0 : 500;
}
}
