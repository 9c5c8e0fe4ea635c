"""FedCiROne: the head of a frozen encoder in closed form, from one message of each client.

A client sends sums over its examples: the Gram matrix of their features and labels. The server standardises the
features of each site by the site's own mean and spread, so that they do not tell which site an image is from, and
solves ridge regression on the sums. The result is that of pooled training, whatever the label shares of the clients.

Ridge regression on sums of clients: E. Fanì, R. Camoriano, B. Caputo, M. Ciccone. Accelerating Heterogeneous Federated
Learning with Closed-form Classifiers. ICML 2024. https://arxiv.org/abs/2406.01116
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Batch, Replies
from fedcir.errors import InputError
from fedcir.models.builder import NetworkBuilder
from fedcir.models.classifier import Classifier
from fedcir.models.closed_form import FeatureSums, LinearHead, RidgePath, add_sums, count_examples, gram_sums, is_gram
from fedcir.models.private_sums import RandomProjection, add_noise, are_noised_sums, bound_rows, choose_penalty
from fedcir.models.site_statistics import SitePool, StandardisedEncoder, StandardisedHead
from fedcir.rng import seed_for, torch_rng
from fedcir.types import ClientReply, Groups, LocalContext, Modules, ServerContext, ServerState, Tensors
from fedcir.validation import Between

MARGIN = 0.99
"""Statistics of domains or clients are used only where they lower the error by a hundredth."""
PENALTIES = tuple(10.0 ** (exponent / 2) for exponent in range(-8, 3))
"""Penalties that are tried, relative to features of variance 1."""
NOISED_ERROR = 0.25
"""Least error on noised sums that counts, as a share of the variance of labels."""
CANDIDATES = ("domain", "client", "federation")
MAX_SITES = 1_000
"""Clients with statistics of their own in the model."""

Standardisation = Literal["auto", "domain", "client", "federation", "none"]


@dataclass(frozen=True)
class FedCiROne(Algorithm):
    """Closed form on a frozen encoder: one round, no learning rate, no drift."""

    standardise: Standardisation = "auto"
    """Whose mean and spread standardise features: the domain's, the client's, or all; auto takes the best one."""
    head: Literal["ridge", "lda"] = "ridge"
    """Ridge regression of the labels, or linear discriminant analysis."""
    penalty: Annotated[float, Between(0, 1_000_000)] = 0.0
    """Ridge penalty relative to the variance of the features; 0 chooses it on validation sums."""
    balance: Literal["none", "domains", "labels"] = "none"
    """Let all domains count alike (auto is then domain), or all classes (lda), whatever their numbers of examples."""
    project: Annotated[int, Between(0, 16_384)] = 0
    """Width of a random projection of the features, which are then scaled to length 1; 0 leaves them as they are."""

    needs_classes = True
    one_shot = True
    sends = ("sums",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.balance == "labels" and self.head != "lda":
            raise InputError("algorithm.balance=labels needs the priors of algorithm.head=lda: set both")
        if self.balance == "domains" and self.standardise not in ("auto", "domain"):
            reason = f"algorithm.standardise={self.standardise} does not keep apart"
            raise InputError(f"algorithm.balance=domains needs sums by domain, which {reason}: set it to domain")

    def build(self, builder: NetworkBuilder) -> Modules:
        width = self.project or builder.features
        model = replace(builder, features=width).classifier()
        encoder = model.encoder
        if self.project:
            encoder = RandomProjection(encoder, builder.features, width, torch_rng(builder.seed, "init", "projection"))
        return {"model": Classifier(StandardisedEncoder(encoder, width), model.head)}

    def covers_examples(self, clip: float) -> bool:
        for setting, is_right in (
            ("algorithm.project, such as 512", self.project > 0),
            ("privacy.clip=1, the length of projected features", clip == 1),
            ("algorithm.head=ridge", self.head == "ridge"),
            ("algorithm.balance=none", self.balance == "none"),
        ):
            if not is_right:
                raise InputError(f"privacy.noise on the sums of fedcirone needs {setting}: set it")
        return True

    def check_masks(self) -> None:
        if self.standardise not in ("federation", "none"):
            raise InputError(
                f"server.masked hides the sums of sites, which algorithm.standardise={self.standardise} needs: "
                "set algorithm.standardise=federation"
            )

    def local_summary(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        encoder: StandardisedEncoder = modules["model"].encoder
        sums: Tensors = {}
        for part, batches in (("train", data), ("validation", ctx.validation and ctx.validation())):
            if batches is not None:
                rows: Iterable[Batch] = ((encoder.encoder(x), y) for x, y in batches)
                if ctx.noise is not None:
                    rows = bound_rows(rows, ctx.noise.clip)
                gram = gram_sums(rows, len(encoder.mean), ctx.num_classes)
                if ctx.noise is not None and ctx.noise_rng is not None:
                    gram = add_noise(gram, ctx.noise, ctx.noise_rng)
                sums |= {f"{part}_{name}": tensor for name, tensor in gram.items()}
        return {"sums": sums}

    def find_reply_fault(self, reply: ClientReply, ctx: ServerContext) -> str | None:
        sums = reply.tensors["sums"]
        if ctx.noise is not None:
            if are_noised_sums(sums["train_high"], sums["train_low"], ctx.noise, reply.num_examples):
                return None
            return "its sums are not the noised ones of its examples"
        for part in ("train", "validation"):
            if f"{part}_high" in sums and not is_gram(sums[f"{part}_high"], sums[f"{part}_low"]):
                return f"its {part} sums are not those of any examples"
        counted = count_examples(select_sums(sums, "train"), ctx.num_classes)
        if counted != reply.num_examples:
            return f"its sums count {counted:g} examples, not {reply.num_examples}"
        return None

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        chooses = ctx.noise is None and self.balance != "domains"  # sums with noise cannot choose
        automatic: tuple[str, ...] = CANDIDATES if chooses else ("domain",)
        kinds = automatic if self.standardise == "auto" else (self.standardise,)
        features = state.shared["model"]["head.weight"].shape[1]
        pools = {kind: SitePool(kind, features, ctx.noise, self.balance) for kind in kinds}
        partial: dict[str, dict[int, Groups]] = {kind: {} for kind in kinds if kind != "client"}
        tested: set[str] = set()
        releases = 0
        for reply in replies:
            sums, domain = reply.tensors["sums"], ctx.domain_of(reply.client_id)
            parts = {"train": select_sums(sums, "train")}
            if "validation_high" in sums and domain not in tested:  # clients of a domain share its validation images
                tested.add(domain)
                parts["validation"] = select_sums(sums, "validation")
            releases += 1
            for kind, pool in pools.items():
                key = site_key(kind, domain, reply.client_id)
                if kind == "client":  # nothing is to be added to its sums, so they need not be held
                    pool.add(key, parts)
                    continue
                site = partial[kind].setdefault(key, {})
                site |= {part: add_sums(site[part], new) if part in site else new for part, new in parts.items()}
        for kind, sites in partial.items():
            for key, site in sites.items():
                pools[kind].add(key, site)
        if len(kinds) > 1 and len(pools["client"].statistics) == len(pools["domain"].statistics):
            del pools["client"]  # a client for each domain: the same statistics
        if "client" in pools and len(pools["client"].statistics) > MAX_SITES:
            if self.standardise == "client":
                raise InputError(f"algorithm.standardise=client takes {MAX_SITES} clients at most: use domain")
            del pools["client"]
        fits = [self._fit(pool, releases) for pool in pools.values()]
        best = min(fits, key=lambda fit: fit.error)
        if len(kinds) > 1:
            plain = next(fit for fit in fits if fit.kind == "federation")
            best = best if best.error < MARGIN * plain.error else plain
        model = {**state.shared["model"], **best.tensors()}
        return replace(state, round=ctx.round, shared={**state.shared, "model": model})

    def predict(self, modules: Modules, x: Tensor, ctx: LocalContext) -> Tensor:
        model: Classifier = modules["model"]
        logits: Tensor = model.head(model.encoder(x, site_keys(ctx)))
        return logits

    def _fit(self, pool: SitePool, releases: int) -> StandardisedHead:
        """Fit the head to the standardised sums of all sites, with the best penalty."""
        train, held, pooled, noise = pool.train, pool.held, pool.pooled, pool.noise
        if train is None or pooled is None:
            raise InputError("no client has an example")
        if self.balance == "domains":
            train = train * (pooled.total / train.total)
        path = RidgePath(train)
        if noise is None:
            penalty = self.select_penalty(path, held)
        else:
            penalty = self.penalty or choose_penalty(noise, releases, pool.features, train.total)
        head, error = self.fit_head(path, penalty), path.expected_error(penalty, held)
        if self.head == "ridge":
            # Under Gaussian errors of this variance, output / variance is the log-probability up to a constant.
            variance = max(error / len(head.bias), 1e-6)
            if noise is not None:  # an error that noise made small or negative is no reason for certainty
                variance = max(variance, NOISED_ERROR * path.label_variance)
            head = LinearHead(head.weight / variance, head.bias / variance)
        if pool.kind in ("federation", "none"):
            return StandardisedHead(pool.kind, error, head, next(iter(pool.statistics.values())), {})
        fallback = pooled.mean, pooled.spread if noise is None else torch.ones_like(pooled.mean)
        return StandardisedHead(pool.kind, error, head, fallback, pool.statistics)

    def select_penalty(self, path: RidgePath, validation: FeatureSums | None) -> float:
        """The penalty of the settings, or the one with the least expected error."""
        return self.penalty or min(PENALTIES, key=lambda penalty: path.expected_error(penalty, validation))

    def fit_head(self, path: RidgePath, penalty: float, once: bool = False) -> LinearHead:
        """Fit a head of the kind of the settings; `once` if no other penalty of this path is needed."""
        if self.head == "lda":
            return path.fit_discriminant(penalty, uniform=self.balance == "labels")
        return path.fit_once(penalty) if once else path.fit(penalty)


def site_key(kind: str, domain: str, client: int) -> int:
    """Key of a site's statistics: one for each domain, for each client, or for all."""
    paths: dict[str, tuple[str | int, ...]] = {"domain": ("domain", domain), "client": ("client", domain, client)}
    return seed_for(0, *paths[kind]) >> 1 if kind in paths else 0


def list_site_keys(domain: str, client: int) -> list[int]:
    """Keys under which a model may have statistics for a client."""
    return [site_key(kind, domain, client) for kind in ("client", "domain")]


def site_keys(ctx: LocalContext) -> list[int]:
    return list_site_keys(ctx.domain, ctx.client)


def select_sums(sums: Tensors, part: str) -> Tensors:
    return {name: sums[f"{part}_{name}"] for name in ("high", "low")}
