"""Text from elsewhere, such as names of files, as a terminal or a Markdown page may show it."""

import re

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tabs and line ends, marks that turn the direction of text, and halves of characters."""


def escape_controls(text: str) -> str:
    """Show control characters as JSON writes them, such as \\u001b, so that escaped JSON stays the same JSON."""
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def escape_line(text: str) -> str:
    """The same of a text that must stay within its line."""
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")


def escape_markdown(text: str) -> str:
    """Text in Markdown that is neither HTML nor a link nor the border of a table's cell."""
    plain = re.sub(r"([\\`\[\]|])", r"\\\1", escape_line(text))
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_code(text: str) -> str:
    """Text as Markdown shows code, whatever backticks it holds."""
    plain = escape_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    return f"`{plain}`" if fence == "`" else f"{fence} {plain} {fence}"
