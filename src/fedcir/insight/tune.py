"""Which values of its settings suit a method on some data: short runs, judged on validation images only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedcir.algorithms import asked_config, make_algorithm
from fedcir.config import Asked, Between, Config, differing
from fedcir.data.domains import Domains
from fedcir.data.federation import deal, federation_from
from fedcir.data.partition.manifest import manifest_of
from fedcir.data.partition.shares import Share
from fedcir.engine.resume import MAY_DIFFER
from fedcir.engine.simulate import check_run, open_rounds
from fedcir.engine.trust import resumed
from fedcir.insight.attempts import Attempt, Book, Plan
from fedcir.insight.recommend import VALIDATION, without_test_images
from fedcir.insight.search import Proposal, propose, require_optuna
from fedcir.insight.space import Space, as_texts, own_settings, space_of, with_settings
from fedcir.insight.tuned import Tuning
from fedcir.runs.batch import OnNote, OnWork, unheard
from fedcir.runs.places import latest, run_name, unused
from fedcir.types import FedcirError, InputError, RunError

TRIALS = 12
MAY_CHANGE = MAY_DIFFER - {"server.rounds"}
"""Settings that a resume may change: the trials stay comparable."""

OnTrial = Callable[[Attempt], None]
"""Told of every trial that has ended."""


def tune(
    *,
    trials: int | None = None,
    space: Sequence[str] | Mapping[str, str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    preset: str | None = None,
    config: str | Path | None = None,
    set: Sequence[str] | Mapping[str, Any] = (),
    on_work: OnWork = unheard,
    on_note: OnNote = unheard,
    on_trial: OnTrial = unheard,
    **options: Any,
) -> Tuning:
    """Search for good settings of one algorithm, as `fedcir tune` does.

    `options` are those of the command, such as algorithm="fedprox", dataset="pacs", data_root="data/pacs" or rounds=20.
    `space` adds settings to vary or replaces the ranges that the algorithm declares: {"local.lr": "1e-3..1e-1",
    "algorithm.mu": "0.1,0.5,0.9"}. All trials have the same seed, clients and batches. They are judged on validation
    images, a fifth of the training images unless data.val_fraction says otherwise; test images are not looked at.
    The trials go into `out`, a new folder in runs/ if not given; `resume` continues there, also after a kill.
    """
    require_optuna()
    if trials is not None:
        Between(1, 100_000).check("trials", trials)
    asked = Asked.of(options, preset, config, set)
    book = Book(_place(asked, out, resume))
    with book.locked():
        plan, values = _begun(book, asked, space, trials, resume)
        domains, shares = without_test_images(*deal(plan.config, partial(on_work, what="decoding images")))
        data = manifest_of(domains, shares)["hash"]
        if plan.data not in ("", data):
            raise InputError(f"{book.path} was started on other data: choose another folder")
        _check(plan.config, domains, shares)
        book.save(replace(plan, data=data))
        on_note(f"trials are saved in {book.path}")
        done, first, rounds = book.attempts(), own_settings(plan.config, values), plan.config.server.rounds
        while len(done) < plan.trials:
            proposal = propose(done, values, first, plan.config.run.seed, rounds)
            if proposal is None:
                on_note(f"all {len(done)} combinations have been tried")
                break

            def told(round: int, number: int = len(done)) -> None:
                on_work(number * rounds + round, plan.trials * rounds, f"trial {number + 1} of {plan.trials}")

            attempt = _attempt(len(done) + 1, plan.config, proposal, domains, shares, told)
            book.add(attempt)
            done.append(attempt)
            Tuning(book.path, plan.config, values, done).save_best()
            on_trial(attempt)
    tuning = Tuning(book.path, plan.config, values, done)
    if tuning.best is None:
        raise RunError(f"no trial came to an end: {next(each.why for each in done if each.why)}")
    tuning.draw()
    return tuning


def _place(asked: Asked, out: str | Path | None, resume: bool) -> Path:
    if out is not None:
        return Path(out)
    usual = Path("runs", f"tune-{run_name(asked_config(asked))}")
    return latest(usual) if resume else unused(usual)


def _begun(
    book: Book, asked: Asked, space: Sequence[str] | Mapping[str, str], trials: int | None, resume: bool
) -> tuple[Plan, Space]:
    """What to do: as asked, or as it was asked before."""
    if not resume:
        if book.exists:
            raise InputError(f"{book.path} already holds trials: resume them, or choose another folder")
        config = _judged(asked_config(asked))
        values = space_of(config, space)
        return Plan(config, _texts(values), trials or TRIALS, ""), values
    if not book.exists:
        raise InputError(f"{book.path} holds no trials to continue: start without resume")
    saved = book.plan()
    try:
        resumed(saved.config, asked.tables(), book.path, trust_code=False)
    except InputError as error:  # the folder keeps no copy of it
        raise InputError(f"{str(error).partition(': if ')[0]}: if it is yours, name it again") from None
    config = _judged(asked.config_over(saved.config))
    for key, (old, new) in differing(saved.config, config).items():
        if key not in MAY_CHANGE:
            raise InputError(f"{book.path} was started with {key}={old}, not {new}: choose another folder")
    values = space_of(config, {**saved.space, **as_texts(space)})
    for place, text in _texts(values).items():
        if saved.space.get(place) != text:
            raise InputError(
                f"{book.path} was started with the space {place}={saved.space.get(place)}, not {text}: "
                "choose another folder"
            )
    return replace(saved, config=config, trials=trials or saved.trials), values


def _texts(space: Space) -> dict[str, str]:
    return {place: str(values) for place, values in space.items()}


def _judged(config: Config) -> Config:
    """With validation images, which the trials are judged on."""
    return config if config.data.val_fraction else replace(config, data=replace(config.data, val_fraction=VALIDATION))


def _check(config: Config, domains: Domains, shares: Sequence[Share]) -> None:
    """Find what is wrong with the user's settings before anything is saved."""
    check_run(config, make_algorithm(config.algorithm), federation_from(config, domains, shares))


def _attempt(
    number: int,
    config: Config,
    proposal: Proposal,
    domains: Domains,
    shares: Sequence[Share],
    on_round: Callable[[int], None],
) -> Attempt:
    """One trial, to its end or until it is hopeless. Domains hold validation images in the place of test images."""
    tested: list[tuple[int, float, float]] = []
    attempt = Attempt(number, proposal.settings, "done", [], [], None)
    try:
        trying = with_settings(config, proposal.settings)
        federation, algorithm = federation_from(trying, domains, shares), make_algorithm(trying.algorithm)
        with open_rounds(trying, algorithm, federation, None, False) as (_, rounds):
            for record in rounds:
                on_round(record.round)
                if record.accuracy is None or record.accuracy_mean is None:
                    continue
                tested.append((record.round, record.accuracy_mean, min(record.accuracy.values())))
                if proposal.hopeless(record.round, record.accuracy_mean) and record.round < config.server.rounds:
                    attempt = replace(attempt, state="stopped")
                    break
    except FedcirError as error:  # it diverged, or its values do not go together
        attempt = replace(attempt, state="failed", why=str(error))
    return replace(
        attempt,
        rounds=[round for round, _, _ in tested],
        accuracy=[mean for _, mean, _ in tested],
        worst=tested[-1][2] if tested else None,
    )
