"""What the runner stands on: devices, memory, CUDA graphs, thread counts, sampling on the host."""
