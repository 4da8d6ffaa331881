"""Products of matrices with a few tokens by compiled code, products.c.

`choose_kernels` says which a model runs with and why; `Kernels` calls them and counts.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from expertly.core.compiled import compiled
from expertly.core.errors import ConfigError
from expertly.core.messages import Span
from expertly.core.resources import granted_cpus
from expertly.formats.gguf import grids
from expertly.native.activations import Activation

VARIABLE = "EXPERTLY_KERNELS"
"""The environment's choice: "auto", "torch", or an instruction set of the compiled products."""

ACCEPTED = ("auto", "torch", "avx512_bf16", "avx512", "avx2", "neon", "generic")

TASK_TOKENS, MANY_TOKENS = 16, 48
"""As in products.h: most tokens of one product, which reads a chunk of weights again from the cache for every few; and
those of a prompt for which a tile of quantised weights is decoded once.
"""

_ATTENTION_TOKENS = 64
"""Tokens of one sequence, behind others that the cache holds: for more of them torch's attention is as fast."""

_MAX_FLOAT32_TOKENS = 4
"""Where weights are not quantised: another order of summation changes last bits, which tiny random models magnify."""

VERSION = 39
"""Of the interface that is called here; products.c says the same number."""

PLAIN = (nn.Parameter, torch.Tensor)
"""Other kinds of tensor, as quantizing makes them, have no memory of their own, or other bytes in it."""

_STRIDED, _is_compiling = torch.strided, torch.compiler.is_compiling  # looked up several times a layer

STEP_NBYTES = 2
"""Behind a row of codes."""

NO_DOWN = -1
"""In place of down's format: the blocks of one matrix."""

_ROWS = -1
"""In place of a format: rows of numbers."""

NORM_STYLES = {"rounded": 0, "weighed": 1, "one more": 2}
"""How a norm weighs: rounded to its dtype before; in float32; in float32 by 1 + weight."""

BOOLEAN = 3
"""A mask's kind beside the dtypes, whose masks are added to the scores."""

Work = tuple[Span, Sequence[int], Sequence[int]]
"""A span, the rows of its expert's inputs, and those of its outputs."""

_COMBINE_NBYTES = 16 << 20
"""torch's weighted sum over K takes this many bytes of outputs at a time, to keep a prompt's peak memory low."""

_FAILED = "a compiled product"

_INT, _LONG, _ADDRESS = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p

_COMPUTING: dict[str, tuple[Any, ...]] = {
    # level, dtype, threads, tasks, how many; matrices, neurons, width, bytes from row to row and from matrix to matrix
    "products_dots": (*3 * (_INT,), _ADDRESS, *6 * (_LONG,), _ADDRESS, *2 * (_LONG,), *2 * (_ADDRESS,), _LONG),
    "tiles_dots": (*6 * (_INT,), _ADDRESS, *5 * (_LONG,), _ADDRESS, *2 * (_LONG,), *2 * (_ADDRESS,), _LONG),
    "tiles_decode": (*3 * (_INT,), _ADDRESS, *2 * (_LONG,), _ADDRESS),
    "experts": (*3 * (_INT,), _ADDRESS),
    "combine": (*3 * (_INT,), *3 * (_LONG,), *3 * (_ADDRESS,)),
    "attention": (*3 * (_INT,), _ADDRESS, *2 * (ctypes.c_double,)),
    "projections": (*3 * (_INT,), _ADDRESS, *2 * (ctypes.c_double,)),
    "encode": (*2 * (_INT,), *4 * (_LONG,), *3 * (_ADDRESS,)),
    "norm": (*3 * (_INT,), *2 * (_LONG,), _ADDRESS, _LONG, _ADDRESS, ctypes.c_double, _ADDRESS),
    "router": (*3 * (_INT,), _ADDRESS),
    "program": (*2 * (_INT,), _ADDRESS, *2 * (_LONG,)),
}
"""Functions of products.c, by their names without "expertly_". They release the interpreter lock and return 0, or -1
where memory is short or the request is not one of theirs; `program` what program.h says.
"""

FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    **{name: (_LONG if name == "program" else _INT, arguments) for name, arguments in _COMPUTING.items()},
    "products_grids": (_INT, (ctypes.c_char_p, _LONG)),
    "products_name": (ctypes.c_char_p, (_INT,)),
    "products_has_half": (_INT, (_INT,)),
    "products_take_openmp": (None, (_INT,)),
}

STEPS = (
    *("norm", "projections", "attention", "router", "dots", "tiles", "experts", "add", "multiply", "looked up"),
    *("following", "torch"),
)
"""The kinds of a program's steps, by the numbers of program.h; and what the caller has torch compute."""


class Tape(Protocol):
    """Notes calls of kernels, to be made again on the same memory."""

    def note(self, kind: str, arguments: Sequence[int], kept: Sequence[Any]) -> None:
        """`arguments`: as program.h has them for a step of this kind; `kept`: whose memory they name."""


class UnsureError(Exception):
    """A router that is noted cannot tell its choice: another token may do."""


def double_bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little", signed=True)


def are_plain(first: torch.Tensor, *rest: torch.Tensor | None) -> bool:
    """Whether kernels may compute with these tensors, as numbers of the first one's dtype in the host's memory: nobody
    trains, traces or casts them. Asked at each call, as whoever has the model may have replaced or moved them.
    """
    if _is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    dtype, can_train = first.dtype, torch.is_grad_enabled()
    for tensor in (first, *rest):
        if tensor is not None and (
            type(tensor) not in PLAIN
            or tensor.dtype is not dtype
            or not tensor.is_cpu
            or tensor.layout is not _STRIDED
            or (can_train and tensor.requires_grad)
        ):
            return False
    return True


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(frozen=True)
class Library:
    """The compiled products for one instruction set."""

    name: str  # of the instruction set
    level: int
    dtypes: dict[torch.dtype, int]  # what it multiplies, by its own numbers
    call: SimpleNamespace  # FUNCTIONS


@cache
def libraries() -> Sequence[Library]:
    """All that run on this machine, from the fastest down; the last, in portable C, runs everywhere. Raises ConfigError
    where nothing was compiled.
    """
    call = compiled("native/_products", VERSION, FUNCTIONS)
    call.products_take_openmp(not spins_shortly())
    tables = grids()
    if call.products_grids(tables, len(tables)):
        raise ConfigError("expertly's compiled code and the package gguf differ in their grids: install another gguf")
    made = []
    for level in (3, 2, 1, 0):
        if (name := call.products_name(level)) is not None:
            dtypes = {torch.bfloat16: 0, **({torch.float16: 1} if call.products_has_half(level) else {})}
            made.append(Library(name.decode(), level, dtypes | {torch.float32: 2}, call))
    return made


def spins_shortly() -> bool:
    """Whether torch's threads soon sleep when they wait: as `import expertly` has it, or the user."""
    return "GOMP_SPINCOUNT" in os.environ or os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"


_SOFT = 1  # omp_pause_soft: other libraries' hard one ends the threads of all


def end_team() -> None:
    """End the threads that torch computes with beside the calling one; its next product begins them again.

    Each thread that computes has such a team. Where all teams together are more than the processors, libgomp's threads
    sleep after every product, and a prompt takes twice as long: whoever computes no more for now ends its own.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_SOFT)


class ExpertProducts:
    """What calls for the experts of one layer have in common: `formats` of gate, up (where there is no gate, up has
    gate's) and down, all NO_DOWN where they are rows of numbers; `row_nbytes` from row to row, or from block to block,
    and `matrix_nbytes` from matrix to matrix of rows; biases, contiguous: of each inner matrix [E, I], and of down
    [E, H].
    """

    def __init__(
        self,
        formats: tuple[int, int, int],
        shape: tuple[int, int],
        row_nbytes: int,
        matrix_nbytes: int,
        activation: Activation,
        inner_bias: Sequence[torch.Tensor],
        down_bias: torch.Tensor | None,
    ) -> None:
        self.formats = formats
        self.num_inner, hidden = shape
        self._kept = (activation.f, activation.g, *(*inner_bias, None, None)[:2], down_bias)
        width = inner_bias[0].shape[1] if inner_bias else 0
        self.addresses = (hidden, row_nbytes, matrix_nbytes, *map(_address, self._kept), width)


class ChosenExperts:
    """A program's step for the experts of one token: `ids` [1, K] choose them, and `out` [1, H] is the sum by `weights`
    [1, K] of what they make of `x` [1, H]. All contiguous.
    """

    def __init__(
        self,
        layer: ExpertProducts,
        num_neurons: int,
        slots: tuple[int, int, int, int],
        tensors: Sequence[torch.Tensor],
        weights_dtype: int,
    ) -> None:
        """`slots`: address of the table of experts' slots, -1 where one is not wholly there, how many it has, address
        of slot 0, bytes of a slot. `tensors`: x, ids, weights, out.
        """
        x, ids, weights, out = tensors
        table, num_experts, base, slot_nbytes = slots
        outputs = x.new_empty(ids.numel(), x.shape[1])
        self._kept = layer, outputs, tensors
        self.numbers = array(  # the last two: when the last call began and ended, of `time.perf_counter_ns`
            "q",
            (
                *(*layer.formats, layer.num_inner, num_neurons, *layer.addresses, 0, *(0,) * 4),
                *(x.data_ptr(), x.nbytes, 0, 0, ids.data_ptr(), table, base, slot_nbytes, ids.numel(), num_experts),
                *(weights_dtype, weights.data_ptr(), outputs.data_ptr(), out.data_ptr(), *(0,) * 6),
            ),
        )
        self.address = self.numbers.buffer_info()[0]

    def look_ahead(self, scores: torch.Tensor, table: int, num_experts: int, num_named: int) -> None:
        """Run only where the best experts of the next layer are resident, too: so many, by `scores` [1, E] in float32,
        which are there before the step. `table`: as in `slots`.
        """
        assert scores.numel() >= num_experts and scores.dtype == torch.float32
        self.numbers[-6:-2] = array("q", (scores.data_ptr(), table, num_experts, num_named))


class Projections:
    """What calls for one attention's queries, keys and values have in common: matrices of `num_rows` rows of `hidden`
    numbers, each `weights` [rows, H], or in a format, by its kernel's number in `formats`, blocks of 16 rows; `biases`
    [rows]; of the first two the norm (weight [head_width or rows], epsilon, style), then the rotation of the first
    `rotated_width` numbers of each head. All numbers of one dtype; contiguous.
    """

    def __init__(
        self,
        hidden: int,
        num_rows: Sequence[int],
        weights: Sequence[torch.Tensor],
        formats: Sequence[int | None],
        biases: Sequence[torch.Tensor | None],
        norms: Sequence[tuple[torch.Tensor, float, str] | None],
        head_width: int,
        rotated_width: int,
    ) -> None:
        self._kept = (*weights, *biases, *norms)
        self.head_width = head_width
        self.num_rows = num_rows
        self.epsilons = [0.0 if norm is None else norm[1] for norm in norms]
        of_norms = [None if norm is None else norm[0] for norm in norms]
        self.addresses = (
            *(hidden, head_width, rotated_width),
            *(0 if weight is None else len(weight) for weight in of_norms),
            *(0 if norm is None else NORM_STYLES[norm[2]] for norm in norms),
            *map(_address, (*of_norms, *weights, *biases)),
            *num_rows,
            *(_ROWS if number is None else number for number in formats),
            *(weight.stride(0) * weight.element_size() for weight in weights),
        )


def point_at(
    call: array[int],
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dtypes: Mapping[torch.dtype, int],
    positions: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> None:
    """Have a call of attention read these keys, values and mask; of keys and values those at `positions`. `factors`:
    see `encode`.
    """
    call[8], call[9], call[28], call[29] = k.data_ptr(), v.data_ptr(), min(k.shape[2], v.shape[2]), _address(factors)
    call[16], call[17], call[18] = k.stride()[:3]
    call[19], call[20], call[21] = v.stride()[:3]
    for place, number in zip(SEEN, seen(k.shape[2], positions, mask, dtypes), strict=True):
        call[place] = number


SEEN = 4, 27, 10, 22, 23, 24, 25
"""Where a call of attention has what `seen` gives."""


def seen(
    num_keys: int, positions: torch.Tensor | None, mask: torch.Tensor | None, dtypes: Mapping[torch.dtype, int]
) -> tuple[int, ...]:
    """What says of a call which keys its tokens see, whatever the layer."""
    of_keys = (num_keys, 0) if positions is None else (positions.numel(), positions.data_ptr())
    if mask is None:
        return *of_keys, 0, 0, 0, 0, BOOLEAN
    strides, size = mask.stride(), mask.element_size()
    steps = [0 if mask.shape[number] == 1 else strides[number] * size for number in range(3)]
    return *of_keys, mask.data_ptr(), *steps, BOOLEAN if mask.dtype == torch.bool else dtypes[mask.dtype]


def put_into(
    call: array[int], places: Sequence[torch.Tensor] | None, first: int, factors: torch.Tensor | None = None
) -> None:
    """Have a call of projections put keys and values of its tokens into `places`, from the row `first` on; None: beside
    the queries. `factors`: see `encode`.
    """
    call[-8] = _address(factors)
    if places is None:
        call[-7] = call[-6] = 0
        return
    for number, place in enumerate(places):
        of_sequence, of_head, of_token, _ = place.stride()
        size = place.element_size()
        call[number - 7] = place.data_ptr() + first * of_token * size
        call[2 * number - 4], call[2 * number - 3] = of_sequence * size, of_head * size


@dataclass
class KernelCounts:
    """How often a device's kernels, and torch, computed something."""

    native: int = 0  # experts, or parts of one, that were computed by the compiled products, or Triton's
    early: int = 0  # of these, before the host knew that they were chosen
    torch: int = 0  # the same by torch: prompts, mostly
    attention: int = 0  # layers' attentions that were computed by the compiled kernels
    graphs: int = 0  # layers whose dense part an accelerator's graphs computed, for a token
    programs: int = 0  # layers that ran as a program, for a token


class Kernels:
    """The products of one device of one model. `library` is None where torch multiplies."""

    def __init__(self, library: Library | None, reason: str) -> None:
        self.library = library
        self._call, self._level = (SimpleNamespace(), 0) if library is None else (library.call, library.level)
        self.reason = reason
        self.name = "torch" if library is None else f"native {library.name}"
        self.dtypes = {} if library is None else library.dtypes  # of matrices that they take, in the host's memory
        self.most_tokens = cache(self._most_tokens)
        """`most_tokens(dtype, weights)`: for how many tokens at a time they are worth while and exact enough; 0: never.
        `weights`: their format, of which a task by itself may have any number; "" where they are numbers of `dtype`;
        None: there are none, as in attention, whose tokens are those of one sequence. Kept, as it is asked several
        times a layer.
        """
        self.max_threads = granted_cpus()
        self.counts = KernelCounts()
        self.stopped: Counter[str] = Counter()  # layers that are no program, or graph, by what stopped them
        self.tape: Tape | None = None  # of who notes calls

    def _most_tokens(self, dtype: torch.dtype, weights: str | None = "") -> int:
        library = self.library
        if library is None or dtype not in library.dtypes:
            return 0
        if weights:
            return sys.maxsize
        if weights is None:
            return _ATTENTION_TOKENS
        return _MAX_FLOAT32_TOKENS if dtype == torch.float32 else TASK_TOKENS

    def slots(self, *layer: Any) -> Any:
        """An accelerator's kernels over a layer's slots, which triton_slots.SlotProducts describes; None: torch's."""
        return None

    def facts(self) -> dict[str, str | int]:
        stopped = ", ".join(f"{reason} ({num} layers)" for reason, num in self.stopped.items())
        return {"name": self.name, "why": self.reason, **asdict(self.counts), "stopped": stopped}

    def dots(
        self,
        address: int,
        x: torch.Tensor,
        out: torch.Tensor,
        row_nbytes: int,
        bias: torch.Tensor | None = None,
        format: int | None = None,
    ) -> None:
        """out[t, i] = row i . x[t], of a matrix whose rows begin every `row_nbytes` from `address` on; in a format, by
        its kernel's number, blocks of 16 rows do, and there may be any number of tokens.

        `x` [..., H] and `out` [..., r] are contiguous. `bias` [r] is added before rounding. Raises MemoryError.
        """
        width, num_rows, dtype = x.shape[-1], out.shape[-1], self.dtypes[x.dtype]
        num_tokens = x.numel() // width
        task = array("q", (address, 0, num_tokens, 0))
        matrix = task.buffer_info()[0], num_rows, width, row_nbytes
        inputs = x.data_ptr(), num_tokens, width * x.element_size(), 0 if bias is None else bias.data_ptr()
        threads = min(torch.get_num_threads(), self.max_threads)
        arguments: tuple[int, ...]
        if format is None:
            kind, arguments = "dots", (matrix[0], 1, 1, *matrix[1:], 0, *inputs, out.data_ptr(), num_tokens)
            failed = self._call.products_dots(self._level, dtype, threads, *arguments)
        else:
            kind, arguments = "tiles", (format, *matrix, *inputs, out.data_ptr(), num_tokens)
            numbers = matrix[0], 1, 1, *arguments[2:]
            failed = self._call.tiles_dots(self._level, format, format, NO_DOWN, dtype, threads, *numbers)
        if failed:
            raise MemoryError(_FAILED)
        if self.tape is not None:
            self.tape.note(kind, (dtype, *arguments), (task, x, bias, out))

    # -- a layer's experts -------------------------------------------------------------------------------------

    def experts(
        self,
        layer: ExpertProducts | None,
        slots: tuple[int, int, int],
        works: Sequence[Work],
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        adds: bool = False,
    ) -> None:
        """out[o] = expert(x[i]) for each span, rows i of `x` [*, H] and rows o of `out` [*, H], which is contiguous; of
        each at most most_tokens. Spans are of equal size. In formats one by itself may have any number of rows.
        `slots`: address of slot 0, and a slot's bytes and neurons. `adds`: a span's part of the sum is added to `out`,
        which is float32, unrounded and without bias. Raises MemoryError.
        """
        assert layer is not None, "they do not know such a layer"
        if x.stride(1) != 1:
            x = x.contiguous()
        self.counts.native += len(works)
        packed, of_x, of_out = array("q"), array("q"), array("q")
        address, nbytes, num_neurons = slots
        for span, x_rows, out_rows in works:
            packed.extend((address + span.slot * nbytes, len(x_rows), span.expert))
            of_x.extend(x_rows)
            of_out.extend(out_rows)
        begin, num_neurons = span.segment * num_neurons, span.num_segments * num_neurons
        call = array(
            "q",
            (
                *(*layer.formats, layer.num_inner, num_neurons, *layer.addresses, begin),
                *(packed.buffer_info()[0], len(packed) // 3, of_x.buffer_info()[0], of_out.buffer_info()[0]),
                *(x.data_ptr(), x.stride(0) * x.element_size(), out.data_ptr(), adds),
            ),
        )
        threads = min(torch.get_num_threads(), self.max_threads)
        if self._call.experts(self._level, self.dtypes[x.dtype], threads, call.buffer_info()[0]):
            raise MemoryError(_FAILED)

    def combine(self, rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[T, H] of `dtype` from the outputs of a layer's experts [T * K, H] and their weights [T, K]: the sum over K,
        rounded as in the reference, product in the promoted type, sum, then `dtype`.
        """
        (num_tokens, top_k), width = weights.shape, rows.shape[1]
        if (
            self.library is None
            or num_tokens > self.most_tokens(rows.dtype, None)
            or rows.dtype != dtype
            or weights.dtype not in (torch.float32, dtype)
            or not weights.is_contiguous()
        ):
            step = max(1, _COMBINE_NBYTES // (top_k * width * 4))
            pairs = zip(rows.view(num_tokens, top_k, width).split(step), weights.split(step), strict=True)
            parts = [(some * shares.unsqueeze(-1)).sum(dim=1).to(dtype) for some, shares in pairs]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        out = rows.new_empty(num_tokens, width)
        dtypes = self.dtypes[rows.dtype], self.dtypes[weights.dtype]
        addresses = rows.data_ptr(), weights.data_ptr(), out.data_ptr()
        if self._call.combine(self._level, *dtypes, num_tokens, top_k, width, *addresses):
            raise MemoryError(_FAILED)
        return out

    # -- the dense part ----------------------------------------------------------------------------------------

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None = None,
        *,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
        then: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """Attention [B, n, H, W] of queries [B, H, n, D] over keys [B, G, S, D] and values [B, G, S, W], G dividing H.

        `mask` [B or 1, H or 1, n, S] says what is seen, or is added to the scores; `softcap` bounds scores by a tanh;
        `sinks` [H] are scores that take their share of the softmax and have no value. Widths lie side by side.
        `positions` int64 [S], contiguous: which keys and values of one sequence are read, instead of all. `factors`:
        they are codes, see `encode`. `then`: what the linear layer of this weight [rows, H * W] and bias [rows],
        contiguous, makes of it instead, [B, n, rows], of at most most_tokens. Raises MemoryError.
        """
        num_batches, num_heads, num_tokens, _ = q.shape
        out = q.new_empty(num_batches, num_tokens, num_heads, v.shape[3] - (0 if factors is None else STEP_NBYTES))
        call = self.attention_call(q, k, out, sinks)
        point_at(call, k, v, mask, self.dtypes, positions, factors)
        projected = out
        if then is not None:
            weight, bias = then
            num_rows = weight.shape[0]  # len is ten times slower
            projected = q.new_empty(num_batches, num_tokens, num_rows)
            call[-4:] = array("q", (weight.data_ptr(), _address(bias), num_rows, projected.data_ptr()))
        threads = min(torch.get_num_threads(), self.max_threads)
        dtype = self.dtypes[q.dtype]
        if self._call.attention(self._level, dtype, threads, call.buffer_info()[0], scale, softcap):
            raise MemoryError(_FAILED)
        self.counts.attention += 1
        return projected

    def attention_call(
        self, q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
    ) -> array[int]:
        """The numbers of a call, without keys and values, see `point_at`; keys have as many heads as `k`."""
        num_batches, num_heads, num_tokens, key_width = q.shape
        return array(
            "q",
            (
                *(num_batches, num_heads, k.shape[1], num_tokens, 0, key_width, out.shape[3], q.data_ptr(), 0, 0, 0),
                *(_address(sinks), out.data_ptr(), *q.stride()[:3], *(0,) * 9),
                *(BOOLEAN, 0 if sinks is None else self.dtypes.get(sinks.dtype, 0), *(0,) * 7),
            ),
        )

    def encode(self, x: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
        """Keys or values `x` [B, heads, n, D] as codes, uint8 [B, heads, n, D + STEP_NBYTES]: a row's numbers, of keys
        over `factors` [heads, D] of float32, in steps of a 127th of the largest, plus 128; behind them the step, in
        bfloat16.
        """
        (*sizes, width), x = x.shape, x.contiguous()
        if factors is not None and factors.shape != (sizes[1], width):
            raise ValueError(f"factors of {list(factors.shape)} for keys {list(x.shape)}")
        out = torch.empty(*sizes, width + STEP_NBYTES, dtype=torch.uint8)
        addresses = x.data_ptr(), _address(factors), out.data_ptr()
        if self._call.encode(self._level, self.dtypes[x.dtype], *sizes, width, *addresses):
            raise MemoryError(_FAILED)
        return out

    def projections(
        self,
        x: torch.Tensor,
        layer: Projections,
        cos: torch.Tensor,
        sin: torch.Tensor,
        places: Sequence[torch.Tensor] | None = None,
        factors: torch.Tensor | None = None,
    ) -> Sequence[torch.Tensor]:
        """Queries, keys and values [B, heads, S, D] of `x` [B, S, H], of at most most_tokens. Rotated by `cos` and
        `sin` [..., angles]: as many angles as numbers, or one a pair; position t modulo positions is token t's. All
        of the layer's dtype. `places` [B, heads, more, D] end with room for the keys and values, which are put there;
        they are returned in place of these. `factors`: places take codes, see `encode`. Raises MemoryError.
        """
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        num_sequences, length, hidden = x.shape
        num, itemsize, width = num_sequences * length, x.element_size(), layer.head_width
        out = x.new_empty(num * sum(layer.num_rows))
        made, addresses, first, address = [], [], 0, out.data_ptr()
        for rows in layer.num_rows:
            if places is None or not first:
                shape = num_sequences, rows // width, length, width
                made.append(out.as_strided(shape, (length * rows, width, rows, 1), first))
            addresses.append(address + first * itemsize)
            first += num * rows
        angles = cos.shape[-1]
        call = array(
            "q",
            (
                *(num, hidden * itemsize, x.data_ptr()),
                *(angles, cos.numel() // angles, cos.data_ptr(), sin.data_ptr()),
                *(*addresses, *layer.addresses, 0, 0, 0, num_sequences, 0, 0, 0, 0),
            ),
        )
        if places is not None:
            made += places
            put_into(call, places, places[0].shape[2] - length, factors)
        dtype, numbers = self.dtypes[x.dtype], call.buffer_info()[0]
        threads = min(torch.get_num_threads(), self.max_threads)
        if self._call.projections(self._level, dtype, threads, numbers, *layer.epsilons):
            raise MemoryError(_FAILED)
        if self.tape is not None:
            arguments = (dtype, numbers, *map(double_bits, layer.epsilons))
            self.tape.note("projections", arguments, (call, x, layer, cos, sin, out))
        return made

    def router(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        top_k: int,
        dtype: torch.dtype,
        *,
        is_normalised: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Logits [T, E] of `x` [T, H], and of the chosen experts weights [T, K] in `dtype`, their shares of all
        scores or where it `is_normalised` of those of the chosen, and ids [T, K]. `weight` [E, H], `bias` [E]; all of
        one dtype and contiguous. None where torch is to choose: where scores are not numbers, or as near to each
        other as another exp may put them. Raises MemoryError.
        """
        (num_tokens, width), num_experts = x.shape, weight.shape[0]
        logits = x.new_empty(num_tokens, num_experts)
        weights = x.new_empty(num_tokens, top_k, dtype=dtype)
        ids = x.new_empty(num_tokens, top_k, dtype=torch.int64)
        call = array(
            "q",
            (
                *(num_tokens, width, num_experts, top_k, is_normalised, self.dtypes[dtype]),
                *(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()),
                *(logits.data_ptr(), weights.data_ptr(), ids.data_ptr(), 0),
            ),
        )
        threads = min(torch.get_num_threads(), self.max_threads)
        result = self._call.router(self._level, self.dtypes[x.dtype], threads, call.buffer_info()[0])
        if result < 0:
            raise MemoryError(_FAILED)
        if self.tape is not None:
            if result:
                raise UnsureError
            arguments = self.dtypes[x.dtype], call.buffer_info()[0]
            self.tape.note("router", arguments, (call, x, weight, bias, logits, weights, ids))
        return None if result else (logits, weights, ids)

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, style: str) -> torch.Tensor:
        """`x` [..., D], contiguous, over the root of its mean square and `epsilon`; weighed as NORM_STYLES says."""
        width = x.shape[-1]
        out = torch.empty_like(x)
        arguments = (
            *(self.dtypes[x.dtype], NORM_STYLES[style], x.numel() // width, width, x.data_ptr()),
            *(width * x.element_size(), 0 if weight is None else weight.data_ptr()),
        )
        self._call.norm(self._level, *arguments, epsilon, out.data_ptr())
        if self.tape is not None:
            self.tape.note("norm", (*arguments, double_bits(epsilon), out.data_ptr()), (x, weight, out))
        return out

    def run_program(self, steps: array[int], begin: int, most: int = 0) -> tuple[int, int]:
        """The steps of a program from `begin` on, and of up to `most` that follow it. Returns the step that did not
        run, which the caller takes, and how many programs further it is. Raises MemoryError.
        """
        threads = min(torch.get_num_threads(), self.max_threads)
        reached: int = self._call.program(self._level, threads, steps.buffer_info()[0], begin, most)
        if reached < 0:
            raise MemoryError(_FAILED)
        return reached & 0xFFFFFFFF, reached >> 32

    def tile_decode(self, format: int, address: int, out: torch.Tensor) -> None:
        """The weights of a matrix alone, `out` [rows, width], from its blocks at `address`, rounded to its dtype."""
        how = self._level, format, self.dtypes[out.dtype]
        if self._call.tiles_decode(*how, address, *out.shape, out.data_ptr()):
            raise MemoryError(_FAILED)


def choose_kernels(wanted: str | None = None, *, runs_on_host: bool = True) -> Kernels:
    """The fastest for a device, or what `wanted`, else the environment, says. `runs_on_host`: it computes in the host's
    memory, which the compiled ones need.

    Raises ConfigError where that is unknown or not to be had here.
    """
    wanted = wanted or os.environ.get(VARIABLE) or "auto"
    if wanted not in ACCEPTED:
        raise ConfigError(f"{VARIABLE}={wanted!r}: unknown; accepted: {', '.join(ACCEPTED)}")
    if wanted == "torch":
        return Kernels(None, f"{VARIABLE}=torch")
    if not runs_on_host:
        return _of_accelerator() if wanted == "auto" else Kernels(None, "the compiled ones are for a CPU")
    for library in libraries():
        if wanted in ("auto", library.name):
            return Kernels(library, "the fastest of this processor" if wanted == "auto" else f"{VARIABLE}={wanted}")
    names = ", ".join(library.name for library in libraries())
    raise ConfigError(f"{VARIABLE}={wanted!r}: not of this processor; accepted here: auto, torch, {names}")


def _of_accelerator() -> Kernels:
    try:
        from expertly.native.triton_slots import TritonKernels, why_not
    except ImportError as error:
        return Kernels(None, f"Triton is not installed: {error}")
    reason = why_not()
    return Kernels(None, reason) if reason else TritonKernels("Triton compiles for this device")
