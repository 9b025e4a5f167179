"""Codecs: what values become on the wire, how much of them is lost, and that everyone agrees."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onefold.errors import ConfigError, WireError
from onefold.wire import codec as codecs
from onefold.wire.codec import LARGEST, Codec, codec_of, encode_with_feedback

WORDS = ["int8", "int4", "int8+h", "int4+h"]
LENGTHS = [0, 1, 2, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1000, 4097]
FP32_MAX = torch.finfo(torch.float32).max
ODD = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 1e-30, FP32_MAX, -FP32_MAX]
NO_NUMBERS = [math.inf, -math.inf, math.nan]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(numel: int, seed: int = 0) -> Tensor:
    """Student's t with 3 degrees of freedom."""
    normal = gaussian(4 * numel, seed).view(4, numel)
    return normal[0] / normal[1:].square().mean(0).sqrt()


def encoded(codec: Codec, values: Tensor) -> Tensor:
    message = torch.full((codec.nbytes(len(values)),), 0xA5, dtype=torch.uint8)
    codec.encode(values, message)
    return message


def decoded(codec: Codec, message: Tensor, numel: int, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.full((numel,), math.nan, dtype=dtype or torch.float32)
    codec.decode(message, out)
    return out


def there_and_back(codec: Codec, values: Tensor) -> Tensor:
    return decoded(codec, encoded(codec, values), len(values))


def each_scale(codec: Codec, message: Tensor, numel: int) -> Tensor:
    """The scale of every element, fp32 [numel]."""
    scales = message[: 2 * -(-numel // codec.group)].view(torch.bfloat16).float()
    return scales.repeat_interleave(codec.group)[:numel]


def nmse(codec: Codec, values: Tensor) -> float:
    lost = there_and_back(codec, values) - values
    return (lost.double().square().sum() / values.double().square().sum()).item()


@st.composite
def magnitudes(draw: st.DrawFn) -> Tensor:
    """Values of any magnitude, with odd ones among them; all of them finite."""
    numel = draw(st.integers(1, 1200))
    values = gaussian(numel, draw(st.integers(0, 1000))) * 10.0 ** draw(st.integers(-44, 37))
    for _ in range(draw(st.integers(0, 4))):
        values[draw(st.integers(0, numel - 1))] = draw(st.sampled_from(ODD))
    if draw(st.booleans()):
        start = draw(st.integers(0, numel))
        values[start : start + 600] = 0.0
    return values.nan_to_num_()


# bytes


@pytest.mark.parametrize("numel", LENGTHS)
def test_messages_have_two_bytes_a_group_and_one_or_a_half_an_element(numel):
    wanted = {
        "int8": numel + 2 * math.ceil(numel / 512),
        "int4": math.ceil(numel / 2) + 2 * math.ceil(numel / 128),
    }  # fmt: skip
    for word, nbytes in wanted.items():
        assert codec_of(word).nbytes(numel) == nbytes
    for word in ("int8", "int4"):
        assert codec_of(word + "+h").nbytes(numel) == wanted[word]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_a_message_is_written_whole_and_the_same_each_time(word, numel):
    codec, values = codec_of(word), gaussian(numel)
    message = encoded(codec, values)
    other = torch.zeros_like(message)
    codec.encode(values, other)
    assert torch.equal(message, other)


@pytest.mark.parametrize("word", WORDS)
def test_a_message_may_lie_anywhere_in_a_larger_buffer(word):
    codec, values = codec_of(word), heavy_tailed(777)
    nbytes = codec.nbytes(777)
    buffer = torch.full((nbytes + 128,), 0x5A, dtype=torch.uint8)
    for offset in (16, 48, 112):
        buffer.fill_(0x5A)
        message = buffer[offset : offset + nbytes]
        codec.encode(values, message)
        assert torch.equal(message, encoded(codec, values))
        assert (buffer[:offset] == 0x5A).all()
        assert (buffer[offset + nbytes :] == 0x5A).all()
        assert torch.equal(decoded(codec, message, 777), there_and_back(codec, values))


# what is lost


@settings(max_examples=150)
@given(values=magnitudes(), word=st.sampled_from(["int8", "int4"]))
def test_no_element_is_off_by_more_than_half_its_scale_whatever_the_magnitude(values, word):
    codec = codec_of(word)
    message = encoded(codec, values)
    assert decoded(codec, message, len(values)).isfinite().all()
    lost = decoded(codec, message, len(values)).double() - values.double()
    scale = each_scale(codec, message, len(values)).double()
    assert (lost.abs() <= scale * (0.5 + LARGEST[word] * 2.0**-23)).all()


@settings(max_examples=150)
@given(values=magnitudes(), word=st.sampled_from(["int8", "int4"]))
def test_the_scale_is_the_nearest_bf16_to_the_largest_of_its_group(values, word):
    codec = codec_of(word)
    scales = each_scale(codec, encoded(codec, values), len(values))
    for start in range(0, len(values), codec.group):
        largest = values[start : start + codec.group].abs().max() / LARGEST[word]
        wanted = max(largest.bfloat16().float().item(), 2.0**-126)
        assert scales[start].item() == wanted


def test_four_bits_go_two_to_a_byte_low_nibble_first():
    values = torch.tensor([7.0, -7.0, 1.0, 0.0, -1.0])
    message = encoded(codec_of("int4"), values)
    assert message[:2].view(torch.bfloat16).item() == 1.0
    assert message[2:].tolist() == [0x97, 0x01, 0x0F]


def test_ties_go_to_the_even_one():
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    assert there_and_back(codec_of("int8"), values).tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("numel", [1, 33, 1000])
def test_zeros_come_back_as_zeros(word, numel):
    for zero in (0.0, -0.0):
        back = there_and_back(codec_of(word), torch.full((numel,), zero))
        assert torch.equal(back, torch.zeros(numel))


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_zeros_beside_large_values_come_back_as_zeros(word):
    values = gaussian(3000)
    values[::3] = 0.0
    assert (there_and_back(codec_of(word), values)[::3] == 0.0).all()


@settings(max_examples=150)
@given(values=magnitudes(), word=st.sampled_from(["int8", "int4"]))
def test_what_was_decoded_encodes_to_the_same_message_again(values, word):
    """A rank that forwards what it received adds no error; with the rotation this cannot hold."""
    codec = codec_of(word)
    message = encoded(codec, values)
    assert torch.equal(encoded(codec, decoded(codec, message, len(values))), message)


# no numbers, nothing, little


@pytest.mark.parametrize("bad", NO_NUMBERS)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(("numel", "index"), [(1, 0), (700, 5), (700, 699), (40, 39)])
def test_a_value_that_is_no_number_comes_back_as_none(word, bad, numel, index):
    codec, values = codec_of(word), gaussian(numel)
    assert there_and_back(codec, values).isfinite().all()
    values[index] = bad
    assert not there_and_back(codec, values)[index].isfinite()


@pytest.mark.parametrize("bad", NO_NUMBERS)
@pytest.mark.parametrize("word", ["int8", "int4"])
def test_a_value_that_is_no_number_spoils_its_group_and_no_other(word, bad):
    codec, values = codec_of(word), gaussian(2000)
    wanted = there_and_back(codec, values)
    values[600] = bad
    got = there_and_back(codec, values)
    group = slice(600 // codec.group * codec.group, (600 // codec.group + 1) * codec.group)
    assert got[group].isnan().all()
    got[group] = wanted[group]
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("word", WORDS)
def test_nothing_is_a_message_of_no_bytes(word):
    codec = codec_of(word)
    message = encoded(codec, torch.empty(0))
    assert message.shape == (0,)
    assert decoded(codec, message, 0).shape == (0,)
    codec.add(message, torch.empty(0))


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("value", [1.0, -3.25, 1e-30, -1e30])
def test_one_element_comes_back_within_the_rounding_of_its_scale(word, value):
    got = there_and_back(codec_of(word), torch.tensor([value])).item()
    assert got == pytest.approx(value, rel=2**-8)


@pytest.mark.parametrize("word", WORDS)
def test_the_largest_fp32_numbers_do_not_overflow(word):
    codec = codec_of(word)
    for values in (torch.full((33,), FP32_MAX), torch.tensor([FP32_MAX, -FP32_MAX, 0.0])):
        back = there_and_back(codec, values)
        if "h" not in word:
            assert back.isfinite().all()
            torch.testing.assert_close(back, values, rtol=2**-7, atol=0)
        else:  # rotated, a group may round past the largest number; its scale is one still
            assert each_scale(codec, encoded(codec, values), len(values)).isfinite().all()


# dtypes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("word", WORDS)
def test_values_of_any_dtype_encode_as_fp32_and_decode_rounded(word, dtype):
    codec, values = codec_of(word), heavy_tailed(1100).to(dtype)
    message = encoded(codec, values)
    assert torch.equal(message, encoded(codec, values.float()))
    wide = decoded(codec, message, 1100)
    assert torch.equal(decoded(codec, message, 1100, dtype), wide.to(dtype))


@pytest.mark.parametrize("word", WORDS)
def test_add_adds_what_decode_gives(word):
    codec, values, before = codec_of(word), heavy_tailed(1100), gaussian(1100, 1)
    got = before.clone()
    codec.add(encoded(codec, values), got)
    assert torch.equal(got, before + there_and_back(codec, values))


@pytest.mark.parametrize("word", WORDS)
def test_values_are_not_changed_and_take_no_part_in_autograd(word):
    values = heavy_tailed(700)
    given_ = values.clone().requires_grad_()
    message = encoded(codec_of(word), given_)
    assert torch.equal(given_, values)
    assert not message.requires_grad


@pytest.mark.parametrize("word", WORDS)
def test_torchs_way_gives_the_same_bits_in_blocks_of_any_length(word, monkeypatch):
    monkeypatch.setattr(codecs, "kernel", lambda: None)
    values = heavy_tailed(5000)
    message = encoded(codec_of(word), values)
    back = there_and_back(codec_of(word), values)
    monkeypatch.setattr(codecs, "CPU_BLOCK_NUMEL", 1024)
    assert torch.equal(encoded(codec_of(word), values), message)
    assert torch.equal(there_and_back(codec_of(word), values), back)


# the rotation


def hadamard() -> Tensor:
    """Sylvester's matrix of order 32, fp64."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    return torch.kron(torch.kron(torch.kron(torch.kron(two, two), two), two), two)


def test_rotated_blocks_are_quantized_products_with_hadamards_matrix():
    values = gaussian(1024)
    rotated = (values.double().view(-1, 32) @ hadamard() / 32).float().flatten()
    back = there_and_back(codec_of("int8"), rotated).double().view(-1, 32) @ hadamard()
    got = there_and_back(codec_of("int8+h"), values)
    torch.testing.assert_close(got.double(), back.flatten(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_rotation_lowers_the_mean_error_of_heavy_tails_and_not_of_normal_ones(word):
    heavy, normal = heavy_tailed(1 << 18), gaussian(1 << 18)
    plain, rotated = codec_of(word), codec_of(word + "+h")
    assert nmse(rotated, heavy) < 0.6 * nmse(plain, heavy)
    assert nmse(rotated, normal) == pytest.approx(nmse(plain, normal), rel=0.02)


@pytest.mark.parametrize("numel", [1, 31, 33, 63, 545])
def test_elements_after_the_last_whole_block_are_as_good_as_the_others(numel):
    values = gaussian(numel)
    back = there_and_back(codec_of("int8+h"), values)
    assert (back - values).abs().max() <= 0.05


# feedback


@pytest.mark.parametrize("word", ["int8", "int4", "int4+h"])
def test_with_feedback_all_that_was_decoded_sums_to_all_values_but_for_the_last_residual(word):
    codec, numel = codec_of(word), 700
    residual, message = torch.zeros(numel), torch.empty(codec.nbytes(numel), dtype=torch.uint8)
    total, arrived = (torch.zeros(numel, dtype=torch.float64) for _ in range(2))
    without = torch.zeros(numel, dtype=torch.float64)
    for seed in range(30):
        values = 0.3 + heavy_tailed(numel, seed)
        encode_with_feedback(codec, values, residual, message)
        total += values
        arrived += decoded(codec, message, numel)
        without += there_and_back(codec, values)
    torch.testing.assert_close(arrived + residual.double(), total, rtol=0, atol=1e-3)
    assert (arrived - total).square().mean() < 0.5 * (without - total).square().mean()


def test_the_residual_is_what_was_lost():
    codec, values, before = codec_of("int8"), gaussian(600), 0.01 * gaussian(600, 1)
    residual, message = before.clone(), torch.empty(codec.nbytes(600), dtype=torch.uint8)
    encode_with_feedback(codec, values, residual, message)
    assert torch.equal(message, encoded(codec, values + before))
    assert torch.equal(residual, (values + before) - decoded(codec, message, 600))


def test_a_group_with_no_numbers_starts_its_residual_from_zero_again():
    codec, values = codec_of("int8"), gaussian(1024)
    values[3] = math.nan
    residual, message = torch.zeros(1024), torch.empty(codec.nbytes(1024), dtype=torch.uint8)
    encode_with_feedback(codec, values, residual, message)
    assert decoded(codec, message, 1024).isnan().tolist() == [True] * 512 + [False] * 512
    assert (residual[:512] == 0).all()
    assert residual[512:].count_nonzero() > 400


# choices


def test_codecs_are_values():
    for a, b in itertools.product(WORDS, repeat=2):
        assert (codec_of(a) == codec_of(b)) is (a == b)
    assert len({codec_of(word) for word in WORDS * 2}) == len(WORDS)
    assert [codec_of(word).name for word in WORDS] == WORDS
    assert codec_of("int8", group=256) != codec_of("int8")
    assert "256" in codec_of("int8", group=256).name


@pytest.mark.parametrize(("word", "hint"), [("int9", "int8"), ("fp8", "int8"), ("int4h", "int4")])
def test_unknown_words_are_refused_with_the_nearest_one(word, hint):
    with pytest.raises(ConfigError, match=f"expected one of int8, .*{word}(.|\n)*hint: .*{hint}"):
        codec_of(word)


@pytest.mark.parametrize("group", [1, 48, 1024])
def test_groups_of_int4_have_at_most_512_elements_and_whole_blocks(group):
    with pytest.raises(ConfigError, match=rf"multiple of 32 .* 512 for int4, got {group}"):
        codec_of("int4", group=group)


@pytest.mark.parametrize("group", [32, 64, 512])
@pytest.mark.parametrize("word", WORDS)
def test_any_group_size_works(word, group):
    codec, values = codec_of(word, group=group), gaussian(1111)
    assert nmse(codec, values) < 0.03


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_what_does_not_fit_is_refused_before_bytes_are_misread(word):
    codec, values = codec_of(word), gaussian(64)
    message = encoded(codec, values)
    with pytest.raises(WireError, match=f"a message of {len(message)} bytes"):
        codec.encode(values, message[:-1])
    with pytest.raises(WireError, match="a message of"):
        codec.decode(message, torch.empty(96))
    with pytest.raises(WireError, match="flat values of a floating dtype"):
        codec.encode(values.view(8, 8), message)
    with pytest.raises(WireError, match=r"torch\.float32 to decode to, got .*float64"):
        codec.add(message, values.double())
