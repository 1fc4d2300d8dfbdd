"""A person's browser: Chromium driven through chromedriver, with real key presses."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import pytest

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
HERE = bool(CHROMIUM and DRIVER)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--disable-dev-shm-usage",
)  # fmt: skip
TAB, ENTER, ESCAPE, SPACE, SHIFT = "\ue004", "\ue007", "\ue00c", " ", "\ue008"
DOWN, END = "\ue015", "\ue010"

VIOLATIONS = """
return axe.run(document, {resultTypes: ["violations"]}).then((result) =>
  result.violations.map((each) => each.id + ": " + each.nodes[0].html.slice(0, 200)))
"""


def read_axe(folder):
    """axe-core's script, from npm's registry."""
    if not HERE or shutil.which("npm") is None:
        pytest.skip("Chromium, chromedriver and npm are needed")
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "axe-core@4"]
    subprocess.run(install, cwd=folder, check=True, timeout=120)
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


class Browser:
    """A window on one page at a time.

    Args:
      address: of chromedriver.
    """

    def __init__(self, address):
        self.address = address
        options = {"binary": CHROMIUM, "args": list(FLAGS)}
        capabilities = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }
        found = self._post("/session", {"capabilities": {"alwaysMatch": capabilities}})
        self.session = f"/session/{found['sessionId']}"

    def _post(self, path, content, method="POST"):
        data = None if method in ("GET", "DELETE") else json.dumps(content).encode()
        request = urllib.request.Request(self.address + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read().decode()[:500]}") from error

    def cdp(self, command, **parameters):
        """A command of Chromium's own protocol."""
        content = {"cmd": command, "params": parameters}
        return self._post(f"{self.session}/goog/cdp/execute", content)

    def show(self, path, width=1280, height=900, dark=False):
        """Opens a file, or an address, in a viewport of a size, in light or dark mode."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])
        self._logs("performance")
        address = path if str(path).startswith("http://") else f"file://{path}"
        self._post(f"{self.session}/url", {"url": address})

    def run(self, script):
        """What a script in the page returns."""
        return self._post(f"{self.session}/execute/sync", {"script": script, "args": []})

    def wait_for(self, script, seconds=60):
        """What a script in the page returns, once it returns anything that is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"{script}: {self.errors()}"
            time.sleep(0.02)
        return found

    def press(self, *keys):
        """Presses keys one after the other; SHIFT is held with the key after it."""
        actions = []
        held = None
        for key in keys:
            actions.append({"type": "keyDown", "value": key})
            if key == SHIFT:
                held = key
                continue
            actions.append({"type": "keyUp", "value": key})
            if held:
                actions.append({"type": "keyUp", "value": held})
                held = None
        source = {"type": "key", "id": "keyboard", "actions": actions}
        self._post(f"{self.session}/actions", {"actions": [source]})

    def hover(self, selector):
        """Moves the pointer over an element."""
        self.run(
            f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}});"
            "return new Promise((done) => setTimeout(done, 200))"  # until it has scrolled
        )
        box = self.run(
            f"const b = document.querySelector({selector!r}).getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]"
        )
        move = {"type": "pointerMove", "duration": 0, "x": round(box[0]), "y": round(box[1])}
        source = {"type": "pointer", "id": "mouse", "actions": [move]}
        self._post(f"{self.session}/actions", {"actions": [source]})

    def requests(self):
        """Addresses that were asked for since the page was opened, the page's own left out."""
        found = []
        for entry in self._logs("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found[1:]

    def errors(self):
        """What the page's script and the browser complained about."""
        return [entry["message"] for entry in self._logs("browser")]

    def _logs(self, kind):
        return self._post(f"{self.session}/se/log", {"type": kind})

    def picture(self, *, whole=False):
        """A PNG of what is seen, or of the whole page."""
        try:
            found = self.cdp("Page.captureScreenshot", captureBeyondViewport=whole)
        except RuntimeError:  # now and then no frame is drawn in time
            time.sleep(1)
            found = self.cdp("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def printed(self):
        """A PDF of the page as it is printed on the paper that its style sheet names."""
        # Once its layout has settled: now and then a page is printed before it is drawn.
        self.run("return new Promise((done) => setTimeout(done, 300))")
        found = self.cdp("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(found["data"])

    def close(self):
        """Ends the browser."""
        self._post(self.session, None, "DELETE")


def start_driver():
    """Starts chromedriver, and gives its process and port.

    chromedriver takes a free port of IPv4 and ends where IPv6's of the same number is taken.
    """
    said = []
    for _ in range(10):
        driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        for line in driver.stdout:
            said.append(line)
            if "on port" in line and "successfully" in line:
                return driver, line.rsplit(" ", 1)[1].strip(" .\n")
        driver.communicate()
    raise RuntimeError("chromedriver did not start:\n" + "".join(said))


@contextlib.contextmanager
def open_browser():
    """Starts chromedriver and a browser, and ends both."""
    driver, port = start_driver()
    with driver:
        try:
            browser = Browser(f"http://127.0.0.1:{port}")
            try:
                yield browser
            finally:
                browser.close()
                time.sleep(0.1)
        finally:
            driver.terminate()
