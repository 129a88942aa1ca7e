# The images of KubeRoll; `make images` builds all three.
#
#   docker build --target operator -t kuberoll/operator:0.2.0 .
#   docker build --target worker   -t kuberoll/worker:0.2.0 .
#   docker build --target serve    -t kuberoll/generation:0.2.0 .                          # NVIDIA GPUs
#   docker build --target serve    -t kuberoll/generation:0.2.0-cpu --build-arg ENGINE=cpu .
#
# Any of docker, podman and buildah will do. docs/how-to/images.md: sizes, users, how to use your own environments' packages.
ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim-bookworm
# vLLM's own image: it has CUDA's libraries, and the C compiler that Triton's kernels are started with.
ARG GPU_IMAGE=docker.io/vllm/vllm-openai:v0.32.0
ARG ENGINE=gpu
ARG VERSION=0.2.0

# ---- what the images have in common
FROM ${PYTHON_IMAGE} AS base
# Libraries ask for the name and the home of the user that they run as.
RUN groupadd --gid 65532 kuberoll \
    && useradd --uid 65532 --gid 65532 --no-log-init --create-home --shell /usr/sbin/nologin kuberoll
LABEL org.opencontainers.image.title="KubeRoll" \
      org.opencontainers.image.description="Reinforcement-learning rollouts on Kubernetes" \
      org.opencontainers.image.source="https://github.com/kuberoll/kuberoll" \
      org.opencontainers.image.licenses="Apache-2.0"
# HOME is the one directory that every pod may write to, whatever of its root is read-only.
ENV PATH=/opt/kuberoll/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /tmp
USER 65532:65532

# ---- KubeRoll itself, for all images: a layer of a few MB, the one that differs from version to version
#
# pip's settings come as the secrets `pip`, a pip.conf, and `ca`, certificates that it may name as /run/secrets/ca:
# what a machine needs for its mirror is in no layer. Without them pip asks PyPI, or the index of PIP_INDEX_URL.
FROM base AS application
USER root
ARG PIP_INDEX_URL
# Commands begin with the path of this interpreter.
RUN python3 -m venv /opt/kuberoll
COPY . /tmp/src
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    pip install --no-cache-dir --no-compile --no-deps --prefix /opt/application /tmp/src \
    && /tmp/src/scripts/compile.sh /opt/application

# ---- dependencies: installed into the images' own layers, which need not be copied then
FROM base AS dependencies-operator
USER root
ARG PIP_INDEX_URL
COPY pyproject.toml /tmp/src/
COPY scripts/requirements.py scripts/install.py scripts/compile.sh scripts/dependencies.sh /tmp/src/scripts/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    /tmp/src/scripts/dependencies.sh --without-engine operator
USER 65532:65532

FROM base AS dependencies-worker
USER root
ARG PIP_INDEX_URL
COPY pyproject.toml /tmp/src/
COPY scripts/requirements.py scripts/install.py scripts/compile.sh scripts/dependencies.sh /tmp/src/scripts/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    /tmp/src/scripts/dependencies.sh --without-engine workers s3 gcs
USER 65532:65532

# ---- what runs
FROM dependencies-operator AS operator
COPY --from=application /opt/application /opt/kuberoll
ARG VERSION
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
EXPOSE 8080
ENTRYPOINT ["python", "-m", "kuberoll_operator"]

FROM dependencies-worker AS worker
USER root
# With pip: packages of environments are added (docs/how-to/images.md).
RUN python -m ensurepip --default-pip
USER 65532:65532
COPY --from=application /opt/application /opt/kuberoll
# What comes into sandboxes, ready to be copied: each of their pods does so before it starts.
USER root
RUN python -m kuberoll_workers.sandboxes.runtime /opt/kuberoll/sandbox-runtime
USER 65532:65532
ENV KUBEROLL_SANDBOX_RUNTIME=/opt/kuberoll/sandbox-runtime
COPY examples/models /opt/kuberoll/models
ARG VERSION
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
EXPOSE 9464
CMD ["python", "-m", "kuberoll_workers.pods.worker", "--config", "/etc/kuberoll/job.json"]

FROM dependencies-worker AS serve-cpu
USER root
# vLLM's kernels for CPUs are linked with it.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
ARG PIP_INDEX_URL
COPY pyproject.toml /tmp/src/
COPY scripts/requirements.py scripts/install.py scripts/compile.sh scripts/dependencies.sh /tmp/src/scripts/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    /tmp/src/scripts/dependencies.sh workers s3 gcs
USER 65532:65532
COPY --from=application /opt/application /opt/kuberoll

FROM ${GPU_IMAGE} AS serve-gpu
LABEL org.opencontainers.image.title="KubeRoll generation" \
      org.opencontainers.image.source="https://github.com/kuberoll/kuberoll" \
      org.opencontainers.image.licenses="Apache-2.0"
ARG PIP_INDEX_URL
ENV PYTHONUNBUFFERED=1 HOME=/tmp VLLM_NO_USAGE_STATS=1
# Pods start `python`.
RUN groupadd --gid 65532 kuberoll \
    && useradd --uid 65532 --gid 65532 --no-log-init --create-home --shell /usr/sbin/nologin kuberoll \
    && { command -v python || ln -s "$(command -v python3)" /usr/local/bin/python; }
COPY pyproject.toml /tmp/src/
COPY scripts/requirements.py /tmp/src/scripts/
# vLLM, PyTorch and transformers stay as their image has them.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    python3 /tmp/src/scripts/requirements.py workers s3 gcs | grep -v '^transformers' > /tmp/requirements.txt \
    && pip freeze | grep -i -E '^(torch|vllm|transformers|numpy)==' > /tmp/constraints.txt \
    && pip install --no-cache-dir -r /tmp/requirements.txt -c /tmp/constraints.txt && rm -r /tmp/src /tmp/*.txt
COPY . /tmp/src
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    pip install --no-cache-dir --no-deps /tmp/src && rm -r /tmp/src
WORKDIR /tmp
USER 65532:65532
ENTRYPOINT []

FROM serve-${ENGINE} AS serve
COPY examples/models /opt/kuberoll/models
ARG VERSION
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
EXPOSE 8000 8080
CMD ["python3", "-m", "kuberoll_workers.pods.generation", "--config", "/etc/kuberoll/job.json"]
