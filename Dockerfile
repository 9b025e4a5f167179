# Onefold with CUDA: torch's wheels for Linux bring CUDA's libraries, the host brings the driver.
#     docker build -t onefold .
#     docker run --gpus all --ipc host onefold onefold doctor
# Not built where this file was written: it needs containers and gigabytes of CUDA packages.
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/onefold
ARG TORCH="torch>=2.11,<2.16"
RUN pip install --no-cache-dir "$TORCH"
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY docs/tools/index_page.py docs/tools/index_page.py
COPY src src
RUN pip install --no-cache-dir ".[hf,lightning]"
WORKDIR /work
CMD ["onefold", "doctor"]
