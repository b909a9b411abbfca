from protos import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ValuesRequest(_message.Message):
    __slots__ = ("pairs", "last_step")
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    pairs: _common_pb2.Pairs
    last_step: int
    def __init__(self, pairs: _Optional[_Union[_common_pb2.Pairs, _Mapping]] = ..., last_step: _Optional[int] = ...) -> None: ...

class ValuesResponse(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    def __init__(self, values: _Optional[bytes] = ...) -> None: ...

class TrainRequest(_message.Message):
    __slots__ = ("step", "pairs", "values", "returns", "epochs", "minibatch_size", "seed", "last_step")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    pairs: _common_pb2.Pairs
    values: bytes
    returns: bytes
    epochs: int
    minibatch_size: int
    seed: int
    last_step: int
    def __init__(self, step: _Optional[int] = ..., pairs: _Optional[_Union[_common_pb2.Pairs, _Mapping]] = ..., values: _Optional[bytes] = ..., returns: _Optional[bytes] = ..., epochs: _Optional[int] = ..., minibatch_size: _Optional[int] = ..., seed: _Optional[int] = ..., last_step: _Optional[int] = ...) -> None: ...

class TrainResponse(_message.Message):
    __slots__ = ("metrics",)
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: bytes
    def __init__(self, metrics: _Optional[bytes] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class SaveResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("path", "last_step", "without_copies")
    PATH_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_COPIES_FIELD_NUMBER: _ClassVar[int]
    path: str
    last_step: int
    without_copies: bool
    def __init__(self, path: _Optional[str] = ..., last_step: _Optional[int] = ..., without_copies: bool = ...) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("last_step",)
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    last_step: int
    def __init__(self, last_step: _Optional[int] = ...) -> None: ...

class CriticInfo(_message.Message):
    __slots__ = ("model", "last_step", "initialised_from")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    INITIALISED_FROM_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    last_step: int
    initialised_from: str
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., last_step: _Optional[int] = ..., initialised_from: _Optional[str] = ...) -> None: ...
