"""lm-evaluation-harness's command with our model: `python -m t0repro.lm_eval --model t0repro ...`.

The harness (0.4.13) finds models only in a registry of its own process, so this module starts its
command. All other arguments are the harness's.
"""

import sys

from t0repro.errors import UserError


def main() -> None:
    """Registers the model and runs the harness's command."""
    try:
        # The harness registers its own models only when this is imported.
        import lm_eval.models  # noqa: F401 # pyright: ignore[reportMissingImports]
        from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
        from lm_eval.api.registry import model_registry  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        # The harness is installed, but not what it imports; Python's own error names that.
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        fix = "EXTRAS=lm-eval bash scripts/setup.sh"
        print(UserError("lm-evaluation-harness is not installed.", fix=fix), file=sys.stderr)
        sys.exit(2)
    model_registry.register("t0repro", target="t0repro.lm_eval.model:T0ReproLM")
    # The harness lets the model's errors through, which would end it with a traceback.
    try:
        cli_evaluate()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
