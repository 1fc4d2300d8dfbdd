"""Which cases and examples run by default, from times as tests/seconds.json has them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import strategies

from .helpers import schedule


def items(*names):
    return [SimpleNamespace(nodeid=f"tests/test_a.py::{name}") for name in names]


def chosen(found, **seconds):
    recorded = {f"tests/test_a.py::{name}": x for name, x in seconds.items()}
    return [name.partition("::")[2] for name in sorted(schedule.cheapest_cases(found, recorded))]


def test_the_cheapest_cases_run_until_the_budget_is_spent_and_one_at_least():
    found = items("test_b[x]", "test_b[y]", "test_b[z]", "test_c[x]", "test_d")
    times = {"test_b[x]": 9.0, "test_b[y]": 0.5, "test_b[z]": 1.0, "test_c[x]": 30.0}
    assert chosen(found, **times, test_d=50.0) == ["test_b[y]", "test_b[z]", "test_c[x]", "test_d"]


def test_tests_of_a_file_choose_the_same_case():
    found = items("test_b[x]", "test_b[y]", "test_c[x]", "test_c[y]")
    times = {"test_b[x]": 3.0, "test_b[y]": 4.0, "test_c[x]": 9.0, "test_c[y]": 5.0}
    assert chosen(found, **times) == ["test_b[y]", "test_c[y]"]


def test_a_case_that_has_no_time_yet_runs():
    assert chosen(items("test_b[x]", "test_b[y]"), **{"test_b[x]": 9.0}) == [
        "test_b[x]",
        "test_b[y]",
    ]


def test_hypothesis_draws_what_the_budget_allows():
    drawn = []

    @hypothesis.settings(max_examples=50, database=None)
    @hypothesis.given(strategies.integers())
    def check(number):
        drawn.append(number)

    item = SimpleNamespace(nodeid="a", obj=check)
    schedule.draw_fewer([item], {})
    check()
    assert len(drawn) == 50
    drawn.clear()
    expected = schedule.draw_fewer([item], {"a": 10 * schedule.BUDGET})
    check()
    assert len(drawn) == 5
    assert expected == {"a": schedule.BUDGET}


def test_a_long_test_waits_and_tests_share_their_files_fixtures():
    expected = {"a::short": 1.0, "a::long": 3.1, "b::one": 0.1, "b::two": 2.9, "c::one": 0.1}
    expected |= {"b::fixtures": 5.0, "c::fixtures": 9.0, "c::alone": 2.0, "c::long": 4.0}
    names = expected.keys() - {"b::fixtures", "c::fixtures"} | {"a::new"}
    found = schedule.short_tests(names, expected, {"c::alone", "c::long"})
    assert found == {"a::short", "a::new", "b::one", "b::two", "c::alone"}


@pytest.fixture(scope="module")
def costly():
    return 1


def test_a_test_that_uses_a_fixture_of_its_file_shares_it(costly, request):
    assert costly and schedule.shares_fixtures(request.node)


def test_a_test_that_uses_pytests_fixtures_alone_shares_none(tmp_path, request):
    assert tmp_path and not schedule.shares_fixtures(request.node)


def test_every_test_has_its_turn_and_a_days_tests_fit_or_one_runs_alone():
    hour, third = 10 * schedule.TURN, schedule.TURN / 3
    recorded = {"a": third, "b": hour, "c": third, "d": 2 * third, "f": 0.0}
    assert schedule.turns("fedcbag", recorded) == [["a"], ["b"], ["c", "d"], ["e", "f", "g"]]
    assert schedule.turns("a", {"a": 0.0}) == [["a"]]


def test_what_was_not_run_keeps_its_time_while_it_is_there():
    here = f"tests/{Path(__file__).name}"
    assert schedule.exists(f"{here}::test_what_was_not_run_keeps_its_time_while_it_is_there[x]")
    assert schedule.exists(f"{here}::{schedule.FIXTURES}")
    assert not schedule.exists(f"{here}::test_of_yesterday")
    assert not schedule.exists("tests/test_of_yesterday.py::test_a")


def test_times_are_read_as_they_were_written(tmp_path):
    times = {"tests/a.py::test_b[x::y]": 1.25, "tests/a.py::fixtures": 2.0}
    schedule.write(tmp_path / "seconds.json", times)
    assert schedule.read(tmp_path / "seconds.json") == times


def test_a_process_that_has_not_ended_is_counted():
    before = schedule.processor_seconds()
    code = "import sys; sum(range(10**7)); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert schedule.processor_seconds() > before + 0.05
        process.communicate()
