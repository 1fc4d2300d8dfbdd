"""The report as a screen reader meets it: axe-core finds nothing to object to."""

import pytest

from t0repro.reports.report_files import write_report

from .browser import VIOLATIONS, open_browser, read_axe
from .suites import full_report, small_suite


@pytest.fixture(scope="module")
def axe(tmp_path_factory) -> str:
    """axe-core's script."""
    return read_axe(tmp_path_factory.mktemp("axe"))


@pytest.mark.slow
@pytest.mark.network
def test_axe_objects_to_nothing_in_the_report(axe, tmp_path):
    report = full_report(small_suite(tmp_path / "a" / "validation_eval"), tmp_path)
    write_report(report, tmp_path / "out")
    with open_browser() as browser:
        for width in (400, 1280):
            for dark in (False, True):
                browser.show(tmp_path / "out" / "report.html", width=width, dark=dark)
                browser.run(axe)
                assert browser.run(VIOLATIONS) == [], (width, dark)
        # It would object: an image without a text, and a link without a name.
        nameless = '<img src="a.png"><a href="#b"></a>'
        browser.run(f"document.body.innerHTML += '{nameless}'")
        found = browser.run(VIOLATIONS)
        assert {each.partition(":")[0] for each in found} >= {"image-alt", "link-name"}
