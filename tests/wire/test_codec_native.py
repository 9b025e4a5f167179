"""The C kernel of the codecs: torch's bits, on every instruction set, wherever a message lies."""

from __future__ import annotations

import math
from shutil import which

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onefold.errors import WireError
from onefold.wire import codec as codecs
from onefold.wire.codec import codec_of, encode_with_feedback
from onefold.wire.kernels import compiling
from onefold.wire.kernels.library import library
from onefold.wire.native import CodecKernel, Parts
from tests.support.rows import again_but

WORDS = ["int8", "int4", "int8+h", "int4+h"]
DTYPES = [torch.float32, torch.bfloat16]
ODD = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[CodecKernel]:
    """Every loop of the source that lies here that this CPU runs, the fastest first."""
    if which("cc") is None:
        pytest.skip("needs a C compiler")
    path = tmp_path_factory.mktemp("native") / "kernels.so"
    assert compiling.compile_library(["cc"], path) == ""
    return CodecKernel.offered_by(library(path))


@st.composite
def cases(draw: st.DrawFn) -> Tensor:
    """Values of many magnitudes with some that are odd or no numbers; often all ties, or zeros."""
    numel = draw(st.integers(0, 1500))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randn(numel, generator=generator)
    kind = draw(st.sampled_from(["normal", "spread", "ties", "zeros"]))
    if kind == "spread":
        values = values * 10.0 ** (12 * torch.randn(numel, generator=generator))
    elif kind == "ties":
        values = (values * 200).round() / 2
    elif kind == "zeros":
        values = torch.zeros(numel)
    values = values * 10.0 ** draw(st.integers(-44, 37))
    for _ in range(draw(st.integers(0, 3)) if numel else 0):
        values[draw(st.integers(0, numel - 1))] = draw(st.sampled_from(ODD))
    return values


def bits(tensor: Tensor) -> Tensor:
    """To compare NaN with NaN, and -0 not with 0; which NaN it is, nobody says."""
    narrow = tensor.masked_fill(tensor.isnan(), math.nan)
    return narrow.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def with_kernel(monkeypatch: pytest.MonkeyPatch, kernel: CodecKernel | None) -> None:
    monkeypatch.setattr(codecs, "kernel", lambda: kernel)


@settings(max_examples=400)
@given(
    values=cases(), word=st.sampled_from(WORDS), group=st.sampled_from([None, 32, 96, 512]),
    given_in=st.sampled_from(DTYPES), wanted_in=st.sampled_from(DTYPES),
    shift=st.integers(0, 20), offset=st.integers(0, 5),
)  # fmt: skip
def test_messages_and_what_they_decode_to_have_torchs_bits(
    compiled, values, word, group, given_in, wanted_in, shift, offset
):
    codec, numel = codec_of(word, group=group), len(values)
    nbytes = codec.nbytes(numel)
    buffer = torch.zeros(16 * offset + nbytes, dtype=torch.uint8)
    source = torch.zeros(shift + numel, dtype=given_in)[shift:].copy_(values)
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for kernel in (None, *compiled):
            with_kernel(monkeypatch, kernel)
            message = buffer[16 * offset :].fill_(0xA5)
            codec.encode(source, message)
            out = torch.full((shift + numel,), 7.0, dtype=wanted_in)[shift:]
            codec.decode(message, out)
            total = torch.full((shift + numel,), 0.1)[shift:]
            codec.add(message, total)
            found.append((message.clone(), bits(out), bits(total)))
    for got in found[1:]:
        for a, b in zip(got, found[0], strict=True):
            assert torch.equal(a, b)


@settings(max_examples=300)
@given(
    count=st.integers(1, 9), numel=st.integers(1, 700), gap=st.integers(0, 40),
    word=st.sampled_from(WORDS), group=st.sampled_from([None, 32, 96]),
    given_in=st.sampled_from([*DTYPES, torch.float16]),
    wanted_in=st.sampled_from([*DTYPES, torch.float16]), block=st.sampled_from([1024, 1 << 17]),
)  # fmt: skip
def test_rows_that_lie_apart_have_the_messages_of_one_row_after_the_other(
    compiled, count, numel, gap, word, group, given_in, wanted_in, block
):
    """And rows that are summed have the bits of adding one after the other."""
    codec, generator = codec_of(word, group=group), torch.Generator().manual_seed(numel)
    values = torch.randn(count, numel + gap, generator=generator).to(given_in)[:, :numel]
    nbytes = codec.nbytes(numel)
    stride = -(-(nbytes + gap) // 16) * 16
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(codecs, "CPU_BLOCK_NUMEL", block)
        for kernel in (None, compiled[0]):
            with_kernel(monkeypatch, kernel)
            buffer = torch.full((count * stride,), 0xA5, dtype=torch.uint8)
            messages = buffer.view(count, stride)[:, :nbytes]
            codec.encode(values, messages)
            assert (buffer.view(count, stride)[:, nbytes:] == 0xA5).all()
            outs = torch.full((2, count, numel + gap), 0.1)
            out, apart = (outs[0].to(wanted_in, copy=True) for _ in range(2))
            summed, wanted = torch.full((2, numel), 0.1)
            codec.decode(messages, out[:, :numel])
            codec.add(messages, outs[1, :, :numel])
            codec.add(messages, summed)
            for row in range(count):
                message = torch.empty(nbytes, dtype=torch.uint8)
                codec.encode(values[row], message)
                assert torch.equal(messages[row], message)
                codec.decode(message, apart[row, :numel])
                codec.add(message, outs[0, row, :numel])
                codec.add(message, wanted)
            assert torch.equal(out, apart)
            assert torch.equal(bits(outs[0]), bits(outs[1]))
            assert torch.equal(bits(summed), bits(wanted))


@again_but("int8", "int4+h")
@pytest.mark.parametrize("word", WORDS)
def test_nothing_is_written_beside_message_and_values(compiled, word, monkeypatch):
    with_kernel(monkeypatch, compiled[0])
    codec = codec_of(word)
    for numel in (1, 33, 127, 545, 1500):
        nbytes = codec.nbytes(numel)
        buffer = torch.full((nbytes + 64,), 0xA5, dtype=torch.uint8)
        codec.encode(torch.randn(numel), buffer[16 : 16 + nbytes])
        assert (buffer[:16] == 0xA5).all()
        assert (buffer[16 + nbytes :] == 0xA5).all()
        for dtype in DTYPES:
            out = torch.full((numel + 64,), 5.0, dtype=dtype)
            codec.decode(buffer[16 : 16 + nbytes], out[16 : 16 + numel])
            assert (out[:16] == 5.0).all()
            assert (out[16 + numel :] == 5.0).all()


@again_but("int8", "int4+h")
@pytest.mark.parametrize("word", WORDS)
def test_feedback_is_the_same_with_and_without(compiled, word, monkeypatch):
    codec, found = codec_of(word), []
    for kernel in (None, *compiled):
        with_kernel(monkeypatch, kernel)
        generator = torch.Generator().manual_seed(0)
        residual = torch.zeros(700)
        message = torch.empty(codec.nbytes(700), dtype=torch.uint8)
        for _ in range(5):
            encode_with_feedback(codec, torch.randn(700, generator=generator), residual, message)
        found.append((residual, message))
    for residual, message in found[1:]:
        assert torch.equal(bits(residual), bits(found[0][0]))
        assert torch.equal(message, found[0][1])


def test_without_a_library_torch_does_it(monkeypatch):
    assert CodecKernel.offered_by(None) == []
    with_kernel(monkeypatch, None)
    codec, values = codec_of("int8"), torch.tensor([127.0, -63.5, 0.0])
    message, out = torch.empty(codec.nbytes(3), dtype=torch.uint8), torch.empty(3)
    codec.encode(values, message)
    codec.decode(message, out)
    assert out.tolist() == [127.0, -64.0, 0.0]


def test_what_was_decoded_to_counts_as_changed_in_place(compiled, monkeypatch):
    with_kernel(monkeypatch, compiled[0])
    codec, values = codec_of("int8"), torch.randn(64)
    message, out = torch.empty(codec.nbytes(64), dtype=torch.uint8), torch.zeros(64)
    codec.encode(values, message)
    before = out._version
    codec.decode(message, out)
    assert out._version > before
    with torch.inference_mode():
        codec.decode(message, torch.zeros(64))


@again_but("torch.float16-int8", "torch.float64-int4")
@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_torchs(compiled, word, dtype, monkeypatch):
    """With the kernel, too, they encode as the fp32 values they are."""
    with_kernel(monkeypatch, compiled[0])
    codec, values = codec_of(word), torch.randn(700).to(dtype)
    messages = [torch.empty(codec.nbytes(700), dtype=torch.uint8) for _ in range(2)]
    codec.encode(values, messages[0])
    codec.encode(values.float(), messages[1])
    assert torch.equal(*messages)
    out, wide = torch.zeros(700, dtype=dtype), torch.zeros(700)
    codec.decode(messages[0], out)
    codec.decode(messages[0], wide)
    assert torch.equal(out, wide.to(dtype))


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_every_loop_refuses_a_message_that_does_not_fit_and_writes_nothing(compiled, word):
    """Groups longer than a loop's buffer, or of no elements; scales or bytes that are too few."""
    values, nbytes = torch.ones(1000), 1000 if word == "int8" else 500
    sizes = [(8192, 1, nbytes), (0, 8, nbytes), (-32, 8, nbytes), (100, 10, nbytes)]
    sizes += [(128, 7, nbytes), (128, 8, nbytes - 1)]
    for kernel in compiled:
        for group, num_scales, num_bytes in sizes:
            scales = torch.zeros(num_scales, dtype=torch.bfloat16)
            payload = torch.zeros(num_bytes, dtype=torch.uint8)
            parts = Parts(word, group, False, scales[None], payload[None])
            for call in (kernel.encode, lambda v, p, k=kernel: k.decode(p, v, adds=False)):
                with pytest.raises(WireError, match=f"groups of {group}"):
                    call(values[None], parts)
            assert not payload.any()
            assert torch.equal(values, torch.ones(1000))
