"""Mutation testing: each small change to a parity-critical module should make a test of it fail.

  EXTRAS=mutation bash scripts/setup.sh                           # mutmut, once
  .venv/bin/python scripts/mutation.py                            # all modules: 45 minutes
  .venv/bin/python scripts/mutation.py t0repro/training/losses.py   # these

Prints each change that no test noticed, as a diff; docs/reliability.md explains them.

mutmut generates the changes and selects one at each call. `mutmut run` starts a process and
collects the tests for every change. This script tries all changes of a module in one process: it
collects the tests once and compiles JAX's operations once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
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

ROOT = Path(__file__).resolve().parents[1]

# Modules whose arithmetic and names must equal other systems', with the tests that should notice
# their changes.
TESTS = {
    "t0repro/training/adafactor.py": [
        "tests/training/test_adafactor.py",
        "tests/training/test_t5x_adafactor.py",
    ],
    "t0repro/training/losses.py": [
        "tests/training/test_loss.py",
        "tests/training/test_t5x_loss.py",
        "-k",  # skip slow tests that have a quicker equivalent
        "not never_has_all and not each_way and not metrics_have and not is_the_whole",
    ],
    "t0repro/evaluation/rank.py": ["tests/evaluation/test_rank.py"],
    "t0repro/evaluation/grouping.py": [
        "tests/evaluation/test_packing.py",
        "tests/evaluation/test_grouping.py",
    ],
    "t0repro/reports/statistics.py": ["tests/reports/test_statistics.py"],
    "t0repro/parameters/naming.py": [
        "tests/converters/test_layout.py",
        "tests/partitioning/test_rules.py::test_a_parameter_is_divided_by_the_table",
    ],
    "t0repro/partitioning/devices.py": [
        "tests/partitioning/test_rules.py",
        "tests/partitioning/test_devices.py",
    ],
}


class MutatedModule:
    """A module with all of its changes in it, imported in the original's place."""

    def __init__(self, path: str):
        self._computes_on_import = False
        self.name = path.removesuffix(".py").replace("/", ".")
        mutated = mutate_file_contents(path, (ROOT / path).read_text())
        self.changes = list(mutated.mutant_names)
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
        if self.failure:
            return True
        self.module.choose("")
        seconds = {}
        for test in [*session.items, *session.items]:  # the first time, JAX compiles its operations
            start = time.monotonic()
            if not self._pass([test]):
                return True
            seconds[test] = time.monotonic() - start
        quick_first = sorted(session.items, key=seconds.__getitem__)
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


def try_changes(path: str) -> None:
    """Tries all changes of one module in this process and prints those that no test noticed."""
    module = MutatedModule(path)
    sys.meta_path.insert(0, module)
    trials, start = Trials(module), time.monotonic()
    options = ["-o", "addopts=--import-mode=importlib", "-m", "not mtf", "--capture=sys"]
    options += ["-p", "no:cacheprovider", "-p", "no:terminal"]
    pytest.main([*options, *TESTS[path]], plugins=[trials])
    if trials.failure:
        sys.exit(f"mutation: {trials.failure.nodeid} fails as it is: {trials.failure.longrepr}")
    minutes = (time.monotonic() - start) / 60
    counts = f"{len(module.changes)} changes, {trials.unnoticed} unnoticed"
    print(f"{path}: {counts}; {minutes:.1f} min", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="module", help=" ".join(TESTS))
    paths = parser.parse_args().modules or list(TESTS)
    if unknown := set(paths) - TESTS.keys():
        parser.error(f"{min(unknown)} is none of {', '.join(TESTS)}")
    if len(paths) == 1:
        # Operation by operation, so that no program is recompiled for each change.
        os.environ |= {"JAX_DISABLE_JIT": "1", "JAX_PLATFORMS": "cpu"}
        os.chdir(ROOT)
        try_changes(paths[0])
    else:
        for path in paths:  # so that one module's changes cannot affect the next
            subprocess.run([sys.executable, __file__, path], check=True)


if __name__ == "__main__":
    main()
