"""Keys land where Kafka's clients put them."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as kafka_python_murmur2

from millstream.wire.partitioning import murmur2, murmur3, partition_of_key

# From the tests of Kafka's Java client (`UtilsTest.testMurmur2`), as it prints them: signed.
JAVA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
# From librdkafka (`rdmurmur2.c`, its unit test): without a sign.
LIBRDKAFKA = {
    b"kafka": 0xD067CF64,
    b"giberish123456789": 0x8F552B0C,
    b"1234": 0x9FC97B14,
    b"234": 0xE7C009CA,
    b"34": 0x873930DA,
    b"4": 0x5A4B5CA1,
    b"PreAmbleWillBeRemoved,ThePrePartThatIs": 0x78424F1C,
    b"reAmbleWillBeRemoved,ThePrePartThatIs": 0x4A62B377,
    b"eAmbleWillBeRemoved,ThePrePartThatIs": 0xE0E4E09E,
    b"AmbleWillBeRemoved,ThePrePartThatIs": 0x62B8B43F,
    b"": 0x106E08D9,
}
# MurmurHash3_x86_32 with seed 0, by its reference implementation.
MURMUR3 = {
    b"": 0,
    b"a": 0x3C2569B2,
    b"abc": 0xB3DD93FA,
    b"Hello, world!": 0xC0363E43,
    b"The quick brown fox jumps over the lazy dog": 0x2E4FF723,
}


@pytest.mark.parametrize(("key", "number"), JAVA.items())
def test_murmur2_is_that_of_the_java_client(key: bytes, number: int) -> None:
    assert murmur2(key) == number & 0xFFFFFFFF


@pytest.mark.parametrize(("key", "number"), LIBRDKAFKA.items())
def test_murmur2_is_that_of_librdkafka(key: bytes, number: int) -> None:
    assert murmur2(key) == number


def test_keys_land_where_librdkafka_itself_puts_them() -> None:
    """Its producer sends to the broker in memory that it brings for its own tests."""
    producer = Producer({"test.mock.num.brokers": 1, "partitioner": "murmur2"})
    partitions: dict[bytes | None, int | None] = {}
    keys = [b"key-%d" % number * (number % 7 + 1) for number in range(300)]
    for key in keys:
        producer.produce(
            "keys",
            b"value",
            key=key,
            on_delivery=lambda _, message: partitions.update({message.key(): message.partition()}),
        )
    assert producer.flush(60) == 0
    count = len(producer.list_topics("keys", timeout=60).topics["keys"].partitions)
    assert count > 1
    assert partitions == {key: partition_of_key(key, count) for key in keys}


@given(st.binary(max_size=200))
def test_murmur2_is_that_of_kafka_python(key: bytes) -> None:
    assert murmur2(key) == kafka_python_murmur2(key) & 0xFFFFFFFF


@pytest.mark.parametrize(("key", "number"), MURMUR3.items())
def test_murmur3_is_that_of_its_reference(key: bytes, number: int) -> None:
    assert murmur3(key) == number


def test_a_key_has_the_partition_that_kafka_gives_it() -> None:
    # toPositive(murmur2(key)) % partitions, which differs from the remainder of the signed number.
    assert partition_of_key(b"21", 3) == (-973932308 & 0x7FFFFFFF) % 3
    assert partition_of_key(b"abc", 7) == 479470107 % 7
    assert partition_of_key(b"abc", 7, "murmur3") == (0xB3DD93FA & 0x7FFFFFFF) % 7
