"""Tables and progress bars by rich, with control characters in their texts escaped."""

from typing import IO, Any

from rich.console import Console
from rich.progress import Task, TextColumn
from rich.text import Text

from fedcir.cli.terminal import unescaped
from fedcir.config.display import escape_controls, escape_line


class PlainConsole(Console):
    """A console that styles what it prints, and shows control characters in texts that are given to it."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; what others print while a bar is shown comes here as text too."""
        texts = (Text(escape_controls(each.plain)) if isinstance(each, Text) else each for each in objects)
        super().print(*texts, **options)


def make_console(stream: IO[str], **options: Any) -> Console:
    return PlainConsole(file=unescaped(stream), highlight=False, markup=False, emoji=False, **options)


class PlainColumn(TextColumn):
    """A column of a progress bar whose text is neither markup nor a control sequence."""

    def render(self, task: Task) -> Text:
        return Text(escape_line(self.text_format.format(task=task)))
