"""FedCiROne by files that people carry: a site's signed message, and the model of several messages."""

from fedcir.courier.merge import merge_courier_files, read_known_keys
from fedcir.courier.message_file import CourierFile, describe_courier_file, read_courier_file
from fedcir.courier.site_message import make_courier_file

__all__ = [
    "CourierFile",
    "describe_courier_file",
    "make_courier_file",
    "merge_courier_files",
    "read_courier_file",
    "read_known_keys",
]
