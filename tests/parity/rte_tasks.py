"""RTE from T0REPRO_DATA_DIR with one of its prompts: what the parity tests train on."""

from t0repro.tasks.registration import add_prompted_task

add_prompted_task("super_glue", "rte", "GPT-3 style", ["train", "validation"])
