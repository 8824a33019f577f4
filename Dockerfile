# barista on NVIDIA GPUs. Linted (tests/launch/test_containers.py); NOT BUILT by the project's own checks, which have no
# GPU and no container engine. Build and try it on a GPU machine:
#   docker build -t barista .
#   docker run --rm --gpus all --shm-size=8g barista python -m launch.doctor
# The devel image, because DeepSpeed asks for nvcc's version when it is imported beside a CUDA build of torch.
ARG CUDA_IMAGE=nvidia/cuda:12.6.3-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

# The version that constraints.txt's other packages are tested with (Makefile); its wheel brings its own CUDA libraries.
ARG TORCH_VERSION=2.13.0

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# RDMA libraries for NCCL over InfiniBand and RoCE; git so that runs record their commit; pdsh and ssh for hostfiles.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        git g++ ibverbs-providers libibverbs1 librdmacm1 openssh-client pdsh python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:${PATH} \
    DS_BUILD_OPS=0 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/barista
COPY pyproject.toml constraints.txt README.md LICENSE ./

# Dependencies before the code, so that a changed line does not install them again.
RUN python3 -m venv "${VIRTUAL_ENV}" \
    && mkdir -p data models trainer launch \
    && touch data/__init__.py models/__init__.py trainer/__init__.py launch/__init__.py \
    && pip install --no-cache-dir --constraint constraints.txt "torch==${TORCH_VERSION}" \
    && pip install --no-cache-dir --constraint constraints.txt --editable ".[demo,lora]"

COPY . .

CMD ["python", "-m", "launch.doctor"]
