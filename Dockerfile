# nearkin on a CPU: the command line and the service.
#   docker build -t nearkin .
#   docker run --rm -v "$PWD:/data" nearkin embed efficientnet-lite0 photos/ --out photos.npz
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY recipes ./recipes
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# The CPU build of torch: the default one for Linux brings gigabytes of CUDA.
RUN pip install --no-cache-dir "torch==2.13.0" --index-url https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[glyphs,lite,report,serve,postgres]" && rm -r /wheels \
    && useradd --uid 1000 --create-home nearkin && mkdir /data && chown 1000 /data
USER 1000
WORKDIR /data
ENV NEARKIN_CACHE=/data/.nearkin-cache
EXPOSE 8765
# Whether it listens; /api/health says more, to those with a token.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import socket; socket.create_connection(('127.0.0.1', 8765), 3).close()"]
ENTRYPOINT ["nearkin"]
CMD ["--help"]
