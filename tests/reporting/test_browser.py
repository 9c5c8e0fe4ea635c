"""The page in a real browser: everything is drawn, read off by pointer and keys, toggled, and names are only text."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Open = Callable[..., Any]

WIDTHS = (390, 1440)


@pytest.fixture
def open_page(chromium: Any, page_file: Path) -> Iterator[Open]:
    """The report at a width; whatever the browser complains of or asks for is an error at the end."""
    opened = []
    trouble: list[str] = []

    def open_it(width: int = 1440, path: Path = page_file, **settings: Any) -> Any:
        page = chromium.new_page(viewport={"width": width, "height": 900}, **settings)
        page.on("console", lambda message: trouble.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: request.url == path.as_uri() or trouble.append(f"asks for {request.url}"))
        page.goto(path.as_uri())
        # not for a function, which the page's policy refuses
        page.wait_for_selector("figure.chart .plot > svg", state="attached")
        opened.append(page)
        return page

    yield open_it
    for page in opened:
        page.close()
    assert trouble == []


@pytest.mark.parametrize("width", WIDTHS)
def test_every_chart_and_every_choice_is_drawn_and_nothing_is_wider_than_the_screen(
    open_page: Open, width: int
) -> None:
    page = open_page(width)
    figures = page.locator("figure.chart")
    assert figures.count() >= 8
    for figure in figures.all():
        picks = figure.locator("select option").count()
        for pick in range(max(1, picks)):
            if picks:
                figure.locator("select").select_option(index=pick)
            shapes = figure.locator(".plot > svg").locator("polyline, circle, rect, path").count()
            assert shapes > 1, f"{figure.locator('figcaption').inner_text()}, choice {pick}"
            assert figure.locator(".plot > svg").get_attribute("aria-label")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_method_is_toggled_in_every_chart(open_page: Open) -> None:
    page = open_page()
    lines, bars = page.locator("polyline.line"), page.locator("rect.bar")
    before = lines.count(), bars.count()
    button = page.get_by_role("button", name="fedavg", exact=True)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert (lines.count(), bars.count()) == (before[0] // 2, before[1] // 2)
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert (lines.count(), bars.count()) == before


def test_with_no_method_left_the_page_says_so(open_page: Open) -> None:
    page = open_page()
    for name in ("fedavg", "fedcir"):
        page.get_by_role("button", name=name, exact=True).click()
    assert page.get_by_text("No method is selected").count() > 0


def test_curves_are_read_off_by_hovering_and_by_keys(open_page: Open, page_file: Path) -> None:
    page = open_page()
    chart = figure(page_file, "Test accuracy, mean over domains")["choices"][0]
    last = {series["name"]: series["y"][-1] for series in chart["series"]}
    plot = page.locator("figure.chart").first.locator(".plot")
    plot.scroll_into_view_if_needed()
    box = plot.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 100)
    message = plot.locator(".tip").inner_text()
    assert "round 4" in message
    for name, value in last.items():
        assert f"{name}: {value:.2f}".rstrip("0").rstrip(".") in message
    page.mouse.move(0, 0)
    assert not plot.locator(".tip").is_visible()
    plot.locator("svg").focus()
    page.keyboard.press("Home")
    assert "round 1" in page.locator(".live").inner_text()
    page.keyboard.press("ArrowRight")
    assert "round 2" in page.locator(".live").inner_text()
    page.keyboard.press("Escape")
    assert not plot.locator(".tip").is_visible()


def test_a_cell_of_the_distances_is_read_off(open_page: Open, page_file: Path) -> None:
    page = open_page()
    title = "Proxy A-distance between domains"
    value = figure(page_file, title)["choices"][0]["values"][0][1]
    sheet = page.locator("figure.chart").filter(has_text=title).first.locator("svg").first
    sheet.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    message = page.locator(".live").inner_text()
    assert "\"quotes' & {braces}, <img src=x onerror=alert(1)>" in message
    assert float(message.rpartition("value: ")[2]) == pytest.approx(value, abs=1e-3)


def test_the_numbers_behind_a_chart_are_there_as_a_table(open_page: Open) -> None:
    page = open_page()
    numbers = page.locator("figure.chart").first.locator("details.numbers")
    assert numbers.locator("table").count() == 0
    numbers.locator("summary").click()
    numbers.locator("table").wait_for()
    assert numbers.locator("tbody tr").count() == 4
    assert numbers.locator("thead th").all_inner_texts() == ["round", "fedavg", "fedcir"]


@pytest.mark.slow
def test_a_table_that_is_cut_off_says_so_until_it_fits(open_page: Open) -> None:
    page = open_page(390)
    hint = "(box) => getComputedStyle(box.previousElementSibling, '::after').content"
    table = page.locator("main .table").first
    assert table.evaluate("(box) => box.scrollWidth > box.clientWidth")
    assert "Scroll sideways" in table.evaluate(hint)
    table.evaluate("(box) => { box.scrollLeft = 150 }")
    left = table.locator("tbody th").first.bounding_box()["x"]
    assert left == pytest.approx(table.bounding_box()["x"])  # the methods' names stay
    page.emulate_media(media="print")
    assert table.evaluate(hint) == "none"
    page.emulate_media(media="screen")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.locator("main .caption:not([data-more])").first.wait_for()
    assert table.evaluate(hint) == "none"


def test_names_stay_text(open_page: Open, names: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    domains, classes = names
    page = open_page()
    text = page.locator("main").inner_text()
    for name in domains:
        assert name in text
    assert page.locator("main img, main script, main b").count() == 0
    options = " ".join(page.locator("option").all_inner_texts())
    assert domains[0] in options
    drawn = page.locator("svg text").all_text_contents()
    assert all(any(text.startswith(name) for text in drawn) for name in classes)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_an_accessibility_checker_finds_nothing(open_page: Open, scheme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    result = Axe().run(open_page(width, color_scheme=scheme))
    assert result.violations_count == 0, result.generate_report()


def test_light_dark_and_paper_look_different(open_page: Open) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".methods").is_visible()  # the legend
    assert not page.locator(".links").is_visible()
    assert page.pdf().startswith(b"%PDF")


def figure(path: Path, title: str) -> dict[str, Any]:
    """What the page was given to draw."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return next(each for each in json.loads(text)["figures"] if each["title"] == title)
