from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogprobsRequest(_message.Message):
    __slots__ = ("trajectories", "temperature", "min_new_tokens", "end_ids")
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_IDS_FIELD_NUMBER: _ClassVar[int]
    trajectories: bytes
    temperature: float
    min_new_tokens: int
    end_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, trajectories: _Optional[bytes] = ..., temperature: _Optional[float] = ..., min_new_tokens: _Optional[int] = ..., end_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LogprobsResponse(_message.Message):
    __slots__ = ("ref_logprobs",)
    REF_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ref_logprobs: bytes
    def __init__(self, ref_logprobs: _Optional[bytes] = ...) -> None: ...

class ReferenceInfo(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ...) -> None: ...
