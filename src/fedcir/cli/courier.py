"""`fedcir site`, `fedcir inspect` and `fedcir merge`: FedCiROne by files, without a network."""

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedcir.cli import options as cli
from fedcir.cli.options import argument, option, output, setting, split_names
from fedcir.text import escape_line

if TYPE_CHECKING:
    from fedcir.courier import CourierFile


def site(
    folder: Path = argument("The site's images, as DIR/<class>/<image>.", metavar="DIR"),
    encoder: str = option("Frozen encoder, such as efficientnet-lite0, or a callable (./mine.py:make).", ...),
    federation: str = option("Name of the federation, the same at all sites.", ...),
    out: Path = output("File to write, such as hospital-a.fedcir.", ...),
    site: str | None = option("The site's name. [default: that of the folder]"),
    classes: str | None = option("Classes of the federation, separated by commas. [default: the folders of DIR]"),
    key: Path | None = option("The site's private key, made if there is none. [default: as --out, with .key]"),
    image_size: int | None = setting("image_size"),
    seed: int | None = setting("seed"),
    set: list[str] | None = cli.SET,
    quiet: bool = cli.ONLY_ERRORS,
) -> None:
    """Write a site's message to a signed file. FedCiROne needs one of each site, for `fedcir merge`, and no network."""
    from fedcir.cli.progress import Meter
    from fedcir.courier import make_courier_file

    names = tuple(split_names(classes) or ())
    with Meter("computing features", quiet) as meter:
        file, notes = make_courier_file(
            folder, out, federation=federation, encoder=encoder, site=site, classes=names, key=key,
            image_size=image_size, seed=seed, set=set or (), on_file=meter.show,
        )  # fmt: skip
    if quiet:
        return
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    _print_file(file)


def inspect(file: Path = argument("A courier file.", metavar="FILE"), json: bool = cli.JSON) -> None:
    """Say in words all that a courier file holds. Verifies its signature first."""
    from fedcir.courier import describe_courier_file, read_courier_file

    content = read_courier_file(file)
    if json:
        print(jsonlib.dumps(dict(describe_courier_file(content)), indent=1, ensure_ascii=False))
    else:
        _print_file(content)


def merge(
    files: list[Path] = argument("Courier files, one of each site.", metavar="FILES..."),
    out: Path = output("Folder for the run.", ...),
    encoder: str | None = option("Your copy of the encoder, if it is the sites' own code (./mine.py:make)."),
    trust: list[str] | None = option("Fingerprint of a site's key; may be repeated. Other keys are refused."),
    keys: Path | None = option("File of known keys: a fingerprint and a site's name on each line."),
    set: list[str] | None = cli.SET,
    quiet: bool = cli.ONLY_ERRORS,
) -> None:
    """Make a FedCiROne model from the files of all sites. The result is an ordinary run."""
    from fedcir.courier import merge_courier_files, read_known_keys

    known = {**({} if keys is None else read_known_keys(keys)), **dict.fromkeys(trust or ())}
    merged = merge_courier_files(
        files, out, encoder=encoder, set=set or (), known_keys=known if trust or keys else None
    )
    if quiet:
        return
    for file in merged:
        print(f"{file.signature.fingerprint} {escape_line(file.header.site)}")
    if not (trust or keys):
        print("note: compare these fingerprints with those that the sites see, or name them by --keys", file=sys.stderr)
    images = sum(file.header.train for file in merged)
    print(f"the model of {len(merged)} sites and {images:,} training images is saved in {out}")
    print("note: nothing was tested: `fedcir evaluate` does so on images that you have", file=sys.stderr)


def _print_file(file: "CourierFile") -> None:
    from fedcir.courier import describe_courier_file

    for title, text in describe_courier_file(file):
        print(f"{title:<13} {escape_line(text)}")
