"""The report, and the live page, as a browser lays them out: nothing sticks out, dark is dark, ink is seen.

One harness holds every page in frames of two widths, a phone's and a desk's, and measures them by a script of
its own; a browser is started once in the light and once in the dark. Pages themselves have no script.
"""

import html
import json
import shutil
import subprocess
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from farthing.deploy.metrics import PartyView, View
from farthing.ledger.journal import Journal
from farthing.report import Subject, broken, live_page, page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (390, 1280)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]

_MEASURE = """
<script>
addEventListener('load', function () {
  const found = {};
  for (const frame of document.querySelectorAll('iframe')) {
    const page = frame.contentDocument, root = page.documentElement, wide = frame.clientWidth;
    const out = [...page.body.querySelectorAll('*')].filter(function (one) {
      const box = one.getBoundingClientRect();
      return box.width > 0 && (box.right > wide + 1 || box.left < -1) && !one.closest('.scroll');
    });
    const texts = [...page.querySelectorAll('figure svg[role] text')].map(function (one) {
      const box = one.getBoundingClientRect(), svg = one.ownerSVGElement.getBoundingClientRect();
      return [one.ownerSVGElement.getAttribute('aria-labelledby'), one.textContent, box.left - svg.left,
              box.right - svg.left, box.top, box.bottom, svg.width];
    });
    found[frame.name] = {
      wide: root.scrollWidth, frame: wide, tall: root.scrollHeight,
      out: out.slice(0, 5).map(one => one.tagName + '.' + one.className),
      dark: frame.contentWindow.matchMedia('(prefers-color-scheme: dark)').matches,
      paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
      ink: frame.contentWindow.getComputedStyle(page.body).color,
      line: [...page.querySelectorAll('.line')].map(one => getComputedStyle(one).stroke).slice(0, 1),
      said: page.body.innerText, figures: page.querySelectorAll('figure').length, texts: texts,
      scripts: page.scripts.length,
    };
  }
  const told = document.createElement('pre');
  told.id = 'found';
  told.textContent = JSON.stringify(found);
  document.body.replaceChildren(told);
});
</script>
"""


def browsed(file, folder, *options):
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", "--no-proxy-server"),
        *("--hide-scrollbars", "--window-size=1280,1000", *options, file.as_uri()),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, encoding="utf-8")
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def pages(full, seeded):
    with Journal(seeded) as journal:
        void = Subject.of(journal, title="Tried with a seed", method="auto")
    long = "a-name-without-any-place-to-break-it-" * 20
    spread = replace(
        full,
        title=long,
        method=long,
        released=(long,),
        tuning=long,
        scores=tuple(replace(score, label=long + score.label) for score in full.scores),
        audit=tuple((long, replace(verdict, attack=long)) for _, verdict in full.audit),
    )
    parties = (
        PartyView(name="north", state="here", left=13, most=40, records=10853, epsilon=1.0, delta=1e-6),
        PartyView(
            name=long[:64],
            state="refused",
            left=0,
            most=40,
            records=903,
            epsilon=1.0,
            delta=1e-6,
            reason=long[:120],
        ),
        PartyView(name="south", state="away"),
    )
    points = tuple((t, 0.76 + 0.003 * t) for t in range(1, 28))
    view = View(
        run=long[:64],
        method="sgd2 · adult",
        phase="training",
        round=27,
        parties=parties,
        accuracy=points,
        noise=26.7,
        clip=1.0,
        seconds=2.34,
        end=95.0,
    )
    return {
        "full": page(full),
        "void": page(void),
        "broken": broken("a.ledger", "row 5 was changed, it does not have its hash. " + long),
        "long": page(spread),
        "live": live_page.document(view),
    }


@pytest.fixture(scope="module")
def looked(tmp_path_factory):
    """What the browser made of every page, by the name of the page and the width of its frame."""
    held = {}

    def look(full, seeded, dark):
        if dark not in held:
            folder = tmp_path_factory.mktemp("browser")
            frames = "".join(
                f'<iframe name="{name}-{wide}" width="{wide}" height="900" frameborder="0" '
                f'srcdoc="{html.escape(text)}"></iframe>'
                for name, text in pages(full, seeded).items()
                for wide in WIDTHS
            )
            file = folder / "harness.html"
            file.write_text(f"<!doctype html><meta charset=utf-8>{_MEASURE}{frames}", encoding="utf-8")
            options = ["--blink-settings=preferredColorScheme=0"] if dark else []
            text = browsed(file, folder, "--dump-dom", *options)
            begin, end = text.index('<pre id="found">') + 16, text.index("</pre>")
            held[dark] = json.loads(html.unescape(text[begin:end]))
        return held[dark]

    return look


@pytest.mark.parametrize("wide", WIDTHS)
@pytest.mark.parametrize("name", ["full", "void", "broken", "long", "live"])
def test_nothing_sticks_out(looked, full, seeded, name, wide):
    found = looked(full, seeded, False)[f"{name}-{wide}"]
    assert found["frame"] == wide
    assert found["wide"] <= wide, found["out"]
    assert found["out"] == []


def test_what_is_shown(looked, full, seeded):
    found = looked(full, seeded, False)["full-1280"]
    assert found["figures"] == 7
    assert found["scripts"] == 0
    for text in ("(1, 10⁻⁵)-differential privacy", "2.72", "73.1 %", "Smith & Thakurta 2022", "163 clients"):
        assert text in found["said"], text
    assert "NO PRIVACY GUARANTEE" in looked(full, seeded, False)["void-390"]["said"]
    assert "is damaged" in looked(full, seeded, False)["broken-390"]["said"]


@pytest.mark.parametrize("wide", WIDTHS)
@pytest.mark.parametrize("name", ["full", "long"])
def test_words_in_pictures_are_apart_and_inside(looked, full, seeded, name, wide):
    """By the boxes that the browser gave them, in its own font."""
    found = looked(full, seeded, False)[f"{name}-{wide}"]["texts"]
    assert len(found) > 40
    for place, (picture, said, left, right, top, bottom, width) in enumerate(found):
        assert -0.5 <= left <= right <= width + 0.5, (picture, said)
        for other, word, begin, end, high, low, _ in found[:place]:
            if other == picture:
                shared = min(right, end) - max(left, begin), min(bottom, low) - max(top, high)
                assert min(shared) <= 2.5, (said, word)


def test_dark_is_dark(looked, full, seeded):
    light, dark = (looked(full, seeded, dark)["full-1280"] for dark in (False, True))
    if not dark["dark"]:
        pytest.skip("this Chromium cannot be told to be dark")
    assert brightness(light["paper"]) > 200 > 60 > brightness(light["ink"])
    assert brightness(dark["ink"]) > 200 > 60 > brightness(dark["paper"])
    assert light["line"] != dark["line"]
    assert light["said"][:1000] == dark["said"][:1000]


def brightness(colour):
    parts = [float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    return sum(parts) / len(parts)


def test_it_is_drawn_and_printed(tmp_path, full):
    """The file itself, under its own policy: its styles apply, so that it is no column of plain text."""
    file, shot, paper = tmp_path / "report.html", tmp_path / "report.png", tmp_path / "report.pdf"
    file.write_text(page(full), encoding="utf-8")
    browsed(file, tmp_path, f"--screenshot={shot}")
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert shot.stat().st_size > 30_000  # not blank
    browsed(file, tmp_path, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    assert paper.read_bytes().startswith(b"%PDF")
    assert paper.stat().st_size > 30_000
    dom = browsed(file, tmp_path, "--dump-dom")
    assert dom.count("<figure>") == 7
    ElementTree.fromstring(page(full))
