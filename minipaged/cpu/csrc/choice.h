// How the products of this process are made. calibrate.py chooses once, before the first product and by what
// this machine measures; one choice for every number of rows, so that a batch changes no bit of a row.
#pragma once
#include <cstdint>
#include "lanes.h"

// How a weight is asked for before it is needed: not at all, once (it need not push other data out of the
// caches), or into every cache. The numbers are those of __builtin_prefetch.
enum Prefetch { NONE = -1, NTA = 0, T0 = 3 };

struct Way {
    int32_t tiles;     // 1: AMX, bfloat16 only. 0: vectors
    int32_t prefetch;  // a Prefetch
};
extern Way way_float32, way_bfloat16;

template <typename T> static inline const Way& way();
template <> inline const Way& way<float>() { return way_float32; }
template <> inline const Way& way<bfloat16>() { return way_bfloat16; }
