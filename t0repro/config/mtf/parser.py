"""Parses gin files and --gin_param overrides as t5_mesh_transformer does, into gin's own state."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from t0repro.config import cloud
from t0repro.config.gin_door import Bindings, record_bindings
from t0repro.config.gin_errors import check_references, configuration_errors
from t0repro.config.gin_imports import restrict_imports
from t0repro.files import check_output
from t0repro.tasks.module_names import resolved
from t0repro.words import printable
from t0repro.working_copies import for_tensorflow

UTILS = "mesh_tensorflow.transformer.utils"
MESH_TRANSFORMER = "t5.models.mesh_transformer"


@dataclasses.dataclass(frozen=True)
class MeshInputs:
    """What the command line of t5_mesh_transformer says about gin.

    Attributes:
      skip_unknown: True to ignore every unknown configurable, or the names of those to ignore
        beside t5's own list of deprecated references.
      tfds_data_dir: where TensorFlow Datasets keeps its data, in place of each task's own folder.
      import_allowlist: modules that gin files may import; see gin_imports. None allows all.
    """

    model_dir: str
    gin_files: Sequence[str] = ()
    gin_params: Sequence[str] = ()
    location_prefixes: Sequence[str] = ()
    module_imports: Sequence[str] = ()
    cache_dirs: Sequence[str] = ()
    skip_unknown: bool | Sequence[str] = ()
    tfds_data_dir: str | None = None
    import_allowlist: Sequence[str] | None = None


def parse(inputs: MeshInputs, *, warn: bool = True) -> Bindings:
    """Fills gin's global configuration from the inputs, in mesh_transformer_main's order.

    Args:
      inputs: files, overrides and search paths.
      warn: whether to print a warning for each macro in a file that nothing reads.

    Raises:
      UserError: for whatever gin's parser finds wrong, a module that cannot be imported, or a
        macro on the command line that nothing reads.
    """
    from t0repro import compat

    compat.install()
    with configuration_errors():
        return _parse(inputs, warn)


def _parse(inputs: MeshInputs, warn: bool) -> Bindings:
    import gin

    mesh_transformer = importlib.import_module(MESH_TRANSFORMER)
    utils = importlib.import_module(UTILS)
    seqio = importlib.import_module("seqio")
    importlib.import_module("t0repro.config.mtf.arguments")  # registers it with gin
    for module in resolved(inputs.module_imports):
        importlib.import_module(module)

    skip: Any = inputs.skip_unknown
    if skip is not True:
        # t5's list comes on top, whatever the user adds.
        skip = (*mesh_transformer.DEPRECATED_GIN_REFERENCES, *(skip or ()))
    # gin's state is the process's own: another command line may have been parsed before.
    gin.clear_config()
    own_gin_files = os.path.dirname(str(importlib.import_module("t0repro.gin").__file__))
    for prefix in (_folder(mesh_transformer, "gin"), own_gin_files, *inputs.location_prefixes):
        gin.add_config_file_search_path(prefix)
    cloud.read_gin_from_buckets()
    allowlist = inputs.import_allowlist
    # What --module_import names is allowed in gin files too.
    restrict_imports(None if allowlist is None else (*allowlist, *inputs.module_imports))
    for cache_dir in inputs.cache_dirs:
        check_output(cache_dir, "--additional_task_cache_dirs")
    # defaults.gin first, so that files and parameters win over it.
    with record_bindings() as bindings:
        gin.parse_config_files_and_bindings(
            [os.path.join(_folder(utils, "gin"), "defaults.gin"), *inputs.gin_files],
            list(inputs.gin_params),
            skip_unknown=skip,
            finalize_config=False,
        )
    # Released operative configs bind functions that are gone as the vocabulary. t5 overrides that
    # binding, so it is dropped before references are checked.
    gin.bind_parameter("run.vocabulary", None)
    # t5 asks for the mixture by its macro's name, to find the vocabulary.
    for warning in check_references(bindings, read_by_t5=("MIXTURE_NAME",)):
        if warn:
            print(printable(f"warning: {warning}"), file=sys.stderr)
    # By now it is known where the mixture's name is bound.
    with configuration_errors(bindings):
        gin.bind_parameter("run.vocabulary", mesh_transformer.get_vocabulary())
    # Locked from here on; a later change has to unlock it on purpose.
    gin.finalize()
    flag = "--additional_task_cache_dirs"
    seqio.add_global_cache_dirs([for_tensorflow(folder, flag) for folder in inputs.cache_dirs])
    if inputs.tfds_data_dir:
        seqio.set_tfds_data_dir_override(inputs.tfds_data_dir)
    return bindings


def _folder(module: Any, name: str) -> str:
    return os.path.join(os.path.dirname(module.__file__), name)
