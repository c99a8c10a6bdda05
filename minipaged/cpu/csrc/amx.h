// The six instructions of Intel's AMX that a product of bfloat16 takes. A tile is a register of at most 16 rows
// of 64 bytes; a thread has eight of them, and says first how large each is. Described in Intel's "64 and IA-32
// Architectures Software Developer's Manual", volume 1, chapter "Programming with Intel AMX", and volume 2.
//
// They are written in assembly, so any compiler for x86-64 takes them, whatever processor it compiles for; only
// a processor that choice.cpp has asked may run them. Where there is no such compiler, and for tests
// (MINIPAGED_EMULATE_TILES), the same six are plain C++.
#pragma once
#include <cstdint>

// The argument of LDTILECFG.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row of each tile
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "as the processor reads it");

#if defined MINIPAGED_EMULATE_TILES
#define EMULATED_TILES_SERVE
#elif defined __x86_64__ && defined __linux__ && __has_include(<amxtileintrin.h>)  // so the assembler knows them
#define REAL_TILES
#endif

#ifdef REAL_TILES
static inline void configure_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
static inline void release_tiles() { asm volatile("tilerelease"); }

template <int TILE> static inline void zero_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(TILE)); }

// Rows of a tile begin `stride` bytes apart in memory.
template <int TILE> static inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE> static inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}

// SUMS[m][n] += the sum over k of X[m][k] * W[k][n], where X[m][k] and W[k][n] are pairs of bfloat16, whose two
// products are both added, and SUMS[m][n] is a float32.
template <int SUMS, int X, int W> static inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(W));
}
#else
#include "amx_emulated.h"
#endif
