// The layers of a model: first what a layer does to each row beside products and attention, in one pass over
// memory each (torch makes a pass, and a tensor, of every operation); then all layers in one call, for a call
// from Python takes longer than many of them compute. Numbers are float32 between load and store.
#include "arguments.h"

constexpr int64_t WORTH_THREADS = 1 << 14;  // numbers; for fewer, waking a thread costs more than it saves

// The norm of each row; x, out: [rows, size]
template <typename T>
static void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++)
        rms_norm_row(x + row * size, weight, out + row * size, size, eps);
}

// Turn, in place, the pairs (x[i], x[i + half]) of each head; row r of x begins at r * stride. cos, sin:
// [rows, half]
template <typename T>
static void rotate(T* x, const T* cos, const T* sin, int64_t rows, int64_t stride, int64_t heads,
                   int64_t half) {
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

// cache[slots[row]] = key or value of the row, which begins at row * stride. A negative slot is padding.
// Returns how many slots are beyond the cache; their rows are not stored.
template <typename T>
static int64_t write_kv(const T* key, const T* value, const int64_t* slots, T* keys, T* values,
                        int64_t num_slots, int64_t rows, int64_t stride, int64_t size) {
    int64_t beyond = 0;
#pragma omp parallel for reduction(+ : beyond) if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t slot = slots[row];
        if (slot >= num_slots) beyond++;
        if (slot < 0 || slot >= num_slots) continue;
        std::memcpy(keys + slot * size, key + row * stride, size * sizeof(T));
        std::memcpy(values + slot * size, value + row * stride, size * sizeof(T));
    }
    return beyond;
}

template <typename T> static void multiply(Product<T> p, const T* x, T* out, int64_t rows) {
    p.x = x;
    p.out = out;
    p.rows = rows;
    product(p);
}

// What CompiledLayer of modules.py does, layer after layer. x is changed in place. Returns how many slots are
// beyond the cache, and stops there.
template <typename T> static int64_t run_layers(const Layers<T>& s) {
    Decodes<T> decodes = s.decodes;
    Prompts<T> prompts = s.prompts;
    const int64_t size = decodes.size, kv_heads = decodes.kv_heads, turned = decodes.heads + kv_heads;
    const int64_t stride = (turned + kv_heads) * size;
    const T *const key = s.heads + decodes.heads * size, *const value = s.heads + turned * size;
    for (int64_t i = 0; i < s.num_layers; i++) {
        const Layer<T>& layer = s.layers[i];
        T *const keys = s.keys + i * s.layer_stride, *const values = s.values + i * s.layer_stride;
        decodes.keys = prompts.keys = keys;
        decodes.values = prompts.values = values;
        multiply(layer.qkv, s.x, s.heads, s.rows);
        rotate(s.heads, s.cos, s.sin, s.rows, stride, turned, size / 2);
        // All keys of the step before any of its queries reads: requests may share blocks that it fills.
        const int64_t beyond =
            write_kv(key, value, s.slots, keys, values, s.num_slots, s.rows, stride, kv_heads * size);
        if (beyond) return beyond;
        if (decodes.num_seqs) decode(decodes);
        if (prompts.num_tasks) prefill(prompts);
        multiply(layer.attended, s.attended, s.x, s.rows);
        multiply(layer.gate_up, s.x, s.gated, s.rows);
        multiply(layer.down, s.gated, s.x, s.rows);
    }
    return 0;
}
extern "C" int64_t layers_float32(const Layers<float>* s) { return run_layers(*s); }
extern "C" int64_t layers_bfloat16(const Layers<bfloat16>* s) { return run_layers(*s); }

// What Python looks up, for each dtype.
template <typename T> struct Functions {
    decltype(&rms_norm<T>) norm = rms_norm<T>;
    decltype(&rotate<T>) turn = rotate<T>;
    decltype(&write_kv<T>) store = write_kv<T>;
};
extern "C" const Functions<float> functions_float32;
extern "C" const Functions<bfloat16> functions_bfloat16;
const Functions<float> functions_float32;
const Functions<bfloat16> functions_bfloat16;
extern "C" const Field layout_Functions[] = {
    AT(Functions<float>, norm), AT(Functions<float>, turn), AT(Functions<float>, store),
    END(Functions<float>)};
