// Products of rows with a weight, out = x . weight^T: with the norm before them, and what is done to the sums
// while they are in registers. With few rows the time goes into reading the weight: it is laid out once in
// the order of reading (packing.py), each part is asked for before it is needed, and used for as many rows as
// fit while it is in the processor (tile.h).
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <memory>
#include <vector>

#include "arguments.h"
#include "tile.h"

constexpr int64_t BLOCK = 240;  // rows, at most, that stay in a core's own cache while it goes through its panels

template <typename T> static void finish(const Product<T>& p, const Lanes* sums, int64_t row, int64_t panel) {
    const int64_t at = (row * p.panels + panel) * (p.after == GATE ? LANES : WIDTH);
    T* const out = static_cast<T*>(p.out) + at;
    if (p.after == GATE) {
        float denominator[LANES];
        store(sums[0], denominator);
// Without the pragma the compiler writes the loop out before it looks for vectors. exp(89) is infinite.
#pragma omp simd
        for (int i = 0; i < LANES; i++) denominator[i] = 1 + std::exp(std::min(-denominator[i], 88.0f));
        store(sums[0] / load(denominator) * sums[1], out);
    } else for (int i = 0; i < 2; i++) {
        if (p.after == KEEP_FLOAT32) store(sums[i], static_cast<float*>(p.out) + at + i * LANES);
        else store(p.after == ADD ? sums[i] + load(out + i * LANES) : sums[i], out + i * LANES);
    }
}

// Of a row, what a thread has seen: the largest sum, its first place, and in `sizes` the largest bits without
// sign, by which numbers that are not finite are known. (Fast maths knows none.)
struct Best { Bits sizes; float value; int64_t place; };

static void keep_argmax(Best& best, const Lanes* sums, int64_t panel) {
    const Lanes most = sums[0] > sums[1] ? sums[0] : sums[1];
    float value = most[0];
    for (int i = 1; i < LANES; i++) value = std::max(value, most[i]);
    for (int half = 0; half < 2; half++) {
        const Bits size = (Bits)sums[half] & 0x7fffffff;
        best.sizes = size > best.sizes ? size : best.sizes;
    }
    if (value <= best.value) return;
    int i = 0;
    while (i < WIDTH - 1 && sums[i / LANES][i % LANES] < value) i++;
    best.value = value;
    best.place = panel * WIDTH + i;
}

// Put together what the threads have seen; the place is -1 in a row with a number that is not finite.
static void merge(std::vector<Best>& all, const std::vector<Best>& seen, int64_t* places) {
    for (size_t row = 0; row < all.size(); row++) {
        Best& best = all[row];
        const Best& other = seen[row];
        best.sizes = other.sizes > best.sizes ? other.sizes : best.sizes;
        if (other.value > best.value || (other.value == best.value && other.place < best.place)) {
            best.value = other.value;
            best.place = other.place;
        }
        uint32_t size = 0;
        for (int i = 0; i < LANES; i++) size = std::max(size, best.sizes[i]);
        places[row] = size >= 0x7f800000 ? -1 : best.place;
    }
}

template <typename T, Prefetch HINT> static void product(const Product<T>& p) {
    const int64_t depth = p.words * 4 / sizeof(T);
    const int64_t most = rows_at_once<T>(), block = BLOCK / most * most;
    const std::unique_ptr<T[]> normed(p.norm ? new T[std::min(block, p.rows) * depth] : nullptr);
    const std::vector<Best> nothing(p.after == ARGMAX ? p.rows : 0, Best{{}, -FLT_MAX, 0});
    std::vector<Best> all = nothing;
#pragma omp parallel
    {
        std::vector<Best> seen = nothing;
        for (int64_t first = 0; first < p.rows; first += block) {
            const int64_t rows = std::min(block, p.rows - first), groups = (rows + most - 1) / most;
            const T* x = p.x + first * depth;
            if (p.norm) {
#pragma omp for schedule(static)
                for (int64_t row = 0; row < rows; row++)
                    rms_norm_row(x + row * depth, p.norm, normed.get() + row * depth, depth, p.eps);
                x = normed.get();
            }
#pragma omp for schedule(static)  // a thread keeps its panels
            for (int64_t panel = 0; panel < p.panels; panel++)
                for (int64_t i = 0; i < groups; i++) {
                    const int64_t begin = rows * i / groups, end = rows * (i + 1) / groups;
                    const uint32_t* weight = p.weight + panel * p.words * WIDTH;
                    Lanes sums[MOST_ROWS][2];
                    multiply<T, HINT>(end - begin, x + begin * depth, p.words, weight, p.words, sums);
                    for (int64_t row = begin; row < end; row++)
                        if (p.after == ARGMAX) keep_argmax(seen[first + row], sums[row - begin], panel);
                        else finish(p, sums[row - begin], first + row, panel);
                }
        }
        done_multiplying<T>();
#pragma omp critical
        merge(all, seen, static_cast<int64_t*>(p.out));
    }
}

template <typename T> void product(const Product<T>& p) {
    switch (way<T>().prefetch) {
        case NONE: return product<T, NONE>(p);
        case T0: return product<T, T0>(p);
        default: return product<T, NTA>(p);
    }
}
template void product(const Product<float>&);
template void product(const Product<bfloat16>&);
extern "C" void product_float32(const Product<float>* p) { product(*p); }
extern "C" void product_bfloat16(const Product<bfloat16>* p) { product(*p); }
