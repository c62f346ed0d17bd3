# Pagefold's server for NVIDIA GPUs and CPUs:
#
#   docker build -t pagefold .
#   docker run --gpus all -p 8000:8000 -v pagefold-cache:/cache pagefold MODEL [flags of `pagefold serve`]
#
# Everything that is downloaded or compiled at run time is kept in the volume /cache. Anybody who reaches the port may
# use the server unless -e PAGEFOLD_API_KEY=... is given.

FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /opt/pagefold
ENV PATH=/opt/pagefold/bin:$PATH
COPY pyproject.toml README.md LICENSE ./
COPY pagefold ./pagefold
# the versions are those of pyproject.toml
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[server]"

FROM python:3.12-slim
# kernels are compiled on first use: Triton's launchers and those of the CPU
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home pagefold \
 && install -d -o pagefold /cache
COPY --from=build /opt/pagefold /opt/pagefold
ENV PATH=/opt/pagefold/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton
USER 1000
WORKDIR /home/pagefold
VOLUME /cache
EXPOSE 8000
# a model may take minutes to load, or an hour to download
HEALTHCHECK --start-period=1h --interval=15s --timeout=5s --retries=4 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["pagefold", "serve", "--host", "0.0.0.0", "--port", "8000"]
