// Decode attention for a CPU: one query token per sequence, keys and values read through the block table.
// The job of decode.py on a GPU. Nothing is gathered; sums are float32.
#include <algorithm>
#include <cmath>
#include <vector>
#include "arguments.h"

constexpr int LARGEST_HEAD = 256;
struct Scratch { std::vector<int64_t> rows; std::vector<float> query, weights; };

// One sequence, the KV heads from `kv` on: scores of all keys, their softmax, the weighted sum of the values.
// SIZE is the head size and GROUP the query heads that use a cached row once it is loaded, both known when
// compiling so that the loops over them become straight vector code; 0 and 1 serve any.
template <typename T, int SIZE, int GROUP>
static void attend(const Decodes<T>& b, int64_t seq, int64_t kv, Scratch& s) {
    const int64_t size = SIZE ? SIZE : b.size, parts = size / LANES;
    const int64_t len = b.lens[seq], group = b.heads / b.kv_heads;
    const int64_t heads = b.kv_together * group, width = b.kv_together * size * sizeof(T), row = b.rows[seq];
    const int32_t* table = b.tables + seq * b.table_stride;
    s.rows.resize(len);
    s.weights.resize(heads * len);
    s.query.resize(heads * size);
    int64_t* const rows = s.rows.data();  // of each token: where its row begins in the cache
    float *const w = s.weights.data(), *const query = s.query.data();
    for (int64_t pos = 0; pos < len; table++)
        for (int64_t i = 0; i < b.block_size && pos < len; i++)
            rows[pos++] = ((*table * b.block_size + i) * b.kv_heads + kv) * size;
    for (int64_t i = 0; i < heads * size; i += LANES)
        store(load(b.query + row * b.query_stride + kv * group * size + i) * b.scale, query + i);
    for (int64_t pos = 0; pos < len; pos++) {
        fetch(b.keys + rows[std::min(pos + 16, len - 1)], width);
        fetch(b.values + rows[pos], width);  // for the second loop
        for (int64_t h = 0; h < heads; h += GROUP) {
            const T* key = b.keys + rows[pos] + h / group * size;
            Lanes score[GROUP] = {};
            for (int64_t p = 0; p < parts; p++) {
                const Lanes k = load(key + p * LANES);
                for (int g = 0; g < GROUP; g++) score[g] += load(query + (h + g) * size + p * LANES) * k;
            }
            for (int g = 0; g < GROUP; g++) w[(h + g) * len + pos] = sum(score[g]);
        }
    }
    for (int64_t h = 0; h < heads; h += GROUP) {
        Lanes acc[GROUP][(SIZE ? SIZE : LARGEST_HEAD) / LANES] = {};
        float total[GROUP] = {};
        for (int g = 0; g < GROUP; g++) {
            float *const x = w + (h + g) * len, largest = *std::max_element(x, x + len);
            for (int64_t i = 0; i < len; i++) total[g] += x[i] = std::exp(x[i] - largest);
        }
        for (int64_t pos = 0; pos < len; pos++)
            for (int64_t p = 0; p < parts; p++) {
                const Lanes value = load(b.values + rows[pos] + h / group * size + p * LANES);
                for (int g = 0; g < GROUP; g++) acc[g][p] += w[(h + g) * len + pos] * value;
            }
        T* const out = b.out + (row * b.heads + kv * group + h) * size;
        for (int64_t i = 0; i < GROUP * parts; i++)
            store(acc[i / parts][i % parts] / total[i / parts], out + i * LANES);
    }
}

template <typename T> void decode(const Decodes<T>& b) {
    const int64_t size = b.size, group = b.heads / b.kv_heads;
    const auto attend_some = size == 64 && group % 3 == 0 ? attend<T, 64, 3> : size == 64 && group % 4 == 0
        ? attend<T, 64, 4> : size == 128 && group % 4 == 0 ? attend<T, 128, 4> : attend<T, 0, 1>;
#pragma omp parallel
    {
        Scratch scratch;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t i = 0; i < b.num_seqs; i++)
            for (int64_t kv = 0; kv < b.kv_heads; kv += b.kv_together) attend_some(b, b.seqs[i], kv, scratch);
    }
}
template void decode(const Decodes<float>&);
template void decode(const Decodes<bfloat16>&);
extern "C" void decode_float32(const Decodes<float>* b) { decode(*b); }
extern "C" void decode_bfloat16(const Decodes<bfloat16>* b) { decode(*b); }
