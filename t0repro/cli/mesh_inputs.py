"""A command line's gin files and overrides in Mesh TensorFlow's dialect."""

from __future__ import annotations

from collections.abc import Sequence

from t0repro.cli.gin_options import GinOptions, SkippedNames
from t0repro.config.mtf.parser import MeshInputs
from t0repro.errors import UserError
from t0repro.tasks.modules import resolve_modules


def mesh_inputs(
    gin: GinOptions, modules: Sequence[str] | None, skipped: SkippedNames, model_dir: str = ""
) -> MeshInputs:
    """The options of a command line for Mesh TensorFlow's gin files.

    Raises:
      UserError: If there are neither files nor overrides.
    """
    if not (gin.gin_file or gin.gin_param):
        raise UserError(
            "No gin file is given, so there is no run to take.",
            where="--gin_file",
            fix="Name the run's gin files, or take the demo's: --demo.",
        )
    return MeshInputs(
        model_dir=model_dir,
        gin_files=gin.gin_file or (),
        gin_params=gin.gin_param or (),
        location_prefixes=gin.folders,
        module_imports=resolve_modules(modules or ()),
        skip_unknown=skipped.skip_unknown,
        import_allowlist=gin.allowlist,
    )
