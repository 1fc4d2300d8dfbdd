"""Registers the prompts in the files that T0REPRO_TEMPLATES names, when this module is imported.

    T0REPRO_TEMPLATES=my.yaml T0REPRO_DATA_DIR=... seqio_cache_tasks \
        --module_import=t0repro.tasks.user_templates --tasks='my_reviews_.*' --output_cache_dir=...

t0repro's commands read these files without it. For the format see `t0repro.tasks.template_files`.
"""

from __future__ import annotations

from t0repro.errors import UserError
from t0repro.tasks.template_registration import register_templates
from t0repro.tasks.user_files import TEMPLATES_VARIABLE, template_files

if not template_files():
    raise UserError(
        f"{TEMPLATES_VARIABLE} is not set, so there are no prompts to register.",
        fix=f"Set {TEMPLATES_VARIABLE} to the file of your prompts, in promptsource's YAML format.",
    )
for _file in template_files():
    register_templates(_file)
