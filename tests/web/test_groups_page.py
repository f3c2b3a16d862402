"""Groups in the service and in the page: addresses with good and bad requests, and every step in a real browser."""

import io
import threading

import numpy as np
import pytest
from test_page import CHROMIUM, EACH, KINDS, NO_BROWSER, PHONE, Served, Watched, browser, playwright, shoot  # noqa: F401

from nearkin.gallery import Gallery
from nearkin.gallery.schema import UNLABELLED
from nearkin.web import build
from nearkin.web.request_log import request_logger

pytest.importorskip("httpx2", reason="its tests need httpx2")
from starlette.testclient import TestClient


@pytest.fixture
def client(tmp_path):
    draw = np.random.default_rng(0)
    rows = np.repeat(draw.normal(size=(5, 8)), 6, 0) + 0.02 * draw.normal(size=(30, 8))
    with Gallery.open(tmp_path / "g.gallery", dim=8) as gallery:
        gallery.enrol(rows.astype(np.float32), UNLABELLED)
        app = build(gallery, log=request_logger(io.StringIO()), pictures=False)
        with TestClient(app, base_url="http://127.0.0.1") as opened:
            opened.gallery = gallery
            yield opened


def step(client, path, **body):
    answer = client.post(f"/api/groups/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_step_over_http(client):
    empty = client.get("/api/groups").json()
    nothing = {"similarity": None, "total": 0, "ungrouped": 30, "undo": None, "groups": []}
    assert empty == {"version": 0, "scope": "unlabelled"} | nothing
    state = step(client, "propose", version=0, similarity=0.9)
    assert (state["total"], state["ungrouped"], [card["rows"] for card in state["groups"]]) == (5, 0, [6] * 5)
    a, b, c, *_ = (card["group"] for card in state["groups"])
    state = step(client, "merge", version=state["version"], groups=[a, b])
    assert state["groups"][0] == {"group": a, "rows": 12, "ids": client.get(f"/api/groups/{a}").json()["ids"]}
    some = state["groups"][0]["ids"][:4]
    state = step(client, "split", version=state["version"], group=a, ids=some)
    assert sorted(card["rows"] for card in state["groups"]) == [4, 6, 6, 6, 8]
    state = step(client, "name", version=state["version"], group=c, label="heron")
    assert client.get("/api/labels").json()["labels"] == [
        {"label": UNLABELLED, "rows": 24}, {"label": "heron", "rows": 6},
    ]  # fmt: skip
    assert (state["total"], state["undo"]) == (4, "name")
    state = step(client, "undo", version=state["version"])
    assert client.get("/api/labels").json()["labels"] == [{"label": UNLABELLED, "rows": 30}]
    assert [card["group"] for card in client.get("/api/groups?start=1&most=2").json()["groups"]] == [
        card["group"] for card in state["groups"][1:3]
    ]


def test_refusals_are_one_sentence(client):
    state = step(client, "propose", version=0, similarity=0.9)
    group = state["groups"][0]["group"]
    for path, body, status, sentence in [
        ("name", {"version": 0, "group": group, "label": "x"}, 409, "the groups have changed meanwhile"),
        ("name", {"version": 1, "group": 99, "label": "x"}, 404, "there is no group 99"),
        ("name", {"version": 1, "group": group, "label": UNLABELLED}, 422, "label must be a name"),
        ("name", {"version": 1, "group": group}, 422, "label"),
        ("merge", {"version": 1, "groups": [group]}, 422, "groups"),
        ("split", {"version": 1, "group": group, "ids": [1, 2, 3, 4, 5, 6]}, 422, "not all of them"),
        ("split", {"version": 1, "group": group, "ids": [30]}, 422, "must be rows of group"),
        ("undo", {"version": True}, 422, "version"),
        ("propose", {"version": 1, "scope": "some"}, 422, "scope"),
        ("propose", {"version": 1, "similarity": 2}, 422, "similarity"),
        ("propose", {"version": 1, "colour": 2}, 422, "colour"),
    ]:
        answer = client.post(f"/api/groups/{path}", json=body)
        assert answer.status_code == status, (path, body, answer.text)
        assert sentence in answer.json()["error"]
    assert client.get("/api/groups/99").status_code == 404
    assert client.get("/api/groups").json() == state


def test_of_many_browsers_one_names_a_group(client):
    state = step(client, "propose", version=0, similarity=0.9)
    codes = []

    def name(n):
        body = {"version": state["version"], "group": state["groups"][0]["group"], "label": f"label {n}"}
        codes.append(client.post("/api/groups/name", json=body).status_code)

    threads = [threading.Thread(target=name, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200] + [409] * 5


# --- the page


@pytest.fixture
def served(tmp_path):
    made = Served(tmp_path / "served", labels=[UNLABELLED] * KINDS)
    yield made
    made.stop()


def cards(page):
    return page.locator("#groups-list > li")


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
@pytest.mark.slow
def test_group_name_split_merge_and_undo(browser, served, shoot):  # noqa: F811
    expect = playwright.expect
    with Watched(browser, served.address + "#groups") as page:
        page.locator("#groups-propose [type=submit]").click()
        expect(cards(page)).to_have_count(KINDS)
        expect(page.locator("#groups-note")).to_have_text("4 groups")
        expect(page.locator("#groups-list img")).to_have_count(KINDS * EACH)
        shoot(page, "groups")
        card = cards(page).first
        card.locator("input[list]").fill("heron")
        card.locator("[type=submit]").click()
        expect(cards(page)).to_have_count(KINDS - 1)
        assert served.gallery.labels() == {UNLABELLED: (KINDS - 1) * EACH, "heron": EACH}
        page.locator("#groups-undo").click()
        expect(cards(page)).to_have_count(KINDS)
        assert served.gallery.labels() == {UNLABELLED: KINDS * EACH}
        card = cards(page).first
        expect(card.locator(".split")).to_be_disabled()
        for n in (0, 1, 2):
            card.locator(".pick").nth(n).click()
        shoot(page, "groups-chosen")
        card.locator(".split").click()
        expect(cards(page)).to_have_count(KINDS + 1)
        expect(page.locator("#groups-undo")).to_have_text("Undo splitting")
        expect(page.locator("#groups-merge")).to_be_disabled()
        for n in (0, 1):
            cards(page).nth(n).locator("[type=checkbox]").check()
        page.locator("#groups-merge").click()
        expect(cards(page)).to_have_count(KINDS)
        page.locator("#groups-undo").click()
        expect(cards(page)).to_have_count(KINDS + 1)
        page.locator("#groups-undo").click()
        expect(cards(page)).to_have_count(KINDS)
        page.locator("#groups-undo").click()
        expect(cards(page)).to_have_count(0)
        expect(page.locator("#groups-undo")).to_be_disabled()


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
@pytest.mark.slow
def test_a_press_before_the_first_answer_and_an_answer_after_its_time(browser, served):  # noqa: F811
    held, early = [], []

    def hold_the_first(route):
        if held:
            route.continue_()
        else:
            held.append(route)
            early.append(route.fetch())

    def prepared(page):
        page.route("**/api/groups?*", hold_the_first)

    with Watched(browser, served.address + "#groups", prepare=prepared) as page:
        page.locator("#groups-propose [type=submit]").click()
        playwright.expect(cards(page)).to_have_count(KINDS)
        held[0].fulfill(response=early[0])
        page.wait_for_load_state("networkidle")
        playwright.expect(page.locator("#groups-note")).to_have_text("4 groups")
        playwright.expect(cards(page)).to_have_count(KINDS)


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
@pytest.mark.slow
def test_groups_that_another_browser_changed_are_shown_again(browser, served):  # noqa: F811
    expect = playwright.expect
    with Watched(browser, served.address + "#groups") as page:
        page.locator("#groups-propose [type=submit]").click()
        expect(cards(page)).to_have_count(KINDS)
        with Watched(browser, served.address + "#groups") as other:
            expect(cards(other)).to_have_count(KINDS)
            cards(other).first.locator("input[list]").fill("ibis")
            cards(other).first.locator("[type=submit]").click()
            expect(cards(other)).to_have_count(KINDS - 1)
        cards(page).nth(1).locator("input[list]").fill("jay")
        cards(page).nth(1).locator("[type=submit]").click()
        expect(page.locator("#trouble")).to_contain_text("the groups have changed meanwhile")
        expect(cards(page)).to_have_count(KINDS - 1)
        assert "jay" not in served.gallery.labels()


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
@pytest.mark.slow
def test_groups_in_korean_on_a_phone_in_the_dark(browser, served, shoot):  # noqa: F811
    expect = playwright.expect
    with Watched(browser, served.address + "#groups", PHONE, "dark", locale="ko-KR") as page:
        expect(page.locator("#groups h2")).to_have_text("비슷한 항목 묶기")
        page.locator("#groups-propose [type=submit]").click()
        expect(cards(page)).to_have_count(KINDS)
        expect(page.locator("#groups-note")).to_have_text("그룹 4개")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
        expect(page.locator("#groups-list img")).to_have_count(KINDS * EACH)
        shoot(page, "groups-phone")
