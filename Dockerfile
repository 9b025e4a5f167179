# Onefold with CUDA: torch's wheels for Linux bring CUDA's libraries, the host brings the driver.
# Between nodes NCCL speaks RDMA by the user libraries below: add --device /dev/infiniband.
#     docker build -t onefold .
#     docker run --gpus all --ipc host onefold onefold doctor
# Not built where this file was written: it needs containers and gigabytes of CUDA packages.
FROM python:3.12.11-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
    libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/onefold
ARG TORCH="torch==2.13.0"
RUN pip install --no-cache-dir "$TORCH"
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY docs/tools/index_page.py docs/tools/index_page.py
COPY src src
RUN pip install --no-cache-dir ".[hf,lightning]"
RUN useradd --create-home onefold
USER onefold
WORKDIR /home/onefold
CMD ["onefold", "doctor"]
