"""Which runs belong together, under which names, and which do not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedcir.config import Config
from fedcir.errors import InputError
from fedcir.reporting.sections import describe_privacy, open_study, shareable_settings
from fedcir.runs.reader import Run, load_run

Tiny = Callable[..., Config]
Train = Callable[..., Path]


@pytest.fixture
def run(tiny: Tiny, train: Train, tmp_path: Path) -> Callable[..., Run]:
    def make(name: str, *settings: str, **more: Any) -> Run:
        number = len(list(tmp_path.iterdir()))
        return load_run(train(tiny(name, "server.rounds=1", *settings), tmp_path / f"{number}", **more))

    return make


def test_runs_are_by_method_and_seed_and_fedavg_is_the_baseline(run: Callable[..., Run]) -> None:
    runs = [run("fedcir"), run("fedcir", "run.seed=3"), run("fedavg", "run.seed=3")]
    study = open_study(runs)
    assert [(name, list(by_seed)) for name, by_seed in study.runs.items()] == [("fedavg", [3]), ("fedcir", [0, 3])]
    assert (study.baseline, study.common_seed, study.seeds) == ("fedavg", 3, [0, 3])
    assert study.one_of_each["fedcir"] is runs[1]
    assert study.notes == ()


def test_methods_are_in_the_papers_order_and_ones_own_follow_by_name(run: Callable[..., Run], tmp_path: Path) -> None:
    for name in ("Zeta", "Alpha"):
        text = f'"""{name}: the mean."""\nfrom fedcir import FedAvg\nclass {name}(FedAvg):\n    """Mine."""\n'
        (tmp_path / f"{name.lower()}.py").write_text(text)
    runs = [run(f"{tmp_path}/zeta.py"), run("fedcir"), run(f"{tmp_path}/alpha.py"), run("fedavg")]
    assert list(open_study(runs).runs) == ["fedavg", "fedcir", "alpha", "zeta"]


def test_runs_of_one_method_are_told_apart_by_what_differs(run: Callable[..., Run]) -> None:
    runs = [run("fedcir"), run("fedcir", "algorithm.lambda_reg=2.0"), run("fedavg")]
    assert list(open_study(runs).runs) == ["fedavg", "fedcir lambda_reg=0.5", "fedcir lambda_reg=2.0"]


def test_runs_that_differ_in_more_than_the_method_are_said_to(run: Callable[..., Run]) -> None:
    (note,) = open_study([run("fedcir"), run("fedavg", "local.lr=0.5")]).notes
    assert note == "these runs differ not only in the method, but also in local.lr"


def test_workers_and_places_make_no_difference(run: Callable[..., Run]) -> None:
    study = open_study([run("fedavg", "run.workers=1"), run("fedavg", "run.workers=2", "run.seed=1")])
    assert list(study.runs) == ["fedavg"]


def test_the_same_run_twice_is_refused(run: Callable[..., Run]) -> None:
    with pytest.raises(InputError, match="are both fedavg with seed 0: leave one out"):
        open_study([run("fedavg"), run("fedavg")])


def test_what_is_not_finished_is_left_out_and_said(run: Callable[..., Run]) -> None:
    half = run("fedcir", "server.rounds=3", until=1)
    message = f"left out: {half.path} holds no finished run: resume it to finish it"
    assert open_study([run("fedavg"), half]).notes == (message,)
    with pytest.raises(InputError, match="holds no finished run: resume it to finish it"):
        open_study([half])


def test_the_baseline_is_a_federated_method_where_there_is_one(run: Callable[..., Run]) -> None:
    assert open_study([run("centralized"), run("fedcir")]).baseline == "fedcir"
    assert open_study([run("centralized")]).baseline == "centralized"


def test_runs_on_other_data_are_refused(
    run: Callable[..., Run], write_domain: Callable[..., Path], tmp_path: Path
) -> None:
    first = run("fedavg")
    other = tmp_path / "other"
    other.mkdir()
    for name, seed in (("ink", 5), ("pen", 6)):
        write_domain(other / f"{name}.npz", seed=seed)
    with pytest.raises(InputError, match="ran on different data: look at each alone"):
        open_study([first, run("fedcir", f"data.root={other}")])


def test_seeds_that_draw_other_training_images_are_on_the_same_data(run: Callable[..., Run]) -> None:
    runs = [run("fedavg", "data.train_per_domain=12", f"run.seed={seed}") for seed in (0, 1)]
    assert runs[0].manifest["content"] != runs[1].manifest["content"]
    assert open_study(runs).seeds == [0, 1]


def test_settings_to_share_hold_names_of_files_and_no_path(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("fedavg", "model.weights=/secret/start.safetensors", "data.lists=/secret/lists")
    message = shareable_settings(Run(tmp_path, config, {}, (), None))
    assert message["model"]["weights"] == "start.safetensors"
    assert message["data"].keys().isdisjoint({"root", "lists"})
    assert "secret" not in repr(message)


def test_a_run_with_noise_says_what_it_tells_of_a_client_at_most(run: Callable[..., Run]) -> None:
    private = run("fedavg", "model.norm=group", "privacy.clip=1", "privacy.noise=1", "run.workers=1")
    assert describe_privacy(open_study([private])) == [
        "The model of fedavg is differentially private: epsilon 4.38 at delta 1e-05, for a whole client (zero-out).",
        "Its noise comes from the run's seed: this is an experiment and protects nobody.",
    ]
    assert describe_privacy(open_study([run("fedavg")])) == []
