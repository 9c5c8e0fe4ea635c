"""Networks, the task that builds them, optimisers, and operations on their tensors."""

from fedcir.models.normalisation import renormalise

__all__ = ["renormalise"]
