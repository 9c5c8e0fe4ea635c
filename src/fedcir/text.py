"""Text for people: quantities with units, lists of names, and escapes for terminals, Markdown and spreadsheets."""

import contextlib
import re
from collections.abc import Sequence

from fedcir.errors import replace_unprintable

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tabs and line ends, marks that turn the direction of text, and halves of characters."""


def to_one_line(text: object, most: int | None = None) -> str:
    """Put any text, or the message of an exception, on one printable line of at most `most` characters."""
    line = " ".join(replace_unprintable(str(text)).split())
    return line if most is None or len(line) <= most else f"{line[: most - 3]}..."


def describe_error(error: BaseException, most: int | None = None) -> str:
    """Return the type and the message of an exception on one line."""
    return to_one_line(f"{type(error).__name__}: {error}".removesuffix(": "), most)


def join_names(names: Sequence[str], most: int = 5) -> str:
    """Join names, the first `most` of them, and say how many more there are."""
    listed = ", ".join(names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


def escape_controls(text: str) -> str:
    """Escape control characters as JSON does, such as \\u001b, so that escaped JSON stays the same JSON."""
    return CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def escape_line(text: str) -> str:
    """Escape control characters and line breaks, for a text that must stay on its line."""
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")


def escape_markdown(text: str) -> str:
    """Escape text for Markdown, so that it is neither HTML nor a link nor the border of a table's cell."""
    plain = re.sub(r"([\\`\[\]|])", r"\\\1", escape_line(text))
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def format_code(text: str) -> str:
    """Format text as Markdown code, whatever backticks it contains."""
    plain = escape_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    return f"`{plain}`" if fence == "`" else f"{fence} {plain} {fence}"


PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def format_bytes(count: float, unit: str = "B") -> str:
    """Format a number of bytes, such as 105 MB."""
    factor, name = choose_unit(count, unit)
    return f"{count / factor:.3g} {name}"


def format_flops(count: float) -> str:
    """Format a number of floating-point operations, such as 3.2 TFLOPs."""
    return format_bytes(count, "FLOPs")


def format_duration(seconds: float) -> str:
    """Format seconds in their two largest units, such as 2 min 10 s."""
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    for large, small, name, rest in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= large:
            count, remainder = divmod(whole, large)
            remainder //= small
            return f"{count} {name} {remainder} {rest}" if remainder else f"{count} {name}"
    return f"{whole} s"


def choose_unit(most: float, unit: str) -> tuple[float, str]:
    """Choose the divisor and the name of the unit of an axis that ends at `most`."""
    factor, prefix = next((pair for pair in PREFIXES if float(f"{most:.3g}") >= pair[0]), PREFIXES[-1])
    return factor, f"{prefix}{unit}"


def choose_time_unit(longest: float) -> tuple[float, str]:
    """Choose the divisor and the name of the unit of an axis of seconds."""
    units = ((3600.0, "hours"), (60.0, "minutes"))
    return next((unit for unit in units if longest >= 2 * unit[0]), (1.0, "seconds"))


_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def escape_cell(cell: str) -> str:
    """Escape a cell of a CSV file that a spreadsheet would run as a formula; numbers stay as they are."""
    with contextlib.suppress(ValueError):
        float(cell)
        return cell
    return f"'{cell}" if _FORMULA.match(cell) else cell


def unescape_cell(cell: str) -> str:
    """Undo `escape_cell`."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
