"""Adapt a model to a new site by unlabelled images, and judge from these what to expect of the model there.

BatchNorm statistics of a new site: Y. Li, N. Wang, J. Shi, J. Liu, X. Hou. Revisiting Batch Normalization For Practical
Domain Adaptation. 2016. https://arxiv.org/abs/1603.04779
Average thresholded confidence: S. Garg, S. Balakrishnan, Z. Lipton, B. Neyshabur, H. Sedghi. Leveraging
Unlabeled Data to Predict Out-of-Distribution Performance. ICLR 2022. https://arxiv.org/abs/2201.04234
"""

import copy
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedcir.client.calibration import compute_confidence
from fedcir.data.domains import Split
from fedcir.errors import InputError
from fedcir.inference.model import BATCH, TrainedModel
from fedcir.models.normalisation import estimate_statistics, find_statistics_layers
from fedcir.models.site_statistics import StandardisedEncoder
from fedcir.runs.evaluation_data import sample_rows

MAX_IMAGES = 1024
"""Most images of a site that a model is adapted to."""
MEAN_IMAGES = 100
"""Images as which the mean probability counts beside thresholded confidence, which varies more with few images."""
TOO_NOVEL = 0.85
"""Mean novelty from which a site is refused: 0.5 is that of the sites that the model was trained on."""
NO_STATISTICS = "the model has no statistics of features or of BatchNorm, so there is nothing to adapt"


@dataclass(frozen=True)
class SiteEstimate:
    """What to expect of a model on images without labels."""

    images: int
    accuracy: float
    """Estimate of the share of correct predictions: from many images the share that is confident enough."""
    novelty: float
    """Mean novelty: how often an image is more novel than an image set aside in training."""

    @property
    def text(self) -> str:
        return f"an accuracy of about {self.accuracy:.0%} (rough estimate), mean novelty {self.novelty:.2f}"

    def check(self, site: str) -> None:
        """Refuse a site that is too unlike those of training."""
        if self.novelty >= TOO_NOVEL:
            raise InputError(
                f"{site} is too unlike the sites that the model was trained on: the mean novelty of {self.images:,} "
                f"images is {self.novelty:.2f} (known images: 0.50, refused from {TOO_NOVEL}); label some of them and "
                "train with them, or use the model anyway with force"
            )


def can_adapt(model: TrainedModel) -> bool:
    encoder = getattr(model.network, "encoder", None)
    return isinstance(encoder, StandardisedEncoder) or bool(find_statistics_layers(model.network))


def adapt_model(model: TrainedModel, images: Split) -> tuple[TrainedModel, SiteEstimate | None]:
    """Replace statistics of training by those of a site's images; labels are not used.

    Features of fedcirone are standardised by the site's own mean and spread; other models get its BatchNorm statistics.
    Without a calibration, nothing can be estimated.
    """
    if not can_adapt(model):
        raise InputError(f"{model.run.path}: {NO_STATISTICS}; leave the images of the site out")
    rows = sample_rows(len(images), MAX_IMAGES, 0, "adapt")
    batches = [images.pixels(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]
    network = copy.deepcopy(model.network)
    if isinstance(encoder := getattr(network, "encoder", None), StandardisedEncoder):
        source = model.with_cached_features()  # computed once, for the statistics and the estimate
        with torch.inference_mode():
            encoder.adapt(torch.cat([encoder.encoder(source.inputs(batch)) for batch in batches]))
        adapted = replace(source, modules={**model.modules, "model": network})
    else:
        adapted = source = model.with_network(network)
        with estimate_statistics(network), torch.no_grad():
            for batch in batches:
                if len(batch) > 1 or len(rows) == 1:  # BatchNorm needs two images
                    network(source.inputs(batch))
    estimate = _estimate(adapted, batches) if model.calibrated else None
    return replace(adapted, features=model.features if adapted.features else None), estimate


def _estimate(model: TrainedModel, batches: list[np.ndarray]) -> SiteEstimate:
    """Estimate the accuracy by thresholded confidence and by the mean probability of the predicted class.

    The latter is too high for sites unlike those of training, and counts as MEAN_IMAGES images.
    """
    outputs = [model.compute(batch) for batch in batches]
    logits, novelty = (torch.cat(parts).cpu() for parts in zip(*((o.logits, o.novelty) for o in outputs), strict=True))
    calibration, images = model.calibration, len(logits)
    accuracy = float((logits.double() / calibration.temperature).softmax(-1).amax(-1).mean())
    if calibration.threshold is not None:
        confident = float((compute_confidence(logits) >= calibration.threshold).double().mean())
        accuracy += (confident - accuracy) * images / (images + MEAN_IMAGES)
    return SiteEstimate(images, accuracy, float(calibration.share(novelty).mean()))
