"""What is in a dataset's folder, and whether it can be trained on."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fedcir.config import DataConfig
from fedcir.data.cache import OnFile
from fedcir.data.folders import ImageFile
from fedcir.data.pictures import picture_size
from fedcir.data.sources import chosen_files, find


@dataclass(frozen=True)
class Findings:
    """Everything that a look at all files tells."""

    counts: dict[str, Counter[str]]
    """Images by domain and class."""
    classes: list[str]
    published: dict[str, int]
    """Images by domain according to the publication, where there is one."""
    unreadable: list[str]
    duplicates: list[list[str]]
    """Files of equal content, in groups."""
    sizes: Counter[tuple[int, int]]
    """Width and height."""

    @property
    def trainable(self) -> bool:
        return not self.unreadable and len(self.classes) > 1 and not self.one_class

    @property
    def one_class(self) -> list[str]:
        """Domains that hold a single class."""
        return [domain for domain, classes in self.counts.items() if len(classes) == 1]

    @property
    def missing(self) -> dict[str, list[str]]:
        """Classes that a domain lacks."""
        lacking = {domain: [c for c in self.classes if not counts[c]] for domain, counts in self.counts.items()}
        return {domain: classes for domain, classes in lacking.items() if classes}

    @property
    def off(self) -> dict[str, tuple[int, int]]:
        """Domains whose number of images is not the published one: found and published."""
        found = {domain: sum(classes.values()) for domain, classes in self.counts.items()}
        return {d: (found.get(d, 0), n) for d, n in self.published.items() if n and found.get(d, 0) != n}


def check_files(data: DataConfig, on_file: OnFile | None = None) -> Findings:
    """Read every file of a dataset of images."""
    source, root = find(data)
    files = chosen_files(source, root, data)
    counts: dict[str, Counter[str]] = {}
    for file in files:
        counts.setdefault(file.domain, Counter())[file.label] += 1
    looks = _look(root, files, on_file)
    by_content: dict[str, list[str]] = {}
    for file, (digest, _, error) in zip(files, looks, strict=True):
        if error is None:
            by_content.setdefault(digest, []).append(file.name)
    return Findings(
        counts=counts,
        classes=sorted({file.label for file in files}),
        published=dict(source.published.counts) if source.published else {},
        unreadable=[f"{root / file.name}: {error}" for file, (_, _, error) in zip(files, looks, strict=True) if error],
        duplicates=[names for names in by_content.values() if len(names) > 1],
        sizes=Counter(size for _, size, error in looks if error is None),
    )


def _look(
    root: Path, files: Sequence[ImageFile], on_file: OnFile | None
) -> list[tuple[str, tuple[int, int], str | None]]:
    """Each file's hash, size, and what is wrong with it."""

    def look(file: ImageFile) -> tuple[str, tuple[int, int], str | None]:
        try:
            size = picture_size(root / file.name)
            return hashlib.blake2b((root / file.name).read_bytes(), digest_size=16).hexdigest(), size, None
        except Exception as error:  # Pillow raises nearly anything on a damaged file
            return "", (0, 0), f"{type(error).__name__}: {error}"

    looks = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for seen in pool.map(look, files):
            looks.append(seen)
            if on_file is not None:
                on_file(len(looks), len(files))
    return looks
