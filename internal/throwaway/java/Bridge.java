import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Future;
import java.util.concurrent.LinkedBlockingQueue;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.PartitionInfo;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Reads one request per line from standard input, answers each by a line on standard output, and
 * ends with its input. Its argument holds the clients' settings as a JSON object.
 */
public class Bridge {
    static final ObjectMapper JSON = new ObjectMapper();
    static final Properties SETTINGS = new Properties();
    static KafkaProducer<byte[], byte[]> plain;
    static KafkaProducer<byte[], byte[]> transactional;

    public static void main(String[] args) throws Exception {
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err); // for the clients' notes
        JSON.readTree(args[0]).properties().forEach(e -> SETTINGS.put(e.getKey(), e.getValue().asText()));
        BlockingQueue<String> requests = new LinkedBlockingQueue<>();
        Thread reader = new Thread(() -> {
            try {
                BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
                for (String line; (line = in.readLine()) != null; ) {
                    requests.add(line);
                }
            } catch (Exception e) {
                e.printStackTrace();
            }
            Runtime.getRuntime().halt(0); // also out of a call that hangs
        });
        reader.setDaemon(true);
        reader.start();
        while (true) {
            ObjectNode answer = JSON.createObjectNode();
            try {
                JsonNode request = JSON.readTree(requests.take());
                if (request.get("op").asText().equals("produce")) {
                    produce(request, answer.putArray("records"));
                } else {
                    consume(request, answer.putArray("records"));
                }
            } catch (Exception e) {
                answer.removeAll().put("error", e.toString());
            }
            out.println(JSON.writeValueAsString(answer));
        }
    }

    static KafkaProducer<byte[], byte[]> producer(Map<String, String> more) {
        Properties settings = new Properties();
        settings.putAll(SETTINGS);
        settings.putAll(more);
        return new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
    }

    static void produce(JsonNode request, ArrayNode answer) throws Exception {
        String end = request.path("end").asText("");
        if (end.isEmpty()) {
            if (plain == null) {
                plain = producer(Map.of());
            }
            send(plain, request.get("records"), answer);
            return;
        }
        if (transactional == null) {
            transactional = producer(Map.of("transactional.id", request.get("id").asText()));
            transactional.initTransactions();
        }
        transactional.beginTransaction();
        try {
            send(transactional, request.get("records"), answer);
        } catch (Exception e) {
            transactional.abortTransaction();
            throw e;
        }
        if (end.equals("commit")) {
            transactional.commitTransaction();
        } else {
            transactional.abortTransaction();
        }
    }

    static void send(KafkaProducer<byte[], byte[]> producer, JsonNode records, ArrayNode answer) throws Exception {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (JsonNode r : records) {
            Long timestamp = r.get("timestamp").asLong() == 0 ? null : r.get("timestamp").asLong();
            ProducerRecord<byte[], byte[]> record = new ProducerRecord<>(
                r.get("topic").asText(), null, timestamp, bytes(r.get("key")), bytes(r.get("value")));
            for (JsonNode h : r.withArray("/headers")) {
                record.headers().add(h.get("name").asText(), bytes(h.get("value")));
            }
            sent.add(producer.send(record));
        }
        producer.flush();
        for (Future<RecordMetadata> f : sent) {
            RecordMetadata at = f.get();
            answer.addObject().put("topic", at.topic()).put("partition", at.partition())
                .put("offset", at.offset()).put("timestamp", at.timestamp());
        }
    }

    static byte[] bytes(JsonNode base64) throws Exception {
        return base64 == null || base64.isNull() ? null : base64.binaryValue();
    }

    static void consume(JsonNode request, ArrayNode answer) {
        Properties settings = new Properties();
        settings.putAll(SETTINGS);
        settings.put("isolation.level", request.get("isolation").asText());
        try (KafkaConsumer<byte[], byte[]> consumer =
            new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            List<TopicPartition> partitions = new ArrayList<>();
            for (PartitionInfo p : consumer.partitionsFor(request.get("topic").asText())) {
                partitions.add(new TopicPartition(p.topic(), p.partition()));
            }
            consumer.assign(partitions);
            consumer.seekToBeginning(partitions);
            Map<TopicPartition, Long> ends = consumer.endOffsets(partitions);
            while (partitions.stream().anyMatch(p -> consumer.position(p) < ends.get(p))) {
                for (ConsumerRecord<byte[], byte[]> r : consumer.poll(Duration.ofMillis(100))) {
                    ObjectNode to = answer.addObject().put("topic", r.topic()).put("partition", r.partition())
                        .put("offset", r.offset()).put("timestamp", r.timestamp())
                        .put("key", r.key()).put("value", r.value());
                    ArrayNode headers = to.putArray("headers");
                    for (Header h : r.headers()) {
                        headers.addObject().put("name", h.key()).put("value", h.value());
                    }
                }
            }
        }
    }
}
