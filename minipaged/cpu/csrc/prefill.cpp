// Attention of prompts for a CPU: several query tokens of a sequence at once. The job of prefill.py on a GPU.
// A task is some tokens of a sequence and one KV head. Its keys and values are laid out once more, each read
// once through the block table, so that scores and sums of values are products of tiles; between the two is
// the softmax of each row.
#include <algorithm>
#include <cmath>
#include <vector>

#include "arguments.h"
#include "tile.h"

template <typename T> struct Scratch {
    std::vector<uint32_t> keys, values;  // panels of tile.h; a column is a key, or a number of the head
    std::vector<T> query, weights;       // a tile's rows of both products
    std::vector<float> scores;
};

// Lay out the `len` keys and values that a task sees. What comes after them, up to `padded`, repeats the last
// one.
template <typename T>
static void gather(const Prompts<T>& b, const Task& task, int64_t kv, int64_t len, int64_t padded,
                   Scratch<T>& s) {
    constexpr int64_t per_word = 4 / sizeof(T);
    const int64_t words = b.size / per_word;
    const int32_t* table = b.tables + task.seq * b.table_stride;
    const auto row = [&](int64_t pos) {  // where the head of a token begins in the cache
        pos = std::min(pos, len - 1);
        return ((table[pos / b.block_size] * b.block_size + pos % b.block_size) * b.kv_heads + kv) * b.size;
    };
    s.keys.resize(padded * words);
    s.values.resize(padded * words);
    for (int64_t pos = 0; pos < padded; pos++) {
        const auto* key = reinterpret_cast<const uint32_t*>(b.keys + row(pos));
        uint32_t* const column = s.keys.data() + pos / WIDTH * WIDTH * words + pos % WIDTH;
        for (int64_t i = 0; i < words; i++) column[i * WIDTH] = key[i];
    }
    for (int64_t pos = 0; pos < padded; pos += per_word) {
        const T *value = b.values + row(pos), *next = b.values + row(pos + per_word - 1);
        uint32_t* const line = s.values.data() + pos / per_word * WIDTH;
        for (int64_t i = 0; i < b.size; i += LANES)
            store(words_of(value + i, next + i), line + i / WIDTH * WIDTH * padded / per_word + i % WIDTH);
    }
}

// weights = exp(scale * (scores - largest)) of the first `len`, 0 after them; returns their sum.
template <typename T>
static float softmax(float* scores, int64_t len, int64_t padded, float scale, T* weights) {
    std::fill(scores + len, scores + padded, -1e30f);
    Lanes most = load(scores), total = {};
    for (int64_t i = LANES; i < padded; i += LANES) most = load(scores + i) > most ? load(scores + i) : most;
    float largest = most[0];
    for (int i = 1; i < LANES; i++) largest = std::max(largest, most[i]);
    for (int64_t i = 0; i < padded; i++) scores[i] = std::exp((scores[i] - largest) * scale);
    for (int64_t i = 0; i < padded; i += LANES) {
        total += load(scores + i);
        store(load(scores + i), weights + i);
    }
    return sum(total);
}

// A row is a query token and one of the heads that share the KV head; as many at a time as a product takes.
template <typename T> static void attend(const Prompts<T>& b, const Task& task, int64_t kv, Scratch<T>& s) {
    constexpr int64_t per_word = 4 / sizeof(T);
    const int64_t group = b.heads / b.kv_heads, words = b.size / per_word;
    const int64_t num_rows = (task.end - task.first) * group;
    const auto whole = [](int64_t keys) { return (keys + WIDTH - 1) / WIDTH * WIDTH; };
    const int64_t len = task.keys + task.end - task.first - 1, padded = whole(len);
    const int64_t most = rows_at_once<T>();
    gather(b, task, kv, len, padded, s);
    s.query.resize(most * b.size);
    s.weights.resize(most * padded);
    s.scores.resize(most * padded);
    for (int64_t first = 0; first < num_rows; first += most) {
        const int64_t rows = std::min(most, num_rows - first);
        const int64_t seen = whole(task.keys + (first + rows - 1) / group);  // by the last row
        int64_t token[MOST_ROWS], head[MOST_ROWS];
        float total[MOST_ROWS];
        Lanes sums[MOST_ROWS][2];
        for (int64_t r = 0; r < rows; r++) {
            token[r] = task.first + (first + r) / group;
            head[r] = kv * group + (first + r) % group;
            std::copy_n(b.query + token[r] * b.query_stride + head[r] * b.size, b.size, &s.query[r * b.size]);
        }
        for (int64_t key = 0; key < seen; key += WIDTH) {
            multiply<T, NONE>(rows, s.query.data(), words, &s.keys[key * words], words, sums);
            for (int64_t r = 0; r < rows; r++)
                for (int i = 0; i < 2; i++) store(sums[r][i], &s.scores[r * padded + key + i * LANES]);
        }
        for (int64_t r = 0; r < rows; r++) {
            const int64_t keys = task.keys + (first + r) / group;
            total[r] = softmax(&s.scores[r * padded], keys, seen, b.scale, &s.weights[r * padded]);
        }
        for (int64_t i = 0; i < b.size; i += WIDTH) {
            const uint32_t* panel = &s.values[i * padded / per_word];
            multiply<T, NONE>(rows, s.weights.data(), padded / per_word, panel, seen / per_word, sums);
            for (int64_t r = 0; r < rows; r++) {
                T* const out = b.out + (token[r] * b.heads + head[r]) * b.size + i;
                for (int half = 0; half < 2; half++) store(sums[r][half] / total[r], out + half * LANES);
            }
        }
    }
}

template <typename T> void prefill(const Prompts<T>& b) {
#pragma omp parallel
    {
        Scratch<T> scratch;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t i = 0; i < b.num_tasks; i++)
            for (int64_t kv = 0; kv < b.kv_heads; kv++) attend(b, b.tasks[i], kv, scratch);
        done_multiplying<T>();
    }
}
template void prefill(const Prompts<float>&);
template void prefill(const Prompts<bfloat16>&);
extern "C" void prefill_float32(const Prompts<float>* prompts) { prefill(*prompts); }
extern "C" void prefill_bfloat16(const Prompts<bfloat16>* prompts) { prefill(*prompts); }
