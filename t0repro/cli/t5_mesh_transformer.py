r"""The command t5_mesh_transformer: t5 0.9.4's, on Mesh TensorFlow or on JAX.

It takes every flag of t5's command (t5 itself defines them) and three more: --backend, --vocab
and --debug. Inputs are checked before anything is built or written: a mistake ends with a message
on stderr and exit code 2.

Example:
  t5_mesh_transformer --model_dir=DIR --module_import=t0repro.tasks.demo \
    --gin_file=dataset.gin --gin_param="MIXTURE_NAME = 'demo_train'" \
    --gin_file=models/t5.1.1.small.gin --gin_param="utils.run.mesh_shape = []"
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging

from t0repro.errors import UserError

USER_ERROR = 2  # exit code


def console_entry_point() -> None:
    """Runs the command with sys.argv."""
    _define_flags()
    sys.modules["__main__"].__doc__ = __doc__  # what absl prints above the flags on --help
    app.run(main, flags_parser=_parse_flags)


def _define_flags() -> None:
    """Defines t5's flags, by importing t5's command, and this project's."""
    from t0repro.mesh import compat

    compat.install()
    from mesh_tensorflow.transformer import utils
    from t5.models import mesh_transformer_main

    if "backend" not in flags.FLAGS:
        flags.DEFINE_enum(
            "backend", "mtf", ["mtf", "jax"], "Mesh TensorFlow on CPU, or JAX on any device."
        )
        flags.DEFINE_string(
            "vocab",
            None,
            "A local copy of the SentencePiece model that the tasks use (sets T0REPRO_VOCAB).",
        )
        flags.DEFINE_boolean("debug", False, "Show tracebacks and Mesh TensorFlow's own log.")
    by_module = flags.FLAGS.flags_by_module_dict()
    for module in (mesh_transformer_main, utils, sys.modules[__name__]):
        for flag in by_module.get(module.__name__, []):
            # --help shows the flags of the module that runs: the console script's.
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)


def _parse_flags(arguments: Sequence[str]) -> list[str]:
    try:
        return app.parse_flags_with_usage(list(arguments))
    except SystemExit as end:  # absl exits with 1 for an unknown flag, after its usage message
        sys.exit(USER_ERROR if end.code else 0)


def main(arguments: Sequence[str]) -> None:
    """Checks the inputs and runs the chosen stack; exits with 2 for a mistake of the user's.

    Anything else that fails keeps its traceback: it may come hours into a run.
    """
    options = flags.FLAGS
    try:
        if len(arguments) > 1:
            raise UserError(
                f"Unexpected argument {arguments[1]!r}.",
                fix='Write --flag=value; quote a binding: --gin_param="A.b = 1".',
            )
        run(options)
    except Exception as error:
        mistake = find_user_error(error)
        if mistake is None or options.debug:
            raise
        print(f"t5_mesh_transformer: {mistake}", file=sys.stderr)
        sys.exit(USER_ERROR)


def run(options: Any) -> None:
    """Runs t5_mesh_transformer for parsed flags.

    Raises:
      UserError: if a check of the inputs fails; nothing is written then.
    """
    if options.vocab:
        if not options.vocab.startswith("gs://") and not os.path.isfile(options.vocab):
            raise UserError(
                f"There is no vocabulary {options.vocab}.",
                where="--vocab",
                fix="Give the path of a SentencePiece model file.",
            )
        os.environ["T0REPRO_VOCAB"] = options.vocab
    if not options.debug and not options["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    if options.backend == "jax":
        _check(options)
        from t0repro.runs import backend_jax

        backend_jax.run(options)
    else:
        _run_mesh_tensorflow(options)


def _check(options: Any) -> None:
    """Parses gin as t5's main will, and checks what it names."""
    import gin
    from t0repro.config import checks
    from t0repro.config.mtf.parser import parse

    with checks.configuration_errors():
        parse(gin_inputs(options))
    if not options.use_model_api:
        checks.check_run(options.model_dir, jax=options.backend == "jax")
    gin.clear_config()


def gin_inputs(options: Any) -> Any:
    """The GinInputs of parsed flags."""
    from t0repro.config.mtf.parser import GinInputs

    return GinInputs(
        model_dir=options.model_dir,
        gin_files=options.gin_file or (),
        gin_params=options.gin_param or (),
        location_prefixes=options.gin_location_prefix,
        module_imports=options.module_import or (),
        cache_dirs=options.additional_task_cache_dirs,
        skip_unknown=options.skip_all_gin_unknowns or options.additional_deprecated_gin_references,
    )


def _run_mesh_tensorflow(options: Any) -> None:
    """Runs t5's own main, with metrics.jsonl beside its files."""
    import tensorflow

    tf = tensorflow.compat.v1
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.INFO if options.debug else tf.logging.WARN)
    # absl's handler prints what TensorFlow's own handler prints too.
    tf.get_logger().propagate = False
    _check(options)

    from t5.models import mesh_transformer_main

    from t0repro.mesh import hooks

    if not options.tpu:
        hooks.install(options.model_dir)
    mesh_transformer_main.main(sys.argv)


# tf.data reports an exception of a Python function as an error of its own whose text begins with
# the exception's, "UserError: ...", and goes on with its traceback.
_WRAPPED = re.compile(r"UserError: (.*?)(?=\n+Traceback|\n\n|\Z)", re.DOTALL)


def find_user_error(error: BaseException | None) -> str | None:
    """The text of the UserError that an exception is, was caused by, or carries in its message."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, UserError):
            return str(error)
        wrapped = _WRAPPED.search(str(error))
        if wrapped:
            return wrapped.group(1).strip()
        error = error.__cause__ or error.__context__
    return None
