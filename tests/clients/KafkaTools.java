// What tools for Kafka do through its own client, which is Java's: pages that show a cluster, and
// programs that produce and consume. `java -cp JARS KafkaTools.java HOST:PORT` writes a line for
// each call: its name and what came of it. The test beside this one reads them.

import java.time.Duration;
import java.util.*;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.acl.AclBindingFilter;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.quota.ClientQuotaFilter;
import org.apache.kafka.common.serialization.*;

public class KafkaTools {
    interface Call {
        Object make() throws Exception;
    }

    static final String TOPIC = "from-java";
    static final TopicPartition FIRST = new TopicPartition(TOPIC, 0);
    static final int RECORDS = 100;
    static final Duration PATIENCE = Duration.ofSeconds(60);
    static String server;

    public static void main(String[] arguments) throws Exception {
        server = arguments[0];
        try (Admin admin = Admin.create(settings())) {
            topics(admin);
            produce();
            records(admin);
            consume(admin, "classic", Map.of());
            consume(admin, "cooperative", Map.of(
                "partition.assignment.strategy", CooperativeStickyAssignor.class.getName()));
            consume(admin, "consumer", Map.of("group.protocol", "consumer"));
            share(admin);
            later(admin);
            say("deleteTopics", () -> admin.deleteTopics(List.of(TOPIC)).all().get());
        }
    }

    static Properties settings() {
        Properties page = new Properties();
        page.put("bootstrap.servers", server);
        return page;
    }

    static void say(String name, Call call) {
        String outcome;
        try {
            outcome = String.valueOf(call.make());
        } catch (ExecutionException error) {
            outcome = error.getCause().getClass().getSimpleName();
        } catch (Exception error) {
            outcome = error.getClass().getSimpleName() + " " + error.getMessage();
        }
        System.out.println(name + ": " + outcome);
    }

    static void topics(Admin admin) {
        say("describeCluster", () -> {
            DescribeClusterResult found = admin.describeCluster();
            return found.nodes().get().size() + " " + found.controller().get().id();
        });
        say("createTopics", () -> {
            NewTopic topic = new NewTopic(TOPIC, 2, (short) 1);
            topic.configs(Map.of("retention.ms", "60000"));
            CreateTopicsResult made = admin.createTopics(List.of(topic));
            return made.numPartitions(TOPIC).get() + " " + made.config(TOPIC).get()
                .get("retention.ms").value();
        });
        say("listTopics", () -> admin.listTopics(new ListTopicsOptions().listInternal(true))
            .names().get());
        say("createPartitions", () -> admin.createPartitions(
            Map.of(TOPIC, NewPartitions.increaseTo(3))).all().get());
        say("describeTopics", () -> {
            TopicDescription one = admin.describeTopics(List.of(TOPIC)).allTopicNames().get()
                .get(TOPIC);
            TopicCollection ids = TopicCollection.ofTopicIds(List.of(one.topicId()));
            String name = admin.describeTopics(ids).allTopicIds().get().get(one.topicId()).name();
            return one.partitions().size() + " " + name;
        });
        ConfigResource topic = new ConfigResource(ConfigResource.Type.TOPIC, TOPIC);
        ConfigResource broker = new ConfigResource(ConfigResource.Type.BROKER, "1");
        say("incrementalAlterConfigs", () -> admin.incrementalAlterConfigs(Map.of(topic, List.of(
            new AlterConfigOp(new ConfigEntry("segment.ms", "90000"), AlterConfigOp.OpType.SET),
            new AlterConfigOp(new ConfigEntry("retention.ms", ""), AlterConfigOp.OpType.DELETE)
        ))).all().get());
        say("describeConfigs", () -> {
            Map<ConfigResource, Config> found = admin.describeConfigs(List.of(topic, broker),
                new DescribeConfigsOptions().includeSynonyms(true).includeDocumentation(true))
                .all().get();
            return found.get(topic).get("segment.ms").value() + " "
                + found.get(topic).get("retention.ms").source() + " "
                + (found.get(broker).entries().size() > 50);
        });
        say("describeTopics in pages", () -> {
            DescribeTopicsOptions few = new DescribeTopicsOptions()
                .partitionSizeLimitPerResponse(2);
            TopicDescription one = admin.describeTopics(List.of(TOPIC), few).allTopicNames().get()
                .get(TOPIC);
            return one.partitions().stream().map(part -> part.partition()).toList() + " "
                + one.isInternal();
        });
        say("listConfigResources", () -> admin.listConfigResources().all().get().stream()
            .filter(one -> one.type() != ConfigResource.Type.TOPIC || one.name().equals(TOPIC))
            .map(one -> one.type() + " " + one.name()).sorted().toList());
        say("describeMetadataQuorum", () -> {
            QuorumInfo found = admin.describeMetadataQuorum().quorumInfo().get();
            return found.leaderId() + " " + found.voters().size() + " " + found.nodes().keySet()
                + " " + (found.highWatermark() > 0);
        });
        say("describeFeatures", () -> admin.describeFeatures().featureMetadata().get() != null);
        say("listPartitionReassignments", () -> admin.listPartitionReassignments()
            .reassignments().get());
        say("electLeaders", () -> admin.electLeaders(ElectionType.PREFERRED, Set.of(FIRST))
            .partitions().get().get(FIRST).get().getClass().getSimpleName());
    }

    static void produce() {
        for (String compression : List.of("none", "gzip", "snappy", "lz4", "zstd")) {
            say("produce " + compression, () -> {
                Properties page = settings();
                page.put("compression.type", compression);
                try (Producer<String, String> producer = new KafkaProducer<>(
                        page, new StringSerializer(), new StringSerializer())) {
                    long last = -1;
                    for (int number = 0; number < RECORDS / 5; number++) {
                        last = producer.send(new ProducerRecord<>(TOPIC, 0, "k", "v" + number))
                            .get().offset();
                    }
                    return last;
                }
            });
        }
    }

    static void records(Admin admin) {
        Map<String, OffsetSpec> asked = new TreeMap<>(Map.of(
            "earliest", OffsetSpec.earliest(), "latest", OffsetSpec.latest(),
            "newest", OffsetSpec.maxTimestamp(), "by time", OffsetSpec.forTimestamp(0)));
        asked.forEach((name, spec) -> say("listOffsets " + name,
            () -> admin.listOffsets(Map.of(FIRST, spec)).partitionResult(FIRST).get().offset()));
        say("describeLogDirs", () -> admin.describeLogDirs(List.of(1)).allDescriptions().get()
            .get(1).values().iterator().next().replicaInfos().get(FIRST).size() > 1000);
        say("deleteRecords", () -> admin.deleteRecords(
            Map.of(FIRST, RecordsToDelete.beforeOffset(10))).lowWatermarks().get(FIRST).get()
            .lowWatermark());
        say("page of messages", () -> {
            try (Consumer<String, String> consumer = consumer(settings())) {
                consumer.assign(List.of(FIRST));
                consumer.seek(FIRST, consumer.endOffsets(List.of(FIRST)).get(FIRST) - 5);
                List<Long> offsets = new ArrayList<>();
                while (offsets.size() < 5) {
                    consumer.poll(Duration.ofMillis(200)).forEach(one -> offsets.add(one.offset()));
                }
                return consumer.beginningOffsets(List.of(FIRST)).get(FIRST) + " " + offsets;
            }
        });
    }

    static Consumer<String, String> consumer(Properties page) {
        return new KafkaConsumer<>(page, new StringDeserializer(), new StringDeserializer());
    }

    static void consume(Admin admin, String group, Map<String, String> options) {
        say("consume " + group, () -> {
            Properties page = settings();
            page.put("group.id", group);
            page.put("auto.offset.reset", "earliest");
            page.put("enable.auto.commit", "false");
            page.putAll(options);
            try (Consumer<String, String> one = consumer(page);
                    Consumer<String, String> other = consumer(page)) {
                one.subscribe(List.of(TOPIC));
                other.subscribe(List.of(TOPIC));
                int count = 0;
                long end = System.nanoTime() + PATIENCE.toNanos();
                while (one.assignment().size() + other.assignment().size() < 3
                        || one.assignment().isEmpty() || other.assignment().isEmpty()
                        || count < RECORDS - 10) {
                    if (System.nanoTime() > end) {
                        return "only " + count;
                    }
                    count += one.poll(Duration.ofMillis(100)).count();
                    count += other.poll(Duration.ofMillis(100)).count();
                }
                one.commitSync();
                other.commitSync();
                ConsumerGroupDescription found = admin.describeConsumerGroups(List.of(group))
                    .all().get().get(group);
                return found.members().size() + " " + found.groupState() + " " + found.type();
            }
        });
        say("listConsumerGroupOffsets " + group, () -> admin.listConsumerGroupOffsets(group)
            .partitionsToOffsetAndMetadata().get().get(FIRST).offset());
        say("alterConsumerGroupOffsets " + group, () -> admin.alterConsumerGroupOffsets(
            group, Map.of(FIRST, new OffsetAndMetadata(20, "moved"))).all().get());
        say("listGroups " + group, () -> admin.listGroups().all().get().stream()
            .filter(one -> one.groupId().equals(group)).map(one -> one.groupState().get())
            .toList());
        say("deleteConsumerGroupOffsets " + group, () -> admin.deleteConsumerGroupOffsets(
            group, Set.of(FIRST)).all().get());
        say("deleteConsumerGroups " + group, () -> admin.deleteConsumerGroups(List.of(group))
            .all().get());
    }

    static void share(Admin admin) {
        say("share", () -> {
            Properties page = settings();
            page.put("group.id", "workers");
            page.put("share.acknowledgement.mode", "explicit");
            try (ShareConsumer<String, String> worker = new KafkaShareConsumer<>(
                    page, new StringDeserializer(), new StringDeserializer())) {
                worker.subscribe(List.of(TOPIC));
                int accepted = 0;
                int released = 0;
                long end = System.nanoTime() + PATIENCE.toNanos();
                while (accepted < RECORDS - 10 && System.nanoTime() < end) {
                    for (ConsumerRecord<String, String> one : worker.poll(Duration.ofMillis(200))) {
                        if (one.deliveryCount().get() == 1 && one.offset() == 15) {
                            worker.acknowledge(one, AcknowledgeType.RELEASE);
                            released++;
                        } else {
                            worker.acknowledge(one, AcknowledgeType.ACCEPT);
                            accepted++;
                        }
                    }
                    worker.commitSync();
                }
                int members = admin.describeShareGroups(List.of("workers")).all().get()
                    .get("workers").members().size();
                return accepted + " " + released + " " + members;
            }
        });
    }

    /** What this broker does not have, and says so: tools show pages without it. */
    static void later(Admin admin) {
        say("describeAcls", () -> admin.describeAcls(AclBindingFilter.ANY).values().get());
        say("describeClientQuotas", () -> admin.describeClientQuotas(ClientQuotaFilter.all())
            .entities().get());
        say("listTransactions", () -> admin.listTransactions().all().get());
    }
}
