"""What Flower loads for each message at a site. It is thin: a process that lives on does the work, or else this one.

Flower starts a process for every message. To import torch and to open the data again takes longer than most rounds.
"""

import sys
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedcir.flower.handover import hand_over, possible

app = ClientApp()

COMMAND = "flwr-clientapp"
"""The process that Flower starts for one message. Those of its simulation live on themselves."""


@app.query()
def query(msg: Message, context: Context) -> Message:
    return _answered(msg, context)


@app.train()
def train(msg: Message, context: Context) -> Message:
    return _answered(msg, context)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    return _answered(msg, context)


def _answered(msg: Message, context: Context) -> Message:
    if Path(sys.argv[0]).name == COMMAND and possible(context):
        reply = hand_over(msg, context)
        if reply is not None:
            return reply
    from fedcir.flower.answers import answer  # not before it is needed: it imports torch
    from fedcir.flower.place import open_place

    return answer(msg, context, open_place)
