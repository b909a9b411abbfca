"""A request on its way through Serve's proxy, in Serve's own wrapping."""

import pickle
from unittest.mock import MagicMock

from ray.serve._private.proxy_request_response import gRPCProxyRequest

from protos.critic_pb2 import TrainRequest
from services.common.serving.door.checked import Checked


def test_the_replica_gets_the_message_that_the_bytes_are() -> None:
    request = TrainRequest(step=3, values=bytes(1000), last_step=0)
    request.pairs.prompts.token_ids = bytes(400)
    raw = request.SerializeToString()
    context = MagicMock()
    context.invocation_metadata.return_value = (("application", "critic"),)
    asked = gRPCProxyRequest(Checked(TrainRequest, raw), context, "/quartet.v1.Critic/Train", stream=False)
    sent = asked.serialized_replica_arg()
    arrived = pickle.loads(sent).user_request_proto
    assert type(arrived) is TrainRequest
    assert arrived == request
    assert len(sent) < len(raw) + 400
