"""Ctrl-C, twice: the first ends a command in order, the second does not disturb it."""

import signal
import subprocess
import sys

HURRY = 300  # seconds until a process that should have ended is given up

COMMAND = """
import sys
import importlib
interrupt = importlib.import_module("fedcir.cli.application")

interrupt.PATIENCE = float(sys.argv[1])
interrupt.catch_signals()
try:
    print("ready", flush=True)
    sys.stdin.readline()
except KeyboardInterrupt:
    print("saving", flush=True)
    sys.stdin.readline()
    print("saved", flush=True)
sys.stdin.readline()
interrupt.ignore_signals()
print("over", flush=True)
sys.stdin.readline()
"""


def start(patience: float) -> "subprocess.Popen[str]":
    """A command that goes on when it gets a line, and whose signals are quick ones within this patience."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", COMMAND, str(patience)], **pipes, text=True)  # type: ignore[call-overload,no-any-return]


def test_two_quick_signals_let_a_command_end_in_order_and_print_no_traceback() -> None:
    process = start(patience=3600)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    for message, number in (("saving", signal.SIGINT), ("saved", signal.SIGTERM), ("over", signal.SIGINT)):
        assert process.stdout.readline() == f"{message}\n"
        process.send_signal(number)
        process.stdin.write("\n")
        process.stdin.flush()
    out, err = process.communicate(timeout=HURRY)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_signal_long_after_the_first_ends_a_command_at_once() -> None:
    process = start(patience=-1)  # so any second signal comes long after the first
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HURRY)
    assert (process.returncode, err) == (130, "\nfedcir: ended at once\n")
