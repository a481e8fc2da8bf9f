// The intrinsics, for files that are compiled for AVX-512.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the deliberately undefined registers in its own header for mistakes of ours
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
