"""`fedcir init`: a first file of settings for your own images."""

from pathlib import Path
from typing import Annotated

import typer

from fedcir.cli.options import option


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Your images, as DIR/<domain>/<class>/<image>.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File for the settings.")] = Path("fedcir.toml"),
    dataset: Annotated[str, option("dataset")] = "folders",
    force: Annotated[bool, typer.Option("--force", help="Write over an older file.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing.")] = False,
) -> None:
    """Write settings for your own images. Looks at every image, gives a reason for each setting, and trains nothing."""
    from fedcir.cli.progress import Watch
    from fedcir.config import DataConfig, dump_toml
    from fedcir.insight.starter import check_place
    from fedcir.insight.starter import init as look

    check_place(out, DataConfig(dataset, str(folder)), force)
    with Watch(quiet) as watch:
        starter = look(folder, dataset=dataset, on_work=watch.work)
    starter.save(out, force)
    if not quiet:
        for sentence in starter.findings:
            print(sentence)
        print(f"\n{out} says why each of these was chosen:")
        for choice in starter.choices:
            print(f"    {choice.place} = {dump_toml({'is': choice.value}).removeprefix('is = ').rstrip()}")
        print(f"\nNext: `fedcir run {out}`, or `fedcir compare {out}` to see what the choice brings.")
