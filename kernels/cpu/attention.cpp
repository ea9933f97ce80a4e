// Paged attention for a whole step: decodes and chunks form one list of items for all threads.
#include "chunk.h"
#include "decode.h"

namespace stepscope {
namespace {

// Below this much work (query-key pairs, times heads, times head size), about 50 us, one thread
// does it all. Starting other threads costs 3 to 5 us if they are awake, as between the matrix
// products of a step, 50 us if they sleep, and more if another program has their core.
constexpr int64_t WORK_FOR_THREADS = 1 << 20;

thread_local Scratch item_scratch, call_scratch;

template <class T, class C>
void run_item(Call& call, const Item& item, const Item* next) {
    item.is_chunk ? chunk<T, C>(call, item, item_scratch)
                  : decode<T, C>(call, item, next, item_scratch);
}

// The partitions with keys that a decode attends to.
int64_t first_partition(const Call& call, int64_t r) {
    return call.first_key(call.context_lens[r] - 1) / PARTITION;
}
int64_t num_partitions(const Call& call, int64_t r) {
    return (call.context_lens[r] - 1) / PARTITION - first_partition(call, r) + 1;
}

int attend(Call& call, int num_threads) {
    int64_t num_items = 0, num_partials = 0;
    double work = 0;
    const int64_t queries_each = queries_of_item(call);
    for (int64_t r = 0; r < call.num_requests; r++) {
        const int64_t n = call.num_queries(r);
        if (call.decodes[r]) {
            num_items += num_partitions(call, r);
            if (num_partitions(call, r) > 1) num_partials += num_partitions(call, r);
        } else {
            num_items += (n + queries_each - 1) / queries_each * call.num_kv_heads;
        }
        const double seen = (double)call.context_lens[r] - 0.5 * (double)n;
        const double window = call.sliding_window > 0 ? (double)call.sliding_window : seen;
        work += (double)(n * call.num_heads * call.head_dim) * (seen < window ? seen : window);
    }
    if (num_items == 0) return 0;

    const int64_t partial_size = round_up(call.head_dim, 32) + VL;
    Pieces pieces(call_scratch.reserve(
        Pieces::bytes<Item>(num_items) + Pieces::bytes<Split>(call.num_requests) +
        Pieces::bytes<float>(num_partials * call.num_heads * partial_size)));
    Item* items = pieces.take<Item>(num_items);
    call.splits = pieces.take<Split>(call.num_requests);
    call.partials = pieces.take<float>(num_partials * call.num_heads * partial_size);

    // Large items first (chunks, from their last queries), so that small ones fill the gaps.
    int64_t at = 0, first_partial = 0;
    for (int64_t r = 0; r < call.num_requests; r++) {
        if (call.decodes[r]) continue;
        const int64_t n = call.num_queries(r);
        for (int64_t end = n; end > 0;) {
            const int64_t begin = (end - 1) / queries_each * queries_each;
            for (int64_t h = 0; h < call.num_kv_heads; h++) {
                items[at++] = {r, begin, end, h, 1, 0, true};
            }
            end = begin;
        }
    }
    for (int64_t r = 0; r < call.num_requests; r++) {
        if (!call.decodes[r]) continue;
        const int64_t first = first_partition(call, r), count = num_partitions(call, r);
        call.splits[r] = {count, first_partial, (int32_t)count};
        if (count > 1) first_partial += count * call.num_heads;
        for (int64_t p = 0; p < count; p++) {
            const int64_t begin = max((first + p) * PARTITION,
                                      call.first_key(call.context_lens[r] - 1));
            const int64_t end = min((first + p + 1) * PARTITION, call.context_lens[r]);
            items[at++] = {r, begin, end, 0, call.num_kv_heads, p, false};
        }
    }

    if (work < WORK_FOR_THREADS) num_threads = 1;
    const auto run = with_dtypes(call.dtype, call.kv_dtype, [](auto t, auto c) {
        return run_item<decltype(t), decltype(c)>;
    });
    for_each(num_items, num_threads, [&](int64_t i) {
        const Item* next = i + num_threads < num_items ? &items[i + num_threads] : nullptr;
        run(call, items[i], next);
    });
    return call.invalid_block ? -1 : 0;
}

}  // namespace
}  // namespace stepscope

// Filled in by kernels/cpu/attention.py, field by field in this order.
struct Attention {
    const stepscope::Step* step;
    const void* query;
    const void* key_cache;
    const void* value_cache;
    const float* sinks;  // or null
    void* output;
    int64_t num_threads;
};

// Returns 0, or -1 if a block table names a block outside of the caches (the output is unusable).
EXPORT int stepscope_attention(const Attention* a) {
    stepscope::Call call(*a->step);
    call.query = a->query;
    call.key_cache = a->key_cache;
    call.value_cache = a->value_cache;
    call.sinks = a->sinks;
    call.output = a->output;
    call.invalid_block = 0;
    return stepscope::attend(call, (int)a->num_threads);
}
