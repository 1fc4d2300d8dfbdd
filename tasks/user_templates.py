"""Registers the prompts in the files that T0REPRO_TEMPLATES names, when this module is imported.

    T0REPRO_TEMPLATES=my.yaml T0REPRO_DATA_DIR=... seqio_cache_tasks \
        --module_import=t0repro.tasks.user_templates --tasks='my_reviews_.*' --output_cache_dir=...

Separate several files with `:` (`;` on Windows). For the format see `t0repro.tasks.template_files`.
"""

from __future__ import annotations

import os

from t0repro.errors import UserError
from t0repro.tasks.template_registration import register_templates

TEMPLATES_VARIABLE = "T0REPRO_TEMPLATES"

_files = [path for path in os.environ.get(TEMPLATES_VARIABLE, "").split(os.pathsep) if path]
if not _files:
    raise UserError(
        f"{TEMPLATES_VARIABLE} is not set, so there are no prompts to register.",
        fix=f"Set {TEMPLATES_VARIABLE} to a file in promptsource's YAML format.",
    )
for _file in _files:
    register_templates(_file)
