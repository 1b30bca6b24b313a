"""The report in a real browser that has no network: plots are drawn, nothing is asked for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from forebay.plan.arithmetic import work, work_fleet
from forebay.plan.report import page_of
from forebay.plan.resolve import read_flags, resolve
from forebay.plan.solve import solve
from forebay.plan.vary import sweep

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
    "--disable-component-update"
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: `make browser` installs it")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = resolve(flags=read_flags({"checkpoint.cadence": "2min"}))
    plan = work(inputs)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(
        page_of(
            plan,
            work_fleet(plan),
            (solve(inputs, "filesystem"),),
            (sweep(inputs, "cadence=1min:60min", points=5),),
        )
    )
    return path


def test_the_report_works_without_a_network(browser: Browser, report: Path) -> None:
    context = browser.new_context(offline=True, viewport={"width": 1200, "height": 900})
    page = context.new_page()
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(report.as_uri())
    page.wait_for_selector(".js-plotly-plot .main-svg")
    assert page.locator(".js-plotly-plot").count() == 4
    for plot in page.locator(".js-plotly-plot").all():
        assert plot.locator("path.js-line").count() >= 4
    assert not errors
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.title() == "llama3-405b on 2,048 nodes of dgx-h100"
    assert page.locator("span.no", has_text="fails").count() == 2
    assert "durable cadence" in page.inner_text("body")
    context.close()


def test_inputs_unfold_and_a_curve_can_be_switched_off(browser: Browser, report: Path) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    row = page.locator("td", has_text="cluster.d2h_pageable")
    assert not row.is_visible()
    page.locator("summary").click()
    assert row.is_visible()
    plot = page.locator(".js-plotly-plot").first
    before = plot.locator("path.js-line").count()
    plot.locator(".legendtoggle").first.click()
    page.wait_for_function(
        "n => document.querySelector('.js-plotly-plot').querySelectorAll('path.js-line').length < n"
        " || document.querySelector('.js-plotly-plot').data[0].visible === 'legendonly'",
        arg=before,
    )
    page.close()


def test_names_that_are_given_are_no_markup(tmp_path: Path, browser: Browser) -> None:
    flags = read_flags({"model.content": "14"})
    inputs = resolve(flags=flags)
    sources = {**inputs.sources, "cluster.d2h": "<img src=x onerror=alert(1)>"}
    from dataclasses import replace

    plan = work(replace(inputs, sources=sources, title="<script>1</script>"))
    path = tmp_path / "report.html"
    path.write_text(page_of(plan, work_fleet(plan)))
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.title() == "<script>1</script>"
    assert page.locator("img").count() == 0
    page.close()
