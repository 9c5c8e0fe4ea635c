"""Why docs/privacy.md says that Flower's secure aggregation does not fit: a test that fails here is good news."""

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import mod
from flwr.compat.common.recorddict_compat import recorddict_to_fitres
from flwr.server.workflow import SecAggPlusWorkflow
from grid import MemoryGrid, context_of, run_of_flower  # noqa: F401

from fedcir.flower.wire import ARRAYS, METRICS, pack_arrays


def test_the_workflow_takes_only_flowers_old_context() -> None:
    with pytest.raises(TypeError, match="Expect a LegacyContext"):
        SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)(MemoryGrid({}), context_of({}))


def test_the_mod_is_not_among_those_of_messages_and_reads_only_old_replies() -> None:
    assert not [name for name in mod.__all__ if "secagg" in name]
    ours = RecordDict({ARRAYS: pack_arrays({}, ()), METRICS: MetricRecord({"num-examples": 1})})
    with pytest.raises(KeyError, match="fitres"):
        recorddict_to_fitres(ours, keep_input=True)


def test_the_mod_refuses_a_message_that_no_old_workflow_sent() -> None:
    message = Message(RecordDict({"config": ConfigRecord({})}), 1, "train")

    def never(message: Message, context: Context) -> Message:
        raise AssertionError

    with pytest.raises(KeyError, match="configs"):
        secaggplus_mod(message, context_of({}), never)
