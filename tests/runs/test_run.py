"""A run read from its folder: numbers to plot, rows for a table, and the trained network."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

import fedcir as package
from fedcir.algorithms import find_algorithm, list_algorithms
from fedcir.analysis import diagnose_run, verdict
from fedcir.config import Config
from fedcir.data.federation import open_federation
from fedcir.errors import InputError
from fedcir.reporting.run_report import write_report as report
from fedcir.runs.reader import Run, check_same_data, load_run
from kinds import mark_others_slow

Tiny = Callable[..., Config]
Train = Callable[..., Path]
Fedcir = Callable[..., Any]

LINEAR = """
from dataclasses import dataclass

from torch import nn

from fedcir import Algorithm


@dataclass(frozen=True)
class Linear(Algorithm):
    scale: float = 1.0

    def build(self, builder):
        return {"model": nn.Sequential(nn.Flatten(), nn.Linear(192, builder.num_classes))}

    def predict(self, modules, x, ctx):
        return self.scale * modules["model"](x)
"""


PERSONAL = """
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from fedcir import Algorithm, Losses


@dataclass(frozen=True)
class Personal(Algorithm):
    trains = ("model", "shared")
    keeps = ("own",)

    def build(self, builder):
        heads = {name: nn.Linear(builder.num_classes, builder.num_classes) for name in ("shared", "own")}
        return {"model": builder.classifier(), **heads}

    def predict(self, modules, x, ctx):
        return modules["own"](modules["shared"](modules["model"](x)))

    def local_loss(self, modules, x, y, ctx):
        loss = F.cross_entropy(self.predict(modules, x, ctx), y)
        return Losses(loss, {"ce": loss})
"""


@pytest.fixture(scope="module")
def done(tiny: Tiny, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny("fedcir", "server.eval_every=2"), tmp_path_factory.mktemp("runs") / "fedcir")


@pytest.fixture
def foreign(tiny: Tiny, train: Train, tmp_path: Path) -> Path:
    """A run of a method of its author's own, whose network is none of ours."""
    (tmp_path / "linear.py").write_text(LINEAR)
    return train(tiny(str(tmp_path / "linear.py"), "algorithm.scale=2.0"), tmp_path / "linear")


def test_a_run_holds_what_its_folder_holds(done: Path) -> None:
    run = package.load_run(str(done))
    assert isinstance(run, package.Run)
    assert (run.path, run.finished, [record.round for record in run.records]) == (done, True, [1, 2, 3])
    assert run.config.algorithm.name == "fedcir"
    assert {**(run.summary or {}), "checksum": ANY} == json.loads((done / "summary.json").read_text())
    assert {**run.manifest, "checksum": ANY} == json.loads((done / "manifest.json").read_text())
    assert run.final["accuracy_mean"] == run.records[-1].accuracy_mean
    assert (run.card["classes"], run.card["channels"], run.card["model"]["width"]) == (["0", "1", "2"], 3, 2)


def test_a_run_is_read_once(done: Path, tmp_path: Path) -> None:
    run = load_run(shutil.copytree(done, tmp_path / "run"))
    assert run.card
    shutil.rmtree(run.path)
    assert run.curve("accuracy_mean")[0] == [2, 3]
    assert run.final["round"] == 3
    assert run.card["classes"] == ["0", "1", "2"]


def test_a_run_under_way_has_its_rounds_and_no_summary(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    run = load_run(train(tiny("fedavg"), tmp_path / "run", until=2))
    assert (run.finished, run.summary, run.curve("round")) == (False, None, ([1, 2], [1, 2]))
    with pytest.raises(InputError, match="holds no finished run: resume it to finish it"):
        _ = run.final
    with pytest.raises(InputError, match=r"model.safetensors: No such file or directory; resume the run"):
        run.model()


def test_a_run_before_its_first_round_has_empty_curves(tmp_path: Path) -> None:
    run = Run(tmp_path, Config(), {}, (), None)
    assert (run.to_rows(), run.curve("accuracy_mean"), run.curve("losses/ce")) == ([], ([], []), ([], []))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.toml", None, "is not a run: it holds no config.toml"),
        ("manifest.json", "{", "manifest.json: .*; restore the file"),
        ("rounds.jsonl", "{}\n", "line 1 of .*rounds.jsonl"),
        ("summary.json", "[]", "summary.json: .*; delete summary.json there"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(
    done: Path, tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    copy = shutil.copytree(done, tmp_path / "run")
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_text(content)
    with pytest.raises(InputError, match=words) as error:
        load_run(copy)
    assert "\n" not in str(error.value)


def test_a_curve_plots_in_one_line(done: Path) -> None:
    from matplotlib.figure import Figure

    run = load_run(done)
    (line,) = Figure().subplots().plot(*run.curve("accuracy_mean"))
    assert line.get_xydata().tolist() == [
        [r.round, r.accuracy_mean] for r in run.records if r.accuracy_mean is not None
    ]


def test_a_curve_is_of_any_number_of_a_round(done: Path) -> None:
    run = load_run(done)
    tested = [record for record in run.records if record.accuracy is not None]
    assert run.curve("bytes_up") == ([1, 2, 3], [record.bytes_up for record in run.records])
    assert run.curve("losses/total") == ([1, 2, 3], [record.losses["total"] for record in run.records])
    assert run.curve("accuracy/ink") == ([2, 3], [(record.accuracy or {})["ink"] for record in tested])
    assert run.curve("risk_mean") == ([2, 3], [record.risk_mean for record in tested])
    assert run.curve("losses/align")[0] == [2, 3]  # there is no generator in round 1
    assert run.curve("accuracy_unseen") == ([], [])


def test_a_curve_of_an_unknown_name_gets_the_nearest(done: Path) -> None:
    with pytest.raises(InputError, match=r"no number 'acuracy/ink' in the rounds of .*did you mean 'accuracy/ink'\?"):
        load_run(done).curve("acuracy/ink")


def test_rows_make_a_data_frame(done: Path) -> None:
    pandas = pytest.importorskip("pandas")
    run = load_run(done)
    table = pandas.DataFrame(run.to_rows())
    assert list(table["round"]) == [1, 2, 3]
    assert table["accuracy_mean"].isna().tolist() == [True, False, False]
    assert table["accuracy/ink"][2] == run.final["accuracy"]["ink"]
    assert set(table.dtypes.astype(str)) <= {"int64", "float64", "object"}
    assert not any(isinstance(value, dict | list) for row in run.to_rows() for value in row.values())
    assert json.loads(json.dumps(run.to_rows())) == run.to_rows()


@pytest.mark.parametrize(
    "name", mark_others_slow([name for name in list_algorithms() if find_algorithm(name)().one_model])
)
def test_the_model_of_every_method_predicts_as_the_run_was_tested(
    tiny: Tiny, train: Train, tmp_path: Path, name: str
) -> None:
    config = tiny(name, "server.rounds=1")
    run = load_run(train(config, tmp_path / name))
    federation = open_federation(config)
    for number, domain in federation.evaluators.items():
        model = run.model(domain=domain)
        assert not model.training
        test = federation.clients[number].test
        assert test is not None
        x, y = test.batch(torch.arange(len(test)).numpy(), torch.device("cpu"), torch.contiguous_format)
        with torch.inference_mode():
            assert float((model(x).argmax(-1) == y).float().mean()) == pytest.approx(run.final["accuracy"][domain])


def test_a_model_needs_neither_the_data_nor_the_weights_that_it_started_from(done: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(done, tmp_path / "run")
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(re.sub(r"root = .*", 'root = "/nowhere"', text))
    own = load_run(copy).model().state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in load_file(done / "model.safetensors").items())


def test_a_model_whose_statistics_are_with_the_sites_is_refused(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    run = load_run(train(tiny("fedavg", "model.norm=batch", "model.batchnorm=local"), tmp_path / "run"))
    with pytest.raises(InputError, match=r"with model.batchnorm=local each client keeps its own, as in .*domain='ink'"):
        run.model()
    with pytest.raises(InputError, match=r"no domain 'inc' in .*; did you mean 'ink'"):
        run.model(domain="inc")
    ink, pen = (run.model(domain=domain).state_dict()["encoder.norms.0.running_mean"] for domain in ("ink", "pen"))
    assert not torch.equal(ink, pen)


def test_the_model_of_ones_own_method_takes_the_method(foreign: Path, tmp_path: Path) -> None:
    run = load_run(foreign)
    with pytest.raises(InputError, match=r"was trained by .*linear.py, which is not part of fedcir: pass it, as in"):
        run.model()
    model = run.model(algorithm=tmp_path / "linear.py")
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 3)
    with pytest.raises(InputError, match="does not belong to this run: model/"):
        run.model(algorithm=package.FedAvg())


@pytest.mark.parametrize("method", ["fedavg", "fedcir", package.Moon(projection=7)], ids=str)
def test_the_model_of_ones_own_encoder_takes_an_encoder(tmp_path: Path, method: Any) -> None:
    inputs, labels = torch.randn(12, 4), torch.arange(12) % 3
    encoder = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU())
    site = (TensorDataset(inputs, labels),) * 2
    few: dict[str, Any] = {"rounds": 1, "local_steps": 1, "workers": 1, "latent": 6}
    result = package.train([site] * 2, encoder=encoder, num_classes=3, algorithm=method, out=tmp_path / "own", **few)
    run = load_run(tmp_path / "own")
    with pytest.raises(InputError, match=r"was trained by fedcir.train with its caller's encoder: pass one like it"):
        run.model()
    torch.testing.assert_close(run.model(encoder=encoder)(inputs), result.model(inputs))
    with pytest.raises(InputError, match="does not belong to this run"):
        run.model(encoder=torch.nn.Linear(4, 5, bias=False))


def test_a_run_of_fedbn_is_diagnosed_with_the_layers_that_each_domain_was_tested_with(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    run = load_run(train(tiny("fedbn"), tmp_path / "run"))
    assert run.records[-1].risk is not None
    result = {view.domain: view.losses.mean() for view in diagnose_run(run).predictions}
    assert result == pytest.approx(run.records[-1].risk, rel=1e-5)
    shutil.rmtree(tmp_path / "run" / "clients")  # as after a run across sites
    with pytest.raises(InputError, match=r"with fedbn each client keeps its own$"):
        diagnose_run(run)


def test_a_run_is_diagnosed_under_the_predictor_that_it_was_tested_with(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    noisy = ("algorithm.eval_samples=1", "algorithm.sigma_init=20.0")
    run = load_run(train(tiny("fedcir", *noisy), tmp_path / "run"))
    last = run.records[-1]
    views = {view.domain: view for view in diagnose_run(run).predictions}
    assert {name: view.accuracy for name, view in views.items()} == last.accuracy
    assert last.risk is not None
    assert {name: view.losses.mean() for name, view in views.items()} == pytest.approx(last.risk, rel=1e-5)
    means = {view.domain: view.losses.mean() for view in diagnose_run(_without_samples(run)).predictions}
    assert means != pytest.approx(last.risk, rel=0.01)  # the noise makes a difference


def _without_samples(run: Run) -> Path:
    text = (run.path / "config.toml").read_text()
    text = re.sub("checksum = .*\n", "", text)  # as in runs of before there was one
    (run.path / "config.toml").write_text(text.replace("eval_samples = 1", "eval_samples = 0"))
    return run.path


def test_all_that_a_method_predicts_by_takes_part_in_its_diagnosis(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    (tmp_path / "personal.py").write_text(PERSONAL)
    run = load_run(train(tiny(str(tmp_path / "personal.py"), "local.lr=0.1"), tmp_path / "run"), trust_code=True)
    result = diagnose_run(run)
    last = run.records[-1]
    assert result.measured
    assert last.risk is not None
    assert {view.domain: view.losses.mean() for view in result.predictions} == pytest.approx(last.risk, rel=1e-5)
    shutil.rmtree(run.path / "checkpoint")
    with pytest.raises(InputError, match="checkpoint lacks shared, which the run needs to predict; restore the file"):
        diagnose_run(run)


def test_a_network_without_an_encoder_has_a_note_instead_of_distances(foreign: Path) -> None:
    run = load_run(foreign)
    result = diagnose_run(foreign, trust_code=True)
    assert {view.domain: view.accuracy for view in result.predictions} == run.final["accuracy"]
    assert result.confusion("ink").sum() == 12
    assert not result.measured
    assert result.all_notes == (
        "no distances for linear: its network has no part `encoder` that returns (batch, features)",
    )
    assert verdict(result)[-1].startswith("The model is least accurate on ")
    assert verdict(result, result)[-1].startswith("Mean accuracy went from ")


@pytest.mark.slow
def test_diagnose_and_report_work_on_a_network_without_an_encoder(
    fedcir: Fedcir, foreign: Path, tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    plain = train(tiny("fedavg"), tmp_path / "fedavg")
    output = fedcir("diagnose", "--trust-code", plain, foreign, "-o", tmp_path / "x.png")
    assert (output.code, output.err) == (0, "")
    assert "note: no distances for linear: its network has no part `encoder`" in output.out
    assert output.out.count("share of each class that is classified correctly") == 2
    (alone,) = json.loads(fedcir("diagnose", "--trust-code", foreign, "--json", "-o", tmp_path / "y.png").out)
    assert (alone["pad"], alone["mean_pair"], alone["bound"]) == (None, None, None)
    assert alone["confusion"].keys() == {"ink", "pen", "wax"}
    (note,) = report([foreign], tmp_path / "alone.html", trust_code=True)
    assert note == "distances not measured: its network has no part `encoder` that returns (batch, features)"
    (note,) = report([plain, foreign], tmp_path / "both.html", trust_code=True)
    assert note.startswith("distances not measured for linear: its network has no part `encoder`")
    page = (tmp_path / "both.html").read_text()
    assert "linear: accuracy by class and domain" in page
    assert "Not measured for linear: its network has no part" in page


def test_a_network_of_ones_own_with_an_encoder_is_measured(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    parts = "OrderedDict(encoder=nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), top=nn.Linear(4, builder.num_classes))"
    text = LINEAR.replace("nn.Flatten(), nn.Linear(192, builder.num_classes)", parts)
    (tmp_path / "named.py").write_text("from collections import OrderedDict\n" + text)
    result = diagnose_run(train(tiny(str(tmp_path / "named.py")), tmp_path / "run"), trust_code=True)
    assert result.measured
    assert result.predictions[0].z.shape == (12, 4)


def test_one_rule_says_what_the_same_data_are(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    one, other = (load_run(train(tiny("fedavg", f"run.seed={seed}"), tmp_path / f"{seed}")) for seed in (0, 1))
    check_same_data([one, other])
    check_same_data([one, other], clients=True)  # without a draw, seeds make no difference to who holds what
    apart = load_run(train(tiny("fedavg", "partition.clients=6", "partition.scheme=dirichlet"), tmp_path / "six"))
    check_same_data([one, apart])
    with pytest.raises(InputError, match="ran with different clients or seeds: look at each alone"):
        check_same_data([one, apart], clients=True)


def test_with_all_data_in_one_place_a_round_takes_the_steps_of_all_clients(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    one, all_ = (load_run(train(tiny(name, "server.rounds=1"), tmp_path / name)) for name in ("centralized", "fedavg"))
    assert one.curve("flops") == all_.curve("flops")
    assert one.config.server.active == 3
