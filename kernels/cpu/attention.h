// The arguments of an attention call, and the items into which it is split for the threads.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "vec.h"

namespace stepscope {

// Filled in by kernels/cpu/attention.py, field by field in this order. `PagedBatch` in
// kernels/paged_attention.py describes the arrays; caches are
// [num_blocks, block_size, num_kv_heads, head_dim].
struct Step {
    const int64_t* query_starts;
    const int64_t* context_lens;
    const int64_t* block_tables;
    const int64_t* decodes;  // [num_requests], 1 if its only query is a decode
    int64_t table_stride;
    int64_t num_requests;
    int64_t num_blocks;
    int64_t block_size;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t dtype;     // Dtype of queries and output
    int64_t kv_dtype;  // Dtype of the caches
    int64_t sliding_window;  // 0: none
    double scale;
    double softcap;  // 0: none
};

constexpr int64_t PARTITION = 512;  // keys in one item of a decode
constexpr int64_t KEY_TILE = 128;  // keys of a chunk that are packed at a time

// Part of one request, for some of its KV heads: [begin, end) are the keys of one partition for a
// decode, and queries for a chunk.
struct Item {
    int64_t request;
    int64_t begin;
    int64_t end;
    int64_t first_kv_head;
    int64_t num_kv_heads;
    int64_t partition;
    bool is_chunk;
};

// State of a decode with several partitions. Each leaves its weighted sum of values, its largest
// score and its sum of weights; the thread that finishes last merges them.
struct Split {
    int64_t num_partitions;
    int64_t first_partial;  // index of partition 0 in `Call::partials`
    int32_t num_missing;
};

struct Call : Step {
    Call(const Step& step) : Step(step) {}

    const void* query;
    const void* key_cache;
    const void* value_cache;
    const float* sinks;  // or null
    void* output;
    float* partials;
    Split* splits;          // one for each request
    int32_t invalid_block;  // set if a block table names a block outside of the caches

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t num_queries(int64_t r) const { return query_starts[r + 1] - query_starts[r]; }
    // The first key that a query at this position attends to.
    int64_t first_key(int64_t query_position) const {
        return sliding_window == 0 ? 0 : max(0, query_position - sliding_window + 1);
    }

    // Element offsets of the keys [begin, end) of a request, in KV head 0. The last offset is
    // repeated up to `padded_end`, so that loads need no further bound.
    void row_offsets(int64_t r, int64_t begin, int64_t end, int64_t padded_end, int64_t* offsets) {
        const int64_t* table = block_tables + r * table_stride;
        const int64_t row = num_kv_heads * head_dim;
        int64_t block = begin / block_size, in_block = begin % block_size;
        int64_t k = begin;
        while (k < end) {
            int64_t id = table[block++];
            if (id < 0 || id >= num_blocks) {
                __atomic_store_n(&invalid_block, 1, __ATOMIC_RELAXED);
                id = 0;
            }
            const int64_t base = (id * block_size) * row;
            for (; in_block < block_size && k < end; in_block++) {
                offsets[k++ - begin] = base + in_block * row;
            }
            in_block = 0;
        }
        for (; k < padded_end; k++) offsets[k - begin] = offsets[end - 1 - begin];
    }
};

INLINE vf cap_and_scale(vf score, float scale, float softcap) {
    score = score * scale;
    return softcap == 0 ? score : softcap * tanh(score * (1 / softcap));
}

// Writes an output row from the weighted sum of values; weights are relative to `largest_score`.
template <class T>
void finish(const Call& call, int64_t token, int64_t head, const float* values,
            float largest_score, float sum_of_weights) {
    float factor = 1;
    if (call.sinks != nullptr) {
        const float sink = call.sinks[head];
        const float top = sink > largest_score ? sink : largest_score;
        factor = exp(splat(largest_score - top))[0];
        sum_of_weights = sum_of_weights * factor + exp(splat(sink - top))[0];
    }
    factor /= sum_of_weights;
    T* out = (T*)call.output + (token * call.num_heads + head) * call.head_dim;
    for (int64_t d = 0; d < call.head_dim; d += VL) {
        store(out + d, load(values + d) * factor, call.head_dim - d);
    }
}

}  // namespace stepscope
