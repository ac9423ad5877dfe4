# slime with SGLang and Megatron-core, from the package registries alone: no fork, no patch, nothing compiled here.
#
#   docker build -t slime .
#   docker run --rm --gpus all --ipc=host --shm-size=16g --ulimit memlock=-1 --ulimit stack=67108864 -it slime
#
# The wheels of PyTorch and SGLang bring CUDA's libraries; the host gives the driver.
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git iproute2 libnuma1 numactl procps \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0

WORKDIR /workspace/slime
COPY . .

# One call, so that one torch fits all: SGLang pins its own, slime takes a range.
RUN pip install -e ".[megatron,sglang,cluster,plots]" \
    && python train.py --help > /dev/null

CMD ["/bin/bash"]
