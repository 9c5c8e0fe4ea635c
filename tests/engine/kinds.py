"""An algorithm of each kind, by what is kept from round to round. Conformance goes over all algorithms."""

KINDS = ["fedavg", "fedcir", "fedproc", "fedsr", "scaffold", "fedbn", "fedproto", "centralized"]
"""Nothing; at the server an optimiser, or prototypes; at the client a network, groups, layers, or the whole model."""
