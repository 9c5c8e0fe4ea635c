"""The split of a site's own: what its folders or the rows of its table are for."""

from collections.abc import Iterator, Sequence

from fedcir.data.pictures.items import Item, Part


def agreed(items: list[Item], many: str = "folders", one: str = "folder") -> tuple[list[Item], tuple[str, ...]]:
    """What each image of a split is for, and what is to be said of it; `many` and `one` are what the split is made of.

    Where there is no test set, the validation images are tested on: they were held back by someone who knew the
    images, and a share that is drawn from the others might show the same patient or scene as these.
    """
    parts: dict[str, set[Part | None]] = {}
    for item in items:
        parts.setdefault(item.domain, set()).add(item.part)
    if not any(part for has in parts.values() for part in has):
        return items, ()
    tested = {domain for domain, has in parts.items() if has == {"train", "validation"}}
    items = [i._replace(part="test") if i.domain in tested and i.part == "validation" else i for i in items]
    return items, tuple(_notes(parts, many, one))


def _notes(parts: dict[str, set[Part | None]], many: str, one: str) -> Iterator[str]:
    for has, said in (
        ({"train", "test"}, f"the {many} train and test are used as the split"),
        (
            {"train", "validation", "test"},
            f"the {many} train, val and test are used as the split; the best round is picked on val",
        ),
        (
            {"train", "validation"},
            f"the {many} train and val are used as the split; there is no {one} test, so val is tested on",
        ),
        ({None}, f"there are no {many} train and test, so test images are drawn at random"),
    ):
        domains = [domain for domain, there in parts.items() if there == has]
        if domains:
            yield f"{'all domains' if len(domains) == len(parts) > 1 else some(domains)}: {said}"


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
