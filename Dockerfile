# slime with SGLang and Megatron-core, from the package registries alone: no fork, no patch, nothing compiled here.
#
#   docker build -t slime .
#   docker run --rm --gpus all --ipc=host --shm-size=16g --ulimit memlock=-1 --ulimit stack=67108864 -it slime
#
# The wheels of PyTorch and SGLang bring CUDA's libraries; the host gives the driver. A smaller image for machines
# without a GPU has neither SGLang nor Megatron-core, the CPU build of PyTorch, and the releases that the tests run with:
#
#   docker build --build-arg DEVICE=cpu -t slime:cpu .
#   docker run --rm --shm-size=2g -it slime:cpu
#
# scripts/build_image.sh builds both where there is no Docker, and trains in them.
FROM python:3.11-slim-bookworm

ARG DEVICE=cuda

# Triton calls gcc, and SGLang numactl. git is for a checkout of your own.
RUN if [ "$DEVICE" = cuda ]; then \
        apt-get update \
        && apt-get install -y --no-install-recommends build-essential git libnuma1 numactl \
        && rm -rf /var/lib/apt/lists/*; \
    fi

ENV PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0

WORKDIR /workspace/slime
COPY . .

# For CUDA one call, so that one torch fits all: SGLang pins its own, slime takes a range. SGLang also pins a torchaudio
# that is three releases older than that torch, and only its audio models import it. For the CPU torch comes first,
# because its build is another file than that of the registry.
RUN if [ "$DEVICE" = cuda ]; then \
        pip install -e ".[megatron,sglang,cluster,plots,gguf]" \
        && pip uninstall -y torchaudio; \
    else \
        grep -o '^[a-z0-9.-]*==[^ ]*' requirements/cpu.txt > /tmp/pins.txt \
        && PYTHONPATH=scripts python -c \
            "import pathlib, sys, env_setup; env_setup.install_cpu_torch(pathlib.Path(sys.prefix))" \
        && pip install -c /tmp/pins.txt -e ".[cluster,plots,gguf]" \
        && rm /tmp/pins.txt; \
    fi \
    && python train.py --help > /dev/null

CMD ["/bin/bash"]
