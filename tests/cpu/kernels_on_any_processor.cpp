// Every kernel of minipaged/cpu/csrc on small inputs, beside plain loops in double: one program for any
// processor. It needs no Python, so it runs in an emulator too; test_any_processor.py builds it together with
// the kernels.
//
// It prints a line for each kernel and each way in which products are made; the exit status is the number of
// those that are wrong. Arrays are as long as they must be and no longer, slots without a key are NaN, and what
// must not be written holds a NaN of its own. (So this file is compiled without fast maths, which knows no
// NaN.) With the argument `beyond` a kernel is made to read past the end of the cache instead: a build with
// sanitizers must report it.
//
// In order: numbers and verdicts, the formulas, then kernel by kernel, whole layers last.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "arguments.h"
#include "tile.h"

// What layers.cpp hands to Python.
template <typename T> struct RowKernels {
    void (*norm)(const T* x, const T* weight, T* out, int64_t rows, int64_t size, float eps);
    void (*turn)(T* x, const T* cos, const T* sin, int64_t rows, int64_t stride, int64_t heads, int64_t half);
    int64_t (*store)(const T* key, const T* value, const int64_t* slots, T* keys, T* values,
                     int64_t num_slots, int64_t rows, int64_t stride, int64_t size);
};
extern "C" const RowKernels<float> functions_float32;
extern "C" const RowKernels<bfloat16> functions_bfloat16;
extern "C" int64_t layers_float32(const Layers<float>*);
extern "C" int64_t layers_bfloat16(const Layers<bfloat16>*);

// The ways in which a product can be made (choice.h), by what they compute: a hint changes no bit.
struct Manner { const char* name; int32_t tiles, prefetch; };
extern "C" int32_t tiles_allowed();
extern "C" void choose_float32(int32_t tiles, int32_t prefetch);
extern "C" void choose_bfloat16(int32_t tiles, int32_t prefetch);
const Manner MANNERS[] = {{"", 0, NTA}, {", tiles", 1, T0}};
static const char* manner = "";  // the name of the chosen one

// ---- Numbers ----

double number(double x) { return x; }
double number(float x) { return x; }
double number(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <typename T> T from_bits(uint32_t bits) {  // those of a float32; bfloat16 keeps the upper half
    T x;
    if (sizeof(T) == 2) bits >>= 16;
    std::memcpy(&x, &bits, sizeof(T));
    return x;
}
template <typename T> bool same_bits(T a, T b) { return std::memcmp(&a, &b, sizeof(T)) == 0; }
template <typename T> T to(double x) {  // to nearest, ties to even
    const float value = float(x);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (sizeof(T) == 2) bits += 0x7fff + ((bits >> 16) & 1);
    return from_bits<T>(bits);
}
const uint32_t NO_KEY = 0x7fc00000, UNTOUCHED = 0x7fc50000;  // two NaNs

template <typename T> using Rows = std::vector<T>;  // a matrix, row after row

struct Random {
    uint64_t state = 1;
    uint32_t below(uint32_t limit) {
        state = state * 6364136223846793005 + 1442695040888963407;
        return uint32_t(state >> 33) % limit;
    }
    double signed_unit() { return below(1 << 20) / double(1 << 19) - 1; }  // -1 to 1
    template <typename T> Rows<T> rows(int64_t count, double largest = 1) {
        Rows<T> x(count);
        for (T& value : x) value = to<T>(largest * signed_unit());
        return x;
    }
} any;

// ---- Verdicts ----

template <typename T> const char* name_of();
template <> const char* name_of<float>() { return "float32"; }
template <> const char* name_of<bfloat16>() { return "bfloat16"; }
template <typename T> constexpr double ROUNDING = sizeof(T) == 2 ? 1.0 / 256 : 2e-6;

// One kernel in one dtype: its cases so far, and the first that was wrong.
struct Verdict {
    std::string kernel, wrong;
    double limit, largest = 0;  // error, as a share of the largest exact result of a case
    int64_t cases = 0;

    Verdict(const char* kernel, const char* dtype, double limit)
        : kernel(std::string(kernel) + " " + dtype + manner), limit(limit) {}

    void require(bool right, const std::string& what, const char* more = "") {
        if (!right && wrong.empty()) wrong = what + more;
    }
    template <typename T>
    void close(const Rows<T>& ours, const Rows<double>& exact, const std::string& what) {
        close(ours, exact, what, limit);
    }
    template <typename T>
    void close(const Rows<T>& ours, const Rows<double>& exact, const std::string& what, double limit) {
        double error = 0, size = 0;
        bool finite = ours.size() == exact.size();
        for (size_t i = 0; finite && i < ours.size(); i++) {
            finite = std::isfinite(number(ours[i]));
            error = std::max(error, std::abs(number(ours[i]) - exact[i]));
            size = std::max(size, std::abs(exact[i]));
        }
        cases++;
        largest = std::max(largest, error / size);
        require(finite && error <= limit * size, what, finite ? "" : ": not finite");
    }
    template <typename T> void untouched(const T* from, int64_t count, const std::string& what) {
        for (int64_t i = 0; i < count; i++)
            require(same_bits(from[i], from_bits<T>(UNTOUCHED)), what, ": writes where it must not");
    }
    int failures() const {
        std::printf("%-24s %4d cases, largest error %.1e of %.1e: %s\n", kernel.c_str(), int(cases), largest,
                    limit, wrong.empty() ? "right" : ("WRONG at " + wrong).c_str());
        std::fflush(stdout);
        return wrong.empty() ? 0 : 1;
    }
};

std::string label(std::initializer_list<std::pair<const char*, int64_t>> facts) {
    std::string text;
    for (const auto& fact : facts) text += (text.empty() ? "" : ", ") + std::string(fact.first) + " " +
                                           std::to_string(fact.second);
    return text;
}

// ---- What the kernels compute, in double ----

// The RMSNorm of a row.
template <typename T> Rows<double> normed(const Rows<T>& x, const Rows<double>& weight, double eps) {
    const int64_t size = weight.size();
    Rows<double> out(x.size());
    for (size_t first = 0; first < x.size(); first += size) {
        double squares = 0;
        for (int64_t i = 0; i < size; i++) squares += number(x[first + i]) * number(x[first + i]);
        const double scale = 1 / std::sqrt(squares / size + eps);
        for (int64_t i = 0; i < size; i++) out[first + i] = number(x[first + i]) * scale * weight[i];
    }
    return out;
}

// x [rows, depth] times weight [columns, depth].
template <typename T, typename W>
Rows<double> times(const Rows<T>& x, const Rows<W>& weight, int64_t depth) {
    const int64_t rows = x.size() / depth, columns = weight.size() / depth;
    Rows<double> out(rows * columns);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < columns; column++) {
            double sum = 0;
            for (int64_t i = 0; i < depth; i++)
                sum += number(x[row * depth + i]) * number(weight[column * depth + i]);
            out[row * columns + column] = sum;
        }
    return out;
}

// silu(gate) * up: the first half of each row are gates, the second ups.
Rows<double> gated(const Rows<double>& sums, int64_t columns) {
    const int64_t half = columns / 2, rows = sums.size() / columns;
    Rows<double> out(rows * half);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < half; i++) {
            const double gate = sums[row * columns + i], up = sums[row * columns + half + i];
            out[row * half + i] = gate / (1 + std::exp(-gate)) * up;
        }
    return out;
}

template <typename T> Rows<double> numbers(const Rows<T>& x) {
    Rows<double> out;
    for (const T& value : x) out.push_back(number(value));
    return out;
}

// Keys and values of some sequences: blocks in no order, NaN in slots without a key, tables that go on with
// blocks that do not exist.
template <typename T> struct Cache {
    int64_t block_size, kv_heads, size, table_stride = 0, num_slots = 0;
    std::vector<int32_t> lens, tables;
    Rows<T> keys, values;  // [num_slots, kv_heads, size]

    int64_t slot(int64_t seq, int64_t pos) const {
        return tables[seq * table_stride + pos / block_size] * block_size + pos % block_size;
    }
    int64_t at(int64_t seq, int64_t pos, int64_t kv) const { return (slot(seq, pos) * kv_heads + kv) * size; }
};

template <typename T>
Cache<T> make_cache(std::vector<int32_t> lens, int64_t block_size, int64_t kv_heads, int64_t size) {
    Cache<T> cache = {};
    cache.block_size = block_size;
    cache.kv_heads = kv_heads;
    cache.size = size;
    cache.lens = lens;
    const auto blocks_of = [&](int64_t len) { return (len + block_size - 1) / block_size; };
    int64_t num_blocks = 2;
    for (const int32_t len : lens) {
        num_blocks += blocks_of(len);
        cache.table_stride = std::max(cache.table_stride, blocks_of(len) + 2);
    }
    std::vector<int32_t> shuffled(num_blocks);
    for (int64_t i = 0; i < num_blocks; i++) {
        const int64_t other = any.below(i + 1);
        shuffled[i] = shuffled[other];
        shuffled[other] = i;
    }
    cache.num_slots = num_blocks * block_size;
    cache.keys.assign(cache.num_slots * kv_heads * size, from_bits<T>(NO_KEY));
    cache.values = cache.keys;
    for (size_t seq = 0; seq < lens.size(); seq++)
        for (int64_t i = 0; i < cache.table_stride; i++) {
            const bool used = i < blocks_of(lens[seq]);
            cache.tables.push_back(used ? shuffled.back() : i % 2 ? -1 : INT32_MAX);
            if (used) shuffled.pop_back();
        }
    for (size_t seq = 0; seq < lens.size(); seq++)
        for (int64_t pos = 0; pos < lens[seq]; pos++)
            for (int64_t i = 0; i < kv_heads * size; i++) {
                cache.keys[cache.at(seq, pos, 0) + i] = to<T>(any.signed_unit());
                cache.values[cache.at(seq, pos, 0) + i] = to<T>(any.signed_unit());
            }
    return cache;
}

// The heads of one query token, which sees the first `seen` keys of its sequence.
template <typename Q, typename T>
Rows<double> attention(const Q* query, int64_t heads, const Cache<T>& cache, int64_t seq, int64_t seen) {
    const int64_t size = cache.size;
    const double scale = 1 / std::sqrt(double(size));
    Rows<double> out(heads * size);
    for (int64_t head = 0; head < heads; head++) {
        const int64_t kv = head / (heads / cache.kv_heads);
        std::vector<double> weights(seen);
        for (int64_t pos = 0; pos < seen; pos++)
            for (int64_t i = 0; i < size; i++)
                weights[pos] +=
                    number(query[head * size + i]) * number(cache.keys[cache.at(seq, pos, kv) + i]);
        const double largest = *std::max_element(weights.begin(), weights.end());
        double total = 0;
        for (double& weight : weights) total += weight = std::exp((weight - largest) * scale);
        for (int64_t pos = 0; pos < seen; pos++)
            for (int64_t i = 0; i < size; i++)
                out[head * size + i] +=
                    weights[pos] / total * number(cache.values[cache.at(seq, pos, kv) + i]);
    }
    return out;
}

// ---- What is done to each row ----

template <typename T> int check_norm(const RowKernels<T>& kernels) {
    // Numbers so small that eps counts, too.
    Verdict verdict("norm", name_of<T>(), 2 * ROUNDING<T>);
    for (const int64_t size : {16, 48, 80, 576})
        for (const int64_t rows : {1, 2, 3, 5, 7, 13, 40}) {
            const Rows<T> x = any.rows<T>(rows * size, rows % 2 ? 3 : 0.005), weight = any.rows<T>(size);
            Rows<T> out((rows + 1) * size, from_bits<T>(UNTOUCHED));
            kernels.norm(x.data(), weight.data(), out.data(), rows, size, 1e-5f);
            verdict.untouched(&out[rows * size], size, label({{"rows", rows}, {"size", size}}));
            out.resize(rows * size);
            verdict.close(out, normed(x, numbers(weight), 1e-5), label({{"rows", rows}, {"size", size}}));
        }
    return verdict.failures();
}

// The angles of a row for each pair of a head.
template <typename T> struct Angles { Rows<T> cos, sin; };
template <typename T> Angles<T> make_angles(int64_t count) {
    Angles<T> angles;
    for (int64_t i = 0; i < count; i++) {
        const double angle = 100 * any.signed_unit();
        angles.cos.push_back(to<T>(std::cos(angle)));
        angles.sin.push_back(to<T>(std::sin(angle)));
    }
    return angles;
}

template <typename T>
void turn_row(double* x, const T* cos, const T* sin, int64_t heads, int64_t half) {
    for (int64_t head = 0; head < heads; head++)
        for (int64_t i = 0; i < half; i++) {
            double &first = x[head * 2 * half + i], &second = x[head * 2 * half + half + i];
            const double a = first, b = second, c = number(cos[i]), s = number(sin[i]);
            first = a * c - b * s;
            second = b * c + a * s;
        }
}

// Of each row some heads are turned, and two after them are not.
template <typename T> int check_turn(const RowKernels<T>& kernels) {
    Verdict verdict("turn", name_of<T>(), ROUNDING<T>);
    for (const int64_t half : {16, 32, 48})
        for (const int64_t rows : {1, 2, 3, 5, 7, 13, 130}) {
            const int64_t heads = 5, turned = heads * 2 * half, stride = turned + 4 * half;
            Rows<T> x = any.rows<T>(rows * stride);
            const Rows<T> before = x;
            const Angles<T> angles = make_angles<T>(rows * half);
            Rows<double> exact = numbers(x);
            for (int64_t row = 0; row < rows; row++)
                turn_row(&exact[row * stride], &angles.cos[row * half], &angles.sin[row * half], heads, half);
            kernels.turn(x.data(), angles.cos.data(), angles.sin.data(), rows, stride, heads, half);
            const std::string what = label({{"rows", rows}, {"half", half}});
            verdict.close(x, exact, what);
            for (int64_t i = 0; i < rows * stride; i++)
                verdict.require(i % stride < turned || same_bits(x[i], before[i]), what, ": other heads");
        }
    return verdict.failures();
}

template <typename T> int check_store(const RowKernels<T>& kernels) {
    Verdict verdict("store", name_of<T>(), 0);
    for (const int64_t size : {1, 24, 72, 576})
        for (const int64_t rows : {1, 2, 3, 5, 7, 13, 40}) {
            const int64_t num_slots = rows + 4, stride = 3 * size;
            const Rows<T> key = any.rows<T>(rows * stride), value = any.rows<T>(rows * stride);
            Rows<T> keys((num_slots + 1) * size, from_bits<T>(UNTOUCHED)), values = keys;
            Rows<T> expected_keys = keys, expected_values = values;
            std::vector<int64_t> slots(rows);
            int64_t beyond = 0;
            for (int64_t row = 0; row < rows; row++) {
                // Backwards; every third row is padding, one of seven names a slot that is not there.
                slots[row] = row % 3 == 2 ? -1 : row % 7 == 4 ? num_slots + row : num_slots - 1 - row;
                beyond += slots[row] >= num_slots;
                if (slots[row] < 0 || slots[row] >= num_slots) continue;
                std::copy_n(&key[row * stride], size, &expected_keys[slots[row] * size]);
                std::copy_n(&value[row * stride], size, &expected_values[slots[row] * size]);
            }
            const int64_t told = kernels.store(key.data(), value.data(), slots.data(), keys.data(),
                                               values.data(), num_slots, rows, stride, size);
            const std::string what = label({{"rows", rows}, {"size", size}});
            verdict.cases++;
            verdict.require(told == beyond, what, ": slots beyond the cache");
            for (size_t i = 0; i < keys.size(); i++)
                verdict.require(same_bits(keys[i], expected_keys[i]) &&
                                    same_bits(values[i], expected_values[i]), what);
        }
    return verdict.failures();
}

// ---- Products ----

// A weight [columns, depth] as in_panels of packing.py lays it out. `gated`: a panel has 16 gates, of the
// first half of the columns, and the 16 ups that belong to them, of the second.
template <typename T>
std::vector<uint32_t> in_panels(const Rows<T>& weight, int64_t depth, bool gated = false) {
    const int64_t per_word = 4 / sizeof(T), words = depth / per_word, columns = weight.size() / depth;
    std::vector<uint32_t> panels(columns * words);
    for (int64_t column = 0; column < columns; column++) {
        const int64_t panel = column / WIDTH, place = column % WIDTH;
        const int64_t up = place < LANES ? 0 : columns / 2;
        const T* row = &weight[depth * (gated ? panel * LANES + place % LANES + up : column)];
        for (int64_t word = 0; word < words; word++)
            std::memcpy(&panels[(panel * words + word) * WIDTH + place], row + word * per_word, 4);
    }
    return panels;
}

template <typename T> Product<T> product_of(const std::vector<uint32_t>& panels, int64_t depth, After after,
                                            const Rows<T>* norm = nullptr) {
    Product<T> p = {};
    p.weight = panels.data();
    p.words = depth * sizeof(T) / 4;
    p.panels = panels.size() / (p.words * WIDTH);
    p.after = after;
    p.norm = norm ? norm->data() : nullptr;
    p.eps = 1e-5f;
    return p;
}

// The product of some rows, with a row after the last that must stay as it is.
template <typename T, typename Out>
Rows<Out> run(Verdict& verdict, Product<T> p, const T* x, int64_t rows, int64_t columns, Rows<Out> out,
              const std::string& what) {
    out.resize((rows + 1) * columns, from_bits<Out>(UNTOUCHED));
    p.x = x;
    p.rows = rows;
    p.out = out.data();
    product(p);
    verdict.untouched(&out[rows * columns], columns, what);
    out.resize(rows * columns);
    return out;
}

template <typename T, typename Out>
void check_alone(Verdict& verdict, const Product<T>& p, const Rows<T>& x, int64_t depth, const Rows<Out>& all,
                 const std::string& what) {
    const int64_t rows = x.size() / depth, columns = all.size() / rows;
    for (int64_t row = 0; row < rows; row += rows > 40 ? 17 : 1) {
        const Rows<Out> alone = run<T, Out>(verdict, p, &x[row * depth], 1, columns, {}, what);
        for (int64_t i = 0; i < columns; i++)
            verdict.require(same_bits(alone[i], all[row * columns + i]), what, ": a row beside others");
    }
}

template <typename T> void check_argmax(Verdict& verdict, const Product<T>& kept, Rows<T> x, int64_t depth,
                                        int64_t columns, const std::string& what) {
    const int64_t rows = x.size() / depth;
    if (rows > 4) x[3 * depth] = from_bits<T>(NO_KEY), x[4 * depth] = from_bits<T>(0x7f800000);  // infinity
    const Rows<float> sums = run<T, float>(verdict, kept, x.data(), rows, columns, {}, what);
    std::vector<int64_t> places(rows, -2);
    Product<T> p = kept;
    p.x = x.data();
    p.rows = rows;
    p.out = places.data();
    p.after = ARGMAX;
    product(p);
    for (int64_t row = 0; row < rows; row++) {
        const float* first = &sums[row * columns];
        const int64_t place = std::max_element(first, first + columns) - first;
        const bool finite = rows <= 4 || (row != 3 && row != 4);
        verdict.require(places[row] == (finite ? place : -1), what + ", row " + std::to_string(row));
    }
    verdict.cases++;
}

template <typename T> void check_products(Verdict& verdict, int64_t rows, int64_t depth, bool with_norm) {
    const int64_t columns = 3 * WIDTH;
    const Rows<T> x = any.rows<T>(rows * depth), norm = any.rows<T>(depth);
    Rows<T> weight = any.rows<T>(columns * depth);
    std::copy_n(&weight[8 * depth], 20 * depth, &weight[60 * depth]);  // equal sums: the first is the largest
    const Rows<T>* const before = with_norm ? &norm : nullptr;
    const Rows<double> left = with_norm ? normed(x, numbers(norm), 1e-5) : numbers(x);
    Rows<double> exact = times(left, weight, depth);
    const auto what = [&](const char* after) {
        return std::string(after) + " " + label({{"rows", rows}, {"depth", depth}, {"norm", with_norm}});
    };
    const std::vector<uint32_t> panels = in_panels(weight, depth), paired = in_panels(weight, depth, true);

    const Product<T> round = product_of(panels, depth, ROUND, before);
    const Rows<T> rounded = run<T, T>(verdict, round, x.data(), rows, columns, {}, what("ROUND"));
    verdict.close(rounded, exact, what("ROUND"));
    check_alone(verdict, round, x, depth, rounded, what("ROUND"));

    const Product<T> keep = product_of(panels, depth, KEEP_FLOAT32, before);
    const Rows<float> kept = run<T, float>(verdict, keep, x.data(), rows, columns, {}, what("KEEP_FLOAT32"));
    // Nothing is rounded to T but the rows after a norm.
    verdict.close(kept, exact, what("KEEP_FLOAT32"), 2 * (with_norm ? ROUNDING<T> : ROUNDING<float>));
    check_alone(verdict, keep, x, depth, kept, what("KEEP_FLOAT32"));
    check_argmax(verdict, keep, x, depth, columns, what("ARGMAX"));

    const Product<T> gate = product_of(paired, depth, GATE, before);
    const Rows<T> half = run<T, T>(verdict, gate, x.data(), rows, columns / 2, {}, what("GATE"));
    verdict.close(half, gated(exact, columns), what("GATE"));

    const Rows<T> there = any.rows<T>(rows * columns, 2);
    for (int64_t i = 0; i < rows * columns; i++) exact[i] += number(there[i]);
    const Product<T> add = product_of(panels, depth, ADD, before);
    verdict.close(run<T, T>(verdict, add, x.data(), rows, columns, there, what("ADD")), exact, what("ADD"));
}

// Whole numbers: every sum is exact, so the result is its rounding to the bit.
template <typename T> void check_rounding(Verdict& verdict, int64_t rows, int64_t depth) {
    const int64_t columns = 2 * WIDTH;
    Rows<T> x, weight, there, expected;
    for (int64_t i = 0; i < rows * depth; i++) x.push_back(to<T>(any.below(31) - 15.0));
    for (int64_t i = 0; i < columns * depth; i++) weight.push_back(to<T>(any.below(31) - 15.0));
    for (int64_t i = 0; i < rows * columns; i++) there.push_back(to<T>(any.below(31) - 15.0));
    const Rows<double> exact = times(x, weight, depth);
    const std::vector<uint32_t> panels = in_panels(weight, depth);
    for (const After after : {ROUND, ADD}) {
        const std::string what = "rounding " + label({{"rows", rows}, {"depth", depth}, {"after", after}});
        const Product<T> p = product_of<T>(panels, depth, after);
        const Rows<T> ours = run<T, T>(verdict, p, x.data(), rows, columns, there, what);
        for (int64_t i = 0; i < rows * columns; i++) {
            const double added = after == ADD ? number(there[i]) : 0;
            verdict.require(same_bits(ours[i], to<T>(exact[i] + added)), what);
        }
        verdict.cases++;
    }
}

template <typename T> int check_product() {
    // Gates multiply two sums; a row of a norm is rounded before the product.
    Verdict verdict("product", name_of<T>(), 2 * ROUNDING<T>);
    for (int64_t rows = 1; rows <= 13; rows++) check_products<T>(verdict, rows, 70, false);
    for (const int64_t rows : {16, 17, 31, 32, 33, 48, 239, 240, 241, 253})
        check_products<T>(verdict, rows, 38, false);
    for (const int64_t depth : {2, 30, 32, 34, 62, 64, 96, 576})
        for (const int64_t rows : {1, 5, 18}) check_products<T>(verdict, rows, depth, false);
    for (const int64_t depth : {16, 48, 64, 80})
        for (const int64_t rows : {1, 5, 13, 241}) check_products<T>(verdict, rows, depth, true);
    for (const int64_t rows : {1, 7, 13, 40}) check_rounding<T>(verdict, rows, 70);
    return verdict.failures();
}

// ---- Attention ----

// What both kernels of attention are told of a cache and of the heads that read it.
template <typename Arguments, typename T>
Arguments reading(const Cache<T>& cache, const T* query, int64_t query_stride, int64_t heads, T* out) {
    Arguments b = {};
    b.query = query;
    b.query_stride = query_stride;
    b.heads = heads;
    b.out = out;
    b.keys = cache.keys.data();
    b.values = cache.values.data();
    b.tables = cache.tables.data();
    b.table_stride = cache.table_stride;
    b.block_size = cache.block_size;
    b.kv_heads = cache.kv_heads;
    b.size = cache.size;
    b.scale = 1 / std::sqrt(float(cache.size));
    return b;
}
template <typename T>
Decodes<T> decodes_of(Decodes<T> b, const Cache<T>& cache, const std::vector<int64_t>& seqs,
                      const std::vector<int32_t>& rows, int64_t kv_together) {
    b.seqs = seqs.data();
    b.num_seqs = seqs.size();
    b.rows = rows.data();
    b.lens = cache.lens.data();
    b.kv_together = kv_together;
    return b;
}
template <typename T> Prompts<T> prompts_of(Prompts<T> b, const std::vector<Task>& tasks) {
    b.tasks = tasks.data();
    b.num_tasks = tasks.size();
    return b;
}

// All sequences but one, the last first, each with its query in a row of its own among wider rows.
template <typename T>
void check_decodes(Verdict& verdict, int64_t size, int64_t group, int64_t kv_heads, int64_t block_size) {
    const Cache<T> cache = make_cache<T>({1, 7, 8, 33, 2, 16}, block_size, kv_heads, size);
    const int64_t heads = group * kv_heads, num_rows = cache.lens.size(), width = (heads + 1) * size;
    const Rows<T> query = any.rows<T>(num_rows * width, 2);
    const std::vector<int64_t> seqs = {5, 4, 3, 1, 0};
    const std::vector<int32_t> rows = {2, 5, 1, 0, 4, 3};
    Rows<double> exact;
    for (const int64_t seq : seqs) {
        const Rows<double> row = attention(&query[rows[seq] * width], heads, cache, seq, cache.lens[seq]);
        exact.insert(exact.end(), row.begin(), row.end());
    }
    for (const int64_t kv_together : {int64_t(1), kv_heads}) {
        const std::string what = label({{"size", size}, {"group", group}, {"kv_heads", kv_heads},
                                        {"block_size", block_size}, {"kv_together", kv_together}});
        Rows<T> out(num_rows * heads * size, from_bits<T>(UNTOUCHED));
        const auto b = reading<Decodes<T>>(cache, query.data(), width, heads, out.data());
        decode(decodes_of(b, cache, seqs, rows, kv_together));
        Rows<T> ours;
        for (const int64_t seq : seqs) {
            const T* row = &out[rows[seq] * heads * size];
            ours.insert(ours.end(), row, row + heads * size);
        }
        verdict.close(ours, exact, what);
        verdict.untouched(&out[rows[2] * heads * size], heads * size, what);
    }
}

template <typename T> int check_decode() {
    Verdict verdict("decode", name_of<T>(), 2 * ROUNDING<T>);
    for (const int64_t group : {1, 2, 3, 4, 8})
        for (const int64_t size : {16, 64, 80, 128, 256})
            check_decodes<T>(verdict, size, group, group == 3 ? 3 : 2, size == 64 ? 16 : 3);
    for (const int64_t block_size : {1, 5, 64}) check_decodes<T>(verdict, 64, 3, 1, block_size);
    return verdict.failures();
}

// Sequences whose last `queries` tokens ask, a task for at most `task_rows` of them. Before, between and
// after them stands a row that belongs to none.
template <typename T>
void check_prompts(Verdict& verdict, int64_t size, int64_t group, int64_t kv_heads, int64_t block_size,
                   int64_t task_rows) {
    const Cache<T> cache = make_cache<T>({9, 40, 33, 5, 70}, block_size, kv_heads, size);
    const std::vector<int32_t> queries = {9, 7, 13, 2, 66};
    const int64_t heads = group * kv_heads, width = (heads + 2) * size;
    const std::string what = label({{"size", size}, {"group", group}, {"kv_heads", kv_heads},
                                    {"block_size", block_size}, {"task_rows", task_rows}});
    std::vector<Task> tasks;
    std::vector<int32_t> seen(1, 0), seq_of(1, 0);  // of each row; 0 keys: it belongs to none
    for (int32_t seq = 0; seq < int32_t(queries.size()); seq++) {
        const int32_t first = seen.size(), end = first + queries[seq];
        const int32_t keys = cache.lens[seq] - queries[seq] + 1;
        for (int32_t row = first; row < end; row += task_rows)
            tasks.push_back({seq, row, std::min<int32_t>(row + task_rows, end), keys + row - first});
        for (int32_t i = 0; i < queries[seq]; i++) seen.push_back(keys + i), seq_of.push_back(seq);
        seen.push_back(0), seq_of.push_back(0);
    }
    std::reverse(tasks.begin(), tasks.end());
    const int64_t num_rows = seen.size();
    const Rows<T> query = any.rows<T>(num_rows * width, 2);
    Rows<T> out(num_rows * heads * size, from_bits<T>(UNTOUCHED)), ours;
    const auto b = reading<Prompts<T>>(cache, query.data(), width, heads, out.data());
    prefill(prompts_of(b, tasks));
    Rows<double> exact;
    for (int64_t row = 0; row < num_rows; row++) {
        const T* const result = &out[row * heads * size];
        if (seen[row] == 0) {
            verdict.untouched(result, heads * size, what);
            continue;
        }
        const Rows<double> right = attention(&query[row * width], heads, cache, seq_of[row], seen[row]);
        exact.insert(exact.end(), right.begin(), right.end());
        ours.insert(ours.end(), result, result + heads * size);
    }
    verdict.close(ours, exact, what);
}

template <typename T> int check_prefill() {
    Verdict verdict("prefill", name_of<T>(), 3 * ROUNDING<T>);  // the weights are rounded too
    for (const int64_t size : {32, 64, 96, 128, 256}) check_prompts<T>(verdict, size, 2, 1, 8, 64);
    for (const int64_t group : {1, 3, 4, 16}) check_prompts<T>(verdict, 32, group, 2, 3, 64);
    for (const int64_t block_size : {1, 16, 256}) check_prompts<T>(verdict, 64, 3, 1, block_size, 5);
    return verdict.failures();
}

// ---- Whole layers ----

template <typename T> struct Weights {
    Rows<T> attention_norm, mlp_norm, qkv, attended, gate_up, down;
    std::vector<uint32_t> qkv_panels, attended_panels, gate_up_panels, down_panels;
};

// Two layers and one step of them: a prompt's last tokens, a row of padding, and two sequences that decode.
template <typename T>
int check_layers(int64_t (*layers_kernel)(const Layers<T>*)) {
    Verdict verdict("layers", name_of<T>(), sizeof(T) == 2 ? 0.03 : 2e-5);
    const int64_t num_layers = 2, rows = 8, hidden = 64, middle = 80, heads = 4, kv_heads = 2, size = 32;
    const int64_t half = size / 2, all = (heads + 2 * kv_heads) * size;
    const std::vector<int32_t> seq_of = {0, 0, 0, 0, 0, -1, 1, 2}, pos_of = {4, 5, 6, 7, 8, 0, 12, 0};
    std::vector<Cache<T>> caches;  // of each layer; tables are those of the first
    std::vector<Cache<double>> exact_caches;
    caches.push_back(make_cache<T>({9, 13, 1}, 4, kv_heads, size));
    caches.push_back(caches[0]);
    const Cache<T>& tables = caches[0];
    std::vector<int64_t> slots;
    for (int64_t row = 0; row < rows; row++)
        slots.push_back(seq_of[row] < 0 ? -1 : tables.slot(seq_of[row], pos_of[row]));
    for (Cache<T>& cache : caches) {
        for (const int64_t slot : slots)  // keys that this step computes are not there yet
            for (int64_t i = 0; slot >= 0 && i < kv_heads * size; i++) {
                cache.keys[slot * kv_heads * size + i] = from_bits<T>(NO_KEY);
                cache.values[slot * kv_heads * size + i] = from_bits<T>(NO_KEY);
            }
        exact_caches.push_back({cache.block_size, kv_heads, size, cache.table_stride, cache.num_slots,
                                cache.lens, cache.tables, numbers(cache.keys), numbers(cache.values)});
    }
    std::vector<Weights<T>> weights(num_layers);
    std::vector<Layer<T>> layers;
    for (Weights<T>& w : weights) {
        w.attention_norm = any.rows<T>(hidden);
        w.mlp_norm = any.rows<T>(hidden);
        w.qkv = any.rows<T>(all * hidden, 0.3);
        w.attended = any.rows<T>(hidden * heads * size, 0.2);
        w.gate_up = any.rows<T>(2 * middle * hidden, 0.3);
        w.down = any.rows<T>(hidden * middle, 0.3);
        w.qkv_panels = in_panels(w.qkv, hidden);
        w.attended_panels = in_panels(w.attended, heads * size);
        w.gate_up_panels = in_panels(w.gate_up, hidden, true);
        w.down_panels = in_panels(w.down, middle);
        layers.push_back({product_of(w.qkv_panels, hidden, ROUND, &w.attention_norm),
                          product_of<T>(w.attended_panels, heads * size, ADD),
                          product_of(w.gate_up_panels, hidden, GATE, &w.mlp_norm),
                          product_of<T>(w.down_panels, middle, ADD)});
    }
    Rows<T> x = any.rows<T>(rows * hidden), qkv(rows * all), between(rows * middle);
    Rows<T> attended(rows * heads * size, to<T>(0));  // a row that sees no key stays zero
    const Angles<T> angles = make_angles<T>(rows * half);

    Rows<double> stream = numbers(x);
    for (int64_t layer = 0; layer < num_layers; layer++) {
        const Weights<T>& w = weights[layer];
        Cache<double>& cache = exact_caches[layer];
        Rows<double> projected = times(normed(stream, numbers(w.attention_norm), 1e-5), w.qkv, hidden), mixed;
        for (int64_t row = 0; row < rows; row++) {
            double* const own = &projected[row * all];
            turn_row(own, &angles.cos[row * half], &angles.sin[row * half], heads + kv_heads, half);
            if (slots[row] < 0) continue;
            std::copy_n(own + heads * size, kv_heads * size, &cache.keys[slots[row] * kv_heads * size]);
            std::copy_n(own + (heads + kv_heads) * size, kv_heads * size,
                        &cache.values[slots[row] * kv_heads * size]);
        }
        for (int64_t row = 0; row < rows; row++) {
            const Rows<double> seen = seq_of[row] < 0 ? Rows<double>(heads * size)
                : attention(&projected[row * all], heads, cache, seq_of[row], pos_of[row] + 1);
            mixed.insert(mixed.end(), seen.begin(), seen.end());
        }
        const Rows<double> from_attention = times(mixed, w.attended, heads * size);
        for (int64_t i = 0; i < rows * hidden; i++) stream[i] += from_attention[i];
        const Rows<double> gates = times(normed(stream, numbers(w.mlp_norm), 1e-5), w.gate_up, hidden);
        const Rows<double> from_mlp = times(gated(gates, 2 * middle), w.down, middle);
        for (int64_t i = 0; i < rows * hidden; i++) stream[i] += from_mlp[i];
    }

    // The caches of all layers in one piece, as the engine has them.
    Rows<T> keys = caches[0].keys, values = caches[0].values;
    keys.insert(keys.end(), caches[1].keys.begin(), caches[1].keys.end());
    values.insert(values.end(), caches[1].values.begin(), caches[1].values.end());
    const std::vector<int64_t> decoding = {1, 2};
    const std::vector<int32_t> query_rows = {0, 6, 7};
    const std::vector<Task> prompts = {{0, 0, 5, 5}};
    Layers<T> step = {};
    step.x = x.data();
    step.heads = qkv.data();
    step.attended = attended.data();
    step.gated = between.data();
    step.cos = angles.cos.data();
    step.sin = angles.sin.data();
    step.slots = slots.data();
    step.keys = keys.data();
    step.values = values.data();
    step.rows = rows;
    step.num_slots = tables.num_slots;
    step.layer_stride = caches[0].keys.size();
    step.num_layers = num_layers;
    step.layers = layers.data();
    const auto decodes = reading<Decodes<T>>(tables, qkv.data(), all, heads, attended.data());
    step.decodes = decodes_of(decodes, tables, decoding, query_rows, 1);
    step.prompts = prompts_of(reading<Prompts<T>>(tables, qkv.data(), all, heads, attended.data()), prompts);
    verdict.require(layers_kernel(&step) == 0, "slots beyond the cache where there are none");
    verdict.close(x, stream, "the residual stream");
    for (int64_t layer = 0; layer < num_layers; layer++) {
        const int64_t first = layer * step.layer_stride;
        Rows<T> stored;
        Rows<double> exact;
        for (int64_t i = 0; i < step.layer_stride; i++) {
            const bool written =
                std::find(slots.begin(), slots.end(), i / (kv_heads * size)) != slots.end();
            verdict.require(written || (same_bits(keys[first + i], caches[layer].keys[i]) &&
                                        same_bits(values[first + i], caches[layer].values[i])),
                            "a slot that belongs to no row");
            if (!written) continue;
            stored.insert(stored.end(), {keys[first + i], values[first + i]});
            exact.insert(exact.end(), {exact_caches[layer].keys[i], exact_caches[layer].values[i]});
        }
        verdict.close(stored, exact, "keys and values of layer " + std::to_string(layer));
    }
    slots[6] = tables.num_slots;
    verdict.require(layers_kernel(&step) == 1, "a slot beyond the cache");
    return verdict.failures();
}

// ---- All of them ----

template <typename T>
int check_all(const RowKernels<T>& kernels, int64_t (*layers_kernel)(const Layers<T>*),
              void (*choose)(int32_t tiles, int32_t prefetch)) {
    manner = "";
    int failures = check_norm(kernels) + check_turn(kernels) + check_store(kernels) + check_decode<T>();
    for (const Manner& next : MANNERS) {
        if (next.tiles && (sizeof(T) == 4 || !tiles_allowed())) continue;
        choose(next.tiles, next.prefetch);
        manner = next.name;
        failures += check_product<T>() + check_prefill<T>() + check_layers(layers_kernel);
    }
    return failures;
}

// A table that names the block after the last.
static int read_beyond() {
    Cache<float> cache = make_cache<float>({3}, 4, 1, 16);
    cache.tables[0] = cache.num_slots / cache.block_size;
    const Rows<float> query = any.rows<float>(16);
    Rows<float> out(16);
    const auto b = reading<Decodes<float>>(cache, query.data(), 16, 1, out.data());
    decode(decodes_of(b, cache, {0}, {0}, 1));
    return 0;
}

int main(int count, char** arguments) {
    if (count > 1) return std::string(arguments[1]) == "beyond" ? read_beyond() : 64;
    const int failures = check_all(functions_float32, layers_float32, choose_float32) +
                         check_all(functions_bfloat16, layers_bfloat16, choose_bfloat16);
    std::printf("%d kernels are wrong\n", failures);
    return failures;
}
