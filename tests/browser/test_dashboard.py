"""The dashboard in a real browser, over a real server whose store the test writes."""

import json
import time
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from selenium.webdriver.common.keys import Keys
from tests.browser.conftest import Browser
from tests.browser.served_site import Site

from concertina.cli.times import parse_time
from concertina.cluster import keys
from concertina.cluster.records import User
from concertina.core.job import JobPhase
from concertina.server.auth import add_user

VIEWS = ("#/", "#/jobs/digits-1", "#/queue", "#/nodes", "#/ask", "#/jobs/nobody")
SPOKEN = {"button", "link", "textbox", "searchbox", "spinbutton", "checkbox", "combobox", "progressbar", "dialog"}
SIDEWAYS = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


def some_jobs(site: Site) -> None:
    site.cluster()
    due = time.time() + 3600
    site.job("digits-1", deadline_s=due).runs_on(2, "2 slots were free", step=40)
    site.job("chars-2", submitted_s=time.time() - 50).runs_on(1, "it takes what is left", first=2)
    site.job("mlp-3", JobPhase.WAITING, deadline_s=due)
    site.job("resnet-4", deadline_s=due).ends(JobPhase.REJECTED, "it needs 3 h on all 4 slots")


def write_events(site: Site, job: str) -> None:
    """A little of what a keeper writes: enough for charts and logs."""
    folder = site.folder / "jobs" / job
    (folder / "logs").mkdir(parents=True)
    at = time.time() - 50
    start = {
        "event": "generation_started",
        "time": at,
        "generation": 1,
        "step": 0,
        "workers": 2,
        "members": [0, 1],
        "reason": "all 2 joined",
    }
    steps = [{"event": "step", "time": at + n, "step": n, "log": {"loss": 2.0 / (n + 1)}} for n in range(40)]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (start, *steps)))
    (folder / "logs" / "worker-0.log").write_text("epoch 1 begins\n<b>not bold</b>\n")


def test_an_empty_cluster_says_how_to_begin(site: Site, browser: Browser) -> None:
    site.cluster(slots=3)
    browser.driver.get(site.open())
    browser.reads("main .empty", "No jobs yet")
    assert browser.text("main .empty code").startswith("concertina submit examples/digits.py")
    browser.reads("#pulse", "0 of 3 slots at work")
    browser.reads("main figure", "Nothing has run")
    browser.find("[data-view=queue]").click()
    browser.reads("main .empty", "Nobody waits")
    browser.find("[data-view=nodes]").click()
    browser.until(lambda: len(browser.all(".tile[data-state=free]")) == 3, "three free slots")


def test_a_job_is_seen_growing_with_its_reason_and_nobody_reloads(site: Site, browser: Browser) -> None:
    site.cluster()
    browser.driver.get(site.open())
    browser.reads("main .empty", "No jobs yet")
    job = site.job("digits-1")
    browser.reads(".jobs tbody tr", "digits-1")
    job.runs_on(1, "a slot became free")
    browser.reads(".bellows", "1 of 4")
    job.runs_on(3, "two more became free <img src=x onerror=alert(1)>")
    browser.reads(".bellows", "3 of 4")
    assert len(browser.all(".bellows .open")) == 3
    browser.reads(".jobs .why", "Two more became free <img src=x onerror=alert(1)>")
    assert not browser.all("main img")
    browser.reads("#announce", "digits-1 has 3 workers: two more became free")
    browser.until(lambda: len(browser.all("#pulse .open")) == 3, "three slots of the header in use")
    browser.until(lambda: browser.all(".plot .trace"), "a drawn picture")
    job.ends(JobPhase.FINISHED, "all its steps are done")
    browser.reads(".jobs .chip", "finished")


def test_the_page_says_that_the_server_is_gone_and_finds_it_again(site: Site, browser: Browser) -> None:
    browser.expected = [
        "ERR_CONNECTION_REFUSED",
        "ERR_INCOMPLETE_CHUNKED_ENCODING",
        "ERR_CONNECTION_RESET",
        "ERR_EMPTY_RESPONSE",
    ]
    site.cluster()
    job = site.job("digits-1")
    job.runs_on(1, "a slot became free")
    browser.driver.get(site.open())
    browser.is_live()
    assert not browser.find("#trouble").is_displayed()
    site.close()
    browser.reads("#link", "reconnecting")
    browser.reads("#trouble", "The server does not answer. What you see is from before")
    assert "1 of 4" in browser.text(".bellows")  # still there to be read
    job.runs_on(4, "three more became free")
    site.open()
    browser.is_live()
    browser.reads(".bellows", "4 of 4")
    assert not browser.find("#trouble").is_displayed()


def test_an_answer_that_is_lost_on_the_way_is_asked_for_again(site: Site, browser: Browser) -> None:
    browser.expected = ["ERR_BLOCKED_BY_CLIENT"]
    some_jobs(site)
    browser.block("*/api/v1/cluster")  # the stream of events opens, what should follow does not come
    browser.driver.get(site.open())
    browser.reads("#trouble", "The server does not answer. Start it with: concertina up")
    browser.block()
    browser.is_live()
    browser.until(lambda: len(browser.all(".jobs tbody tr")) == 4, "four jobs")
    assert not browser.find("#trouble").is_displayed()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_every_view_without_sideways_scrolling(site: Site, browser: Browser, scheme: str) -> None:
    browser.expected = ["404 (Not Found)"]  # the job that is not there
    some_jobs(site)
    site.job("a-name-that-is-as-long-as-names-may-be-and-has-no-place-to-break", JobPhase.WAITING)
    write_events(site, "digits-1")
    browser.screen(360, 740)
    browser.prefers(color_scheme=scheme)
    address = site.open()
    for view in VIEWS:
        browser.driver.get(f"{address}/{view}")
        browser.is_live()
        browser.until(lambda: not browser.all("main .loading"), f"{view} loaded")
        assert browser.run(SIDEWAYS) == 0, view
        assert browser.run("return document.documentElement.dataset.theme") == scheme
        assert browser.text("h1")


def test_a_phone_shows_whole_tables_and_no_focus_hides_behind_the_bar(site: Site, browser: Browser) -> None:
    some_jobs(site)
    write_events(site, "digits-1")
    browser.screen(390, 620)
    address = site.open()
    browser.driver.get(f"{address}/#/jobs/digits-1")
    browser.until(lambda: browser.all(".generations tbody tr"), "a generation")
    assert browser.run("return [...document.querySelectorAll('.scroll')].every((e) => e.scrollWidth <= e.clientWidth)")
    browser.driver.get(f"{address}/#/ask")
    browser.until(lambda: browser.all("#ask-script"), "the form")
    hidden = """
        const bar = document.querySelector(".top nav").getBoundingClientRect().top;
        const covered = (field) => {
          scrollTo(0, 0);
          field.focus();
          return field.checkVisibility() && field.getBoundingClientRect().bottom > bar;
        };
        const fields = [...document.querySelectorAll("form input, form button")];
        return fields.filter(covered).map((field) => field.outerHTML);
    """
    assert browser.run(hidden) == []


COLOURS_AFTER_AN_EARLY_EVENT = """
    const done = arguments[arguments.length - 1];
    const job = (id, submitted_s) => ({ id, submitted_s, phase: "running", slots: [], workers: 1 });
    const first = job("first", 1), second = job("second", 2);
    const answer = (value) => new Response(JSON.stringify(value));
    const early = new TextEncoder().encode(`event: job\ndata: ${JSON.stringify(second)}\n\n`);
    const events = new ReadableStream({ start: (source) => source.enqueue(early) });
    let read;
    const heard = new Promise((resolve) => { read = resolve; });
    window.fetch = async (path) => {
      if (path.includes("events")) return new Response(events);
      await heard; // the lists are slower than the first event
      return answer(path.includes("jobs") ? { items: [first, second], total: 2, after: null } : {});
    };
    const { follow, known, onChange } = await import("./live.js");
    const { colourOf } = await import("./colours.js");
    onChange(() => {
      read();
      if (known.ready) done([colourOf("first"), colourOf("second")]);
    });
    follow();
"""


def test_the_colours_do_not_depend_on_which_job_is_heard_of_first(site: Site, browser: Browser) -> None:
    browser.expected = ["favicon.ico"]  # a bare file names no picture of its own
    site.cluster()
    address = site.open()
    browser.driver.get(f"{address}/static/colours.js")  # the right origin, and no page that would ask for anything
    script = f"const run = async function () {{ {COLOURS_AFTER_AN_EARLY_EVENT} }}; run.apply(this, arguments);"
    script = script.replace('"./', f'"{address}/static/')
    assert browser.driver.execute_async_script(script) == ["#3d7ea6", "#d1893a"]


def test_the_keyboard_reaches_everything(site: Site, browser: Browser) -> None:
    some_jobs(site)
    browser.driver.get(site.open())
    browser.until(lambda: len(browser.all(".jobs tbody tr")) == 4, "four jobs")
    focused = "return document.activeElement.textContent"
    browser.keys("j", "j")
    assert browser.run(focused) == "chars-2"
    browser.keys("k")
    assert browser.run(focused) == "digits-1"
    browser.keys(Keys.ENTER)
    browser.reads("h1", "digits-1")
    browser.reads("#reason", "2 slots were free")
    browser.keys(Keys.ESCAPE)
    browser.until(lambda: browser.all("#search"), "the list again")
    browser.keys("/")
    browser.until(lambda: browser.run("return document.activeElement.id") == "search", "the search field in focus")
    browser.keys("mlp j")  # a letter that moves nothing while somebody writes
    browser.until(lambda: not browser.all(".jobs tbody tr"), "no match")
    browser.keys(Keys.BACKSPACE, Keys.BACKSPACE, Keys.ESCAPE)
    browser.until(lambda: [row.text for row in browser.all(".jobs tbody th a")] == ["mlp-3"], "one match")
    browser.keys("?")
    browser.reads("dialog[open]", "search the jobs")
    browser.keys(Keys.ESCAPE)
    browser.until(lambda: not browser.all("dialog"), "no dialog")
    browser.find("[data-group=other]").click()
    browser.reads("main", "No job matches")


def test_a_screen_reader_finds_landmarks_and_names(site: Site, browser: Browser) -> None:
    browser.expected = ["404 (Not Found)"]
    some_jobs(site)
    write_events(site, "digits-1")
    address = site.open()
    for view in VIEWS:
        browser.driver.get(f"{address}/{view}")
        browser.is_live()
        browser.until(lambda: not browser.all("main .loading"), f"{view} loaded")
        found = browser.spoken()
        assert {"banner", "navigation", "main"} <= {role for role, _ in found}, view
        nameless = [role for role, name in found if role in SPOKEN and not name.strip()]
        assert nameless == [], view
        assert len(browser.all("h1")) == 1, view


def test_a_job_page_shows_charts_logs_story_and_when(site: Site, browser: Browser) -> None:
    some_jobs(site)
    write_events(site, "digits-1")
    browser.driver.get(f"{site.open()}/#/jobs/digits-1")
    browser.reads(".log", "epoch 1 begins\n<b>not bold</b>\n")
    browser.reads(".story", "2 slots were free.")
    browser.reads(".answer", "It waits: it needs 1 cpu")
    browser.reads(".answer .when", "Expected to start")
    browser.reads(".generations", "All 2 joined.")
    browser.until(lambda: len(browser.all(".charts .plot .trace")) == 2, "loss and throughput drawn")
    browser.reads(".facts", "here/0, here/1")


def test_what_if_tells_the_earliest_deadline_and_submits_from_the_same_form(site: Site, browser: Browser) -> None:
    script = site.folder / "train.py"
    script.write_text("print('hello')\n")
    some_jobs(site)
    browser.driver.get(f"{site.open()}/#/ask")
    browser.is_live()
    browser.find("#ask-script").send_keys(str(script))
    browser.find("#ask-deadline").send_keys("1 min", Keys.ENTER)
    browser.reads(".verdict", "It would be refused")
    browser.reads(".verdict", "All 4 slots would need 5 min for it.")
    browser.reads(".verdict", "digits-1 would end 2 min later")
    next(button for button in browser.all(".verdict button") if button.text == "Use it").click()
    browser.find("button[value=quote]").click()
    browser.reads(".verdict", "It would be taken")
    browser.find("#submit-now").click()
    browser.reads("h1", "train")
    browser.reads("#reason", "The controller has not looked at it yet.")
    browser.reads(".facts", str(script))
    browser.find("[data-view=ask]").click()
    assert browser.find("#ask-script").get_attribute("value") == str(script)  # kept


LOSE_ONE_ANSWER = """
    const real = window.fetch;
    window.fetch = async (...how) => {
      const answer = await real(...how);
      if (how[1]?.method !== "POST") return answer;
      window.fetch = real;
      throw new TypeError("the connection was cut");
    };
"""


def test_a_submission_whose_answer_is_lost_may_be_sent_again(site: Site, browser: Browser) -> None:
    script = site.folder / "train.py"
    script.write_text("print('hello')\n")
    some_jobs(site)
    browser.driver.get(f"{site.open()}/#/ask")
    browser.is_live()
    browser.find("#ask-script").send_keys(str(script))
    browser.find("#ask-deadline").send_keys("2h")
    browser.run(LOSE_ONE_ANSWER)
    browser.find("#submit-now").click()
    browser.reads(".verdict", "The server does not answer")
    browser.find("#submit-now").click()
    browser.reads("h1", "train")
    assert len(site.store.list_prefix(keys.REQUESTS).entries) == 5, "one job more than before"


def test_times_are_read_as_the_command_line_reads_them(site: Site, browser: Browser) -> None:
    browser.expected = ["favicon.ico"]
    browser.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Europe/Berlin"})
    now = datetime(2026, 10, 24, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    address = site.open()
    browser.driver.get(f"{address}/static/words.js")
    script = f"""
        const [texts, now, at, done] = arguments;
        import("{address}/static/words.js").then(({{ moment, written }}) => {{
          const read = (text) => {{ try {{ return moment(text, now); }} catch (error) {{ return error.message; }} }};
          done([texts.map(read), written(at)]);
        }});
    """
    good = ["2h", "90 min", "1h30m", "2 days", "1 hour 5 minutes", "18:00", "2026-12-01T18:00"]
    bad = ["2 months", "3 decades", "2 monkeys", "2026-12-01", "2h30", "soonish"]
    later = datetime(2026, 10, 25, 12, tzinfo=now.tzinfo)  # the clocks are put back in between
    read, written = browser.driver.execute_async_script(script, good + bad, now.timestamp(), later.timestamp())
    assert read[: len(good)] == [parse_time(text, now) for text in good]
    assert [said for said in read[len(good) :] if "is no time: write 2h" not in str(said)] == []
    assert written == "2026-10-25T12:00:00"


def test_an_address_that_is_no_address_is_a_job_that_is_not_there(site: Site, browser: Browser) -> None:
    browser.expected = ["404 (Not Found)", "422 (Unprocessable"]
    some_jobs(site)
    browser.driver.get(site.open())
    browser.is_live()
    browser.run("location.hash = '#/jobs/100%'")
    browser.reads("h1", "100%")
    browser.run("location.hash = '#/queue'")
    browser.reads("main", "mlp-3")


def test_the_charts_of_an_ended_job_are_read_to_their_end(
    site: Site, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("concertina.server.progress.CALL_BYTES", 500)
    monkeypatch.setattr("concertina.server.progress.CHUNK_BYTES", 500)
    some_jobs(site)
    write_events(site, "digits-1")
    site.job("digits-1").ends(JobPhase.FINISHED, "all its work is done")
    browser.driver.get(f"{site.open()}/#/jobs/digits-1")
    last = "return Math.max(...[...document.querySelectorAll('.plot')].map((p) => p.data?.[0].x.at(-1) ?? 0))"
    browser.until(lambda: browser.run(last) == 39, "the last step in a chart")


def test_the_form_says_what_is_wrong(site: Site, browser: Browser, tmp_path: Path) -> None:
    browser.expected = ["422 (Unprocessable"]
    site.cluster()
    browser.driver.get(f"{site.open()}/#/ask")
    browser.is_live()
    browser.find("#ask-script").send_keys(str(tmp_path / "missing.py"), Keys.ENTER)
    browser.reads(".verdict", "can not be read: No such file or directory")
    browser.find("#ask-deadline").send_keys("soonish", Keys.ENTER)
    message = "return document.getElementById('ask-deadline').validationMessage"
    browser.until(lambda: "is no time: write 2h" in browser.run(message), "a sentence about the deadline")


def test_a_token_is_asked_for_and_kept_for_the_tab(site: Site, browser: Browser) -> None:
    browser.expected = ["401 (Unauthorized)"]
    site.token_needed = True
    some_jobs(site)
    token = add_user(site.store, User(name="ada", token=""))
    browser.driver.get(site.open())
    browser.reads("dialog[open]", "The server asks who you are")
    browser.keys("wrong", Keys.ENTER)
    browser.reads("dialog[open]", "That token was not accepted")
    browser.keys(token, Keys.ENTER)
    browser.until(lambda: len(browser.all(".jobs tbody tr")) == 4, "four jobs")
    browser.driver.refresh()
    browser.is_live()
    assert not browser.all("dialog")


def test_who_watches_too_often_is_not_told_to_start_the_server(
    site: Site, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser.expected = ["401 (Unauthorized)", "429 (Too Many Requests)"]
    monkeypatch.setattr("concertina.server.streams.MOST_EACH", 0)
    site.token_needed = True
    some_jobs(site)
    token = add_user(site.store, User(name="ada", token=""))
    browser.driver.get(site.open())
    browser.reads("dialog[open]", "The server asks who you are")
    browser.keys(token, Keys.ENTER)
    browser.reads("#trouble", "clients of ada watch already")
    assert browser.text("#trouble") == "0 clients of ada watch already. End some of them."


COUNT_DIALOGS = """
    window.asked = 0;
    const count = (node) => { asked += node.tagName === "DIALOG"; };
    const look = (changes) => changes.forEach((change) => change.addedNodes.forEach(count));
    new MutationObserver(look).observe(document.body, { childList: true });
"""


def test_who_has_no_token_now_is_not_asked_again_and_again(site: Site, browser: Browser) -> None:
    browser.expected = ["401 (Unauthorized)"]
    site.token_needed = True
    some_jobs(site)
    browser.driver.get(site.open())
    browser.reads("dialog[open]", "The server asks who you are")
    browser.run(COUNT_DIALOGS)
    browser.keys(Keys.ESCAPE)
    browser.reads("#trouble", "Press “reconnecting” at the top to give a token.")
    time.sleep(5.0)  # as long as views and the connection take to try again
    assert not browser.all("dialog")
    assert browser.run("return window.asked") == 0, "it went, and did not come again"
    browser.find("#link").click()
    browser.reads("dialog[open]", "The server asks who you are")
    browser.keys(add_user(site.store, User(name="ada", token="")), Keys.ENTER)
    browser.is_live()


def test_the_page_works_without_plotly_and_without_motion_and_in_the_other_theme(site: Site, browser: Browser) -> None:
    browser.expected = ["ERR_BLOCKED_BY_CLIENT"]
    browser.block("*plotly*")
    browser.prefers(color_scheme="light", reduced_motion="reduce")
    some_jobs(site)
    browser.driver.get(site.open())
    browser.reads("figure .note", "plotly is missing")
    browser.until(lambda: browser.all(".pleats .open"), "open pleats")
    assert browser.run("return getComputedStyle(document.querySelector('.pleats i')).transitionDuration") in (
        "0s",
        "0s, 0s, 0s",
    )
    theme = "return [document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor]"
    before = browser.run(theme)
    browser.find("#theme").click()
    browser.driver.refresh()
    assert (before[0], browser.run(theme)[0]) == ("light", "dark")
    assert before[1] != browser.run(theme)[1]
