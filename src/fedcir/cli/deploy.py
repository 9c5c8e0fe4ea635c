"""`fedcir deploy`: the same runs across machines, on Flower."""

import sys
from pathlib import Path

from fedcir.cli import options as cli
from fedcir.cli.application import App, Interrupted, print_note
from fedcir.cli.options import Options, argument, flag, option, output, take_options
from fedcir.cli.run import describe_continuation, follow_rounds, print_run
from fedcir.config import ConfigRequest
from fedcir.errors import InputError

deploy = App("Train across machines with Flower.")


@take_options()
def local(
    algorithm: str | None = cli.ALGORITHM,
    seed: int | None = cli.SEED,
    sites: int | None = option("Number of SuperNodes; one per client by default."),
    timeout: float | None = option("Seconds that a site may take to answer in a round; 3600 by default."),
    from_round: int | None = cli.FROM_ROUND,
    trust_code: bool = cli.TRUST_CODE,
    *,
    options: Options,
) -> None:
    """Try a deployment on this machine. Starts a SuperLink and a SuperNode per client, with TLS and authentication."""
    _require_flower()
    from fedcir.cli.progress import Meter
    from fedcir.flower.local_federation import run_local_federation
    from fedcir.runs.tracking import open_tracker
    from fedcir.runtime.run_folder import RunFolder
    from fedcir.types import ignore_progress

    if options.profile:
        raise InputError("--profile measures this process, but the sites train in others: use `fedcir run`")
    config, out = options.to_run(algorithm, seed, prefix="flower-", trust_code=trust_code)
    on_note = ignore_progress if options.quiet else print_note
    done = RunFolder(out).finished and options.resume and from_round is None
    if done and RunFolder(out).config().server.rounds == config.server.rounds:
        on_note(f"{out} is already finished, after round {config.server.rounds}")
        with open_tracker(options.track, out, print_note):  # it may not know all of it
            pass
    else:
        with Meter("preparing images", options.quiet) as meter:
            rounds = run_local_federation(config, out, options.resume, sites, timeout, meter.show, on_note, from_round)
            try:
                follow_rounds(rounds, config, options, out, deployed=True)
            except KeyboardInterrupt:
                rounds.close()
                raise Interrupted(describe_continuation("deploy local", config, out)) from None
    print_run(RunFolder(out).summary(), options, out)


@deploy.command()
def certs(
    hosts: list[str] | None = argument("Host names or IP addresses at which sites reach the server.", None),
    out: Path = output("Folder of the files.", Path("certs")),
    days: int = option("Number of days that the server's certificate is valid.", 365),
    renew: bool = flag("--renew", "Give the server a new certificate and key from the same CA."),
) -> None:
    """Create, renew or show certificates. Makes a CA and the server's certificate; every site needs ca.crt."""
    _require_flower()
    from fedcir.flower.certificates import make_certificates, read_certificates, renew_certificate

    if renew:
        paths = renew_certificate(out, hosts or (), days)
        print(f"{paths['server.crt']}, {paths['server.key']} are new: restart what uses them; the old ones are kept")
    elif hosts:
        paths = make_certificates(hosts, out, days)
        print(f"{paths['ca.crt']}: give it to every site")
        print(f"{paths['server.crt']}, {paths['server.key']}: for the server only")
        print(f"{paths['ca.key']}: keep it away from the server; only a renewal needs it")
    for info in read_certificates(out):
        whom = f", for {', '.join(info.hosts)}" if info.hosts else ""
        print(f"{info.path} is valid until {info.end:%Y-%m-%d}{whom}")
        if info.needs_renewal:
            fix = "`fedcir deploy certs --renew`" if info.hosts else "a new CA in another folder"
            print(f"warning: {info.path} ends in {info.days} days: make a new one with {fix}", file=sys.stderr)


@deploy.command()
def check(
    config: Path | None = argument("A TOML file of a run's settings, which --policy must allow.", None),
    superlink: str | None = option("Address of the SuperLink.", metavar="HOST:PORT"),
    root_certificates: Path | None = option("The ca.crt that belongs to the server."),
    key: Path | None = option("The site's private key."),
    data_root: Path | None = option("The site's folder of <class>/<image>."),
    domain: str | None = option("The site's name."),
    policy: Path | None = option("The site's policy.toml."),
    image_size: int | None = option("Image width and height in pixels; 128 by default."),
    quiet: bool = cli.NO_PROGRESS,
) -> None:
    """Check a site before its first run. Tests its data, policy, certificates, key and connection to the server."""
    _require_flower()
    from fedcir.algorithms import resolve_config
    from fedcir.cli.progress import Meter
    from fedcir.flower.site_check import SiteSetup, check_site

    if all(value is None for value in (superlink, root_certificates, key, policy, data_root, domain)):
        raise InputError(
            "nothing to check: give --superlink, --root-certificates, --key, --policy, or --data-root with --domain"
        )
    if config is not None and policy is None:
        raise InputError(f"give --policy, to compare it with the settings of {config}")
    run = None if config is None else resolve_config(ConfigRequest(file=config))
    if run is not None and image_size is None:
        image_size = run.data.image_size
    with Meter("decoding images", quiet) as meter:
        data = ConfigRequest(options={"dataset": "folders", "image_size": image_size}).resolve().data
        setup = SiteSetup(data_root, domain, root_certificates, superlink, key, policy, config, run, data, meter.show)
        failed = []
        for result in check_site(setup):
            meter.close()
            status = {True: "ok", False: "FAILED", None: "not tried"}[result.ok]
            print(f"{result.name:<13} {status:<10} {result.message}", flush=True)
            if result.ok is False:
                failed.append(result.name)
    if failed:
        raise InputError(f"this site is not ready: {', '.join(failed)} failed, see above")


@deploy.command("app")
def app_(folder: Path = argument("Folder to write the app to.")) -> None:
    """Write the Flower app that `flwr run` starts."""
    _require_flower()
    from fedcir.flower.local_federation import write_app

    write_app(folder)
    print(
        f"{folder / 'pyproject.toml'} holds the run's settings; start it with `flwr run {folder} CONNECTION --stream`"
    )


deploy.command()(local)


def _require_flower() -> None:
    try:
        import flwr  # noqa: F401
        import psutil  # noqa: F401
    except ImportError:
        raise InputError("`fedcir deploy` needs Flower: pip install 'fedcir[flower]'") from None
