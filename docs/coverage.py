"""Write docs/coverage.md from coverage's JSON report: `make coverage`."""

import json
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "coverage.md"
BEGIN, END = "<!-- coverage -->\n", "<!-- /coverage -->"


def format_ranges(lines: list[int]) -> str:
    """Format line numbers: [1, 2, 3, 7] becomes "1-3, 7"."""
    ranges: list[list[int]] = []
    for line in lines:
        if ranges and line == ranges[-1][1] + 1:
            ranges[-1][1] = line
        else:
            ranges.append([line, line])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def coverage_table(report: dict) -> str:
    """Total coverage, and the modules with lines or branches that no test reached, least covered first."""
    totals = report["totals"]
    rows = [["module", "covered", "lines not reached", "branches not taken"]]
    files = sorted(report["files"].items(), key=lambda item: item[1]["summary"]["percent_covered"])
    for path, file in files:
        if file["summary"]["percent_covered"] < 100:
            module = path.split("src/fedcir/")[-1]
            missing = format_ranges(file["missing_lines"])
            branches = str(file["summary"]["missing_branches"])
            rows.append([f"`{module}`", f"{file['summary']['percent_covered']:.0f} %", missing, branches])
    total = (
        f"{totals['percent_covered']:.1f} % of {totals['num_statements']:,} statements and "
        f"{totals['num_branches']:,} branches.\n\n"
    )
    lines = [f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
    return total + "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = coverage_table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")
