/* All kernels in one image. */
#include "admission.cu"
#include "echo.cu"
#include "engine.cu"
