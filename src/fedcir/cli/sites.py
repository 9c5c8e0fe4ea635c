"""Commands of sites: `fedcir deploy` on Flower; `site`, `inspect` and `merge` by files, without a network."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedcir.cli import options as cli
from fedcir.cli.application import App, Interrupted, print_json, print_note
from fedcir.cli.options import Options, argument, flag, option, output, setting, split_names, take_options
from fedcir.cli.run import describe_continuation, follow_rounds, print_run
from fedcir.config import ConfigRequest
from fedcir.errors import InputError
from fedcir.text import escape_line

if TYPE_CHECKING:
    from fedcir.courier import CourierFile

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
    data_root: Path | None = option("The site's folder of <class>/<image>, or its table."),
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
    if config is not None and policy is None and data_root is None:
        raise InputError(f"give --policy, to compare it with the settings of {config}, or --data-root with --domain")
    run = None if config is None else resolve_config(ConfigRequest(file=config))
    if run is not None and image_size is None:
        image_size = run.data.image_size
    with Meter("decoding images", quiet) as meter:
        data = ConfigRequest(options={"dataset": "folders", "image_size": image_size}).resolve().data
        if run is not None and run.data.name in ("csv", "masks", "table"):
            data = replace(run.data, root=None, table=None)
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
        print_json(dict(describe_courier_file(content)))
    else:
        _print_file(content)


def merge(
    files: list[Path] = argument("Courier files, one of each site.", metavar="FILES..."),
    out: Path = output("Folder for the run.", ...),
    encoder: str | None = option("Your copy of the encoder, if it is the sites' own code (./mine.py:make)."),
    trust: list[str] | None = option("Fingerprint of a site's key; may be repeated. Other keys are refused."),
    keys: Path | None = option("File of known keys: a fingerprint and a site's name on each line."),
    worth: bool = flag("--worth", "Also write the heads of all coalitions of sites, which `fedcir worth` tests."),
    set: list[str] | None = cli.SET,
    quiet: bool = cli.ONLY_ERRORS,
) -> None:
    """Make a FedCiROne model from the files of all sites. The result is an ordinary run."""
    from fedcir.courier import merge_courier_files, read_known_keys

    known = {**({} if keys is None else read_known_keys(keys)), **dict.fromkeys(trust or ())}
    merged = merge_courier_files(
        files, out, encoder=encoder, set=set or (), known_keys=known if trust or keys else None, worth=worth
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
