"""`fedcir deploy`: the same runs across machines, on Flower."""

import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from fedcir.cli.app import App
from fedcir.cli.interrupt import Interrupted
from fedcir.cli.options import Options, option, with_options
from fedcir.cli.run import print_note, print_run

deploy = App("Train across machines, on Flower.")


@with_options
def local(
    options: Options,
    algorithm: Annotated[str | None, option("algorithm")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    sites: Annotated[int | None, typer.Option(help="Number of SuperNodes; by default one a client.")] = None,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds that sites have to answer in a round. [default: 3600]", show_default=False),
    ] = 3600.0,
) -> None:
    """Try it on this machine. Starts a SuperLink and a SuperNode for each client, with TLS and authentication."""
    _need_flower()
    from fedcir.cli.progress import Display, Meter
    from fedcir.engine.folder import RunFolder
    from fedcir.flower.locally import run_locally
    from fedcir.runs.places import run_name
    from fedcir.runs.tracking import check_tracker, open_track
    from fedcir.types import InputError

    check_tracker(options.track)
    if options.profile:
        raise InputError("--profile looks into this process, but the sites train in others: use `fedcir run`")
    config, out = options.to_run(algorithm, seed, prefix="flower-")
    name = run_name(config)

    def tell(note: str) -> None:
        if not options.quiet:
            print(f"note: {note}", file=sys.stderr)

    if RunFolder(out).finished and options.resume and RunFolder(out).config().server.rounds == config.server.rounds:
        tell(f"{out} is finished already, after round {config.server.rounds}")
        with open_track(options.track, out, print_note):  # it may not know all of it
            pass
    else:
        with Meter("decoding images", options.quiet) as meter:
            rounds = run_locally(config, out, options.resume, sites, timeout, meter.show, tell)
            with (
                Display(options.quiet, every=True) as display,
                open_track(options.track, out, print_note) as track,
            ):
                display.begin(name, config.server.rounds)
                try:
                    for record in rounds:
                        track.round(record)
                        display.show(name, record)
                except KeyboardInterrupt:
                    rounds.close()
                    raise Interrupted(f"continue with: fedcir deploy local --resume --out {quote(str(out))}") from None
    print_run(RunFolder(out).summary(), options, out)


@deploy.command()
def certs(
    hosts: Annotated[list[str], typer.Argument(help="Names or addresses by which sites reach the server.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the files.")] = Path("certs"),
    days: Annotated[int, typer.Option(help="Days that they are valid.")] = 365,
) -> None:
    """Make a CA and the server's certificate. ca.crt is for every site, server.crt and .key for the SuperLink."""
    _need_flower()
    from fedcir.flower.certs import make_certificates

    paths = make_certificates(hosts, out, days)
    print(f"for {', '.join(hosts)}, valid for {days} days:")
    print(f"{paths['ca.crt']}: give it to every site")
    print(f"{paths['server.crt']}, {paths['server.key']}: for the SuperLink alone")


@deploy.command()
def check(
    superlink: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where the server is.")] = None,
    root_certificates: Annotated[Path | None, typer.Option(help="The server's ca.crt.")] = None,
    key: Annotated[Path | None, typer.Option(help="The site's private key.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="The site's <class>/<image>.")] = None,
    domain: Annotated[str | None, typer.Option(help="The site's name.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels of a side; 128 by default.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Check a site before the first run. It tries the data, the certificates, the way to the server and the key."""
    _need_flower()
    from fedcir.cli.progress import Meter
    from fedcir.config import Asked
    from fedcir.flower.site_check import Setup, check_site
    from fedcir.types import InputError

    if all(each is None for each in (superlink, root_certificates, key, data_root, domain)):
        raise InputError(
            "nothing to try: give --superlink, --root-certificates, --key, --data-root with --domain, or some"
        )
    with Meter("decoding images", quiet) as meter:
        data = Asked(options={"dataset": "folders", "image_size": image_size}).config().data
        setup = Setup(data_root, domain, root_certificates, superlink, key, data, meter.show)
        failed = []
        for finding in check_site(setup):
            meter.close()
            result = {True: "ok", False: "FAILED", None: "not tried"}[finding.ok]
            print(f"{finding.what:<13} {result:<10} {finding.said}", flush=True)
            failed += [finding.what] if finding.ok is False else []
    if failed:
        raise InputError(f"this site is not ready: {', '.join(failed)} failed, see above")


@deploy.command("app")
def app_(folder: Annotated[Path, typer.Argument(help="A new folder.")]) -> None:
    """Write the Flower app that `flwr run` takes into a folder."""
    _need_flower()
    from fedcir.flower.processes import write_app

    write_app(folder)
    print(f"{folder / 'pyproject.toml'} names the run's settings; start it by `flwr run {folder} CONNECTION --stream`")


deploy.command()(local)


def _need_flower() -> None:
    from fedcir.types import InputError

    try:
        import flwr  # noqa: F401
        import psutil  # noqa: F401
    except ImportError:
        raise InputError("`fedcir deploy` needs Flower: pip install 'fedcir[flower]'") from None
