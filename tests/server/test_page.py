"""The page's files: who gets them, under which headers, and that they are small and load nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from octavo.server.page import FOLDER, MEDIA_TYPES, POLICY, ui_files
from tests.server.running_server import Serve

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
#: Bytes of all files together.
MOST = 320_000


def test_browsers_get_the_page_and_programs_what_they_got_before(http: httpx.Client) -> None:
    page = http.get("/", headers=HTML)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert '<div id="app">' in page.text
    for accept in ("application/json", "*/*", ""):
        assert http.get("/", headers={"accept": accept}).json()["name"] == "Octavo"
    head = http.head("/", headers=HTML)
    assert head.content == b"" and head.headers["content-type"] == page.headers["content-type"]


def test_every_file_comes_with_a_strict_policy_and_its_type(http: httpx.Client) -> None:
    for address, file in ui_files().items():
        answer = http.get(address)
        assert answer.status_code == 200 and answer.content == file.body
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["content-type"] == MEDIA_TYPES[Path(address).suffix]
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
        assert answer.headers["x-frame-options"] == "DENY" and answer.headers["referrer-policy"] == "no-referrer"
    for word in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"):
        assert word in POLICY.split("; ")
    assert "unsafe" not in POLICY and "http" not in POLICY and "*" not in POLICY


def test_a_file_that_has_not_changed_is_not_sent_again(http: httpx.Client) -> None:
    first = http.get("/ui/main.js")
    again = http.get("/ui/main.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    assert http.get("/ui/main.js", headers={"accept-encoding": "identity"}).content == first.content


@pytest.mark.parametrize("path", ["/ui/", "/ui/nothing.js", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/vendor"])
def test_nothing_else_is_there(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404


def test_where_others_reach_the_server_there_is_no_page_without_keys(serve: Serve) -> None:
    server = serve("--host", "0.0.0.0")
    with httpx.Client(base_url=f"http://127.0.0.1:{server.address[1]}") as http:
        assert http.get("/", headers=HTML).json()["name"] == "Octavo"
        assert http.get("/ui/main.js").status_code == 404
        refused = http.get("/engine/events")
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "needs_api_keys"


def test_with_keys_the_page_is_there_and_what_it_asks_for_needs_one(serve: Serve) -> None:
    server = serve("--host", "0.0.0.0", env={"OCTAVO_API_KEYS": "secret"})
    with httpx.Client(base_url=f"http://127.0.0.1:{server.address[1]}") as http:
        assert '<div id="app">' in http.get("/", headers=HTML).text
        assert http.get("/ui/main.js").status_code == 200
        for path in ("/", "/engine/events", "/v1/models", "/openapi.json"):
            assert http.get(path).status_code == 401
        with http.stream("GET", "/engine/events", headers={"authorization": "Bearer secret"}) as stream:
            assert stream.status_code == 200 and next(stream.iter_lines()).startswith("data: ")


# --- the files ------------------------------------------------------------------------------------------------------

TEXTS = {path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.*")}


def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < MOST
    assert {Path(name).suffix for name in TEXTS} <= set(MEDIA_TYPES)


def test_no_file_names_an_address_elsewhere() -> None:
    """But those that name things: a namespace, a licence; and the pattern of addresses in an answer."""
    known = {
        "http://www.w3.org/",
        "https://preactjs.com",
        "https://github.com/developit/htm",
        "http://www.apache.org/licenses",
    }
    for name, text in TEXTS.items():
        for url in re.findall(r"https?://[\w.-]+\.\w+[\w./-]*", text):
            assert any(url.startswith(one) for one in known), (name, url)
        assert not re.search(r"""(?:src|href)=["']?//""", text) and "@import" not in text


def test_no_text_of_an_answer_becomes_markup() -> None:
    ways = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "dangerouslySetInnerHTML",
        "eval(",
        "new Function",
    )
    for name, text in TEXTS.items():
        if not name.startswith("vendor/"):
            assert not [way for way in ways if way in text], name
    page = TEXTS["index.html"]
    assert "style=" not in page and not re.search(r"<script(?![^>]*src=)", page) and not re.search(r"\son\w+=", page)


def test_modules_import_only_files_that_are_there() -> None:
    for name, text in TEXTS.items():
        if name.endswith(".js"):
            for target in re.findall(r"""\b(?:from|import)\s*["']([^"']+)["']""", text):
                assert target.startswith("./"), (name, target)
                assert (FOLDER / name).parent.joinpath(target).is_file(), (name, target)


def test_vendored_files_have_their_licences() -> None:
    licences = TEXTS["vendor/LICENSES.txt"]
    assert "MIT License" in licences and "Apache License" in licences
    for path in (FOLDER / "vendor").glob("*.js"):
        assert path.name in licences


#: Of modules by name, as JSON: says what is wrong with those that cannot be read.
READ_MODULES = """
const vm = require("vm");
for (const [identifier, text] of Object.entries(JSON.parse(require("fs").readFileSync(0, "utf8")))) {
  try { new vm.SourceTextModule(text, { identifier }); }
  catch (error) { console.error(error.stack); process.exitCode = 1; }
}
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not there to read the modules")
def test_modules_are_valid() -> None:
    modules = {name: text for name, text in TEXTS.items() if name.endswith(".js")}
    assert len(modules) > 10
    command = ["node", "--experimental-vm-modules", "--no-warnings", "-e", READ_MODULES]
    checked = subprocess.run(command, input=json.dumps(modules), capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
