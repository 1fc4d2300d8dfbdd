# The Mesh TensorFlow stack; what follows the image's name are flags of `t5_mesh_transformer`, as T0's
# README has them.
#   docker build --file docker/mesh_tensorflow.Dockerfile --tag t0repro-mtf .
#   docker run t0repro-mtf --model_dir=... --module_import=t0repro.tasks.t0 --gin_file=...
# Not slim: the locks have packages without wheels, which need a C compiler.
FROM python:3.11-bookworm

# For instance "mlflow".
ARG EXTRAS=""

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

WORKDIR /opt/t0repro
COPY requirements requirements
COPY setup.py pyproject.toml README.md ./
COPY scripts/setup.sh scripts/setup.sh
COPY t0repro t0repro
COPY tasks tasks
COPY converters converters
COPY gin gin

RUN EXTRAS=$EXTRAS bash scripts/setup.sh
ENV PATH=/opt/t0repro/.venv/bin:$PATH
RUN t5_mesh_transformer --help >/dev/null

ENTRYPOINT ["t5_mesh_transformer", "--backend=mtf"]
