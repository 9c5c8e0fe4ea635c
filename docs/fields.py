"""Write each method's table of fields into its page, from the class itself: `make docs`."""

import re
from pathlib import Path

from fedcir.algorithms import algorithm_class
from fedcir.describe import describe
from fedcir.report.tables import markdown

PAGES = Path(__file__).parent / "methods"
BETWEEN = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- /fields -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """A page with every table of fields made anew."""

    def table(match: re.Match[str]) -> str:
        fields = describe(algorithm_class(match[2]))["fields"]
        rows = [["field", "default", "meaning"]] + [[f"`{f['name']}`", f"{f['default']}", f["doc"]] for f in fields]
        return f"{match[1]}{markdown(rows).replace('---:', '---') if fields else 'None.'}{match[3]}"

    return BETWEEN.sub(table, text)


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
