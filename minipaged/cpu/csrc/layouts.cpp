// Where each field of the structures of arguments.h lies. abi.py compares this with its own when the library
// is loaded.
#include "arguments.h"

// For all dtypes alike: they hold pointers to numbers, and no number of a dtype.
typedef Decodes<float> D;
typedef Prompts<float> Q;
typedef Product<float> P;
typedef Layer<float> L;
typedef Layers<float> S;
static_assert(sizeof(S) == sizeof(Layers<bfloat16>), "one layout for all dtypes");

extern "C" const Field layout_Decodes[] = {
    AT(D, query), AT(D, keys), AT(D, values), AT(D, out), AT(D, seqs), AT(D, rows), AT(D, lens),
    AT(D, tables), AT(D, num_seqs), AT(D, table_stride), AT(D, block_size), AT(D, query_stride),
    AT(D, heads), AT(D, kv_heads), AT(D, size), AT(D, kv_together), AT(D, scale), END(D)};
extern "C" const Field layout_Prompts[] = {
    AT(Q, query), AT(Q, keys), AT(Q, values), AT(Q, out), AT(Q, tasks), AT(Q, tables),
    AT(Q, num_tasks), AT(Q, table_stride), AT(Q, block_size), AT(Q, query_stride),
    AT(Q, heads), AT(Q, kv_heads), AT(Q, size), AT(Q, scale), END(Q)};
extern "C" const Field layout_Product[] = {
    AT(P, x), AT(P, norm), AT(P, weight), AT(P, out), AT(P, rows), AT(P, words), AT(P, panels), AT(P, eps),
    AT(P, after), END(P)};
extern "C" const Field layout_Layer[] = {
    AT(L, qkv), AT(L, attended), AT(L, gate_up), AT(L, down), END(L)};
extern "C" const Field layout_Layers[] = {
    AT(S, x), AT(S, heads), AT(S, attended), AT(S, gated), AT(S, cos), AT(S, sin), AT(S, slots),
    AT(S, keys), AT(S, values), AT(S, rows), AT(S, num_slots), AT(S, layer_stride), AT(S, num_layers),
    AT(S, layers), AT(S, decodes), AT(S, prompts), END(S)};
