/* The driver's calls as native/gpu/driver.h declares them against cuda.h; compiled and never run.
 * An int stands there for each enum of CUDA's. */
#include <cuda.h>

#include <string_view>
#include <type_traits>

extern "C" {
#include "driver.h"
}

template <class T> struct plain_of {
    using type = std::conditional_t<std::is_enum_v<T>, int, T>;
};
template <class T> struct plain_of<T *> {
    using type = std::conditional_t<std::is_enum_v<T>, int, T> *;
};
template <class T> using plain = typename plain_of<T>::type;

template <class Ours, class Result, class... Arguments>
constexpr bool is_same(Result (*)(Arguments...)) {
    return std::is_same_v<Ours, plain<Result> (*)(plain<Arguments>...)> &&
           sizeof(Result) == sizeof(plain<Result>);
}

/* cuda.h renames a call whose ABI has changed (cuMemAlloc is cuMemAlloc_v2), and the library has
 * the old one by the old name: ours are looked for by name, so none may be renamed. */
#define TEXT(word)     #word
#define EXPANDED(word) TEXT(word)
#define CHECK(call)                                                                                \
    static_assert(is_same<decltype(dp_driver::call)>(&::call), #call);                             \
    static_assert(std::string_view(EXPANDED(call)) == #call)
CHECK(cuCtxGetCurrent);
CHECK(cuCtxSetCurrent);
CHECK(cuLaunchKernel);
CHECK(cuThreadExchangeStreamCaptureMode);
CHECK(cuStreamQuery);
CHECK(cuStreamSynchronize);
CHECK(cuGetErrorName);
CHECK(cuGetErrorString);
static_assert(sizeof(CUstreamCaptureMode) == sizeof(int));
static_assert(DP_CUDA_NOT_READY == CUDA_ERROR_NOT_READY);
static_assert(DP_CUDA_CAPTURE_RELAXED == CU_STREAM_CAPTURE_MODE_RELAXED);
