"""Networks, the builder that makes them, optimisers, and operations on their tensors."""

from fedcir.models.normalisation import renormalise

__all__ = ["renormalise"]
