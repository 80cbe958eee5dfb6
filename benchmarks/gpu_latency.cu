// Latencies of what the kernels rest on, cycles and ns.
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#define CK(x) do { cudaError_t err_ = (x); if (err_ != cudaSuccess) { printf("%s: %s\n", #x, cudaGetErrorString(err_)); exit(1);} } while (0)
__global__ void empty() {}
__global__ void pdl_kernel() { asm volatile("griddepcontrol.launch_dependents;"); asm volatile("griddepcontrol.wait;" ::: "memory"); }
__global__ void chase(const unsigned* p, int n, long long* out) {
  unsigned at = 0; long long t = clock64();
  for (int i = 0; i < n; i++) at = __ldcg(p + at);
  t = clock64() - t; out[0] = t / n; out[1] = at;
}
__global__ void chase_l1(const unsigned* p, int n, long long* out) {
  unsigned at = 0; for (int i = 0; i < 64; i++) at = p[at];
  long long t = clock64(); for (int i = 0; i < n; i++) at = p[at]; t = clock64() - t; out[0] = t / n; out[1] = at;
}
template <int KIND> __global__ void op(int* p, int n, long long* out) {
  __shared__ int s[1024]; s[threadIdx.x] = 0; __syncthreads();
  int v = 0; long long t = clock64();
  for (int i = 0; i < n; i++) {
    if (KIND == 0) asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(v & 1) : "memory");
    if (KIND == 1) asm volatile("atom.add.relaxed.gpu.global.s32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(v & 1) : "memory");
    if (KIND == 2) asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p + (v & 1)) : "memory");
    if (KIND == 3) asm volatile("atom.add.acq_rel.sys.global.s32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(v & 1) : "memory");
    if (KIND == 4) { asm volatile("st.global.s32 [%0], %1;" :: "l"(p + threadIdx.x * 32), "r"(i) : "memory"); asm volatile("fence.acq_rel.sys;" ::: "memory"); }
    if (KIND == 5) { asm volatile("st.global.s32 [%0], %1;" :: "l"(p + threadIdx.x * 32), "r"(i) : "memory"); asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
    if (KIND == 6) __syncthreads();
    if (KIND == 8) { s[threadIdx.x ^ (v & 1)] = v; __syncthreads(); v = s[(threadIdx.x + 1) % blockDim.x]; __syncthreads(); }
    if (KIND == 10) asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p + (v & 1)) : "memory");
    if (KIND == 11) { v = s[v & 31]; }
  }
  t = clock64() - t; if (threadIdx.x == 0) { out[0] = t / n; out[1] = v; }
}
__global__ void ping(int* flags, int n, long long* out) {
  int me = blockIdx.x; long long t = clock64();
  for (int i = 1; i <= n; i++) {
    int v;
    if (me == 0) { asm volatile("st.release.sys.global.s32 [%0], %1;" :: "l"(flags), "r"(i) : "memory");
      do asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(flags + 64) : "memory"); while (v != i); }
    else { do asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(flags) : "memory"); while (v != i);
      asm volatile("st.release.sys.global.s32 [%0], %1;" :: "l"(flags + 64), "r"(i) : "memory"); }
  }
  if (me == 0) out[0] = (clock64() - t) / n;
}
__global__ void spin(long long ns) { long long a, b; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(a)); do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(b)); while (b - a < ns); }
float graph_us(int blocks, int threads, int n, bool pdl) {
  cudaStream_t s; CK(cudaStreamCreate(&s)); cudaGraph_t g; cudaGraphExec_t e;
  CK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < n; i++) {
    cudaLaunchConfig_t c = {}; c.gridDim = blocks; c.blockDim = threads; c.stream = s; cudaLaunchAttribute a[1];
    a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization; a[0].val.programmaticStreamSerializationAllowed = 1; c.attrs = a; c.numAttrs = pdl ? 1 : 0;
    if (pdl) CK(cudaLaunchKernelEx(&c, pdl_kernel)); else CK(cudaLaunchKernelEx(&c, empty));
  }
  CK(cudaStreamEndCapture(s, &g)); CK(cudaGraphInstantiate(&e, g, 0)); cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
  float best = 1e9; for (int r = 0; r < 10; r++) { cudaEventRecord(a, s); CK(cudaGraphLaunch(e, s)); cudaEventRecord(b, s); CK(cudaEventSynchronize(b)); float ms; cudaEventElapsedTime(&ms, a, b); if (ms < best) best = ms; }
  return best * 1e3f / n;
}
int main() {
  cudaDeviceProp p; cudaGetDeviceProperties(&p, 0); int khz = 0; cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0); printf("%s, clock up to %d MHz, L2 %d MiB\n", p.name, khz / 1000, p.l2CacheSize >> 20);
  spin<<<1, 1>>>(300000000); CK(cudaDeviceSynchronize());
  int shapes[][2] = {{1, 32}, {16, 256}, {132, 512}, {264, 512}, {528, 256}};
  for (auto& s : shapes) printf("launch in a graph, %d x %d: %.2f us, with programmatic dependent launch %.2f us\n", s[0], s[1], graph_us(s[0], s[1], 200, false), graph_us(s[0], s[1], 200, true));
  long long* out; CK(cudaMallocManaged(&out, 256)); long long host;
  CK(cudaFree(out)); CK(cudaMalloc(&out, 256)); 
  size_t sizes[] = {16 << 10, 4u << 20, 24u << 20, 1u << 30};
  for (size_t bytes : sizes) {
    unsigned n = bytes / 4, *h = (unsigned*)malloc(bytes), *d; unsigned step = bytes > (1 << 26) ? 1048583u * 32 % n : 4099u * 32 % n; for (size_t i = 0; i < n; i++) h[i] = (unsigned)((i + step) % n);
    CK(cudaMalloc(&d, bytes)); CK(cudaMemcpy(d, h, bytes, cudaMemcpyHostToDevice)); int reps = bytes > (1u << 26) ? 2000 : 20000;
    if (bytes <= (64 << 10)) { chase_l1<<<1, 1>>>(d, reps, out); CK(cudaMemcpy(&host, out, 8, cudaMemcpyDeviceToHost)); printf("load, L1: %lld cycles\n", host); }
    chase<<<1, 1>>>(d, reps, out); CK(cudaMemcpy(&host, out, 8, cudaMemcpyDeviceToHost)); printf("load past L1, %zu KiB: %lld cycles\n", bytes >> 10, host); cudaFree(d); free(h);
  }
  int* f; CK(cudaMalloc(&f, 1 << 20)); CK(cudaMemset(f, 0, 1 << 20));
#define OP(k, threads, name) op<k><<<1, threads>>>(f, 2000, out); CK(cudaDeviceSynchronize()); CK(cudaMemcpy(&host, out, 8, cudaMemcpyDeviceToHost)); printf("%s: %lld cycles\n", name, host);
  OP(0, 1, "atom.add.acq_rel.gpu") OP(1, 1, "atom.add.relaxed.gpu") OP(3, 1, "atom.add.acq_rel.sys") OP(2, 1, "ld.acquire.sys") OP(10, 1, "ld.relaxed.sys")
  OP(4, 1, "store and fence.acq_rel.sys, 1 thread") OP(4, 256, "store and fence.acq_rel.sys, 256 threads") OP(5, 1, "store and fence.acq_rel.gpu, 1 thread") OP(5, 256, "store and fence.acq_rel.gpu, 256 threads")
  OP(6, 128, "barrier of 128 threads") OP(6, 256, "barrier of 256 threads") OP(6, 512, "barrier of 512 threads") OP(6, 1024, "barrier of 1024 threads") OP(11, 32, "load from shared memory") OP(8, 256, "exchange through shared memory, 256 threads")
  ping<<<2, 1>>>(f, 5000, out); CK(cudaDeviceSynchronize()); CK(cudaMemcpy(&host, out, 8, cudaMemcpyDeviceToHost)); printf("flag to another multiprocessor and back, release and acquire sys: %lld cycles\n", host);
  return 0;
}
