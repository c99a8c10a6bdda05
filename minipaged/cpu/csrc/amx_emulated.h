// The six instructions of amx.h in plain C++, so that the code above them is tested on any machine. What the
// processor would fault on ends the process: a tile that is not configured, or of sizes that do not fit.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

struct EmulatedTiles {
    TileShapes shapes;  // no tile has a row until shapes are configured
    uint8_t data[8][16][64];
};
static thread_local EmulatedTiles emulated;

static inline void require_tile(bool right, const char* what) {
    if (right) return;
    std::fprintf(stderr, "AMX emulated: %s\n", what);
    std::abort();
}

static inline void configure_tiles(const TileShapes& shapes) {
    require_tile(shapes.palette == 1 && shapes.start_row == 0, "another palette, or a start row");
    for (int tile = 0; tile < 16; tile++) {
        const int rows = shapes.rows[tile], bytes = shapes.bytes[tile];
        require_tile(rows <= 16 && bytes <= 64 && (rows == 0) == (bytes == 0), "no size of a tile");
        require_tile(tile < 8 || rows == 0, "more than eight tiles");
    }
    emulated = {shapes, {}};
}
static inline void release_tiles() { emulated = {}; }

template <int TILE> static inline void zero_tile() {
    require_tile(emulated.shapes.rows[TILE] > 0, "a tile that is not configured is zeroed");
    std::memset(emulated.data[TILE], 0, sizeof emulated.data[TILE]);
}

template <int TILE> static inline void load_tile(const void* from, int64_t stride) {
    zero_tile<TILE>();  // what is beyond its rows and bytes
    for (int row = 0; row < emulated.shapes.rows[TILE]; row++)
        std::memcpy(emulated.data[TILE][row], static_cast<const uint8_t*>(from) + row * stride,
                    emulated.shapes.bytes[TILE]);
}

template <int TILE> static inline void store_tile(void* to, int64_t stride) {
    require_tile(emulated.shapes.rows[TILE] > 0, "a tile that is not configured is stored");
    for (int row = 0; row < emulated.shapes.rows[TILE]; row++)
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, emulated.data[TILE][row],
                    emulated.shapes.bytes[TILE]);
}

// A denormal number is zero, of either sign, wherever it goes in or comes out.
static inline float flushed(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (!(bits & 0x7f800000)) bits &= 0x80000000;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
static inline float widened(uint16_t upper_half) {
    const uint32_t bits = uint32_t(upper_half) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return flushed(x);
}

// As the manual's volume 2 has the operation of TDPBF16PS: the lower numbers of all pairs are summed from zero by
// fused multiplications and additions, and so are the upper ones; the two sums are added, and then what stood
// in the tile. Each step rounds to nearest, ties to even, whatever the process has set.
template <int SUMS, int X, int W> static inline void multiply_tiles() {
    const TileShapes& shapes = emulated.shapes;
    const int rows = shapes.rows[SUMS], columns = shapes.bytes[SUMS] / 4, pairs = shapes.bytes[X] / 4;
    require_tile(rows > 0 && shapes.rows[X] == rows && shapes.rows[W] == pairs && pairs > 0 &&
                 shapes.bytes[W] == shapes.bytes[SUMS], "tiles that do not fit are multiplied");
    uint16_t x[16][32], w[16][32];
    float sums[16][16];
    std::memcpy(x, emulated.data[X], sizeof x);
    std::memcpy(w, emulated.data[W], sizeof w);
    std::memcpy(sums, emulated.data[SUMS], sizeof sums);
    for (int m = 0; m < rows; m++) {
        float both[32] = {};  // lower and upper, column by column
        for (int k = 0; k < pairs; k++)
            for (int i = 0; i < 2 * columns; i++)
                both[i] = flushed(std::fma(widened(x[m][2 * k + i % 2]), widened(w[k][i]), both[i]));
        for (int n = 0; n < columns; n++) {
            const volatile float pair = flushed(both[2 * n] + both[2 * n + 1]);  // fast maths would regroup
            sums[m][n] = flushed(flushed(sums[m][n]) + pair);
        }
    }
    std::memcpy(emulated.data[SUMS], sums, sizeof sums);
}
