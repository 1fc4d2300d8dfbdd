"""A command line's gin files and overrides in Mesh TensorFlow's dialect."""

from __future__ import annotations

from collections.abc import Sequence

from t0repro.cli.gin_options import GinOptions, SkippedNames
from t0repro.config.mtf.parser import MeshInputs
from t0repro.tasks.modules import resolved_modules


def mesh_inputs(
    gin: GinOptions, modules: Sequence[str] | None, skipped: SkippedNames, model_dir: str = ""
) -> MeshInputs:
    """The options of a command line for Mesh TensorFlow's gin files."""
    return MeshInputs(
        model_dir=model_dir,
        gin_files=gin.gin_file or (),
        gin_params=gin.gin_param or (),
        location_prefixes=gin.folders,
        module_imports=resolved_modules(modules or ()),
        skip_unknown=skipped.skip_unknown,
        import_allowlist=gin.allowlist,
    )
