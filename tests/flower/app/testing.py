"""fedcir's own app, but the server does several methods one after the other, and clients misbehave as they are told."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedcir.flower import client_app

client = ClientApp()
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    from fedcir.flower import server_app

    given = dict(context.run_config)
    for name in str(given.pop("algorithms")).split():
        more = {"set": f"{given['set']} algorithm.name={name}", "out": f"{given['out']}/{name}"}
        context.run_config = {**given, **more}
        server_app.app(grid, context)


@client.query()
def query(msg: Message, context: Context) -> Message:
    return client_app.query(msg, context)


@client.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    return client_app.evaluate(msg, context)


@client.train()
def train(msg: Message, context: Context) -> Message:
    """Node-config such as faults="2:nan 3:rename" says what goes wrong in which round."""
    faults = dict(fault.split(":") for fault in str(context.node_config.get("faults", "")).split())
    fault = faults.get(msg.metadata.group_id.partition("-")[0])
    reply = client_app.train(msg, context)
    record = reply.content.array_records["arrays"]
    first = next(name for name, array in record.items() if array.dtype == "float32")
    if fault == "nan":
        array = record[first].numpy().copy()
        array[...] = float("nan")
        record[first] = type(record[first])(array)
    if fault == "rename":
        record["model/renamed"] = record.pop(first)
    return reply
