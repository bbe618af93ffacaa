# Image for training and for the teacher service on NVIDIA GPUs: Linux x86_64, driver 580 or newer on the host.
#
#   docker build -t recipe_gkd .
#   docker run --rm -it --gpus all --network=host --shm-size=64g --ulimit memlock=-1 --ulimit stack=67108864 \
#     --ulimit nofile=65536 -v /models:/models -v /data:/data -v /runs:/workspace/outputs recipe_gkd bash
#
# --shm-size: Ray's objects, NCCL and vLLM use /dev/shm, and Docker's default is 64 MiB (or --ipc=host).
# memlock: InfiniBand and pinned buffers. --network=host: Ray and NCCL use arbitrary ports. For InfiniBand also pass
# --device=/dev/infiniband. docs/cluster.md, "On a cluster", has the rest.
#
# The small CUDA image is enough: the packages bring CUDA's libraries, and the host brings the driver. Triton compiles
# a launcher for each kernel at run time, which needs gcc and Python's headers, but not nvcc. Only Transformer Engine
# needs the development image, because its torch extension is compiled with nvcc and cuDNN's headers:
#
#   docker build -t recipe_gkd:te --build-arg BASE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04 --build-arg WITH_TE=1 .
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${BASE}
ARG WITH_TE=

# libibverbs, librdmacm: NCCL over InfiniBand. g++: torch.compile.
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      python3.12 python3.12-dev python3.12-venv gcc g++ libc6-dev libnuma1 ibverbs-providers libibverbs1 librdmacm1 \
      iproute2 wget \
 && rm -rf /var/lib/apt/lists/*

# KubeRay runs `ray start` in a login shell, which may reset PATH, and a job's `python3` is looked up in the same PATH.
# Its probes of a pod's health use wget.
RUN python3.12 -m venv /opt/venv && ln -s /opt/venv/bin/ray /usr/local/bin/ray \
 && echo 'PATH=/opt/venv/bin:$PATH' > /etc/profile.d/recipe_gkd.sh
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /workspace
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip pip install -c constraints/gpu.txt -e ".[gpu]"
RUN --mount=type=cache,target=/root/.cache/pip if [ -n "$WITH_TE" ]; then \
      pip install -c constraints/gpu.txt wheel ninja && \
      pip install -c constraints/gpu.txt --no-build-isolation -e ".[gpu,gpu-te]"; \
    fi

# Where compiled kernels are kept. Mount a local disk of the host here to keep them between containers; not NFS.
# FlashInfer appends .cache/flashinfer to its variable.
ENV VLLM_CACHE_ROOT=/var/cache/recipe_gkd/vllm TRITON_CACHE_DIR=/var/cache/recipe_gkd/triton \
    FLASHINFER_WORKSPACE_BASE=/var/cache/recipe_gkd
RUN mkdir -p "$VLLM_CACHE_ROOT" "$TRITON_CACHE_DIR"
