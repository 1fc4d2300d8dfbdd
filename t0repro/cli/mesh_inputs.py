"""A command line's gin files and overrides in Mesh TensorFlow's dialect."""

from __future__ import annotations

from collections.abc import Sequence

from t0repro.cli.gin_options import SkippedNames, folders_of
from t0repro.config.mtf.parser import MeshInputs
from t0repro.tasks.modules import resolved_modules


def mesh_inputs(
    files: Sequence[str] | None,
    params: Sequence[str] | None,
    folders: Sequence[str] | None,
    modules: Sequence[str] | None,
    *,
    skipped: SkippedNames,
    allowlist: tuple[str, ...] | None = None,
    model_dir: str = "",
) -> MeshInputs:
    """The options of a command line for Mesh TensorFlow's gin files."""
    return MeshInputs(
        model_dir=model_dir,
        gin_files=files or (),
        gin_params=params or (),
        location_prefixes=folders_of(folders),
        module_imports=resolved_modules(modules or ()),
        skip_unknown=skipped.skip_unknown,
        import_allowlist=allowlist,
    )
