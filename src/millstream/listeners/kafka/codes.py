"""Which of Kafka's codes an error of ours has: the one table of this listener."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream import errors
from millstream.errors import MillstreamError
from millstream.observe.logs import get_logger
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from collections.abc import Mapping

# A client tries again what is retriable in Kafka: a full disk, a broker that stops, an append
# whose outcome nobody knows (an idempotent producer may). What is not listed is a bad request.
CODE_OF_ERROR: Mapping[type[MillstreamError], Code] = {
    errors.BatchInvalid: Code.INVALID_RECORD,
    errors.BatchLengthInvalid: Code.CORRUPT_MESSAGE,
    errors.BatchChecksumMismatch: Code.CORRUPT_MESSAGE,
    errors.BatchMagicUnsupported: Code.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    errors.BatchCompressionInvalid: Code.UNSUPPORTED_COMPRESSION_TYPE,
    errors.BatchTooLarge: Code.MESSAGE_TOO_LARGE,
    errors.AppendTooLarge: Code.MESSAGE_TOO_LARGE,
    errors.MessageTooLarge: Code.MESSAGE_TOO_LARGE,
    errors.TopicNameInvalid: Code.INVALID_TOPIC_EXCEPTION,
    errors.TopicExists: Code.TOPIC_ALREADY_EXISTS,
    errors.TopicUnknown: Code.UNKNOWN_TOPIC_OR_PARTITION,
    errors.TopicReserved: Code.TOPIC_AUTHORIZATION_FAILED,
    errors.TopicSettingInvalid: Code.INVALID_CONFIG,
    errors.TooManyTopics: Code.POLICY_VIOLATION,
    errors.PartitionUnknown: Code.UNKNOWN_TOPIC_OR_PARTITION,
    errors.PartitionCountInvalid: Code.INVALID_PARTITIONS,
    errors.OffsetOutOfRange: Code.OFFSET_OUT_OF_RANGE,
    errors.LogDamaged: Code.KAFKA_STORAGE_ERROR,
    errors.TimestampInvalid: Code.INVALID_TIMESTAMP,
    errors.HeaderInvalid: Code.INVALID_RECORD,
    errors.KeyRequired: Code.INVALID_RECORD,
    errors.LaneUnknown: Code.INVALID_RECORD,
    errors.DelayInvalid: Code.INVALID_RECORD,
    errors.ProducerFenced: Code.INVALID_PRODUCER_EPOCH,
    errors.SequenceOutOfOrder: Code.OUT_OF_ORDER_SEQUENCE_NUMBER,
    errors.SequenceDuplicate: Code.DUPLICATE_SEQUENCE_NUMBER,
    errors.DiskFull: Code.KAFKA_STORAGE_ERROR,
    errors.TooManyFiles: Code.KAFKA_STORAGE_ERROR,
    errors.StorageFailed: Code.KAFKA_STORAGE_ERROR,
    errors.EngineBusy: Code.KAFKA_STORAGE_ERROR,
    errors.TooManySchedules: Code.KAFKA_STORAGE_ERROR,
    errors.TooManyIdempotencyKeys: Code.KAFKA_STORAGE_ERROR,
    errors.OutcomeUnknown: Code.REQUEST_TIMED_OUT,
    errors.EngineStopped: Code.NOT_LEADER_OR_FOLLOWER,
    errors.Stopping: Code.NOT_LEADER_OR_FOLLOWER,
    errors.GroupNameInvalid: Code.INVALID_GROUP_ID,
    errors.GroupSettingInvalid: Code.INVALID_CONFIG,
    errors.GroupUnknown: Code.GROUP_ID_NOT_FOUND,
    errors.GroupNotEmpty: Code.NON_EMPTY_GROUP,
    errors.TooManyGroups: Code.GROUP_MAX_SIZE_REACHED,
    errors.TooManyMembers: Code.GROUP_MAX_SIZE_REACHED,
    errors.MemberUnknown: Code.UNKNOWN_MEMBER_ID,
    errors.MemberFenced: Code.FENCED_INSTANCE_ID,
    errors.MemberIdRequired: Code.MEMBER_ID_REQUIRED,
    errors.MemberNotReleased: Code.UNRELEASED_INSTANCE_ID,
    errors.StaleGeneration: Code.ILLEGAL_GENERATION,
    errors.RebalanceUnderWay: Code.REBALANCE_IN_PROGRESS,
    errors.GroupProtocolMismatch: Code.INCONSISTENT_GROUP_PROTOCOL,
    errors.GroupUsesLeases: Code.INCONSISTENT_GROUP_PROTOCOL,
    errors.GroupUsesOffsets: Code.INCONSISTENT_GROUP_PROTOCOL,
    errors.AssignorUnknown: Code.UNSUPPORTED_ASSIGNOR,
    errors.PatternInvalid: Code.INVALID_REGULAR_EXPRESSION,
    errors.MetadataTooLarge: Code.OFFSET_METADATA_TOO_LARGE,
    errors.ReceiptStale: Code.INVALID_RECORD_STATE,
    errors.ReceiptUnknown: Code.INVALID_RECORD_STATE,
    errors.ShareSessionUnknown: Code.SHARE_SESSION_NOT_FOUND,
    errors.ShareSessionEpochInvalid: Code.INVALID_SHARE_SESSION_EPOCH,
}

# A coordinator speaks of itself where a leader speaks of a partition. Clients look for it again.
OF_COORDINATOR: Mapping[Code, Code] = {
    Code.NOT_LEADER_OR_FOLLOWER: Code.NOT_COORDINATOR,
    Code.KAFKA_STORAGE_ERROR: Code.COORDINATOR_NOT_AVAILABLE,
    Code.REQUEST_TIMED_OUT: Code.COORDINATOR_NOT_AVAILABLE,
}

log = get_logger("kafka")


def code_of(error: BaseException) -> Code:
    """An error that is none of ours is a fault of ours; it is logged."""
    if not isinstance(error, MillstreamError):
        log.error("a request failed", exc_info=error)
        return Code.UNKNOWN_SERVER_ERROR
    # Classes that the table names stand before those they come from in an error's own order.
    for one in type(error).__mro__:
        if one in CODE_OF_ERROR:
            return CODE_OF_ERROR[one]
    return Code.INVALID_REQUEST


def message_of(error: BaseException) -> str:
    """What a client is told beside the code, in versions that have room for it."""
    return error.message if isinstance(error, MillstreamError) else "the broker failed; see its log"
