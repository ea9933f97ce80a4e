# vLLM's own image with stepscope's plugin in it. Build it from a checkout of stepscope:
#   docker build -f docs/deploy/vllm.Dockerfile --build-arg VLLM=v0.32.0 -t vllm-stepscope .
ARG VLLM=v0.32.0
FROM vllm/vllm-openai:${VLLM}

# No extra: what observers, the recorder and the plugin need. vLLM's own packages stay as they are.
COPY . /tmp/stepscope
RUN uv pip install --system /tmp/stepscope && rm -rf /tmp/stepscope && stepscope doctor
