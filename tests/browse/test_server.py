"""The bench's server lets in the browser with its token, and nobody else."""

import http.client
import json
import time

import psutil
import pytest

from t0repro.tasks.template_files import read_template_file

from .started import DEMO, PROMPT, fields, run_bench, start_bench

PATHS = (
    "/",
    "/datasets",
    "/dataset?name=synthetic_glue/mrpc",
    f"/prompt?name={PROMPT}",
    "/new?dataset=synthetic_glue/mrpc",
    f"/compare?a={PROMPT}",
    "/measured?dataset=synthetic_glue/mrpc",
    "/static/browse.js",
    "/static/browse.css",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The file that the bench saves prompts in."""
    return tmp_path_factory.mktemp("saved") / "mine.yaml"


@pytest.fixture(scope="module")
def bench(saved):
    with start_bench(DEMO, f"--templates={saved}") as started:
        yield started


def test_it_listens_on_this_machine_alone(bench):
    listening = psutil.Process(bench.process.pid).net_connections("inet")
    assert {each.laddr.ip for each in listening if each.status == "LISTEN"} == {"127.0.0.1"}


@pytest.mark.parametrize("path", PATHS)
def test_a_page_needs_the_token_and_forbids_all_scripts_but_its_own(bench, path):
    for cookie in (None, "t0repro=x", f"{bench.cookie}x", bench.cookie[:-1]):
        status, text, _ = bench.ask(path, headers={"Cookie": cookie})
        assert status == 403 and "token" in text and PROMPT not in text
    status, text, headers = bench.ask(path)
    assert status == 200 and text
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert headers["x-frame-options"] == "DENY" and headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff" and bench.token not in text


def test_the_address_with_the_token_gives_a_cookie_that_no_script_reads(bench):
    status, _, headers = bench.ask(f"/?token={bench.token}", headers={"Cookie": None})
    assert status == 200
    cookie = headers["set-cookie"]
    assert cookie.startswith(bench.cookie) and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    for wrong in ("", "x", "%ff", "é".encode().hex()):
        assert bench.ask(f"/?token={wrong}", headers={"Cookie": None})[0] == 403


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1", "127.0.0.1:1", "localhost.evil.org"])
def test_another_name_for_this_machine_is_refused(bench, host):
    assert bench.ask("/", headers={"Host": host})[0] == 421
    assert bench.ask("/rows", fields(), {"Host": host})[0] == 421


@pytest.mark.parametrize("origin", ["http://example.com", "null", "https://127.0.0.1", None])
def test_another_sites_form_is_refused(bench, saved, origin):
    for path in ("/rows", "/save"):
        assert bench.ask(path, fields(), {"Origin": origin})[0] == 403
    if origin:
        assert bench.ask("/", headers={"Origin": origin})[0] == 403
    assert not saved.exists()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"draft": {}}', b" " * 2_000_000,
        {**fields(), "draft": []}, {**fields(), "start": "0"}, {**fields(), "split": None},
    ],
    ids=range(10),
)  # fmt: skip
def test_what_no_page_sends_is_refused(bench, body):
    assert bench.ask("/rows", body)[0] == 400


@pytest.mark.parametrize(
    "change",
    [{"jinja": 1}, {"jinja": "x" * 200_000}, {"metrics": ["Nonsense"]}, {"name": None}],
)
def test_a_template_that_is_none_is_refused_in_words(bench, change):
    status, text, _ = bench.ask("/rows", fields(**change))
    assert status == 422 and 'class="bad"' in text


def test_scores_are_asked_for_rows_as_they_were_rendered_just_before(bench):
    draft = fields(jinja="{{sentence1}} {{ [1, 2, 3] | random }} ||| {{answer_choices[label]}}")
    rendered = bench.ask("/rows", draft)[1]
    assert bench.ask("/rows", {**draft, "scored": True})[1] == rendered
    other = {**draft, "start": 1, "scored": True}
    assert bench.ask("/rows", other)[1] == bench.ask("/rows", {**draft, "start": 1})[1] != rendered


def test_a_start_beyond_all_rows_shows_none(bench):
    status, text, _ = bench.ask("/rows", {**fields(), "start": 10**30})
    assert status == 200 and "No row" in text
    assert bench.ask(f"/prompt?name={PROMPT}&start={10**30}")[0] == 200
    assert bench.ask(f"/prompt?name={PROMPT}&start=-1&split=nope")[0] == 200


@pytest.mark.parametrize("path", ["/prompt?name=nope", "/dataset?name=nope", "/compare?a=nope"])
def test_what_does_not_exist_is_said_with_the_nearest_names(bench, path):
    status, text, _ = bench.ask(path)
    assert status == 404 and "nope" in text
    assert bench.ask("/static/../server.py")[0] == 404 and bench.ask("/static/x")[0] == 404


def test_a_browser_that_is_closed_stops_no_work(bench, saved):
    body = json.dumps(fields(name="closed"))
    connection = http.client.HTTPConnection(bench.base.removeprefix("http://"))
    headers = {"Cookie": bench.cookie, "Origin": bench.base}
    connection.request("POST", "/save", body, headers)
    connection.close()  # before an answer
    end = time.monotonic() + 60
    while not saved.exists() and time.monotonic() < end:
        time.sleep(0.05)
    (template,) = read_template_file(saved).templates
    assert template.name == "closed"
    saved.unlink()


def test_what_was_changed_on_disk_is_not_overwritten(bench, saved):
    status, address, _ = bench.ask("/save", fields(name="first"))
    assert status == 200 and address == "/prompt?name=synthetic_glue_mrpc_first"
    (template,) = read_template_file(saved).templates
    saved.write_text(saved.read_text().replace("same?", "alike?"))
    status, text, _ = bench.ask("/save", fields(name="first", identifier=template.id, base="x"))
    assert status == 422 and "changed in the file" in text and "alike?" in saved.read_text()
    saved.unlink()


def test_a_taken_port_is_said_and_without_one_another_is_found(bench):
    port = bench.base.rsplit(":", 1)[1]
    refused = run_bench(DEMO, f"--port={port}")
    assert refused.returncode == 2 and f"Port {port} is taken" in refused.stderr
    with start_bench(DEMO) as other:
        assert other.base != bench.base
