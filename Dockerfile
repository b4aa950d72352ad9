# One image for every role; docs/operations.md says how to run it.
#   docker build -t rollout-inspector .
#   docker build -t rollout-inspector-gpu --build-arg REQUIREMENTS=requirements-gpu.txt --build-arg TORCH_INDEX= \
#     --build-arg PACKAGES="gcc libc6-dev" .

# A build names a digest by --build-arg PYTHON=python@sha256:...
ARG PYTHON=python:3.11-slim-bookworm
FROM ${PYTHON} AS build
# The CPU build of PyTorch by default. PyPI's own one, for a GPU, is several GB.
ARG REQUIREMENTS=requirements.txt
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /build
COPY requirements*.txt ./
COPY rollouts/sampling/environments/requirements.txt rollouts/sampling/environments/requirements.txt
RUN python -m venv /opt/venv \
 && PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" /opt/venv/bin/pip install --no-cache-dir -r "${REQUIREMENTS}" \
 && { [ "${REQUIREMENTS}" != requirements.txt ] \
      || /opt/venv/bin/pip install --no-cache-dir --no-deps -r rollouts/sampling/environments/requirements.txt; }

FROM ${PYTHON}
# libseccomp2 confines the processes that render chat templates of strangers. vLLM on a GPU compiles kernels: gcc.
ARG PACKAGES=""
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
 && apt-get install -y --no-install-recommends libseccomp2 ${PACKAGES} \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /data/home --shell /usr/sbin/nologin inspector \
 && install -d -m 0700 -o inspector -g inspector /data
COPY --from=build /opt/venv /opt/venv
COPY . /app
WORKDIR /app
# What is written goes to /data, and drafts to /tmp: the rest may be read-only.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/data/home \
    INSPECTOR_DATA=/data \
    INSPECTOR_LOG_FORMAT=json \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
RUN python -m compileall -q rollout_inspector rollouts inspector tools
USER 10001:10001
VOLUME /data
EXPOSE 8000
ENTRYPOINT ["inspector/server/start"]
CMD ["web"]
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["inspector/server/start", "healthy"]
