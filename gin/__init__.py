"""Gin files: models, recipes and the demo; t5_mesh_transformer finds them by their path in here.

This folder is the package t0repro.gin. A Python started in a checkout's root finds it under the
name `gin` as well, ahead of gin-config, and then makes way for that.
"""

if __name__ == "gin":
    import importlib.util
    import sys
    from importlib.machinery import PathFinder
    from pathlib import Path

    _root = Path(__file__).resolve().parent.parent
    _spec = PathFinder.find_spec("gin", [p for p in sys.path if Path(p).resolve() != _root])
    if _spec is None or _spec.loader is None:
        raise ModuleNotFoundError("gin-config is not installed: bash scripts/setup.sh")
    sys.modules["gin"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["gin"])
