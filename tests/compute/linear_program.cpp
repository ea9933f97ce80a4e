// A linear layer as a program of its own, for a machine that is emulated: reads a Linear, the sizes of
// its arrays, and the arrays (x, packed, bias); writes the width of a panel, the status and the output.
// Compiled by test_arm64.py together with kernels/cpu/linear.cpp.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "linear.cpp"

static void take(void* to, size_t size) {
    if (fread(to, 1, size, stdin) != size) abort();
}

int main() {
    const int64_t width = stepscope_linear_width();
    fwrite(&width, sizeof width, 1, stdout);
    Linear call;
    if (fread(&call, 1, sizeof call, stdin) != sizeof call) return 0;  // only the width is wanted
    int64_t sizes[3];
    take(sizes, sizeof sizes);
    std::vector<char> arrays[3];
    for (int i = 0; i < 3; i++) {
        arrays[i].resize(sizes[i]);
        take(arrays[i].data(), sizes[i]);
    }
    std::vector<float> output(call.num_rows * call.num_columns);
    call.x = arrays[0].data();
    call.packed = arrays[1].data();
    call.bias = sizes[2] == 0 ? nullptr : (const float*)arrays[2].data();
    call.out = output.data();
    const int64_t status = stepscope_linear(&call);
    fwrite(&status, sizeof status, 1, stdout);
    fwrite(output.data(), sizeof(float), output.size(), stdout);
}
