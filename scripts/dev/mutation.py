"""Mutation testing: each small change to a parity-critical module should make a test of it fail.

  EXTRAS=mutation bash scripts/setup.sh                           # mutmut, once
  .venv/bin/python scripts/dev/mutation.py                            # all modules: hours
  .venv/bin/python scripts/dev/mutation.py t0repro/training/losses.py   # these
  .venv/bin/python scripts/dev/mutation.py --sample 10                # so many changes of each

The tests are those that scripts/test.sh runs by default, of the files that import the module.
Prints each change that no test noticed, as a diff; docs/evidence/reliability.md explains them.

mutmut generates the changes and selects one at each call. `mutmut run` starts a process and
collects the tests for every change. This script tries all changes of a module in one process: it
collects the tests once and compiles JAX's operations once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

try:
    from mutmut.core import MutmutProgrammaticFailException
    from mutmut.mutation.file_mutation import mutate_file_contents
except ImportError:
    sys.exit("mutation: mutmut is not installed: EXTRAS=mutation bash scripts/setup.sh")

ROOT = Path(__file__).resolve().parents[2]

# Modules whose arithmetic, names and bytes must equal other systems'.
MODULES = (
    "t0repro/training/adafactor.py",
    "t0repro/training/losses.py",
    "t0repro/training/token_losses.py",
    "t0repro/evaluation/rank.py",
    "t0repro/evaluation/grouping.py",
    "t0repro/reports/statistics.py",
    "t0repro/parity/report.py",
    "t0repro/parameters/naming.py",
    "t0repro/partitioning/devices.py",
    "converters/hf.py",
    "converters/jax_tree.py",
    "converters/safetensors_files.py",
    "converters/t5x_msgpack.py",
    "converters/tensor_bundle.py",
    "converters/tensors.py",
)
# Tests are sought until their files took so many seconds of processor time together.
SECONDS = 60.0


def tests_of(path: str) -> list[str]:
    """The files of tests that import a module, from the one that takes least, as recorded."""
    home = path.removeprefix("t0repro/").removesuffix(".py").replace("/", ".")
    package, _, name = home.rpartition(".")
    imports = re.compile(
        rf"t0repro\.{home}\b|from t0repro\.{package} import .*(?<!as )\b{name}\b", re.MULTILINE
    )
    names = subprocess.run(
        ["git", "ls-files", "tests/*/test_*.py", "tests/test_*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    recorded = json.loads((ROOT / "tests" / "seconds.json").read_text())
    length = {each: sum(recorded.get(each, {}).values()) for each in names}
    found, left = [], SECONDS
    for each in sorted(names, key=length.__getitem__):
        if "hardlife" not in each and imports.search((ROOT / each).read_text()):
            left -= length[each]
            if found and left < 0:
                break
            found.append(each)
    return found


class MutatedModule:
    """A module with all of its changes in it, imported in the original's place."""

    def __init__(self, path: str, sample: int | None):
        self._computes_on_import = False
        # In the checkout, converters/ is not below t0repro.
        self.name = "t0repro." + path.removeprefix("t0repro/").removesuffix(".py").replace("/", ".")
        mutated = mutate_file_contents(path, (ROOT / path).read_text())
        self.changes = list(mutated.mutant_names)
        if sample is not None and sample < len(self.changes):
            self.changes = random.Random(0).sample(self.changes, sample)
        self._lines = mutated.code.splitlines()
        self._spans = mutated.line_span_by_function_name
        self._file = ROOT / "build" / "mutation" / path
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(mutated.code)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Answers the import system, which asks where this module is."""
        if name == self.name:
            return importlib.util.spec_from_file_location(name, self._file)
        return None

    def load(self) -> None:
        """Imports the module, and finds out whether it calls its own functions meanwhile."""
        os.environ["MUTANT_UNDER_TEST"] = "fail"  # mutmut: every call is an error
        try:
            importlib.import_module(self.name)
        except MutmutProgrammaticFailException:
            self._computes_on_import = True
        os.environ["MUTANT_UNDER_TEST"] = ""

    def choose(self, change: str) -> None:
        """Activates a change; "" activates none."""
        os.environ["MUTANT_UNDER_TEST"] = f"{self.name}.{change}"
        if self._computes_on_import:
            importlib.reload(sys.modules[self.name])

    def diff(self, change: str) -> str:
        """The change as a unified diff of its function, without a header."""
        function = change.partition("__mutmut_")[0]
        texts = []
        for name in (f"{function}__mutmut_orig", change):
            span = self._spans[name]
            lines = self._lines[span.start - 1 : span.end]
            texts.append([line.replace(name, function.removeprefix("x_")) for line in lines])
        return "\n".join(list(difflib.unified_diff(*texts, lineterm="", n=1))[2:])


class Trials:
    """A pytest plugin that runs the collected tests once for each change, until one fails."""

    def __init__(self, module: MutatedModule):
        self.module = module
        self.unnoticed = 0
        self.failure: Any = None  # pytest's report of what failed last

    def pytest_configure(self) -> None:
        """Uses the same examples every time and does not shrink a failing one."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutation", derandomize=True, database=None, phases=phases)
        settings.load_profile("mutation")

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        """Before anything else imports the module."""
        self.module.load()

    def pytest_collectreport(self, report: Any) -> None:
        """Called for each file of tests."""
        if report.failed:
            self.failure = report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for each test's setup, call and teardown."""
        if report.failed:
            self.failure = report

    def pytest_runtestloop(self, session: Any) -> bool:
        """In place of pytest's own loop."""
        if self.failure or not session.items:
            return True
        self.module.choose("")
        seconds = {}
        # Without compilation, tests of compiled programs fail. The first time, JAX compiles its
        # operations.
        able = [test for test in session.items if self._pass([test])]
        for test in set(session.items).difference(able):
            print(f"  {test.nodeid} is left out: it fails here without any change", flush=True)
        if not able:
            return True
        for test in able:
            start = time.monotonic()
            self._pass([test])
            seconds[test] = time.monotonic() - start
        quick_first = sorted(able, key=seconds.__getitem__)
        # A change can make a loop endless.
        signal.signal(signal.SIGALRM, _too_slow)
        for count, change in enumerate(self.module.changes, 1):
            signal.alarm(10 + 10 * int(sum(seconds.values())))
            if self._imports(change) and self._pass(quick_first):
                self.unnoticed += 1
                print(f"{change}\n{self.module.diff(change)}\n", file=sys.__stdout__, flush=True)
            signal.alarm(0)
            print(f"  {count} of {len(self.module.changes)}", end="\r", file=sys.__stderr__)
        self.failure = None
        return True

    def _imports(self, change: str) -> bool:
        try:
            self.module.choose(change)
        except Exception:  # whatever the error is, every test would have failed
            return False
        return True

    def _pass(self, tests: list[Any]) -> bool:
        """Whether all tests pass; stops at the first that does not."""
        self.failure = None
        for test, following in zip(tests, [*tests[1:], None], strict=True):
            test.ihook.pytest_runtest_protocol(item=test, nextitem=following)
            if self.failure:
                # Fixtures of module or session scope hold values computed under this change.
                test.session._setupstate.teardown_exact(None)
                return False
        return True


def _too_slow(*_: Any) -> None:
    raise TimeoutError("the change makes the tests ten times slower")


def try_changes(path: str, sample: int | None) -> None:
    """Tries the changes of one module in this process and prints those that no test noticed."""
    module = MutatedModule(path, sample)
    sys.meta_path.insert(0, module)
    trials, start = Trials(module), time.monotonic()
    options = ["-o", "addopts=--import-mode=importlib", "-m", "not mtf", "--capture=sys"]
    options += ["-p", "no:cacheprovider", "-p", "no:terminal", "--default"]
    files = tests_of(path)
    print(f"{path}: {' '.join(files)}", flush=True)
    ended = pytest.main([*options, *files], plugins=[trials])
    if trials.failure:
        sys.exit(f"mutation: {trials.failure.nodeid} fails as it is: {trials.failure.longrepr}")
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"mutation: no change was tried, for pytest ended with {ended!r}")
    minutes = (time.monotonic() - start) / 60
    counts = f"{len(module.changes)} changes, {trials.unnoticed} unnoticed"
    print(f"{path}: {counts}; {minutes:.1f} min", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="module", help=" ".join(MODULES))
    parser.add_argument("--sample", type=int, help="changes of each module, drawn at random")
    asked = parser.parse_args()
    paths = asked.modules or list(MODULES)
    if unknown := [path for path in paths if not (ROOT / path).is_file()]:
        parser.error(f"there is no {unknown[0]}")
    if len(paths) == 1:
        # Operation by operation, so that no program is recompiled for each change.
        os.environ |= {"JAX_DISABLE_JIT": "1", "JAX_PLATFORMS": "cpu"}
        os.chdir(ROOT)
        try_changes(paths[0], asked.sample)
    else:
        more = [] if asked.sample is None else [f"--sample={asked.sample}"]
        for path in paths:  # so that one module's changes cannot affect the next
            subprocess.run([sys.executable, __file__, path, *more], check=True)


if __name__ == "__main__":
    main()
