"""Write each method's tables into its page, from the class itself: `make docs`."""

import re
from pathlib import Path

from fedcir.algorithms import algorithm_class
from fedcir.describe import describe, travels
from fedcir.report.tables import markdown

PAGES = Path(__file__).parent / "methods"
BETWEEN = re.compile(r"(<!-- (fields|travels): (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """A page with every table made anew."""
    makers = {"fields": fields_table, "travels": travels_table}
    return BETWEEN.sub(lambda match: f"{match[1]}{makers[match[2]](match[3])}{match[4]}", text)


def fields_table(name: str) -> str:
    fields = describe(algorithm_class(name))["fields"]
    rows = [["field", "default", "meaning"]] + [[f"`{f['name']}`", f"{f['default']}", f["doc"]] for f in fields]
    return markdown(rows).replace("---:", "---") if fields else "None.\n"


def travels_table(name: str) -> str:
    moved = travels(algorithm_class(name)())
    rows = [["", "group", "bytes"]]
    for way, groups in moved.items():
        rows += [[way, group, f"{size:,}"] for group, size in groups.items()]
    return markdown(rows) if len(rows) > 1 else "Nothing: the data themselves do.\n"


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
