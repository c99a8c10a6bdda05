// The heart of every matrix product here: some rows times a panel, which is 32 columns of a weight, the whole
// depth of it. The sums stay in the processor until they are complete. A row is summed in the same order
// whatever rows come with it, so that the batch changes no bit of its result.
//
// x and panel are words: one float32 or two bfloat16 of the depth. Row r of x begins at r * stride; a panel is
// the first word of its 32 columns, then the second, and so on: [words, WIDTH].
#pragma once
#include "amx.h"
#include "choice.h"
#include "lanes.h"

constexpr int WIDTH = 2 * LANES;
constexpr int VECTOR_ROWS = 12;  // with AVX-512: 24 sums of 16 numbers in its 32 registers
constexpr int TILE_ROWS = 32;    // two tiles of sums above two others
constexpr int MOST_ROWS = TILE_ROWS;
constexpr int64_t AHEAD = 128;   // words of depth between asking for a part of the panel and using it

template <Prefetch HINT> static inline void ask_for(const uint32_t* lines, int64_t words) {
    if constexpr (HINT != NONE)
        for (int64_t i = 0; i < words; i += LANES) __builtin_prefetch(lines + i, 0, HINT);
}

// With vectors, word after word: each word of a row meets those of the 32 columns.
template <typename T, Prefetch HINT, int ROWS>
static void multiply_vectors(const uint32_t* x, int64_t stride, const uint32_t* panel, int64_t words,
                             Lanes (*out)[2]) {
    Lanes sums[ROWS][2] = {};
    for (int64_t word = 0; word < words; word++, panel += WIDTH) {
        ask_for<HINT>(panel + AHEAD * WIDTH, WIDTH);
        const Bits left = load(panel), right = load(panel + LANES);
        for (int r = 0; r < ROWS; r++) {
            const Bits both = Bits{} + x[r * stride + word];
            sums[r][0] = multiply_add<T>(both, left, sums[r][0]);
            sums[r][1] = multiply_add<T>(both, right, sums[r][1]);
        }
    }
    for (int r = 0; r < ROWS; r++) out[r][0] = sums[r][0], out[r][1] = sums[r][1];
}

// With AMX, 16 words at a time: a tile has 16 rows of 16 words.
//     tile 4, rows 0 to 15 of x       tile 6, the left half of the panel
//     tile 5, rows 16 to 31           tile 7, the right half
//     tiles 0 and 1: sums of tile 4 with 6 and 7; tiles 2 and 3: of tile 5
constexpr int TILE_WORDS = 16, ROW_BYTES = TILE_WORDS * 4;

static void configure_for(int rows) {
    const int upper = rows < 16 ? rows : 16, lower = rows - upper;
    const int rows_of[8] = {upper, upper, lower, lower, upper, lower, TILE_WORDS, TILE_WORDS};
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++)
        if (rows_of[tile]) shapes.rows[tile] = rows_of[tile], shapes.bytes[tile] = ROW_BYTES;
    configure_tiles(shapes);
}

// Add the products of TILE_WORDS words to the sums.
static inline void add_tiles(bool lower, const uint32_t* x, int64_t stride, const uint32_t* panel) {
    load_tile<6>(panel, WIDTH * 4);
    load_tile<7>(panel + LANES, WIDTH * 4);
    load_tile<4>(x, stride * 4);
    multiply_tiles<0, 4, 6>();
    multiply_tiles<1, 4, 7>();
    if (!lower) return;
    load_tile<5>(x + 16 * stride, stride * 4);
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
}

template <Prefetch HINT>
static void multiply_amx(int64_t rows, const uint32_t* x, int64_t stride, const uint32_t* panel, int64_t words,
                         Lanes (*out)[2]) {
    const bool lower = rows > 16;
    configure_for(rows);  // here, since other code of the process, oneDNN, configures tiles too
    zero_tile<0>();
    zero_tile<1>();
    if (lower) {
        zero_tile<2>();
        zero_tile<3>();
    }
    int64_t word = 0;
    for (; word + TILE_WORDS <= words; word += TILE_WORDS, panel += TILE_WORDS * WIDTH) {
        ask_for<HINT>(panel + AHEAD * WIDTH, TILE_WORDS * WIDTH);
        add_tiles(lower, x + word, stride, panel);
    }
    if (word < words) {  // the last words, and zeros up to a whole tile
        uint32_t x_end[TILE_ROWS][TILE_WORDS] = {}, panel_end[TILE_WORDS][WIDTH] = {};
        for (int64_t row = 0; row < rows; row++)
            std::memcpy(x_end[row], x + row * stride + word, (words - word) * 4);
        std::memcpy(panel_end, panel, (words - word) * sizeof panel_end[0]);
        add_tiles(lower, x_end[0], TILE_WORDS, panel_end[0]);
    }
    store_tile<0>(&out[0][0], sizeof out[0]);
    store_tile<1>(&out[0][1], sizeof out[0]);
    if (lower) {
        store_tile<2>(&out[16][0], sizeof out[0]);
        store_tile<3>(&out[16][1], sizeof out[0]);
    }
}

// How many rows `multiply` takes at once.
template <typename T> static int64_t rows_at_once() { return way<T>().tiles ? TILE_ROWS : VECTOR_ROWS; }

// out[r] = row r of x times the panel, for 1 to rows_at_once() rows.
template <typename T, Prefetch HINT>
static void multiply(int64_t rows, const T* x, int64_t stride, const uint32_t* panel, int64_t words,
                     Lanes (*out)[2]) {
    static constexpr decltype(&multiply_vectors<T, HINT, 1>) by_rows[VECTOR_ROWS] = {
        multiply_vectors<T, HINT, 1>, multiply_vectors<T, HINT, 2>, multiply_vectors<T, HINT, 3>,
        multiply_vectors<T, HINT, 4>, multiply_vectors<T, HINT, 5>, multiply_vectors<T, HINT, 6>,
        multiply_vectors<T, HINT, 7>, multiply_vectors<T, HINT, 8>, multiply_vectors<T, HINT, 9>,
        multiply_vectors<T, HINT, 10>, multiply_vectors<T, HINT, 11>, multiply_vectors<T, HINT, 12>};
    const auto* from = reinterpret_cast<const uint32_t*>(x);
    if (way<T>().tiles) multiply_amx<HINT>(rows, from, stride, panel, words, out);
    else by_rows[rows - 1](from, stride, panel, words, out);
}

// What a thread calls after its last product: tiles that are in use make each switch of threads dearer.
template <typename T> static void done_multiplying() {
    if (way<T>().tiles) release_tiles();
}
