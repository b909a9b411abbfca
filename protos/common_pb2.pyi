from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Sequences(_message.Message):
    __slots__ = ("token_ids", "lengths")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    lengths: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., lengths: _Optional[bytes] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "model_hash", "tokenizer_hash", "vocab_size", "max_length", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    model_hash: str
    tokenizer_hash: str
    vocab_size: int
    max_length: int
    dtype: str
    def __init__(self, name: _Optional[str] = ..., model_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_length: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("run_id", "number", "identity")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    number: int
    identity: str
    def __init__(self, run_id: _Optional[str] = ..., number: _Optional[int] = ..., identity: _Optional[str] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("ttl_s", "take_over")
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    take_over: bool
    def __init__(self, ttl_s: _Optional[float] = ..., take_over: bool = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("lease", "left_s")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    left_s: float
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., left_s: _Optional[float] = ...) -> None: ...
