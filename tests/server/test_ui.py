"""The page at /ui: its logic under node, and the whole page in a headless Chromium against a fake server."""

import base64
import json
import re
import shutil
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import ceil
from pathlib import Path
from random import Random

import pytest

PAGE = Path(__file__).parents[2] / "pagefold" / "server" / "static" / "ui.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FREE, PREFIX, HOT, SHARED, COLD, FOLDING = range(6)

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def run_logic(expression: str):
    """What an expression over `Logic`, the page's part without a DOM, is worth."""
    (logic,) = re.findall(r'<script id="logic">(.*?)</script>', PAGE.read_text(), re.DOTALL)
    code = f"{logic}\nconsole.log(JSON.stringify({expression}));"
    answer = subprocess.run(["node", "-e", code], check=False, capture_output=True, text=True, timeout=20)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


# ---- the file


def test_the_page_needs_nothing_from_elsewhere():
    """No other host, no other file: it works behind any proxy and without the internet."""
    text = PAGE.read_text()
    assert not re.findall(r"https?://", text)
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,"]
    assert "@import" not in text and "url(" not in text


def test_every_field_of_the_page_has_a_label():
    text = PAGE.read_text()
    for field in re.finditer(r"<(?:input|textarea|select)[^>]*", text):
        name = re.search(r'id="([\w-]+)"', field.group())
        assert name, field.group()
        before = text[: field.start()]
        assert before.rfind("<label>") > before.rfind("</label>") or f'for="{name.group(1)}"' in text


# ---- the logic


@needs_node
def test_every_page_is_in_one_cell_whatever_the_bundle():
    for pages, per in ((7, 1), (100, 3), (101, 100)):
        found = run_logic(f"Logic.cells(new Uint8Array({pages}).fill({HOT}), {per})")
        assert sum(map(sum, found)) == pages == sum(cell[HOT] for cell in found)
        assert len(found) == -(-pages // per) and max(map(sum, found)) <= per


@needs_node
@pytest.mark.parametrize("tiers", [[10], [2400, 900], [200_000, 1], [1]])
@pytest.mark.parametrize("width", [300, 700])
def test_a_map_fits_its_box_with_no_more_bundling_than_needed(tiers, width):
    shape = run_logic(f"Logic.fit({tiers}, {width}, 340)")
    per, size, columns = shape["per"], shape["size"], shape["columns"]
    assert columns * size <= width and 6 <= size <= 18
    height = lambda per, size: sum(ceil(ceil(n / per) / (width // size)) for n in tiers) * size  # noqa: E731
    assert height(per, size) <= 340
    assert per == 1 or height(per - 1, 6) > 340


@needs_node
def test_requests_are_shown_by_rows_kept_of_rows_seen():
    stats = {
        "requests": [
            {"id": "w", "state": "waiting", "prompt_tokens": 50, "rows_seen": 0, "rows_kept": 0},
            {"id": "a", "state": "running", "prompt_tokens": 9, "rows_seen": 4000, "rows_kept": 1000.0},
            {"id": "b", "state": "running", "prompt_tokens": 9, "rows_seen": 2000, "rows_kept": 2000.0},
        ]
    }
    shown = run_logic(f"Logic.requestRows({json.dumps(stats)}, 2)")
    assert [row["id"] for row in shown["rows"]] == ["a", "b"] and shown["more"] == 1
    assert [(row["seen"], row["kept"]) for row in shown["rows"]] == [(1, 0.25), (0.5, 1)]
    assert shown["rows"][0]["text"] == "1,000 of 4,000 rows"


@needs_node
def test_rates_come_from_what_metrics_gained():
    text = lambda tokens, total, number: (  # noqa: E731
        f'# HELP x y\npagefold:generation_tokens_total{{model_name="a b"}} {tokens}\n'
        f'pagefold:time_to_first_token_seconds_bucket{{le="0.1"}} {number}\n'
        f"pagefold:time_to_first_token_seconds_sum {total}\nvllm:time_to_first_token_seconds_count {number}.0\n"
    )
    reading = lambda at, *values: f"{{at: {at}, metrics: Logic.parseMetrics({json.dumps(text(*values))})}}"  # noqa: E731
    found = run_logic(f"Logic.rates({reading(10, 100, 1.0, 4)}, {reading(12, 300, 2.0, 8)})")
    assert found == {"tokens": 100, "first": 250, "between": None}
    restarted = run_logic(f"Logic.rates({reading(10, 100, 1.0, 4)}, {reading(12, 3, 0.1, 1)})")
    assert restarted == {"tokens": None, "first": None, "between": None}


@needs_node
def test_polling_slows_down_when_nothing_happens_and_when_nobody_answers():
    pauses = run_logic("[1, 2, 3, 9, 50].map((failures) => Logic.pause({failures}))")
    assert pauses == sorted(pauses) and pauses[0] == 1000 and pauses[-1] == 15000
    busy, idle, hidden = run_logic(
        "[{busy: true}, {busy: false}, {busy: true, hidden: true}].map((s) => Logic.pause({failures: 0, ...s}))"
    )
    assert busy < idle < hidden
    assert busy < run_logic("Logic.pause({busy: true, failures: 0, pages: 50000})") <= idle


@needs_node
def test_events_cut_anywhere_are_read_whole():
    stream = 'data: {"a": 1}\r\n\r\n: a comment\n\ndata: {"b": "é\\n"}\n\ndata: [DONE]\n\n'
    cuts = "(s => Array.from(s, (_, i) => [s.slice(0, i), s.slice(i)].flatMap(Logic.eventReader())))"
    assert run_logic(f"{cuts}({json.dumps(stream)})") == [[{"a": 1}, {"b": "é\n"}]] * len(stream)
    assert run_logic(f"Array.from({json.dumps(stream)}).flatMap(Logic.eventReader())") == [{"a": 1}, {"b": "é\n"}]


@needs_node
def test_only_the_folded_side_asks_for_eviction():
    settings = {"model": "m", "eviction": "snapkv", "budget": 64, "maxTokens": 9, "temperature": 0}
    full, folded = run_logic(f"['full', 'folded'].map((side) => Logic.chatBody(side, {json.dumps(settings)}, []))")
    assert full["kv_eviction"] == "none" and "kv_budget" not in full
    assert (folded["kv_eviction"], folded["kv_budget"]) == ("snapkv", 64)
    assert all(body["stream_options"] == {"include_usage": True} for body in (full, folded))
    assert {k: v for k, v in full.items() if k[:3] != "kv_"} == {k: v for k, v in folded.items() if k[:3] != "kv_"}


@needs_node
def test_the_folded_side_starts_with_what_the_server_can_do():
    rows = [{"option": "kv_eviction", "got": "snapkv:window=8"}, {"option": "kv_budget", "got": 64}]
    assert run_logic(f"Logic.policyOf({{options: {json.dumps(rows)}}})") == {
        "eviction": "snapkv:window=8",
        "budget": 64,
    }
    without = run_logic('Logic.policyOf({options: [{option: "kv_eviction", got: "none"}]})')
    assert without == run_logic("Logic.policyOf({})") == {"eviction": "keydiff", "budget": 256}


# ---- the page in a browser


def plausible_state(seed: int = 0) -> dict:
    """What an engine in the midst of its work says: a hot and a cold tier, sixteen requests that fold."""
    draws = Random(seed)
    tiers = []
    for name, pages, kinds in (("hot", 2400, [HOT, SHARED, PREFIX, FOLDING]), ("cold", 900, [COLD])):
        codes = bytearray()
        while len(codes) < pages * 0.82:
            kind = draws.choices(kinds, [10, 3, 3, 1][: len(kinds)])[0]
            codes += bytes([kind]) * draws.randint(2, 40)
        codes = bytes(codes[:pages]).ljust(pages, b"\0")
        tiers.append({"name": name, "codes_base64": base64.b64encode(codes).decode()})
    requests = []
    for index in range(16):
        state = "running" if index < 12 else "waiting"
        seen = draws.randint(300, 6000)
        kept = min(seen, 1024 + 16 * draws.randint(0, 8))
        requests.append(
            {"id": f"chatcmpl-{draws.randrange(16**8):08x}", "state": state, "prompt_tokens": 300 + seen // 9}
        )
        requests[-1] |= (
            {"rows_seen": seen, "rows_kept": float(kept)} if index < 12 else {"rows_seen": 0, "rows_kept": 0.0}
        )
    maps = [base64.b64decode(tier["codes_base64"]) for tier in tiers]
    used = [sum(code not in (FREE, PREFIX) for code in codes) for codes in maps]
    kv = [
        {"tier": tier["name"], "format": form, "used": count, "idle": 0, "total": len(codes)}
        for tier, codes, count, form in zip(tiers, maps, used, ("bf16", "int4"), strict=True)
    ]
    stats = {"running": 12, "waiting": 4, "swapped": 0, "requests": requests, "kv": kv}
    facts = {"options": [{"option": "kv_eviction", "asked": "zipage", "got": "zipage", "why": "as asked"}]}
    return {"model": "tiny-model", "facts": facts, "stats": stats, "pool": {"tiers": tiers}}


class FakeServer(BaseHTTPRequestHandler):
    """What the page asks for. Class attributes steer all answers; `posts` keeps what was asked in chats."""

    key: str | None = None
    posts: list[dict] = []
    word_s = 0.01
    words = {
        "none": "Keep every row and the answer is exact.",
        "zipage": "Keep every row that matters and save memory.",
    }
    started = time.monotonic()

    def log_message(self, format, *args):
        pass

    def send(self, text: str | bytes, kind: str = "application/json", status: int = 200) -> None:
        body = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self) -> bool:
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self.send(json.dumps({"error": {"message": "no such key"}}), status=401)
            return False
        return True

    def do_GET(self):
        if self.path == "/ui":
            self.send(PAGE.read_bytes(), "text/html; charset=utf-8")
        elif not self.allowed():
            return
        elif self.path == "/ui/state":
            self.send(json.dumps(plausible_state(int(time.monotonic() - self.started))))
        elif self.path == "/metrics":
            self.send(self.metrics(), "text/plain")
        else:
            self.send("{}", status=404)

    def metrics(self) -> str:
        seconds = time.monotonic() - self.started
        steps = seconds * 38 + 9 * Random(int(seconds)).random()
        lines = [
            f"pagefold:generation_tokens_total {steps * 12}",
            f"pagefold:time_to_first_token_seconds_count {steps}",
        ]
        lines += [f"pagefold:time_to_first_token_seconds_sum {steps * 0.18 + Random(int(seconds) + 1).random() * 3}"]
        lines += [f"pagefold:inter_token_latency_seconds_sum {steps * 0.31 + Random(int(seconds) + 2).random()}"]
        return "\n".join([*lines, f"pagefold:inter_token_latency_seconds_count {steps * 12}", ""])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        self.posts.append(body)
        if body["kv_eviction"] not in self.words:
            self.send(
                json.dumps({"error": {"message": f"kv_eviction: unknown scorer {body['kv_eviction']!r}"}}), status=400
            )
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        words = re.findall(r"\S+\s*", self.words[body["kv_eviction"]])
        for word in words:
            self.event({"choices": [{"index": 0, "delta": {"content": word}}]})
            time.sleep(self.word_s)
        kept = {"none": 1890, "zipage": 272}[body["kv_eviction"]]
        kv = {"tokens": 1890, "rows_kept": kept, "compactions": 0 if kept == 1890 else 101, "peak_bytes": kept * 73_728}
        self.event({"choices": [], "usage": {"completion_tokens": len(words), "kv": kv}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, event: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()


@pytest.fixture
def server():
    """A running fake server; `server.handler` steers it, `server.url` is the page's address."""
    handler = type("Handler", (FakeServer,), {"posts": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handler, server.url = handler, f"http://127.0.0.1:{server.server_port}/ui"  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium")
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield page
    context.close()
    assert not faults


def pixels(page) -> int:
    """How many colours the first map has."""
    return page.evaluate(
        """() => { const c = document.querySelector("#map canvas");
        const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data, seen = new Set();
        for (let i = 0; i < d.length; i += 4) seen.add(d.slice(i, i + 4).join()); return seen.size; }"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_map_and_the_requests_are_drawn(browser, server, scheme):
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("#map canvas >> nth=1")
    assert page.inner_text("#status") == "live" and page.inner_text("#model") == "tiny-model"
    assert pixels(page) >= 5
    assert "hot pages: " in page.get_attribute("#map canvas >> nth=0", "aria-label")
    assert page.locator("#requests li").count() == 16
    assert re.search(r"[\d,]+ of [\d,]+ rows", page.inner_text("#requests"))
    assert "12 running, 4 waiting" in page.inner_text("#requests-note")
    page.wait_for_function("document.getElementById('tile-tokens').textContent !== '–'", timeout=10_000)
    context.close()


def test_both_answers_stream_side_by_side(page, server):
    page.goto(server.url)
    page.wait_for_function("document.getElementById('model').textContent")
    for turn in (1, 2):
        page.fill("#message", f"question {turn}")
        page.click("#send")
        page.wait_for_function(f"document.querySelectorAll('dl').length === {2 * turn}")
        page.wait_for_function("document.getElementById('send').textContent === 'Ask both'")
    full, folded = page.locator("article").all()[:2]
    assert server.handler.words["none"] in full.inner_text()
    assert server.handler.words["zipage"] in folded.inner_text()
    shown = " ".join(folded.inner_text().split())
    assert "272 of 1,890 (14 %)" in shown and "101" in shown and "20 MB" in shown
    assert "same for 15 characters" in shown
    last = [post for post in server.handler.posts if post["messages"][-1]["content"] == "question 2"]
    answers = {post["kv_eviction"]: post["messages"][1]["content"] for post in last}
    assert answers == server.handler.words, "each side has its own history"


def test_an_error_of_one_side_leaves_the_other_alone(page, server):
    page.goto(server.url)
    page.wait_for_function("document.getElementById('model').textContent")
    page.fill("#eviction", "nonsense")
    page.fill("#message", "hello")
    page.press("#message", "Enter")
    page.wait_for_selector(".error")
    page.wait_for_function("document.getElementById('send').textContent === 'Ask both'")
    assert "unknown scorer 'nonsense'" in page.inner_text(".error")
    assert server.handler.words["none"] in page.inner_text("article >> nth=0")


def test_an_answer_can_be_stopped(page, server):
    server.handler.word_s = 0.5
    page.goto(server.url)
    page.wait_for_function("document.getElementById('model').textContent")
    page.fill("#message", "hello")
    page.click("#send")
    page.wait_for_function("document.querySelector('article .text:not(.thought)').textContent")
    page.click("#send")
    page.wait_for_function("document.getElementById('send').textContent === 'Ask both'", timeout=3000)
    assert page.inner_text("article >> nth=0").count("stopped") == 1


def test_a_key_is_asked_for_and_lives_as_long_as_the_tab(page, server):
    server.handler.key = "secret"
    page.goto(server.url)
    page.wait_for_function("document.getElementById('status').textContent.includes('wants an API key')")
    page.fill("#key-text", "secret")
    page.click("#key button")
    page.wait_for_function("document.getElementById('status').textContent === 'live'")
    page.reload()
    page.wait_for_function("document.getElementById('status').textContent === 'live'")
    assert page.evaluate("localStorage.length") == 0 and page.evaluate("document.cookie") == ""


def test_a_server_that_goes_away_and_comes_back(page, server):
    page.goto(server.url)
    page.wait_for_function("document.getElementById('status').textContent === 'live'")
    page.route("**/ui/state", lambda route: route.abort())
    page.wait_for_function("document.getElementById('status').textContent.startsWith('server not reachable')")
    assert page.locator("#map canvas").count() == 2, "the last picture stays"
    page.unroute("**/ui/state")
    page.wait_for_function("document.getElementById('status').textContent === 'live'", timeout=10_000)


def test_a_phone_needs_no_sideways_scrolling(browser, server):
    context = browser.new_context(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("#map canvas")
    page.fill("#message", "w" * 300)
    page.click("#send")
    page.wait_for_selector("dl dd")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    context.close()
