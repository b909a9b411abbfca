from protos import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClaimRequest(_message.Message):
    __slots__ = ("lease", "claim")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    lease: _common_pb2.Lease
    claim: _common_pb2.Claim
    def __init__(self, lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., claim: _Optional[_Union[_common_pb2.Claim, _Mapping]] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: _common_pb2.Held
    def __init__(self, held: _Optional[_Union[_common_pb2.Held, _Mapping]] = ...) -> None: ...

class AdoptRequest(_message.Message):
    __slots__ = ("lease", "last_step")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    lease: _common_pb2.Lease
    last_step: int
    def __init__(self, lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., last_step: _Optional[int] = ...) -> None: ...

class AdoptResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ValuesRequest(_message.Message):
    __slots__ = ("trajectories", "min_step", "lease")
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    MIN_STEP_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    trajectories: bytes
    min_step: int
    lease: _common_pb2.Lease
    def __init__(self, trajectories: _Optional[bytes] = ..., min_step: _Optional[int] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ...) -> None: ...

class ValuesResponse(_message.Message):
    __slots__ = ("values", "steps")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    steps: bytes
    def __init__(self, values: _Optional[bytes] = ..., steps: _Optional[bytes] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("step", "row", "batch", "lease")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    step: int
    row: int
    batch: bytes
    lease: _common_pb2.Lease
    def __init__(self, step: _Optional[int] = ..., row: _Optional[int] = ..., batch: _Optional[bytes] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ...) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainRequest(_message.Message):
    __slots__ = ("step", "batch", "epochs", "minibatch_size", "seed", "last_step", "lease", "staged")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    step: int
    batch: bytes
    epochs: int
    minibatch_size: int
    seed: int
    last_step: int
    lease: _common_pb2.Lease
    staged: int
    def __init__(self, step: _Optional[int] = ..., batch: _Optional[bytes] = ..., epochs: _Optional[int] = ..., minibatch_size: _Optional[int] = ..., seed: _Optional[int] = ..., last_step: _Optional[int] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., staged: _Optional[int] = ...) -> None: ...

class TrainResponse(_message.Message):
    __slots__ = ("metrics",)
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: bytes
    def __init__(self, metrics: _Optional[bytes] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("name", "lease")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    lease: _common_pb2.Lease
    def __init__(self, name: _Optional[str] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ...) -> None: ...

class SaveResponse(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("name", "last_step", "without_copies", "lease")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_COPIES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    last_step: int
    without_copies: bool
    lease: _common_pb2.Lease
    def __init__(self, name: _Optional[str] = ..., last_step: _Optional[int] = ..., without_copies: bool = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ...) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("last_step",)
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    last_step: int
    def __init__(self, last_step: _Optional[int] = ...) -> None: ...

class CriticInfo(_message.Message):
    __slots__ = ("model", "last_step", "initialised_from", "held", "timeline")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    INITIALISED_FROM_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    last_step: int
    initialised_from: str
    held: _common_pb2.Held
    timeline: int
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., last_step: _Optional[int] = ..., initialised_from: _Optional[str] = ..., held: _Optional[_Union[_common_pb2.Held, _Mapping]] = ..., timeline: _Optional[int] = ...) -> None: ...
