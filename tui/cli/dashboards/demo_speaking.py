"""Settings and workload of the demo with a model that writes real text, for two CPU cores."""

from stepscope.engine.models.cache import smollm2
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec

NAME = smollm2.NAME
NOTICE = smollm2.NOTICE
# Eight streams decode in one step as fast as a person reads. A budget of 32 leaves 24 tokens for
# prompts beside them: a question is prefilled in two chunks, and no stream stalls for it.
KNOBS = Knobs(max_num_batched_tokens=32, max_num_seqs=8)
KV_MEMORY = "96MB"  # about 2,000 tokens in fp32
MAX_MODEL_LEN = 1024
WORKLOAD = WorkloadSpec(
    rate=100.0,  # a closed loop: when an answer ends, the next question arrives
    document_share=0.0,
    chat_tokens=45,  # a question in the chat template
    output_tokens=200,
    max_concurrency=KNOBS.max_num_seqs,
    temperature=0.7,
    questions=True,
)
