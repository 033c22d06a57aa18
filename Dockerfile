# A worker, or any kvasir command, in a container: docker build --tag kvasir:0.2.0 .
# For Linux and its CPUs. On a GPU machine run workers beside the accelerator instead (docs/how-to/deployment.md).
# Which extras are installed: docker build --build-arg EXTRAS=mlx .

FROM python:3.11-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
ARG EXTRAS=llamacpp
# llama.cpp computes with OpenMP.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN python -m venv /opt/kvasir \
    && wheel="$(ls /wheels/kvasir_inference-*.whl)" \
    && /opt/kvasir/bin/pip install --no-cache-dir "${wheel}[${EXTRAS}]" \
    && useradd --create-home --uid 10001 kvasir \
    && install --directory --owner=kvasir --mode=0700 /state
ENV PATH=/opt/kvasir/bin:$PATH \
    PYTHONUNBUFFERED=1
# Settings and passwords come when it runs: KVASIR_* variables, files, or a mounted kvasir.toml.
USER kvasir
WORKDIR /home/kvasir
ENTRYPOINT ["kvasir"]
CMD ["--help"]
