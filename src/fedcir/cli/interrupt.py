"""What Ctrl-C leaves behind."""


class Interrupted(Exception):
    """The user asked to stop; the message says how to continue."""
