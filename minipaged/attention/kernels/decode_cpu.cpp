// Decode attention for a CPU: one query token per sequence, keys and values read through the block table.
// The job of decode.py on a GPU. A thread takes one (sequence, KV head) at a time and walks its context block by
// block, first for the scores, then for the weighted sum of the values. Nothing is gathered; sums are float32.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>
struct bfloat16 { uint16_t bits; };
union Word { float number; uint32_t bits; };
static inline float widen(float x) { return x; }
static inline float widen(bfloat16 x) { Word w; w.bits = uint32_t(x.bits) << 16; return w.number; }
static inline void narrow(float x, float* out) { *out = x; }
static inline void narrow(float x, bfloat16* out) {  // to nearest, ties to even
    const Word w = {x};
    out->bits = uint16_t((w.bits + 0x7fff + ((w.bits >> 16) & 1)) >> 16);
}

template <typename T> struct Batch {
    const T *query, *keys, *values;       // [num_tokens, heads, size], [num_slots, kv_heads, size] twice
    T* out;                               // [num_tokens, heads, size]
    const int64_t* seqs;                  // [num_seqs]: the sequences to serve
    const int32_t *rows, *lens, *tables;  // sequence i: query in row rows[i], lens[i] >= 1 keys, blocks in row i
    int64_t num_seqs, table_stride, block_size, heads, kv_heads, size;
    float scale;
};

// Call visit(position, cached row) for each token of a sequence, in order. The rows of one head lie apart in memory,
// which the processor does not guess, so ask for those ahead.
template <typename T, typename Visit>
static inline void walk(const Batch<T>& b, const T* cache, int64_t seq, int64_t size, Visit visit) {
    const int64_t len = b.lens[seq], stride = b.kv_heads * size;
    for (int64_t first = 0; first < len; first += b.block_size) {
        const T* row = cache + b.tables[seq * b.table_stride + first / b.block_size] * b.block_size * stride;
        for (int64_t pos = first; pos < std::min(first + b.block_size, len); pos++, row += stride) {
            for (int64_t d = 0; d < size; d += 64 / sizeof(T)) __builtin_prefetch(row + 8 * stride + d);
            visit(pos, row);
        }
    }
}

// SIZE is the head size, known when compiling so that loops over it become straight vector code; 0: any size.
template <typename T, int SIZE>
static void attend(const Batch<T>& b, int64_t seq, int64_t kv, std::vector<float>& weights, std::vector<float>& acc) {
    const int64_t size = SIZE ? SIZE : b.size, len = b.lens[seq], group = b.heads / b.kv_heads;
    const int64_t first = (b.rows[seq] * b.heads + kv * group) * size;
    weights.resize(group * len);
    acc.assign(group * size, 0.0f);
    float* const w = weights.data();
    walk(b, b.keys + kv * size, seq, size, [&](int64_t pos, const T* key) {
        for (int64_t g = 0; g < group; g++) {
            float score = 0;
            for (int64_t d = 0; d < size; d++) score += widen(b.query[first + g * size + d]) * widen(key[d]);
            w[g * len + pos] = score * b.scale;
        }
    });
    for (int64_t g = 0; g < group; g++) {
        const float largest = *std::max_element(w + g * len, w + (g + 1) * len);
        float total = 0, *const sum = acc.data() + g * size;
        for (int64_t i = g * len; i < (g + 1) * len; i++) total += w[i] = std::exp(w[i] - largest);
        walk(b, b.values + kv * size, seq, size, [&](int64_t pos, const T* value) {
            for (int64_t d = 0; d < size; d++) sum[d] += w[g * len + pos] * widen(value[d]);
        });
        for (int64_t d = 0; d < size; d++) narrow(sum[d] / total, b.out + first + g * size + d);
    }
}

template <typename T> static void decode(const Batch<T>& b) {
    const auto attend_one = b.size == 64 ? attend<T, 64> : b.size == 128 ? attend<T, 128> : attend<T, 0>;
#pragma omp parallel
    {
        std::vector<float> weights, acc;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t i = 0; i < b.num_seqs; i++)
            for (int64_t kv = 0; kv < b.kv_heads; kv++) attend_one(b, b.seqs[i], kv, weights, acc);
    }
}

extern "C" void decode_float32(const Batch<float>* batch) { decode(*batch); }
extern "C" void decode_bfloat16(const Batch<bfloat16>* batch) { decode(*batch); }
