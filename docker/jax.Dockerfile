# The JAX stack; what follows the image's name are options of `t0repro run`.
#   docker build --file docker/jax.Dockerfile --build-arg ACCELERATOR=tpu --tag t0repro-jax .
#   docker run t0repro-jax --run_mode=train --gin_file=...
# Not slim: the locks have packages without wheels, which need a C compiler.
FROM python:3.11-bookworm

# cpu, gpu or tpu: which of jax's builds is installed.
ARG ACCELERATOR=cpu
# Further extras, for instance ",mlflow".
ARG EXTRAS=""

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Python's bytecode is written below, once; a job's lines are logged as they come.
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

WORKDIR /opt/t0repro
COPY requirements requirements
COPY setup.py pyproject.toml README.md ./
COPY scripts/setup.sh scripts/setup.sh
COPY t0repro t0repro
COPY tasks tasks
COPY converters converters
COPY gin gin

# The locks and the package, as on any other machine.
RUN case "$ACCELERATOR" in \
      cpu) extras=gs$EXTRAS ;; \
      gpu | tpu) extras=$ACCELERATOR,gs$EXTRAS ;; \
      *) echo "ACCELERATOR is cpu, gpu or tpu, not '$ACCELERATOR'" >&2; exit 2 ;; \
    esac \
    && EXTRAS=$extras bash scripts/setup.sh
ENV PATH=/opt/t0repro/.venv/bin:$PATH
RUN t0repro --help >/dev/null && python -c "import jax, t0repro.train"

ENTRYPOINT ["t0repro", "run"]
