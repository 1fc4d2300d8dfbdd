"""Parses gin files and overrides as t5_mesh_transformer does."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

import gin
from t0repro import compat
from t0repro.config.gin import door
from t0repro.config.gin.door import Bindings, record_bindings
from t0repro.config.gin.errors import configuration_errors
from t0repro.config.gin.folders import default_bindings, has_module, mesh_folders
from t0repro.config.gin.imports import list_imports, restrict_imports
from t0repro.config.gin.references import check_references
from t0repro.config.mtf import jax_settings as jax_settings  # registers its configurables
from t0repro.config.mtf import stand_ins
from t0repro.storage import check_address
from t0repro.tasks.modules import load_tasks
from t0repro.tasks.registry import add_cache_dirs
from t0repro.words import printable

MESH_TRANSFORMER = "t5.models.mesh_transformer"
# On t5's own list until SeqIO took the vocabularies over; T5 1.0's operative configs have it.
_ONCE_DEPRECATED = ("t5.data.sentencepiece_vocabulary.SentencePieceVocabulary",)
_CACHE_DIRS = "--additional_task_cache_dirs"


@dataclasses.dataclass(frozen=True)
class MeshInputs:
    """The gin-related part of t5_mesh_transformer's command line.

    Attributes:
      skip_unknown: True to ignore every unknown configurable, or the names of those to ignore in
        addition to t5's own list of deprecated references.
      tfds_data_dir: TensorFlow Datasets' data folder, in place of each task's own.
      import_allowlist: modules that gin files may import; see gin.imports. None allows all.
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


def parse(inputs: MeshInputs, *, warn: bool = True, with_packages: bool = True) -> Bindings:
    """Fills gin's global configuration from the inputs, in mesh_transformer_main's order.

    Args:
      inputs: files, overrides and search paths.
      warn: whether to print a warning for each macro in a file that nothing reads.
      with_packages: False within `stand_ins.register`, with the tasks loaded; otherwise t5,
        Mesh TensorFlow and SeqIO are imported, which registers their own configurables.

    Raises:
      UserError: for any error of gin's parser, a module that cannot be imported, or a macro on the
        command line that nothing reads.
    """
    if with_packages:
        # Mesh TensorFlow and t5 do not import on a current TensorFlow unless they are patched.
        compat.install()
        importlib.import_module(MESH_TRANSFORMER)
        # `tpu_mesh_shape` reads one of TensorFlow's flags, which only t5's command parses.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        load_tasks(inputs.module_imports, into_seqio=True)
    with configuration_errors():
        bindings = _parse_files(inputs)
        warnings = check_references(bindings)  # refuses, too
        if warn:
            for warning in (*_list_skipped_imports(inputs), *warnings):
                print(printable(f"warning: {warning}"), file=sys.stderr)
    # By now the place that binds the mixture's name is known.
    with configuration_errors(bindings):
        find_vocabularies: Any = gin.get_configurable(f"{MESH_TRANSFORMER}.get_vocabulary")
        gin.bind_parameter("run.vocabulary", find_vocabularies())
    # This locks gin's configuration; later changes must unlock it explicitly.
    gin.finalize()
    # After gin's files, as in t5's main, so that nothing that they import overrides it.
    add_cache_dirs(inputs.cache_dirs, _CACHE_DIRS)
    if inputs.tfds_data_dir and "seqio" in sys.modules:
        importlib.import_module("seqio").set_tfds_data_dir_override(inputs.tfds_data_dir)
    return bindings


def _list_skipped_imports(inputs: MeshInputs) -> Iterator[str]:
    """A line for each missing module that gin files import in vain, as gin skips those in silence.

    Those of the packages' older versions, in every released operative_config.gin, get none.
    """
    folders, known = mesh_folders(inputs.location_prefixes), stand_ins.read_signatures()["modules"]
    for line in list_imports(inputs.gin_files, inputs.gin_params, folders, None):
        package, _, inside = line.module.partition(".")
        is_reference = package in stand_ins.PACKAGES
        if package == "__main__" or (
            has_module(package, inside) if is_reference else importlib.util.find_spec(package)
        ):
            continue
        near = difflib.get_close_matches(line.module, known, n=1, cutoff=0.85)
        if near or not is_reference:
            nearest = f"; nearest: {near[0]!r}" if near else ""
            what = f"there is no module {line.module}, so the import does nothing{nearest}"
            yield f"{line.place}: {what}"


def list_deprecated_references() -> tuple[str, ...]:
    """The references that gin skips: those on the list of t5's module, or once on it."""
    return (*stand_ins.read_signatures()["deprecated"], *_ONCE_DEPRECATED)


def _parse_files(inputs: MeshInputs) -> Bindings:
    skip: Any = inputs.skip_unknown
    if skip is not True:
        # t5's list always applies, whatever the user adds.
        skip = (*list_deprecated_references(), *(skip or ()))
    # gin's state is global to the process, which may have parsed another command line before.
    gin.clear_config()
    door.extend_readers()
    allowlist = inputs.import_allowlist
    # Modules of --module_import are allowed in gin files too.
    restrict_imports(None if allowlist is None else (*allowlist, *inputs.module_imports))
    for cache_dir in inputs.cache_dirs:
        check_address(cache_dir, _CACHE_DIRS)
    # Parse defaults.gin first, so that files and parameters override it.
    folders = mesh_folders(inputs.location_prefixes)
    with record_bindings() as bindings, door.search_only(*folders, in_packages=True):
        gin.parse_config_files_and_bindings(
            [default_bindings(), *inputs.gin_files],
            list(inputs.gin_params),
            skip_unknown=skip,
            # Finalizing would lock the configuration before the vocabulary is bound.
            finalize_config=False,
        )
    door.check_bound_addresses(bindings)
    # Released operative configs bind the vocabulary to functions that no longer exist. t5 overrides
    # that binding, so drop it before checking references.
    gin.bind_parameter("run.vocabulary", None)
    return bindings
