"""The same algorithms on Flower: between machines, and inside an app of one's own. The only place that imports flwr."""

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError("fedcir.flower needs Flower: pip install 'fedcir[flower]'") from error

from fedcir.flower.client_app import local_update
from fedcir.flower.strategy import AlgorithmStrategy

__all__ = ["AlgorithmStrategy", "local_update"]
