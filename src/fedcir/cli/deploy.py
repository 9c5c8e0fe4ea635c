"""`fedcir deploy`: the same runs across machines, on Flower."""

import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from fedcir.cli.app import App
from fedcir.cli.interrupt import Interrupted
from fedcir.cli.options import FromRound, Options, TrustCode, option, with_options
from fedcir.cli.run import print_note, print_run

deploy = App("Train across machines with Flower.")


@with_options
def local(
    options: Options,
    algorithm: Annotated[str | None, option("algorithm")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    sites: Annotated[int | None, typer.Option(help="Number of SuperNodes; one per client by default.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that a site may take to answer in a round; 3600 by default.")
    ] = None,
    from_round: FromRound = None,
    trust_code: TrustCode = False,
) -> None:
    """Try a deployment on this machine. Starts a SuperLink and a SuperNode per client, with TLS and authentication."""
    _need_flower()
    from fedcir.cli.progress import Display, Meter
    from fedcir.engine.folder import RunFolder
    from fedcir.engine.trust import names_code
    from fedcir.flower.locally import run_locally
    from fedcir.runs.places import run_name
    from fedcir.runs.tracking import check_tracker, open_track
    from fedcir.types import InputError

    check_tracker(options.track)
    if options.profile:
        raise InputError("--profile measures this process, but the sites train in others: use `fedcir run`")
    config, out = options.to_run(algorithm, seed, prefix="flower-", trust_code=trust_code)
    name = run_name(config)

    def tell(note: str) -> None:
        if not options.quiet:
            print(f"note: {note}", file=sys.stderr)

    done = RunFolder(out).finished and options.resume and from_round is None
    if done and RunFolder(out).config().server.rounds == config.server.rounds:
        tell(f"{out} is already finished, after round {config.server.rounds}")
        with open_track(options.track, out, print_note):  # it may not know all of it
            pass
    else:
        with Meter("preparing images", options.quiet) as meter:
            rounds = run_locally(config, out, options.resume, sites, timeout, meter.show, tell, from_round)
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
                    trust = " --trust-code" if names_code(config) else ""
                    raise Interrupted(
                        f"continue with: fedcir deploy local --resume{trust} --out {quote(str(out))}"
                    ) from None
    print_run(RunFolder(out).summary(), options, out)


@deploy.command()
def certs(
    hosts: Annotated[
        list[str] | None, typer.Argument(help="Host names or IP addresses at which sites reach the server.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the files.")] = Path("certs"),
    days: Annotated[int, typer.Option(help="Number of days that the server's certificate is valid.")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Give the server a new certificate and key from the same CA.")
    ] = False,
) -> None:
    """Create, renew or show certificates. Makes a CA and the server's certificate; every site needs ca.crt."""
    _need_flower()
    from fedcir.flower.certs import make_certificates, renew_certificate, terms

    if renew:
        paths = renew_certificate(out, hosts or (), days)
        print(f"{paths['server.crt']}, {paths['server.key']} are new: restart what uses them; the old ones are kept")
    elif hosts:
        paths = make_certificates(hosts, out, days)
        print(f"{paths['ca.crt']}: give it to every site")
        print(f"{paths['server.crt']}, {paths['server.key']}: for the server only")
        print(f"{paths['ca.key']}: keep it away from the server; only a renewal needs it")
    for each in terms(out):
        whom = f", for {', '.join(each.hosts)}" if each.hosts else ""
        print(f"{each.path} is valid until {each.end:%Y-%m-%d}{whom}")
        if each.soon:
            fix = "`fedcir deploy certs --renew`" if each.hosts else "a new CA in another folder"
            print(f"warning: {each.path} ends in {each.days} days: make a new one with {fix}", file=sys.stderr)


@deploy.command()
def check(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file of a run's settings, which --policy must allow.")
    ] = None,
    superlink: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of the SuperLink.")] = None,
    root_certificates: Annotated[Path | None, typer.Option(help="The ca.crt that belongs to the server.")] = None,
    key: Annotated[Path | None, typer.Option(help="The site's private key.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="The site's folder of <class>/<image>.")] = None,
    domain: Annotated[str | None, typer.Option(help="The site's name.")] = None,
    policy: Annotated[Path | None, typer.Option(help="The site's policy.toml.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Image width and height in pixels; 128 by default.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Check a site before its first run. Tests its data, policy, certificates, key and connection to the server."""
    _need_flower()
    from fedcir.algorithms import asked_config
    from fedcir.cli.progress import Meter
    from fedcir.config import Asked
    from fedcir.flower.site_check import Setup, check_site
    from fedcir.types import InputError

    if all(each is None for each in (superlink, root_certificates, key, policy, data_root, domain)):
        raise InputError(
            "nothing to check: give --superlink, --root-certificates, --key, --policy, or --data-root with --domain"
        )
    if config is not None and policy is None:
        raise InputError(f"give --policy, to compare it with the settings of {config}")
    run = None if config is None else asked_config(Asked(file=config))
    if run is not None and image_size is None:
        image_size = run.data.image_size
    with Meter("decoding images", quiet) as meter:
        data = Asked(options={"dataset": "folders", "image_size": image_size}).config().data
        setup = Setup(data_root, domain, root_certificates, superlink, key, policy, config, run, data, meter.show)
        failed = []
        for finding in check_site(setup):
            meter.close()
            result = {True: "ok", False: "FAILED", None: "not tried"}[finding.ok]
            print(f"{finding.what:<13} {result:<10} {finding.said}", flush=True)
            failed += [finding.what] if finding.ok is False else []
    if failed:
        raise InputError(f"this site is not ready: {', '.join(failed)} failed, see above")


@deploy.command("app")
def app_(folder: Annotated[Path, typer.Argument(help="Folder to write the app to.")]) -> None:
    """Write the Flower app that `flwr run` starts."""
    _need_flower()
    from fedcir.flower.processes import write_app

    write_app(folder)
    print(
        f"{folder / 'pyproject.toml'} holds the run's settings; start it with `flwr run {folder} CONNECTION --stream`"
    )


deploy.command()(local)


def _need_flower() -> None:
    from fedcir.types import InputError

    try:
        import flwr  # noqa: F401
        import psutil  # noqa: F401
    except ImportError:
        raise InputError("`fedcir deploy` needs Flower: pip install 'fedcir[flower]'") from None
