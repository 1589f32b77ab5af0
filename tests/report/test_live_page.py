"""The live page: what it shows, to whom, and how it looks in a browser."""

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from farthing.deploy.metrics import PartyView, View
from farthing.errors import InvalidValue
from farthing.report.live_page import Page, body, document

VIEW = View(
    run="wards-1",
    method="sgd2 · adult",
    phase="training",
    round=27,
    parties=(
        PartyView(name="north", state="here", left=13, most=40, records=10853, epsilon=1.0, delta=1e-6),
        PartyView(name="east", state="missing", left=20, most=40, records=10853, epsilon=0.5, delta=1e-6),
        PartyView(
            name="west<script>alert(1)</script>",
            state="refused",
            left=0,
            most=40,
            records=903,
            epsilon=1.0,
            delta=1e-6,
            reason="noise<i>",
        ),
        PartyView(name="south", state="away"),
        PartyView(
            name="middle", state="spent", left=0, most=40, records=11, epsilon=2.0, delta=1e-8, reason="spent"
        ),
    ),
    accuracy=tuple((t, 0.76 + 0.003 * t) for t in range(1, 28)),
    evaluated=((10, 0.781, 0.012), (20, 1.004, 0.012)),
    noise=26.7,
    clip=1.0,
    seconds=2.34,
    end=95.0,
)


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def page():
    shown = [VIEW]
    found = Page(lambda: shown[0], 0)
    found.shown = shown
    yield found
    found.close()


def get(page, path="/", host=None, method="GET"):
    request = urllib.request.Request(f"http://127.0.0.1:{page.port}{path}", method=method)
    if host is not None:
        request.add_header("Host", host)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=300) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


def test_what_it_shows():
    said = " ".join(Tags(body(VIEW)).texts)
    for text in (
        *("27", "1 of 5", "84.1%", "26.7", "2.3 s", "1 min 35 s", "about 10", "10,853", "ε 0.5, δ 1e-6"),
        "training · 1 here, 1 missing, 1 spent, 1 refused, 1 away",
    ):
        assert text in said, text
    assert "about 20" in said
    assert "(spent)" not in said  # the state says it already


def test_names_and_reasons_are_text():
    found = Tags(document(VIEW))
    assert "west<script>alert(1)</script>" in found.texts
    assert sum(tag == "script" for tag, _ in found.tags) == 1
    assert not any(tag == "i" for tag, _ in found.tags)


def test_nothing_comes_from_elsewhere():
    text = document(VIEW)
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    for tag, attributes in Tags(text).tags:
        assert not {"src", "href", "style", "onclick"} & set(attributes), tag


def test_before_anybody_is_there(page):
    page.shown[0] = View(
        run="r", method="addp", phase="waiting for parties", parties=(PartyView(name="a", state="awaited"),)
    )
    _, _, text = get(page)
    assert "waiting for parties" in text
    assert "awaited" in text
    assert "not known yet" in text
    assert "not measured" in text


def test_after_the_end(page):
    page.shown[0] = replace(VIEW, phase="over: nobody can afford another round")
    said = " ".join(Tags(get(page)[2]).texts)
    assert "over: nobody can afford another round" in said


def test_paths(page):
    status, headers, text = get(page)
    assert status == 200
    assert text.startswith("<!doctype html>")
    assert "sha256-" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert get(page, "/part")[2] == body(VIEW)
    told = json.loads(get(page, "/status.json?x=1")[2])
    assert (told["round"], told["parties"][1]["left"]) == (27, 20)
    assert get(page, "/etc/passwd")[0] == 404
    assert get(page, method="POST")[0] == 501
    status, _, text = get(page, method="HEAD")
    assert (status, text) == (200, "")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:PORT", "127.0.0.1", "localhost", "", "127.0.0.1:1"]
)
def test_other_names_are_refused(page, host):
    """A page of somebody else's whose name was made to lead here would be one of these."""
    assert get(page, host=host.replace("PORT", str(page.port)))[0] == 421


@pytest.mark.parametrize("host", ["localhost:PORT", "127.0.0.1:PORT", "LOCALHOST:PORT"])
def test_its_own_names_are_not(page, host):
    assert get(page, host=host.replace("PORT", str(page.port)))[0] == 200


def test_two_names_at_once_are_refused(page):
    with socket.create_connection(("127.0.0.1", page.port), 30) as peer:
        name = f"localhost:{page.port}"
        peer.sendall(f"GET / HTTP/1.1\r\nHost: {name}\r\nHost: evil.example\r\n\r\n".encode())
        assert b" 421 " in peer.recv(65536).splitlines()[0]


def test_on_every_address_it_answers_to_addresses_and_no_names():
    page = Page(lambda: VIEW, 0, "0.0.0.0")
    try:
        assert get(page, host=f"192.0.2.7:{page.port}")[0] == 200
        assert get(page, host=f"evil.example:{page.port}")[0] == 421
    finally:
        page.close()


def test_it_is_on_this_machine_unless_told_otherwise(page):
    assert page.address == f"http://127.0.0.1:{page.port}/"
    with pytest.raises(InvalidValue, match="--page"):
        Page(lambda: VIEW, page.port)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def browsed(page, folder, width, *options):
    return subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", "--no-proxy-server"),
            *(f"--window-size={width},1000", "--virtual-time-budget=6000", *options, page.address),
        ],
        capture_output=True,
        text=True,
        timeout=3000,
        check=True,
    ).stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_in_a_browser(page, tmp_path):
    """Styles and script pass its own policy: the script reads the newer figures and the page shows them."""
    late = replace(VIEW, round=28, phase="training on")
    looks = iter([VIEW])
    page.shown[:] = [VIEW]
    views = lambda: next(looks, late)  # noqa: E731
    other = Page(views, 0)
    try:
        text = browsed(other, tmp_path, 1100, "--dump-dom")
    finally:
        other.close()
    said = " ".join(Tags(text).texts)
    assert "training on" in said
    assert "28" in said
    assert "west<script>alert(1)</script>" in said
    shot = tmp_path / "phone.png"
    browsed(page, tmp_path, 400, f"--screenshot={shot}")
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert shot.stat().st_size > 10_000  # not blank
