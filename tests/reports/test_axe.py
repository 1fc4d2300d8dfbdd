"""The report as a screen reader meets it: axe-core finds nothing to object to."""

import shutil
import subprocess

import pytest

from t0repro.reports.report_files import write_report

from .browser import HERE, open_browser
from .suites import full_report, small_suite

VIOLATIONS = """
return axe.run(document, {resultTypes: ["violations"]}).then((result) =>
  result.violations.map((each) => each.id + ": " + each.nodes[0].html.slice(0, 200)))
"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory) -> str:
    """axe-core's script, from npm's registry."""
    if not HERE or shutil.which("npm") is None:
        pytest.skip("Chromium, chromedriver and npm are needed")
    folder = tmp_path_factory.mktemp("axe")
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "axe-core@4"]
    subprocess.run(install, cwd=folder, check=True, timeout=120)
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


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
