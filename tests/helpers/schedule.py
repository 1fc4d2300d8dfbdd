"""Which tests run, in which order, and for how long, by the processor time that they once took.

Each run writes what its tests took to build/test_seconds.json. By it the next run begins with the
longest files and says how long it will take. tests/seconds.json holds the same of a run of all
tests, for a fresh clone; `bash scripts/test.sh --record` writes it. It alone decides which cases
run, so that every machine runs the same.

Of a parametrized test whose cases took more than BUDGET seconds together, the cheapest run that
took no more, and one at least. A test that Hypothesis draws examples for draws as many as take
BUDGET seconds. A test that even so takes more than LONG seconds does not run, unless it is marked
"always"; nor do those that use a file's fixtures if each takes more with its share of these. With
--all every test, case and example runs, with --part 2/8 those of an eighth of the files, with
--turn 17 the slow tests whose turn is on day 17. Whoever names files or tests gets all of them.
"""

from __future__ import annotations

import collections
import contextlib
import glob
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from t0repro.words import counted

BUDGET = 2.0  # seconds of processor time for the cases of one test
LONG = 3.0  # for a test
TURN = 360.0  # for the tests of a day's turn
UNKNOWN = TURN / 3  # what a test without a record is taken for there
ROOT = Path(__file__).resolve().parents[2]
RECORDED, LATEST = ROOT / "tests" / "seconds.json", ROOT / "build" / "test_seconds.json"
# Of a file: what its fixtures of wider scope than a test take.
FIXTURES = "fixtures"

Seconds = dict[str, float]  # by node id; of fixtures, by file::FIXTURES


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("schedule", "which tests run (tests/helpers/schedule.py)")
    for option, text in {
        "--all": "every test and every case of it",
        "--default": "of files that are named too, what runs without names",
        "--record": "as --all, and write tests/seconds.json",
    }.items():
        group.addoption(option, action="store_true", help=text)
    text = "the K-th of N parts of the files as with --all, beside what runs without"
    group.addoption("--part", metavar="K/N", default="0/1", help=text)
    text = "of the slow tests, those of a day's turn"
    group.addoption("--turn", metavar="DAY", type=int, help=text)


class Schedule:
    """A pytest plugin; in pytest-xdist's controller and in its workers."""

    def __init__(self, config: pytest.Config):
        self._config = config
        named = config.args_source is pytest.Config.ArgsSource.ARGS
        if named and not config.getoption("--default"):
            config.option.all = True  # pytest-xdist's workers, which always get names, see it
        self._recorded = read(RECORDED)
        self._known = self._recorded | read(LATEST)
        self._taken: Seconds = collections.defaultdict(float)
        self._passed: set[str] = set()
        self._said = False
        self._wide = 0.0  # seconds of fixtures of wider scope, in the phase that is running

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        """Leaves out what is not to run; the files that take longest come first."""
        asked = config.getoption
        chosen = {item.nodeid for item in items}
        if (day := asked("--turn")) is not None:
            days = turns((x.nodeid for x in items if is_slow(x)), self._recorded)
            chosen = set(days[day % len(days)])
        elif not (asked("--all") or asked("--record")):
            number, parts = map(int, asked("--part").split("/"))
            whole = {
                item.nodeid
                for item in items
                if zlib.crc32(file_of(item.nodeid).encode()) % parts + 1 == number
            }
            drawn = (item for item in items if item.nodeid not in whole)
            expected = draw_fewer(drawn, self._recorded)
            cheapest = cheapest_cases(items, expected)
            always = {item.nodeid for item in items if item.get_closest_marker("always")}
            alone = {item.nodeid for item in items if not shares_fixtures(item)}
            chosen = short_tests(cheapest, expected, alone) | cheapest & always | whole
        config.hook.pytest_deselected(items=[x for x in items if x.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
        length = by_file(self._known, (item.nodeid for item in items))
        items.sort(key=lambda item: -length[file_of(item.nodeid)])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without pytest-xdist: in its workers, nothing that is said is seen."""
        if not hasattr(self._config, "workerinput") and session.items:
            self._say([item.nodeid for item in session.items], 1)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """The first worker has collected."""
        self._say(ids, len(node.config.getoption("tx")))

    def _say(self, ids: list[str], workers: int) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if self._said or reporter is None:
            return
        self._said = True
        seconds = sum(by_file(self._known, ids).values())
        processors = min(workers, os.cpu_count() or 1)
        reporter.write_line(
            f"{counted(len(ids), 'test')}, about {max(1, round(seconds / processors / 60))} min on"
            f" {counted(processors, 'idle processor')} ({seconds:,.0f} s of processor time)"
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        """Of a wider fixture within another, the outer one's time holds the inner one's."""
        before = None if fixturedef.scope == "function" else (processor_seconds(), self._wide)
        try:
            return (yield)
        finally:
            if before and not hasattr(request, "param"):
                self._wide = before[1] + processor_seconds() - before[0]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Starts the first phase's time; each report ends one."""
        del item
        self._wide, self._start = 0.0, processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Lets a report carry the seconds to pytest-xdist's controller."""
        report: Any = yield
        now = processor_seconds()
        report.seconds_of_fixtures = self._wide
        report.seconds = max(0.0, now - self._start - self._wide)
        self._wide, self._start = 0.0, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """In the controller, for each phase of each test."""
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        self._taken[report.nodeid] += report.seconds
        self._taken[f"{file_of(report.nodeid)}::{FIXTURES}"] += report.seconds_of_fixtures

    def pytest_sessionfinish(self) -> None:
        """Keeps what the tests that passed took, and of other tests what they took before."""
        if hasattr(self._config, "workerinput") or not self._passed:
            return
        files = {file_of(name) for name in self._passed}
        fixtures = {f"{file}::{FIXTURES}" for file in files}
        taken = {name: x for name, x in self._taken.items() if name in self._passed | fixtures}
        for name in fixtures & self._known.keys():  # some were not needed for a part of a file
            taken[name] = max(taken[name], self._known[name])
        write(LATEST, read(LATEST) | taken)
        if self._config.getoption("--record"):
            taken = {name: x for name, x in taken.items() if decides(name, taken)}
            run = {test_of(name) for name in self._passed | fixtures}
            others = {
                name: x
                for name, x in self._recorded.items()
                if test_of(name) not in run and exists(name)
            }
            write(RECORDED, others | taken)


def cheapest_cases(items: Iterable[pytest.Item], recorded: Seconds) -> set[str]:
    """Node ids: of each test those cases that fit in BUDGET; those without a record too.

    A case's place is by what all tests of its file take in it, so that they choose the same: they
    may share a fixture.
    """
    tests: dict[str, list[str]] = collections.defaultdict(list)
    in_file: dict[tuple[str, str], float] = collections.defaultdict(float)
    for item in items:
        test, _, case = item.nodeid.partition("[")
        tests[test].append(item.nodeid)
        in_file[file_of(test), case] += recorded.get(item.nodeid, 0.0)
    chosen = set()
    for test, names in tests.items():
        chosen |= {name for name in names if name not in recorded}
        names = [name for name in names if name in recorded]
        names.sort(key=lambda name: in_file[file_of(test), name.partition("[")[2]])
        left = BUDGET
        for place, name in enumerate(names):
            left -= recorded[name]
            if place and left < 0:
                break
            chosen.add(name)
    return chosen


def draw_fewer(items: Iterable[Any], recorded: Seconds) -> Seconds:
    """Lets Hypothesis draw fewer examples for tests that took more than BUDGET, in proportion.

    Returns what each test is expected to take then.
    """
    expected = recorded.copy()
    for item in items:
        drawn = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
        if drawn and recorded.get(item.nodeid, 0.0) > BUDGET:
            settings = item.obj._hypothesis_internal_use_settings
            count = max(1, int(settings.max_examples * BUDGET / recorded[item.nodeid]))
            fewer = hypothesis.settings(settings, max_examples=count)
            item.obj._hypothesis_internal_use_settings = fewer
            expected[item.nodeid] = BUDGET
    return expected


def shares_fixtures(item: Any) -> bool:
    """Whether it uses a fixture of its file or folder that other tests use too."""
    definitions = (found for each in item._fixtureinfo.name2fixturedefs.values() for found in each)
    return any(
        each.scope != "function"
        and each.func.__module__.startswith("tests.")
        and each.func.__module__ != "tests.conftest"
        for each in definitions
    )


def short_tests(names: set[str], expected: Seconds, alone: set[str]) -> set[str]:
    """Node ids: those that take at most LONG.

    Each bears a share of its file's fixtures, unless it is among those that use none. Once tests of
    a file run, its fixtures cost the others nothing.
    """
    count = collections.Counter(map(file_of, names))

    def share(name: str) -> float:
        file = file_of(name)
        return expected.get(f"{file}::{FIXTURES}", 0.0) / count[file]

    short = {name for name in names if expected.get(name, 0.0) <= LONG}
    files = {file_of(name) for name in short if expected.get(name, 0.0) + share(name) <= LONG}
    return {name for name in short if file_of(name) in files} | short & alone


def turns(names: Iterable[str], recorded: Seconds) -> list[list[str]]:
    """Node ids by day: TURN seconds a day at most, and what takes longer alone."""
    days: list[list[str]] = []
    left = 0.0
    for name in sorted(names):
        left -= recorded.get(name, UNKNOWN)
        if not days or left < 0:
            days.append([])
            left = TURN - recorded.get(name, UNKNOWN)
        days[-1].append(name)
    return days


def is_slow(item: pytest.Item) -> bool:
    """Whether continuous integration runs it by turns, and not each night."""
    return bool(item.get_closest_marker("slow")) and not item.get_closest_marker("hardlife")


def by_file(known: Seconds, ids: Iterable[str]) -> Seconds:
    """What the tests of each file take together, with its fixtures."""
    length: Seconds = collections.defaultdict(float)
    for name in ids:
        file = file_of(name)
        if file not in length:
            length[file] = known.get(f"{file}::{FIXTURES}", 0.0)
        length[file] += known.get(name, 0.0)
    return length


def decides(name: str, taken: Seconds) -> bool:
    """Whether a time is worth a place in the repository: a tenth of a second, or of a long test."""
    test, _, case = name.partition("[")
    if taken[name] >= 0.1 or not case:
        return taken[name] >= 0.1
    return sum(x for other, x in taken.items() if other.startswith(f"{test}[")) > BUDGET


def file_of(name: str) -> str:
    return name.partition("::")[0]


def test_of(name: str) -> str:
    return name.partition("[")[0]


def exists(name: str) -> bool:
    """Whether a test, or a file's fixtures, may still be there."""
    file, _, test = test_of(name).partition("::")
    path, function = ROOT / file, f"def {test.rpartition('::')[2]}("
    return path.exists() and (test == FIXTURES or function in path.read_text())


def read(path: Path) -> Seconds:
    """{} if there is no such file."""
    if not path.exists():
        return {}
    files = json.loads(path.read_text())
    return {f"{file}::{name}": x for file, names in files.items() for name, x in names.items()}


def write(path: Path, seconds: Seconds) -> None:
    """Writes a line for each file."""
    files: dict[str, Seconds] = collections.defaultdict(dict)
    for name, value in sorted(seconds.items()):
        file, _, test = name.partition("::")
        files[file][test] = round(value, 2)
    lines = [f"{json.dumps(file)}: {json.dumps(names)}" for file, names in files.items()]
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.replace(path)


def processor_seconds() -> float:
    """Of this process and those that it started; on Linux also of those that have not ended."""
    own = os.times()
    ended = own.user + own.system + own.children_user + own.children_system
    return ended + sum(map(_of_living, _children(os.getpid())))


def _of_living(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    ticks = sum(map(int, fields[11:15]))  # its own, and of those that it waited for
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(_of_living, _children(pid)))


def _children(pid: int) -> Iterator[int]:
    """Living ones, of any thread."""
    for path in glob.iglob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            yield from map(int, Path(path).read_text().split())
