// Products of rows with a weight, out = x . weight^T, and what comes after them while the sums are still at hand.
// With few rows the time goes into reading the weight: it is laid out once in the order in which it is read (see
// packing.py), each part is asked for before it is needed, and used for up to 12 rows while it is in the processor.
// A row is summed in the same order whatever rows come with it, so the batch changes no bit of its result.
#include <algorithm>
#include <cmath>
#include "lanes.h"

constexpr int WIDTH = 2 * LANES, MOST_ROWS = 12;  // columns of a panel; rows of a tile: 24 sums in 32 registers
constexpr int64_t AHEAD = 128, BLOCK = 240;  // steps between asking and using; rows that stay in a core's own cache
enum After { ROUND, KEEP_FLOAT32, ADD, GATE };
template <typename T> struct Product {
    const T* x;             // [rows, depth]
    const uint32_t* weight; // [panels, words, WIDTH]; a word holds one float32 or two bfloat16 of the depth
    void* out;              // [rows, columns]; float32 after KEEP_FLOAT32; half as many columns after GATE
    int64_t rows, words, panels;
    int32_t after;          // ADD: to what is in out. GATE: a panel has 16 gates and their 16 ups, silu(gate) * up
};

template <typename T> static void finish(const Product<T>& p, const Lanes* sums, int64_t row, int64_t panel) {
    const int64_t at = (row * p.panels + panel) * (p.after == GATE ? LANES : WIDTH);
    T* const out = static_cast<T*>(p.out) + at;
    if (p.after == GATE) {
        Lanes gate = sums[0];
        for (int i = 0; i < LANES; i++) gate[i] /= 1 + std::exp(std::min(-gate[i], 88.0f));  // beyond: infinite
        store(gate * sums[1], out);
    } else for (int i = 0; i < 2; i++) {
        if (p.after == KEEP_FLOAT32) store(sums[i], static_cast<float*>(p.out) + at + i * LANES);
        else store(p.after == ADD ? sums[i] + load(out + i * LANES) : sums[i], out + i * LANES);
    }
}

// Rows `row` to row + ROWS - 1 times one panel.
template <typename T, int ROWS> static void tile(const Product<T>& p, int64_t row, int64_t panel) {
    Lanes sums[ROWS][2] = {};
    const uint32_t* w = p.weight + panel * p.words * WIDTH;
    const auto* x = reinterpret_cast<const uint32_t*>(p.x) + row * p.words;
    for (int64_t word = 0; word < p.words; word++, w += WIDTH) {
        fetch(w + AHEAD * WIDTH, WIDTH * 4);
        const Bits left = load(w), right = load(w + LANES);
        for (int r = 0; r < ROWS; r++) {
            const Bits both = Bits{} + x[r * p.words + word];
            sums[r][0] = multiply_add<T>(both, left, sums[r][0]);
            sums[r][1] = multiply_add<T>(both, right, sums[r][1]);
        }
    }
    for (int r = 0; r < ROWS; r++) finish(p, sums[r], row + r, panel);
}

template <typename T> static void product(const Product<T>* product) {
    const Product<T> p = *product;
    constexpr void (*tiles[])(const Product<T>&, int64_t, int64_t) = {
        nullptr, tile<T, 1>, tile<T, 2>, tile<T, 3>, tile<T, 4>, tile<T, 5>, tile<T, 6>,
        tile<T, 7>, tile<T, 8>, tile<T, 9>, tile<T, 10>, tile<T, 11>, tile<T, MOST_ROWS>};
#pragma omp parallel
    for (int64_t first = 0; first < p.rows; first += BLOCK) {
        const int64_t rows = std::min(BLOCK, p.rows - first), parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp for schedule(static) nowait  // a thread keeps its panels, and no panel's rows depend on another's
        for (int64_t panel = 0; panel < p.panels; panel++)
            for (int64_t i = 0; i < parts; i++) {
                const int64_t begin = rows * i / parts, end = rows * (i + 1) / parts;
                tiles[end - begin](p, first + begin, panel);
            }
    }
}
extern "C" void product_float32(const Product<float>* p) { product(p); }
extern "C" void product_bfloat16(const Product<bfloat16>* p) { product(p); }
// For these dtypes it has the instructions; for others the compiler's code is slower than torch's products.
#if defined __AVX512BF16__
extern "C" const char* const fast_products = "float32 bfloat16";
#elif defined __AVX512F__
extern "C" const char* const fast_products = "float32";
#else
extern "C" const char* const fast_products = "";
#endif
