from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("max_new_tokens", "temperature", "top_p", "top_k", "min_new_tokens", "stop_token_ids", "ignore_eos")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompts", "sampling", "seeds", "min_version", "max_version", "lease", "begun")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    prompts: _common_pb2.Sequences
    sampling: SamplingParams
    seeds: bytes
    min_version: int
    max_version: int
    lease: _common_pb2.Lease
    begun: _common_pb2.Sequences
    def __init__(self, prompts: _Optional[_Union[_common_pb2.Sequences, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., seeds: _Optional[bytes] = ..., min_version: _Optional[int] = ..., max_version: _Optional[int] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., begun: _Optional[_Union[_common_pb2.Sequences, _Mapping]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("policy_version", "start", "end")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    start: int
    end: int
    def __init__(self, policy_version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("index", "ids", "logprobs", "spans", "finish_reason")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    index: int
    ids: bytes
    logprobs: bytes
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish_reason: FinishReason
    def __init__(self, index: _Optional[int] = ..., ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("segments", "replica")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    replica: str
    def __init__(self, segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., replica: _Optional[str] = ...) -> None: ...

class RolloutInfo(_message.Message):
    __slots__ = ("model", "policy_version", "replica", "running", "weights_checksum", "weight_backend", "workers", "checksums", "timeline", "adapter_versions")
    class ChecksumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BACKEND_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    policy_version: int
    replica: str
    running: int
    weights_checksum: str
    weight_backend: str
    workers: int
    checksums: _containers.ScalarMap[int, str]
    timeline: int
    adapter_versions: int
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., policy_version: _Optional[int] = ..., replica: _Optional[str] = ..., running: _Optional[int] = ..., weights_checksum: _Optional[str] = ..., weight_backend: _Optional[str] = ..., workers: _Optional[int] = ..., checksums: _Optional[_Mapping[int, str]] = ..., timeline: _Optional[int] = ..., adapter_versions: _Optional[int] = ...) -> None: ...

class WeightPhase(_message.Message):
    __slots__ = ("discover", "prepare", "transfer", "commit", "abort", "probe", "claim", "rest", "timeout_s", "members", "lease", "proved")
    DISCOVER_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PROVED_FIELD_NUMBER: _ClassVar[int]
    discover: Discover
    prepare: Prepare
    transfer: Transfer
    commit: Commit
    abort: Abort
    probe: Probe
    claim: _common_pb2.Claim
    rest: Rest
    timeout_s: float
    members: _containers.RepeatedScalarFieldContainer[str]
    lease: _common_pb2.Lease
    proved: Proof
    def __init__(self, discover: _Optional[_Union[Discover, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., transfer: _Optional[_Union[Transfer, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., claim: _Optional[_Union[_common_pb2.Claim, _Mapping]] = ..., rest: _Optional[_Union[Rest, _Mapping]] = ..., timeout_s: _Optional[float] = ..., members: _Optional[_Iterable[str]] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., proved: _Optional[_Union[Proof, _Mapping]] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("policy_version", "difference")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    difference: float
    def __init__(self, policy_version: _Optional[int] = ..., difference: _Optional[float] = ...) -> None: ...

class Discover(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    def __init__(self, manifest: _Optional[bytes] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("membership", "senders", "world_size", "ranks", "in_flight", "bucket_bytes", "stall_s", "manifest", "backend", "stage_on_gpu")
    class RanksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    STAGE_ON_GPU_FIELD_NUMBER: _ClassVar[int]
    membership: int
    senders: _containers.RepeatedCompositeFieldContainer[Rendezvous]
    world_size: int
    ranks: _containers.ScalarMap[str, int]
    in_flight: str
    bucket_bytes: int
    stall_s: float
    manifest: bytes
    backend: str
    stage_on_gpu: bool
    def __init__(self, membership: _Optional[int] = ..., senders: _Optional[_Iterable[_Union[Rendezvous, _Mapping]]] = ..., world_size: _Optional[int] = ..., ranks: _Optional[_Mapping[str, int]] = ..., in_flight: _Optional[str] = ..., bucket_bytes: _Optional[int] = ..., stall_s: _Optional[float] = ..., manifest: _Optional[bytes] = ..., backend: _Optional[str] = ..., stage_on_gpu: bool = ...) -> None: ...

class Rendezvous(_message.Message):
    __slots__ = ("address", "port")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    address: str
    port: int
    def __init__(self, address: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("membership", "manifest")
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    membership: int
    manifest: bytes
    def __init__(self, membership: _Optional[int] = ..., manifest: _Optional[bytes] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("membership", "policy_version")
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    membership: int
    policy_version: int
    def __init__(self, membership: _Optional[int] = ..., policy_version: _Optional[int] = ...) -> None: ...

class Rest(_message.Message):
    __slots__ = ("at_most_s",)
    AT_MOST_S_FIELD_NUMBER: _ClassVar[int]
    at_most_s: float
    def __init__(self, at_most_s: _Optional[float] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("membership",)
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    membership: int
    def __init__(self, membership: _Optional[int] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _common_pb2.Sequences
    def __init__(self, sequences: _Optional[_Union[_common_pb2.Sequences, _Mapping]] = ...) -> None: ...

class WeightReport(_message.Message):
    __slots__ = ("replica", "ok", "error", "policy_version", "membership", "workers", "checksum", "logprobs", "stale", "fenced", "held", "place", "timeline", "misfit")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    MISFIT_FIELD_NUMBER: _ClassVar[int]
    replica: str
    ok: bool
    error: str
    policy_version: int
    membership: int
    workers: int
    checksum: str
    logprobs: bytes
    stale: _containers.RepeatedScalarFieldContainer[str]
    fenced: bool
    held: _common_pb2.Held
    place: Place
    timeline: int
    misfit: str
    def __init__(self, replica: _Optional[str] = ..., ok: bool = ..., error: _Optional[str] = ..., policy_version: _Optional[int] = ..., membership: _Optional[int] = ..., workers: _Optional[int] = ..., checksum: _Optional[str] = ..., logprobs: _Optional[bytes] = ..., stale: _Optional[_Iterable[str]] = ..., fenced: bool = ..., held: _Optional[_Union[_common_pb2.Held, _Mapping]] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., timeline: _Optional[int] = ..., misfit: _Optional[str] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("machine", "gpus")
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    machine: str
    gpus: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, machine: _Optional[str] = ..., gpus: _Optional[_Iterable[str]] = ...) -> None: ...

class WeightReports(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[WeightReport]
    def __init__(self, reports: _Optional[_Iterable[_Union[WeightReport, _Mapping]]] = ...) -> None: ...
