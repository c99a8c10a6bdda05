// What a layer does to each row beside products and attention, in one pass over memory each; torch makes a pass, and a
// tensor, of every operation. Numbers are float32 between load and store.
#include "lanes.h"

constexpr int64_t WORTH_THREADS = 1 << 14;  // numbers; for fewer, waking a thread costs more than it saves

// The norm of each row; x, out: [rows, size]
template <typename T>
static void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) rms_norm_row(x + row * size, weight, out + row * size, size, eps);
}

// Turn, in place, the pairs (x[i], x[i + half]) of each head; row r of x begins at r * stride. cos, sin: [rows, half]
template <typename T>
static void rotate(T* x, const T* cos, const T* sin, int64_t rows, int64_t stride, int64_t heads, int64_t half) {
#pragma omp parallel for if (rows * heads * half > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t i = 0; i < half; i += LANES) {
                T *const first = x + row * stride + head * 2 * half + i, *const second = first + half;
                const Lanes a = load(first), b = load(second);
                const Lanes c = load(cos + row * half + i), s = load(sin + row * half + i);
                store(a * c - b * s, first);
                store(b * c + a * s, second);
            }
}

// cache[slots[row]] = key or value of the row, which begins at row * stride. A negative slot is padding. Returns how
// many slots lie behind the cache; their rows are not stored.
template <typename T>
static int64_t write_kv(const T* key, const T* value, const int64_t* slots, T* keys, T* values, int64_t num_slots,
                        int64_t rows, int64_t stride, int64_t size) {
    int64_t behind = 0;
#pragma omp parallel for reduction(+ : behind) if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t slot = slots[row];
        if (slot >= num_slots) behind++;
        if (slot < 0 || slot >= num_slots) continue;
        std::memcpy(keys + slot * size, key + row * stride, size * sizeof(T));
        std::memcpy(values + slot * size, value + row * stride, size * sizeof(T));
    }
    return behind;
}

// What Python looks up, for each dtype; `Functions` of cpu_kernel.py has the same order.
template <typename T> struct Functions {
    decltype(&rms_norm<T>) norm = rms_norm<T>;
    decltype(&rotate<T>) turn = rotate<T>;
    decltype(&write_kv<T>) store = write_kv<T>;
};
extern "C" const Functions<float> functions_float32;
extern "C" const Functions<bfloat16> functions_bfloat16;
const Functions<float> functions_float32;
const Functions<bfloat16> functions_bfloat16;
