/* The driver's calls as native/gpu/driver.h declares them against cuda.h; compiled and never run.
 * An int stands there for each enum of CUDA's. */
#include <cuda.h>

#include <type_traits>

extern "C" {
#include "driver.h"
}

template <class T> using plain = std::conditional_t<std::is_enum_v<T>, int, T>;

template <class Ours, class Result, class... Arguments>
constexpr bool is_same(Result (*)(Arguments...)) {
    return std::is_same_v<Ours, plain<Result> (*)(plain<Arguments>...)> &&
           sizeof(Result) == sizeof(plain<Result>);
}

#define CHECK(call) static_assert(is_same<decltype(dp_driver::call)>(&::call), #call)
CHECK(cuCtxGetCurrent);
CHECK(cuCtxSetCurrent);
CHECK(cuLaunchKernel);
CHECK(cuStreamQuery);
CHECK(cuStreamSynchronize);
CHECK(cuGetErrorName);
CHECK(cuGetErrorString);
static_assert(DP_CUDA_NOT_READY == CUDA_ERROR_NOT_READY);
