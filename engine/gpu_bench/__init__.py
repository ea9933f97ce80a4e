"""`stepscope bench gpu`: what an engine makes of a GPU, measured against what the GPU can do.

Ten parts, each with a letter (`parts.PARTS`): (a) the ceilings, a large copy and a large product;
(b) decode steps as a share of the bandwidth floor; (c) prefill as a share of the product's rate;
(d) how a step's time grows with its tokens, and the knee; (e) kernels alone; (f) the yardstick of
256 requests; (g) the same through transformers' `generate_batch`; (h) long prompts that arrive
among decodes, in each batching mode; (i) what telemetry costs; (j) exactness.

How it is measured. Models have the real shapes and random weights (`models.random_shapes`). Steps
run through the engine's own runner, with its graphs, the next one launched while one runs: a sample
is the time from one step's tokens to the next one's. Beside it stand the device's own time by CUDA
events (`device_ms`) and that of a step with nothing in flight beside it (`alone_ms`). There are
warm-up runs before, and medians and spreads are of samples that are all kept. Kernels go
around copies of their keys and values that are several times the L2 cache.

`conduct` starts a process for each model and gathers what it tells line by line: whatever happens
to one (no memory, an error the driver does not recover from, a hang) is a line in the report.
`worker` is that process. `results` is the report, `aims` judges it, `costs` has the formulas.
Everything but the parts themselves, `worker`, `bench`, `steps` and `timing` is free of torch.
"""
