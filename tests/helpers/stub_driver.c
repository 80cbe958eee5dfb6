// The part of CUDA's driver that Triton calls, for a GPU that is not there: binaries are "loaded", and launches are
// written down and not made. What Triton does on the host is all its own.
//
// A parameter is copied by its size, which `stub_describe` tells of each function once it is loaded.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define MOST_PARAMETERS 48
#define MOST_LAUNCHES 4096

typedef struct {
  char name[256];
  int num_parameters;
  uint8_t sizes[MOST_PARAMETERS];
} Function;

typedef struct {
  const Function *function;
  uint64_t stream;
  int32_t grid[3], threads, shared, device, cooperative, num_parameters;
  uint64_t parameters[MOST_PARAMETERS];
} Launch;

static Launch launches[MOST_LAUNCHES]; // of the last ones
static uint64_t num_launches;
static int current_device, capability = 90, multiprocessors = 132;

void stub_set(int major_and_minor, int num_multiprocessors) {
  capability = major_and_minor;
  multiprocessors = num_multiprocessors;
}
void stub_set_device(int device) { current_device = device; }
uint64_t stub_num_launches(void) { return num_launches; }
const Launch *stub_launch(uint64_t number) { return &launches[number % MOST_LAUNCHES]; }
const char *stub_name(const Function *function) { return function->name; }
void stub_describe(Function *function, int num_parameters, const uint8_t *sizes) {
  function->num_parameters = num_parameters;
  memcpy(function->sizes, sizes, num_parameters);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra) {
  const Function *function = (const Function *)f;
  if (function == NULL || config->blockDimX == 0 || config->gridDimX == 0)
    return CUDA_ERROR_INVALID_VALUE;
  int cooperative = 0;
  for (unsigned int i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
      cooperative = config->attrs[i].value.cooperative;
  if (cooperative && config->gridDimX * config->gridDimY * config->gridDimZ > (unsigned int)multiprocessors)
    return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE; // as of a program that needs all of one
  Launch *launch = &launches[num_launches++ % MOST_LAUNCHES];
  launch->function = function;
  launch->stream = (uint64_t)config->hStream;
  launch->grid[0] = config->gridDimX, launch->grid[1] = config->gridDimY, launch->grid[2] = config->gridDimZ;
  launch->threads = config->blockDimX;
  launch->shared = config->sharedMemBytes;
  launch->device = current_device;
  launch->cooperative = cooperative;
  launch->num_parameters = function->num_parameters;
  for (int i = 0; i < function->num_parameters; i++) {
    launch->parameters[i] = 0;
    memcpy(&launch->parameters[i], parameters[i], function->sizes[i]);
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  Function *function = calloc(1, sizeof(Function));
  strncpy(function->name, name, sizeof(function->name) - 1);
  *f = (CUfunction)function;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    *value = multiprocessors;
    break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    *value = 32;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    *value = 65536;
    break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
    *value = capability / 10;
    break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    *value = capability % 10;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = 227 * 1024;
    break;
  default:
    *value = 1;
  }
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)&current_device;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) {
  *version = 12080;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer; // unified addresses: it is its own
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "the stub of CUDA's driver takes no such call";
  return CUDA_SUCCESS;
}
