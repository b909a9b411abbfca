from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCORED: _ClassVar[Outcome]
    NOT_APPLICABLE: _ClassVar[Outcome]
    TIMEOUT: _ClassVar[Outcome]
    FAILED: _ClassVar[Outcome]
    REFUSED: _ClassVar[Outcome]
    NOT_FINITE: _ClassVar[Outcome]
SCORED: Outcome
NOT_APPLICABLE: Outcome
TIMEOUT: Outcome
FAILED: Outcome
REFUSED: Outcome
NOT_FINITE: Outcome

class TextPairs(_message.Message):
    __slots__ = ("prompts", "responses")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedScalarFieldContainer[str]
    responses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prompts: _Optional[_Iterable[str]] = ..., responses: _Optional[_Iterable[str]] = ...) -> None: ...

class Conversations(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, messages: _Optional[_Iterable[str]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("tokens", "texts", "conversations", "scorer", "labels", "columns", "groups", "pair_timeout_s", "ended")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PAIR_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    texts: TextPairs
    conversations: Conversations
    scorer: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    columns: _containers.RepeatedScalarFieldContainer[str]
    groups: bytes
    pair_timeout_s: float
    ended: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, tokens: _Optional[bytes] = ..., texts: _Optional[_Union[TextPairs, _Mapping]] = ..., conversations: _Optional[_Union[Conversations, _Mapping]] = ..., scorer: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., columns: _Optional[_Iterable[str]] = ..., groups: _Optional[bytes] = ..., pair_timeout_s: _Optional[float] = ..., ended: _Optional[_Iterable[bool]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores", "scorer", "outcomes", "reasons", "part_pairs", "part_places", "part_rewards")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    PART_PAIRS_FIELD_NUMBER: _ClassVar[int]
    PART_PLACES_FIELD_NUMBER: _ClassVar[int]
    PART_REWARDS_FIELD_NUMBER: _ClassVar[int]
    scores: bytes
    scorer: ScorerIdentity
    outcomes: bytes
    reasons: _containers.RepeatedScalarFieldContainer[str]
    part_pairs: bytes
    part_places: bytes
    part_rewards: bytes
    def __init__(self, scores: _Optional[bytes] = ..., scorer: _Optional[_Union[ScorerIdentity, _Mapping]] = ..., outcomes: _Optional[bytes] = ..., reasons: _Optional[_Iterable[str]] = ..., part_pairs: _Optional[bytes] = ..., part_places: _Optional[bytes] = ..., part_rewards: _Optional[bytes] = ...) -> None: ...

class ScorerIdentity(_message.Message):
    __slots__ = ("name", "model_hash", "names", "parts", "process")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model_hash: str
    names: _containers.RepeatedScalarFieldContainer[str]
    parts: _containers.RepeatedCompositeFieldContainer[ScorerIdentity]
    process: bool
    def __init__(self, name: _Optional[str] = ..., model_hash: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., parts: _Optional[_Iterable[_Union[ScorerIdentity, _Mapping]]] = ..., process: bool = ...) -> None: ...

class RewardInfo(_message.Message):
    __slots__ = ("scorers",)
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    scorers: _containers.RepeatedCompositeFieldContainer[ScorerInfo]
    def __init__(self, scorers: _Optional[_Iterable[_Union[ScorerInfo, _Mapping]]] = ...) -> None: ...

class ScorerInfo(_message.Message):
    __slots__ = ("name", "model", "identity")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: _common_pb2.ModelInfo
    identity: ScorerIdentity
    def __init__(self, name: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., identity: _Optional[_Union[ScorerIdentity, _Mapping]] = ...) -> None: ...
