"""The generator against the values that its authors publish (Random123, kat_vectors)."""

import pytest

from rocmega.sampling.philox import draw, philox, seed_of_request

ONES = 0xFFFFFFFF
KNOWN = [
    (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((1 << 64) - 1, (ONES,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        0x299F31D0A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN)
def test_known_answers(key, counter, words):
    assert philox(key, counter) == words


def test_draws_depend_on_seed_and_number_alone():
    drawn = {(seed, number): draw(seed, number) for seed in range(20) for number in range(20)}
    assert len(set(drawn.values())) == len(drawn)
    assert all(draw(*key) == value for key, value in reversed(drawn.items()))
    assert draw(5, 1 << 32) != draw(5, 0)


def test_negative_seeds_are_their_64_bits():
    assert draw(-1, 3) == draw((1 << 64) - 1, 3)


def test_requests_have_seeds_of_their_own():
    assert len({seed_of_request(7, number) for number in range(100)} | {draw(7, n) for n in range(100)}) == 200
