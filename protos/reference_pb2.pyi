from protos import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogprobsRequest(_message.Message):
    __slots__ = ("pairs", "temperature")
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    pairs: _common_pb2.Pairs
    temperature: float
    def __init__(self, pairs: _Optional[_Union[_common_pb2.Pairs, _Mapping]] = ..., temperature: _Optional[float] = ...) -> None: ...

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
