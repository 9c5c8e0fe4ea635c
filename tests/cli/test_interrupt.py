"""Ctrl-C, twice: the first ends a command in order, the second does not disturb it."""

import signal
import subprocess
import sys
import time

COMMAND = """
import time
from fedcir.cli.interrupt import Interrupted, catch_signals, ignore_signals

catch_signals()
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("saving", flush=True)
    time.sleep(0.5)
    print("saved", flush=True)
ignore_signals()
print("over", flush=True)
time.sleep(0.3)
"""


def test_two_quick_signals_let_a_command_end_in_order_and_print_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for said, number in (("ready", signal.SIGINT), ("saving", signal.SIGINT), ("saved", signal.SIGTERM)):
        assert process.stdout.readline() == f"{said}\n"
        process.send_signal(number)
    assert process.stdout.readline() == "over\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_signal_long_after_the_first_ends_a_command_at_once() -> None:
    late = COMMAND.replace("catch_signals()\n", "interrupt.PATIENCE = 0.2\ncatch_signals()\n").replace(
        "time.sleep(0.5)", "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"from fedcir.cli import interrupt\n{late}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "saving\n"
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "\nfedcir: ended at once\n")
