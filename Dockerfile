# The GPU profile as an image: the same steps as `tools/setup.sh --gpu` in a checkout.
#
#   docker build -t moerl:latest .
#   docker run --gpus all --ipc=host --cap-add SYS_NICE -v /data:/data moerl:latest moerl doctor
#
# CUDA comes as wheels, so the base image needs Python 3.12 with its headers (Triton compiles with
# them) and a C++ compiler only.  numactl lets SGLang bind its ranks, and SYS_NICE lets it bind their
# memory.  The wheel of Transformer Engine stays in the build cache: a second build takes minutes.
# `python -m tools.engine_kernels` in the image saves engines the compiler at their first start.
FROM python:3.12-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential numactl libnuma1 libibverbs1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/moerl
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=cache,target=/wheels \
    MOERL_WHEELS=/wheels tools/setup.sh --gpu && rm -rf build
ENV PATH=/opt/moerl/.venv/bin:$PATH
CMD ["moerl", "--help"]
