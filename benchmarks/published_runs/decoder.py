"""Count the work of a decoder from its shapes alone, for models that nobody builds here.

The planner traces a real module instead (`onefold.planner.trace`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onefold.errors import ConfigError
from onefold.planner.work import ModelWork, UnitWork, Work


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The shapes of a decoder: `layers` blocks of attention and a feed-forward of width `ffn`.

    `kv_heads` and `ffn` of 0 mean `heads` and 4 x `hidden`. A gated feed-forward (SwiGLU) has three
    matrices. `has_bias` is GPT's: a bias after every product, and norms with one. `positions` are
    learned position embeddings.
    """

    hidden: int
    layers: int
    heads: int
    vocab: int
    kv_heads: int = 0
    ffn: int = 0
    is_gated: bool = False
    is_tied: bool = True
    has_bias: bool = True
    positions: int = 0

    def __post_init__(self) -> None:
        if min(self.hidden, self.layers, self.heads, self.vocab) < 1:
            raise ConfigError(
                "hidden, layers, heads and vocab of at least 1",
                f"{self.hidden}, {self.layers}, {self.heads}, {self.vocab}",
                hint="TransformerShape(hidden=4096, layers=32, heads=32, vocab=50368)",
            )

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward's inside."""
        return self.ffn or 4 * self.hidden

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values: narrower than `hidden` with grouped queries."""
        return self.hidden * (self.kv_heads or self.heads) // self.heads

    @property
    def block_matrix_numel(self) -> int:
        """Elements of one block's matrices."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        return attention + (3 if self.is_gated else 2) * self.hidden * self.ffn_width

    @property
    def block_numel(self) -> int:
        """Parameters of one block: matrices, biases and two norms."""
        if not self.has_bias:
            return self.block_matrix_numel + 2 * self.hidden
        biases = 2 * self.hidden + 2 * self.kv_width + self.ffn_width + self.hidden
        return self.block_matrix_numel + biases + 4 * self.hidden

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        embeddings = (1 if self.is_tied else 2) * self.vocab + self.positions
        final_norm = (2 if self.has_bias else 1) * self.hidden
        return embeddings * self.hidden + self.layers * self.block_numel + final_norm


def elementwise_numel(shape: TransformerShape, *, is_fused: bool) -> tuple[float, float]:
    """Elements per token that one block's norms, residuals and activations move.

    Returns those of forward and of backward.

    Each kernel reads its inputs and writes its output once. In forward a norm moves 2 tensors of
    width h, a residual sum 3, GELU 2 of the feed-forward's width f; in backward, where each also
    reads a gradient, 3. Gated blocks (SwiGLU) have two kernels in place of GELU, rotate queries and
    keys, and have norms of root mean squares. Without a compiler those norms and the rotation are
    chains of kernels in fp32, worth 18 and 10 tensors; with one (`is_fused`) each is a single
    kernel, a norm goes with the sum before it, and SwiGLU is one kernel.
    """
    hidden, ffn, rotated = shape.hidden, shape.ffn_width, shape.hidden + shape.kv_width
    norm, total, inside, turn = 2, 3, 2, 0
    if shape.is_gated:
        norm, inside, turn = (2, 3, 2) if is_fused else (18, 5, 10)
    if is_fused:
        norm -= 1  # the sum has just been read
    forward = 2 * (norm + total) * hidden + inside * ffn + turn * rotated
    backward = 2 * (1.5 * norm + total) * hidden + 1.5 * inside * ffn + turn * rotated
    return forward, backward


def attention_flops(shape: TransformerShape, seq: int) -> float:
    """FLOPs per token of one block's two products over the whole square of scores: 4 s h."""
    return 4.0 * seq * shape.hidden


def softmax_numel(shape: TransformerShape, seq: int) -> tuple[float, float]:
    """Elements per token of scores that are written out: mask and scale, softmax, dropout.

    Without a fused kernel each of the three reads and writes heads x seq elements in forward, and
    reads two and writes one in backward.
    """
    square = shape.heads * seq
    return 6.0 * square, 9.0 * square


def _block(
    shape: TransformerShape,
    seq: int,
    tokens: int,
    itemsize: int,
    *,
    fused_attention: bool,
    fused_elementwise: bool,
) -> UnitWork:
    """One block's work on `tokens` tokens."""
    flops = 2.0 * shape.block_matrix_numel
    square = attention_flops(shape, seq)
    forward, backward = elementwise_numel(shape, is_fused=fused_elementwise)
    attended = (0.0, 0.0)
    if fused_attention:  # skips the half that a causal mask hides, and repeats QK in backward
        attended = 0.5 * square, 0.5 * 2.5 * square
    else:
        scores = softmax_numel(shape, seq)
        flops, forward, backward = flops + square, forward + scores[0], backward + scores[1]
    return UnitWork(
        "",
        shape.block_numel,
        Work(tokens * flops, tokens * attended[0], tokens * itemsize * forward),
        Work(tokens * 2 * flops, tokens * attended[1], tokens * itemsize * backward),
    )


def transformer_work(
    shape: TransformerShape,
    *,
    seq: int,
    microbatch: int,
    itemsize: int = 2,
    fused_attention: bool = True,
    fused_elementwise: bool = False,
) -> ModelWork:
    """The work of a decoder on `microbatch` sequences of `seq` tokens, from its shapes alone.

    Units are the embedding, each block, and the head; activations have `itemsize` bytes. A product
    of a weight costs 2 FLOPs per token and element in forward and twice that in backward
    (Korthikanti et al., arXiv 2205.05198, appendix A). Fused attention (Dao et al., arXiv
    2205.14135) executes half of the causal square and 2.5 times as much in backward; unfused
    attention all of it, and moves the scores through memory. Cross entropy moves the logits as
    activations and in fp32: 16 and 12 bytes per token and word.
    """
    tokens = seq * microbatch
    block = _block(
        shape,
        seq,
        tokens,
        itemsize,
        fused_attention=fused_attention,
        fused_elementwise=fused_elementwise,
    )
    embedding = UnitWork(
        "embedding",
        (shape.vocab + shape.positions) * shape.hidden,
        Work(nbytes=2.0 * itemsize * tokens * shape.hidden),
        Work(nbytes=3.0 * itemsize * tokens * shape.hidden),
        is_recomputed=False,
    )
    products = 2.0 * shape.vocab * shape.hidden * tokens
    head = UnitWork(
        "head",
        (2 if shape.has_bias else 1) * shape.hidden  # the last norm
        + (0 if shape.is_tied else shape.vocab * shape.hidden),
        Work(products, nbytes=16.0 * shape.vocab * tokens),
        Work(2 * products, nbytes=12.0 * shape.vocab * tokens),
        is_narrowed=False,
        is_recomputed=False,
    )
    blocks = (replace(block, name=f"layer {index}") for index in range(shape.layers))
    return ModelWork((embedding, *blocks, head), tokens)


def block_activation_nbytes(
    shape: TransformerShape,
    *,
    seq: int,
    microbatch: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    selective_recompute: bool = False,
) -> float:
    """Bytes of activations that one GPT block saves for backward on one rank, in 16 bits.

    s b h (10 + 24/t + 5 a s / (h t)), with dropout: Korthikanti et al., arXiv 2205.05198, table 2.
    Sequence parallelism divides the 10 by t as well; selective recompute drops the last term, the
    scores of unfused attention, which a fused kernel does not save either.
    """
    parallel = tensor_parallel
    outside = 10 / parallel if sequence_parallel else 10
    scores = 0.0 if selective_recompute else 5 * shape.heads * seq / (shape.hidden * parallel)
    return seq * microbatch * shape.hidden * (outside + 24 / parallel + scores)
