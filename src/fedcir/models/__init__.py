"""Networks, the task that builds them, and what is done with bags of their tensors."""

from fedcir.models.batchnorms import renormalise

__all__ = ["renormalise"]
