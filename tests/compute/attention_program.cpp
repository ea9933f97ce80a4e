// Attention as a program of its own, for a machine that is emulated: reads a Step, the sizes of its
// arrays, and the arrays (starts, lengths, tables, decodes, query, keys, values, sinks); writes the
// status and the output. Compiled by test_arm64.py together with kernels/cpu/attention.cpp.
#include <cstdio>
#include <vector>

#include "attention.cpp"

static void take(void* to, size_t size) {
    if (fread(to, 1, size, stdin) != size) abort();
}

int main() {
    stepscope::Step step;
    int64_t sizes[8];
    take(&step, sizeof step);
    take(sizes, sizeof sizes);
    std::vector<char> arrays[8];
    for (int i = 0; i < 8; i++) {
        arrays[i].resize(sizes[i]);
        take(arrays[i].data(), sizes[i]);
    }
    step.query_starts = (const int64_t*)arrays[0].data();
    step.context_lens = (const int64_t*)arrays[1].data();
    step.block_tables = (const int64_t*)arrays[2].data();
    step.decodes = (const int64_t*)arrays[3].data();
    std::vector<char> output(arrays[4].size());
    const float* sinks = sizes[7] == 0 ? nullptr : (const float*)arrays[7].data();
    Attention call = {&step, arrays[4].data(), arrays[5].data(), arrays[6].data(),
                      sinks, output.data(), 1};
    const int64_t status = stepscope_attention(&call);
    fwrite(&status, sizeof status, 1, stdout);
    fwrite(output.data(), 1, output.size(), stdout);
}
