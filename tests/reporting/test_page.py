"""The page as text: names that cannot break out of it, and what it is made of."""

import json
import re
from html.parser import HTMLParser

from fedcir.reporting.charts import Heatmap, Lines, Series
from fedcir.reporting.page import Figure, Listing, Section, Sentences, Table, assign_colours, render_page

EVIL = "</script><script>alert('1')</script> & \"x\" <img src=x>\u2028"


def evil_page() -> str:
    chart = Lines(EVIL, EVIL, EVIL, (Series(EVIL, (0.0, 1.0), (1.0, 2.0)),), (EVIL, EVIL))
    heat = Heatmap(EVIL, (EVIL,), (EVIL,), ((None,),), 0.0, 1.0)
    blocks = (Sentences((EVIL,)), Table(EVIL, [[EVIL], [EVIL]]), Figure(EVIL, {EVIL: chart, "b": heat}, EVIL, EVIL))
    return render_page(EVIL, EVIL, [Section(EVIL, (*blocks, Listing(EVIL, EVIL)))], [EVIL])


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)


def test_a_name_makes_no_element() -> None:
    tags = Tags()
    tags.feed(evil_page())
    assert tags.found.count("script") == 2  # the data and the program
    assert "img" not in tags.found


def test_the_data_read_back_as_they_were() -> None:
    (text,) = re.findall(r'id="data">(.*?)</script>', evil_page(), re.DOTALL)
    data = json.loads(text)
    assert data["methods"] == [EVIL]
    (figure,) = data["figures"]
    assert figure["title"] == EVIL
    assert [choice["kind"] for choice in figure["choices"]] == ["lines", "heatmap"]
    assert figure["choices"][0]["series"][0]["name"] == EVIL
    assert figure["choices"][1]["values"] == [[None]]


def test_it_forbids_itself_to_load_anything() -> None:
    made = render_page("t", "l", [], [])
    assert "default-src 'none'" in made
    assert not re.search(r"""(src|href)=["'](?!#)""", made)
    assert "http" not in made.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_numbers_are_kept_to_six_digits() -> None:
    chart = Lines("", "", "", (Series("m", (1 / 3,), (123456.789,)),))
    made = render_page("t", "l", [Section("s", (Figure("f", {"": chart}),))], ["m"])
    assert '"x":[0.333333],"y":[123457.0]' in made


def test_a_method_has_one_colour_in_all_reports_and_no_two_have_the_same() -> None:
    assert assign_colours(["fedavg", "fedcir"]) == [1, 0]
    assert assign_colours(["fedcir"]) == [0]
    assert assign_colours(["mine", "fedavg", "fedcir beta=1", "fedcir beta=2"]) == [2, 1, 0, 3]
