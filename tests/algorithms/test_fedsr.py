"""FedSR: a reference r(z|y) that each client learns and keeps to itself."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from fedcir import FedAvg, FedCiR, InputError, Losses
from fedcir.algorithms.fedsr import FedSR
from fedcir.models.builder import NetworkBuilder
from fedcir.models.classifier import Reference
from fedcir.runtime.rounds import run_rounds
from fedcir.runtime.run_folder import RunFolder
from fedcir.server.accounting import sample_cohort
from fedcir.types import LocalContext, Modules

Tiny = Callable[..., Any]
Train = Callable[..., Path]

X, Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
BOTH = {"alpha_l2r": 0.2, "alpha_cmi": 0.1}
KEPT = ("fedsr", "algorithm.alpha_cmi=0.1", "server.active=2", "server.rounds=6", "server.checkpoint_every=2")


@dataclass(frozen=True)
class Probabilistic(FedAvg):
    """The plain probabilistic model, written on its own."""

    def build(self, builder: NetworkBuilder) -> Modules:
        return {"model": builder.gaussian_classifier(FedSR.sigma_init, FedSR.sigma_floor)}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        mu, sigma = modules["model"].encoder(x)
        loss = F.cross_entropy(modules["model"].head(mu + sigma * torch.randn(mu.shape, generator=ctx.rng)), y)
        return Losses(loss, {"ce": loss})


@dataclass(frozen=True)
class Watched(FedSR):
    """Notes the reference that each round begins with."""

    began: ClassVar[dict[int, Tensor]] = {}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        self.began.setdefault(ctx.round, modules["reference"].mean.detach().clone())
        return super().local_loss(modules, x, y, ctx)


def context() -> LocalContext:
    return LocalContext(1, 4, 3, 6, {}, torch.Generator().manual_seed(0))


def built(builder: NetworkBuilder, algorithm: FedSR) -> tuple[Modules, Any, Any, Any]:
    """Networks whose reference has been moved, and the mu, sigma and z of the batch, in double precision."""
    modules = algorithm.build(builder)
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        modules["reference"].mean += torch.randn(3, 6, generator=rng)
        modules["reference"].raw_sigma += torch.randn(3, 6, generator=rng)
        mu, sigma = modules["model"].encoder(X)
    z = mu + sigma * torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    return modules, *(item.double().numpy() for item in (mu, sigma, z))


def kl(mu: Any, sigma: Any, reference: Reference) -> float:
    """The mean over the batch of KL(N(mu, sigma^2) || r(z|y)), summed over z."""
    mean = reference.mean.detach().double().numpy()[Y]
    std = np.log1p(np.exp(reference.raw_sigma.detach().double().numpy()[Y]))  # softplus
    each = np.log(std / sigma) + (sigma**2 + (mu - mean) ** 2) / (2 * std**2) - 0.5
    return float(each.sum(-1).mean())


def test_the_reference_starts_at_mean_0_and_sigma_softplus_of_1() -> None:
    mean, sigma = Reference(3, 4)(torch.tensor([2, 0]))
    assert mean.tolist() == [[0.0] * 4] * 2
    assert sigma.flatten().tolist() == pytest.approx([math.log(1 + math.e)] * 8)


def test_the_reference_of_a_sample_is_that_of_its_class() -> None:
    reference = Reference(3, 1)
    with torch.no_grad():
        reference.mean.copy_(torch.tensor([[1.0], [2.0], [3.0]]))
    assert reference(torch.tensor([2, 0, 2]))[0].flatten().tolist() == [3.0, 1.0, 3.0]


def test_cmi_and_l2r_by_hand_and_their_weighted_total(builder: NetworkBuilder) -> None:
    algorithm = FedSR(**BOTH)
    modules, mu, sigma, z = built(builder, algorithm)
    losses = algorithm.local_loss(modules, X, Y, context())
    cmi, l2r = kl(mu, sigma, modules["reference"]), np.linalg.norm(z, axis=-1).mean()
    assert losses.terms.keys() == {"ce", "l2r", "cmi"}
    assert losses.terms["cmi"].item() == pytest.approx(cmi, rel=1e-5)
    assert losses.terms["l2r"].item() == pytest.approx(l2r, rel=1e-5)
    assert losses.total.item() == pytest.approx(losses.terms["ce"].item() + 0.2 * l2r + 0.1 * cmi, rel=1e-5)


def test_cross_entropy_and_l2r_are_those_of_the_sampled_z_not_of_mu(builder: NetworkBuilder) -> None:
    algorithm = FedSR(**BOTH, sigma_init=3.0)
    modules, mu, _, z = built(builder, algorithm)
    losses = algorithm.local_loss(modules, X, Y, context())
    logits = modules["model"].head(torch.from_numpy(z).float())
    assert losses.terms["ce"].item() == pytest.approx(F.cross_entropy(logits, Y).item(), rel=1e-5)
    assert losses.terms["l2r"].item() != pytest.approx(np.linalg.norm(mu, axis=-1).mean(), rel=1e-2)


def test_squared_penalises_the_squared_length(builder: NetworkBuilder) -> None:
    algorithm = FedSR(**BOTH, squared=True)
    modules, _, _, z = built(builder, algorithm)
    losses = algorithm.local_loss(modules, X, Y, context())
    assert losses.terms["l2r"].item() == pytest.approx((z**2).sum(-1).mean(), rel=1e-5)


@pytest.mark.parametrize("scale", [2.0, -2.0])
def test_scaled_multiplies_z_by_the_scalar_before_the_kl(builder: NetworkBuilder, scale: float) -> None:
    for scaled, factor in ((True, scale), (False, 1.0)):
        algorithm = FedSR(**BOTH, scaled=scaled)
        modules, mu, sigma, _ = built(builder, algorithm)
        with torch.no_grad():
            modules["reference"].scale.fill_(scale)
        losses = algorithm.local_loss(modules, X, Y, context())
        want = kl(factor * mu, abs(factor) * sigma, modules["reference"])
        assert losses.terms["cmi"].item() == pytest.approx(want, rel=1e-5)
        losses.total.backward()
        assert (modules["reference"].scale.grad is not None) == scaled


def test_the_gradient_of_the_cmi_reaches_encoder_and_reference_but_not_the_head(builder: NetworkBuilder) -> None:
    algorithm = FedSR(**BOTH)
    modules, *_ = built(builder, algorithm)
    algorithm.local_loss(modules, X, Y, context()).terms["cmi"].backward()
    touched = {f"{m}.{n}" for m in modules for n, p in modules[m].named_parameters() if p.grad is not None}
    encoder = {f"model.{n}" for n, _ in modules["model"].named_parameters() if not n.startswith("head.")}
    assert touched == encoder | {"reference.mean", "reference.raw_sigma"}


def test_both_weights_at_zero_is_the_plain_probabilistic_model_and_that_of_fedcir(
    trained: Callable[..., Any], same_model: Callable[..., bool]
) -> None:
    plain = trained(Probabilistic())
    assert same_model(trained(FedSR(alpha_l2r=0.0, alpha_cmi=0.0)), plain)
    assert same_model(trained(FedCiR(lambda_reg=0.0, lambda_align=0.0, hidden=8, noise=4)), plain)
    assert not same_model(trained(FedSR(alpha_cmi=0.1)), plain)


def test_a_term_of_weight_zero_is_not_computed(trained: Callable[..., Any]) -> None:
    wanted = {(0.0, 0.0): set(), (0.1, 0.0): {"l2r"}, (0.0, 0.1): {"cmi"}}
    for (l2r, cmi), terms in wanted.items():
        (record,) = trained(FedSR(alpha_l2r=l2r, alpha_cmi=cmi), rounds=1).records
        assert record.losses.keys() == {"ce", "total"} | terms


def test_each_client_learns_a_reference_of_its_own_and_uploads_the_model_only(opened: Callable[..., Any]) -> None:
    session, transport = opened(FedSR(alpha_cmi=0.1))
    replies = list(transport.train(session.state, [0, 1, 2]))
    assert [reply.tensors.keys() for reply in replies] == [{"model"}] * 3
    kept = [transport.store.load(client, 2)["reference"] for client in range(3)]
    for reference in kept:
        assert reference.keys() == {"mean", "raw_sigma", "scale"}
        assert reference["mean"].abs().max() > 1e-4
        assert not torch.equal(reference["raw_sigma"], torch.ones(3, 6))
    assert not any(torch.equal(kept[a]["mean"], kept[b]["mean"]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_the_reference_is_in_no_state_of_the_server(opened: Callable[..., Any]) -> None:
    session, transport = opened(FedSR(alpha_cmi=0.1))
    for _ in run_rounds(session, transport):
        assert session.state.shared.keys() == {"model"}
        assert session.state.private == {}
    assert not any("reference" in name for name in session.state.shared["model"])


def test_on_disk_the_reference_lies_with_the_clients_and_nowhere_else(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    out = train(tiny("fedsr", "algorithm.alpha_cmi=0.1", "server.rounds=2"), tmp_path / "run")
    for file in out.rglob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
        of_reference = [name for name in names if "reference" in name]
        assert of_reference == (sorted(names) if file.is_relative_to(out / "clients") else []), file
    assert sorted(path.name for path in (out / "clients").iterdir()) == ["0", "1", "2"]


def test_a_shared_reference_is_uploaded_and_averaged_and_not_kept(opened: Callable[..., Any]) -> None:
    session, transport = opened(FedSR(alpha_cmi=0.1, share_reference=True))
    assert session.state.shared.keys() == {"model", "reference"}
    replies = list(transport.train(session.state, [0, 1, 2]))
    assert [reply.tensors.keys() for reply in replies] == [{"model", "reference"}] * 3
    assert [transport.store.load(client, 2) for client in range(3)] == [{}] * 3
    next(run_rounds(session, transport))
    for name in ("mean", "raw_sigma", "scale"):
        want = torch.stack([reply.tensors["reference"][name].double() for reply in replies]).mean(0).float()
        assert torch.equal(session.state.shared["reference"][name], want)


def test_a_shared_reference_is_what_every_client_begins_with(opened: Callable[..., Any]) -> None:
    Watched.began.clear()
    session, transport = opened(Watched(alpha_cmi=0.1, share_reference=True), rounds=3)
    shared = {}
    for record in run_rounds(session, transport):
        shared[record.round] = session.state.shared["reference"]["mean"]
    assert torch.equal(Watched.began[1], torch.zeros(3, 6))
    assert torch.equal(Watched.began[2], shared[1])
    assert torch.equal(Watched.began[3], shared[2])


def test_sharing_the_reference_changes_the_model_from_round_2_on(
    trained: Callable[..., Any], same_model: Callable[..., bool]
) -> None:
    own, shared = FedSR(alpha_cmi=0.1), FedSR(alpha_cmi=0.1, share_reference=True)
    assert same_model(trained(own, rounds=1), trained(shared, rounds=1))
    assert not same_model(trained(own, rounds=2), trained(shared, rounds=2))


def test_a_client_that_sits_out_a_round_goes_on_from_the_reference_that_it_kept(opened: Callable[..., Any]) -> None:
    def cohorts(seed: int) -> list[list[int]]:
        return [sample_cohort((0, 1, 2), 1, seed, round) for round in (1, 2, 3)]

    seed, (first, second, _) = next((s, c) for s in range(100) if (c := cohorts(s))[0] == c[2] != c[1])
    Watched.began.clear()
    session, transport = opened(Watched(alpha_cmi=0.1), active=1, rounds=3, seed=seed)
    rounds = run_rounds(session, transport)
    next(rounds)
    after_1 = transport.store.load(first[0], 2)["reference"]["mean"].clone()
    next(rounds)
    assert torch.equal(transport.store.load(first[0], 3)["reference"]["mean"], after_1)
    next(rounds)
    assert second != first
    assert torch.equal(Watched.began[1], torch.zeros(3, 6))
    assert torch.equal(Watched.began[2], torch.zeros(3, 6))  # another client, its first time
    assert torch.equal(Watched.began[3], after_1)
    assert not torch.equal(transport.store.load(first[0], 4)["reference"]["mean"], after_1)


@pytest.fixture(scope="module")
def whole(tiny: Tiny, train: Train, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of the uninterrupted run."""
    return model(train(tiny(*KEPT), tmp_path_factory.mktemp("whole") / "run"))


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def rounds_kept(out: Path) -> set[int]:
    return {int(path.stem.removeprefix("round-")) for path in (out / "clients").glob("*/round-*.safetensors")}


@pytest.mark.parametrize("stop", [1, 5])
def test_a_resumed_run_takes_what_clients_kept_from_disk(
    tiny: Tiny, train: Train, whole: bytes, tmp_path: Path, stop: int
) -> None:
    out = train(tiny(*KEPT), tmp_path / "run", until=stop)
    assert stop in rounds_kept(out)
    train(tiny(*KEPT), out, resume=True)
    assert model(out) == whole


@pytest.mark.parametrize("stop", [1, 4])
def test_what_clients_kept_after_the_checkpoint_is_not_used(
    tiny: Tiny, train: Train, whole: bytes, tmp_path: Path, stop: int
) -> None:
    out = train(tiny(*KEPT), tmp_path / "run", until=stop)
    (out / "checkpoint" / f"round-{stop:06d}.safetensors").unlink()  # as if killed before it was written
    state = RunFolder(out).load_checkpoint()
    left = state.round if state else 0
    assert left == {1: 0, 3: 2, 4: 2, 5: 4}[stop]
    assert max(rounds_kept(out)) > left
    train(tiny(*KEPT), out, resume=True)
    assert model(out) == whole


def test_if_what_clients_kept_is_lost_a_resumed_run_makes_it_again(
    tiny: Tiny, train: Train, whole: bytes, tmp_path: Path
) -> None:
    out = train(tiny(*KEPT), tmp_path / "run", until=3)
    shutil.rmtree(out / "clients")
    train(tiny(*KEPT), out, resume=True)
    assert model(out) == whole


def test_inference_takes_the_mean_or_averages_the_probabilities_of_samples(builder: NetworkBuilder) -> None:
    algorithm = FedSR(eval_samples=3)
    model = algorithm.build(builder)["model"].eval()
    with torch.no_grad():
        assert torch.equal(FedSR().predict({"model": model}, X, context()), model(X))
        mu, sigma = model.encoder(X)
        noise = torch.randn(3, 1, 6, generator=torch.Generator().manual_seed(0))
        want = sum(model.head(mu + sigma * item).softmax(-1) for item in noise) / 3
        torch.testing.assert_close(algorithm.predict({"model": model}, X, context()).exp(), want)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha_l2r": -1.0}, r"algorithm\.alpha_l2r must be at least 0"),
        ({"alpha_cmi": math.nan}, r"algorithm\.alpha_cmi must be at least 0"),
        ({"sigma_floor": 0.0}, r"algorithm\.sigma_floor must be a number above 0"),
        ({"sigma_init": 1e-4}, r"algorithm\.sigma_init must be above sigma_floor=0\.001, got 0\.0001"),
    ],
)
def test_a_field_out_of_range_is_named(fields: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedSR(**fields)
