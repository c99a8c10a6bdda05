// What the kernels are called with. abi.py has the same structures; layouts.cpp tells it where each field
// lies, so that a difference is found when the library is loaded. To add a field, name it in all three.
#pragma once
#include <cstddef>
#include "lanes.h"

// decode.cpp: sequences with one query token each.
template <typename T> struct Decodes {
    const T* query;                       // row r begins at r * query_stride
    const T *keys, *values;               // the cache: [slots, kv_heads, size]
    T* out;                               // [num_tokens, heads, size]
    const int64_t* seqs;                  // [num_seqs]: the sequences to serve
    const int32_t *rows, *lens, *tables;  // sequence i: query in row rows[i], lens[i] >= 1 keys, its blocks
    int64_t num_seqs, table_stride, block_size, query_stride, heads, kv_heads, size;
    int64_t kv_together;  // KV heads a thread takes at once: all read the cache in order, one spreads work
    float scale;
};

// prefill.cpp: sequences with several. A task is some tokens of one: query rows first to end - 1, of which
// the first sees `keys` keys.
struct Task { int32_t seq, first, end, keys; };
template <typename T> struct Prompts {
    const T *query, *keys, *values;  // as above
    T* out;
    const Task* tasks;
    const int32_t* tables;           // blocks of sequence i in row i
    int64_t num_tasks, table_stride, block_size, query_stride, heads, kv_heads, size;
    float scale;
};

// linear.cpp: rows times a weight, and what is done with the sums while they are in registers.
enum After { ROUND, KEEP_FLOAT32, ADD, GATE, ARGMAX };
template <typename T> struct Product {
    const T *x, *norm;       // [rows, depth]; weight of the RMSNorm that the rows go through first, or null
    const uint32_t* weight;  // [panels, words, WIDTH], see tile.h
    void* out;               // [rows, columns] of T; see `after`
    int64_t rows, words, panels;
    float eps;               // of the norm
    // KEEP_FLOAT32: out is float32. ADD: to what is in out. GATE: a panel has 16 gates and their 16 ups; out
    // is silu(gate) * up, half as many columns. ARGMAX: out is int64 [rows].
    int32_t after;
};

// layers.cpp: a step of all layers of a model.
template <typename T> struct Layer { Product<T> qkv, attended, gate_up, down; };  // but for x, out and rows
template <typename T> struct Layers {
    T *x, *heads, *attended, *gated;  // rows of the residual stream, of all heads, of attention, of the MLP
    const T *cos, *sin;               // [rows, size / 2]
    const int64_t* slots;             // [rows]
    T *keys, *values;                 // of layer 0; those of layer i are i * layer_stride further on
    int64_t rows, num_slots, layer_stride, num_layers;
    const Layer<T>* layers;
    Decodes<T> decodes;               // both but for keys and values; the sizes of `decodes` hold for all
    Prompts<T> prompts;
};

// What layouts.cpp tells of a structure: its fields and where they begin; last, without a name, its size.
struct Field { const char* name; int64_t offset; };
#define AT(Struct, field) {#field, offsetof(Struct, field)}
#define END(Struct) {nullptr, sizeof(Struct)}

template <typename T> void decode(const Decodes<T>& b);
template <typename T> void prefill(const Prompts<T>& b);
template <typename T> void product(const Product<T>& p);
