"""One tree of errors.

Every error that a user can meet has a stable `code`, says whether trying again can help
(`retriable`), and carries fields that help (a topic, an offset, a limit). The message says what
happened and what to do. Listeners map codes to their own; nobody matches on messages.
"""

from __future__ import annotations

from millstream.errors_jobs import *  # noqa: F403  all of its classes are part of this tree
from millstream.errors_root import MillstreamError as MillstreamError  # noqa: PLC0414  and the root

# ---- settings and start


class SettingInvalid(MillstreamError):
    """A setting has a value that cannot be used; fields: setting, value."""

    code = "setting_invalid"


class StoreLocked(MillstreamError):
    """Another broker runs on the data directory; fields: path, pid."""

    code = "store_locked"


class FormatUnsupported(MillstreamError):
    """The data directory was written by a newer version, or is not ours; fields: path."""

    code = "format_unsupported"


class StoreUnreadable(MillstreamError):
    """The data directory is not there, or this user may not read or change it; fields: path."""

    code = "store_unreadable"


class AddressUnavailable(MillstreamError):
    """A listener cannot have its address; fields: setting, address."""

    code = "address_unavailable"


# ---- batches


class BatchInvalid(MillstreamError):
    """The root of everything that can be wrong with the bytes of a batch."""

    code = "batch_invalid"


class BatchLengthInvalid(BatchInvalid):
    """The length field does not fit the bytes, or is too small to hold a header."""

    code = "batch_length_invalid"


class BatchMagicUnsupported(BatchInvalid):
    """The magic byte is not 2: an old message format, or not a batch."""

    code = "batch_magic_unsupported"


class BatchChecksumMismatch(BatchInvalid):
    """The CRC-32C does not match: the bytes changed on their way."""

    code = "batch_checksum_mismatch"


class BatchCountInvalid(BatchInvalid):
    """The record count does not fit the offsets or the bytes."""

    code = "batch_count_invalid"


class BatchCompressionInvalid(BatchInvalid):
    """An unknown compression, or a body that does not decompress."""

    code = "batch_compression_invalid"


class BatchTooLarge(BatchInvalid):
    """Larger than the limit, as it is or once decompressed, or with more records than that;
    fields: limit_bytes or limit_records."""

    code = "batch_too_large"


class BatchRecordInvalid(BatchInvalid):
    """A record inside does not parse: an endless varint, a length past the end, a wrong delta."""

    code = "batch_record_invalid"


# ---- topics, partitions, offsets


class TopicNameInvalid(MillstreamError):
    """A name that is empty, too long or has a character that is not allowed; fields: topic."""

    code = "topic_name_invalid"


class TopicExists(MillstreamError):
    """There is a topic of that name; fields: topic."""

    code = "topic_exists"


class TopicUnknown(MillstreamError):
    """There is no topic of that name; fields: topic."""

    code = "topic_unknown"


class TopicReserved(MillstreamError):
    """A name that begins with `__`: the broker's own topics are not for clients; fields: topic."""

    code = "topic_reserved"


class TopicSettingInvalid(MillstreamError):
    """A setting that topics do not have, or a value that it cannot have; fields: setting, value."""

    code = "topic_setting_invalid"


class TooManyTopics(MillstreamError):
    """As many topics, or partitions of all topics, as are allowed; fields: limit."""

    code = "too_many_topics"


class PartitionUnknown(MillstreamError):
    """The topic has no such partition; fields: topic, partition."""

    code = "partition_unknown"


class PartitionCountInvalid(MillstreamError):
    """A count below one, above the limit, or below what the topic has; fields: partitions."""

    code = "partition_count_invalid"


class OffsetOutOfRange(MillstreamError):
    """The offset lies before the log's start or past its end; fields: offset, start, end."""

    code = "offset_out_of_range"


class SegmentsUnavailable(MillstreamError):
    """The broker keeps its records in no files, so nobody can be told where they are."""

    code = "segments_unavailable"


class LogDamaged(MillstreamError):
    """Bytes in the middle of a log cannot be trusted; fields: segment or partition, first, last."""

    code = "log_damaged"


# ---- publishing


class TimestampInvalid(MillstreamError):
    """A time before 1970 or past what 63 bits hold; fields: record, timestamp_ms."""

    code = "timestamp_invalid"


class HeaderInvalid(MillstreamError):
    """A record's header whose name is empty, too long or reserved; fields: record, header."""

    code = "header_invalid"


class KeyRequired(MillstreamError):
    """A record without a key, in a topic that keeps the newest of each key; fields: record."""

    code = "key_required"


class IdempotencyKeyInvalid(MillstreamError):
    """A key that is empty, too long or has a character that is not visible ASCII."""

    code = "idempotency_key_invalid"


class IdempotencyKeyConflict(MillstreamError):
    """The key was used for a publish of another number of records; fields: records."""

    code = "idempotency_key_conflict"


class TooManyIdempotencyKeys(MillstreamError):
    """As many keys are remembered as are allowed; those that expire make room; fields: limit."""

    code = "too_many_idempotency_keys"
    retriable = True


# ---- producers


class ProducerFenced(MillstreamError):
    """A producer with this id and a newer epoch has written; fields: producer_id, epoch."""

    code = "producer_fenced"


class SequenceOutOfOrder(MillstreamError):
    """A sequence number that does not follow the last; fields: producer_id, expected, got."""

    code = "sequence_out_of_order"


class SequenceDuplicate(MillstreamError):
    """Written before, but too long ago for its offset to be known; fields: producer_id."""

    code = "sequence_duplicate"


# ---- the disk


class DiskFull(MillstreamError):
    """No room for the append. Nothing of it was kept; free some space and send it again."""

    code = "disk_full"
    retriable = True


class TooManyFiles(MillstreamError):
    """The process may open no more files. Nothing was kept; raise the limit or send it again."""

    code = "too_many_files"
    retriable = True


class AppendTooLarge(MillstreamError):
    """An atomic append is larger than one journal frame may be; fields: limit_bytes."""

    code = "append_too_large"


class StorageFailed(MillstreamError):
    """The disk failed a write or a sync, so the broker stopped writing; restart to recover."""

    code = "storage_failed"


class OutcomeUnknown(MillstreamError):
    """The append may or may not survive. Read it back, or send it again idempotently."""

    code = "outcome_unknown"


class EngineBusy(MillstreamError):
    """More appends are waiting than the limit allows; fields: limit_bytes."""

    code = "engine_busy"
    retriable = True


class EngineStopped(MillstreamError):
    """The engine is stopping or has stopped; nothing was appended."""

    code = "engine_stopped"
    retriable = True


# ---- requests


class BrokerUnreachable(MillstreamError):
    """No broker answers where a command looks for one; fields: server."""

    code = "broker_unreachable"
    retriable = True


class ClientClosed(MillstreamError):
    """The client was closed, so nothing more can be asked with it."""

    code = "client_closed"


class StreamClosed(MillstreamError):
    """A WebSocket ended; fields: close_code, reason, where the broker said why."""

    code = "stream_closed"
    retriable = True


class ParameterInvalid(MillstreamError):
    """A parameter of a request is out of range or of the wrong kind; fields: parameter."""

    code = "parameter_invalid"


class ForeignRequest(MillstreamError):
    """A web page from elsewhere, or a host name that is not ours."""

    code = "foreign_request"


class BodyInvalid(MillstreamError):
    """The body of a request does not have the form that the route asks for, or a value is none that
    JSON has; fields, of the latter: at."""

    code = "body_invalid"


class BodyTooLarge(MillstreamError):
    """The body of a request is larger than the limit; fields: limit_bytes."""

    code = "body_too_large"


class Busy(MillstreamError):
    """More requests wait for something to come than are allowed; fields: limit."""

    code = "busy"
    retriable = True


class Stopping(MillstreamError):
    """The broker stops. Try another one, or this one in a while."""

    code = "stopping"
    retriable = True


# ---- groups


class GroupNameInvalid(MillstreamError):
    """A name that is empty, too long, reserved or has a character that is not allowed."""

    code = "group_name_invalid"


class GroupSettingInvalid(MillstreamError):
    """A group setting that does not exist or has a wrong value; fields: setting, value."""

    code = "group_setting_invalid"


class GroupUnknown(MillstreamError):
    """There is no group of that name; fields: group."""

    code = "group_unknown"


class GroupNotEmpty(MillstreamError):
    """Only a group without members lets itself be changed like this; fields: group, members."""

    code = "group_not_empty"


class TooManyGroups(MillstreamError):
    """As many groups as are allowed; fields: groups_max."""

    code = "too_many_groups"
    retriable = True


class TooManyMembers(MillstreamError):
    """As many members as a group may have; fields: group, members_max."""

    code = "too_many_members"
    retriable = True


class MemberUnknown(MillstreamError):
    """The group has no such member, or no longer; fields: group, member_id. Join again."""

    code = "member_unknown"


class MemberFenced(MillstreamError):
    """Another member with the same instance id took over; fields: group, member_id."""

    code = "member_fenced"


class StaleGeneration(MillstreamError):
    """The member went on since that generation; fields: group, member_id, generation, current."""

    code = "stale_generation"


class GroupProtocolMismatch(MillstreamError):
    """The group has members that use another protocol, or none of the same assignors; fields:
    group."""

    code = "group_protocol_mismatch"


class MemberIdRequired(MillstreamError):
    """A new member was given its id, and joins again with it; fields: group, member_id."""

    code = "member_id_required"


class MemberNotReleased(MillstreamError):
    """The instance id belongs to a member that is still there; fields: group, instance_id."""

    code = "member_not_released"


class RebalanceUnderWay(MillstreamError):
    """The members of the group change. Join again."""

    code = "rebalance_under_way"
    retriable = True


class AssignorUnknown(MillstreamError):
    """The broker has no assignor of that name; fields: assignor."""

    code = "assignor_unknown"


class PatternInvalid(MillstreamError):
    """A pattern of topic names that cannot be read, or asks for more than the broker does; fields:
    pattern."""

    code = "pattern_invalid"


class PartitionNotAssigned(MillstreamError):
    """A member may only commit what is assigned to it; fields: group, topic, partition."""

    code = "partition_not_assigned"


class OffsetUnknown(MillstreamError):
    """Nothing is committed, and the member asked not to be sent anywhere; fields: partition."""

    code = "offset_unknown"


class MetadataTooLarge(MillstreamError):
    """The text beside a committed offset is longer than the limit; fields: limit_bytes."""

    code = "metadata_too_large"


class ConsumerUnknown(MillstreamError):
    """No sequential consumer has that id, or no longer; fields: consumer_id, topic."""

    code = "consumer_unknown"


class ConsumerFenced(MillstreamError):
    """A sequential consumer with the same id was opened since; fields: consumer_id."""

    code = "consumer_fenced"


class UpgradeRequired(MillstreamError):
    """The path is that of a WebSocket, and the request asks for none."""

    code = "upgrade_required"


# ---- leases


class ReceiptInvalid(MillstreamError):
    """That is no receipt of this broker; fields: receipt."""

    code = "receipt_invalid"


class ReceiptUnknown(MillstreamError):
    """Nobody was given such a receipt, or another group was; fields: receipt."""

    code = "receipt_unknown"


class ReceiptStale(MillstreamError):
    """The lease ran out, was settled, or the record went to somebody else; fields: receipt."""

    code = "receipt_stale"


class GroupUsesLeases(MillstreamError):
    """The group receives from the topic by lease, and not all of them are settled; fields: group,
    topic, leases."""

    code = "group_uses_leases"


class GroupUsesOffsets(MillstreamError):
    """The group has members that read the topic by offset; fields: group, topic, members."""

    code = "group_uses_offsets"


class ShareSessionUnknown(MillstreamError):
    """The member of a share group has no session; fields: group, member_id. Open one."""

    code = "share_session_unknown"


class ShareSessionEpochInvalid(MillstreamError):
    """A request of a share session was lost, or came twice; fields: group, epoch. Open a new
    one."""

    code = "share_session_epoch_invalid"


class LeasesRefused(MillstreamError):
    """A compacted topic has no leases; fields: topic."""

    code = "leases_refused"


class LaneUnknown(MillstreamError):
    """There is no such lane; fields: lane."""

    code = "lane_unknown"


# ---- queues


class QueueNameInvalid(MillstreamError):
    """A name that is empty, too long or has a character that is not allowed."""

    code = "queue_name_invalid"


class QueueUnknown(MillstreamError):
    """There is no queue of that name; fields: queue_name."""

    code = "queue_not_found"


class QueueFull(MillstreamError):
    """No room in the queue, by count or by bytes; fields: queue_name, queue_capacity."""

    code = "queue_full"
    retriable = True


class MemoryFull(MillstreamError):
    """No room in all queues together; fields: limit_bytes."""

    code = "memory_full"
    retriable = True


class TooManyQueues(MillstreamError):
    """As many queues as are allowed; fields: queues_max."""

    code = "too_many_queues"
    retriable = True


class MessageTooLarge(MillstreamError):
    """A message is larger than the limit; fields: limit_bytes."""

    code = "message_too_large"


class SnapshotInvalid(MillstreamError):
    """A snapshot's name, or its content, cannot be used. The queue is as it was."""

    code = "snapshot_invalid"


class SnapshotUnknown(MillstreamError):
    """There is no snapshot of that name; fields: file."""

    code = "snapshot_not_found"


class SnapshotFailed(MillstreamError):
    """The disk refused a snapshot. What was there before is still there; fields: file."""

    code = "snapshot_failed"
    retriable = True


# ---- Spark


class OptionInvalid(MillstreamError):
    """An option of the data source that does not exist, or has a wrong value; fields: option,
    value."""

    code = "option_invalid"


class ColumnInvalid(MillstreamError):
    """A column that the sink does not have, or of a wrong type; fields: column."""

    code = "column_invalid"


class RowInvalid(MillstreamError):
    """A row that cannot be a record; fields: row, topic."""

    code = "row_invalid"


class SaveModeInvalid(MillstreamError):
    """A write that is to replace what is in a topic."""

    code = "save_mode_invalid"


class WriterNameless(MillstreamError):
    """Spark did not say for which query and micro-batch a task writes."""

    code = "writer_nameless"


class DataLost(MillstreamError):
    """Records that a query was to read are gone; fields: topic, partition, first, last, where they
    are known."""

    code = "data_lost"


class ValueInvalid(MillstreamError):
    """A record's value that is not what its reader was told it is; fields: topic, partition,
    offset."""

    code = "value_invalid"


class KafkaRefused(MillstreamError):
    """A broker refused a request of the Kafka protocol; fields: kafka_code, kafka_error."""

    code = "kafka_refused"


class KafkaAnswerInvalid(MillstreamError):
    """What answers at an address does not speak the Kafka protocol; fields: server."""

    code = "kafka_answer_invalid"


# ---- Spark


class JavaNotFound(MillstreamError):
    """Spark runs on Java, and there is none that is new enough; fields: passed_over."""

    code = "java_not_found"


class PipelineUnknown(MillstreamError):
    """There is no pipeline of that name, or no such file or function; fields: pipeline."""

    code = "pipeline_unknown"


class PipelineInvalid(MillstreamError):
    """What was named is no pipeline, or what a run left behind cannot be read; fields: pipeline."""

    code = "pipeline_invalid"


class PipelineRunning(MillstreamError):
    """A run of that name goes on already; fields: name."""

    code = "pipeline_running"


class PipelineFailed(MillstreamError):
    """A query of a pipeline ended with an error of Spark, or of the source or sink; fields: name,
    part."""

    code = "pipeline_failed"


class ArchiveInvalid(MillstreamError):
    """An archive is not there, cannot be read, or lacks records; fields: archive."""

    code = "archive_invalid"
