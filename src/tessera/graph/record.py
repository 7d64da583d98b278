"""What runs, operator by operator: a dispatch mode that writes down everything torch dispatches and computes nothing.

Real tensors that reach an operator (a constant in a closure, a cache) are replaced by meta twins on the way.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ..errors import CaptureError, DataDependent
from . import costing
from .counted import COUNTED
from .ir import DTYPE_BYTES, Category, Op, Phase, Storage, TensorSpec
from .known import MAX_KNOWN_INTS, Known
from .parts import PARTS
from .routes import Routes
from .signature import Signature, signature_of
from .storages import Storages

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
    torch.bool: "bool", torch.complex64: "complex64", torch.complex128: "complex128",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.float8_e4m3fnuz: "fp8", torch.float8_e5m2fnuz: "fp8",
    torch.complex32: "complex32",
}  # fmt: skip

# Operators that are answered here instead of being run on meta tensors.
_SPECIAL = {**COUNTED, **PARTS}
# Questions a program asks of tensors whose values do not exist, by what they are taken to be answered with.
_TAKEN_TRUE, _TAKEN_FALSE = ("all", "eq", "isfinite", "equal", "_is_all_true"), ("any", "logical_not", "_is_any_true")

# Torch's switches for fp32 by kind of operator. Older versions have one for cuBLAS and one for cuDNN.
_SWITCHES = {"gemm": "matmul", "conv": "conv", "rnn": "rnn"}
_switch: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


# Hooks on what autograd saves, as a checkpoint sets them around a block: what is on top now, None without any.
_saved_tensors_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _tracing: None
)


def switched_to_tf32(kind: str) -> bool:
    """What torch's switches say now about fp32 operators of a kind."""
    if _switch is not None:
        return _switch("cuda", _SWITCHES[kind]) == "tf32"
    return bool(torch._C._get_cublas_allow_tf32() if kind == "gemm" else torch._C._get_cudnn_allow_tf32())


class Recorder(TorchDispatchMode):
    """Writes down the operators of one iteration. `active` off: runs them on meta without writing."""

    def __init__(self, *, always_tf32: bool = False) -> None:
        super().__init__()
        self._always_tf32 = always_tf32
        self.ops: list[Op] = []
        self._storages = Storages(self.ops)
        self.assumptions: dict[str, None] = {}
        self.known = Known()
        self.active = True
        self.scope: Callable[[], str] = lambda: ""
        self.node: str | None = None
        self.modules = 0
        self.functions = 0
        self.phase: Phase = "forward"
        self._twins: dict[int, tuple[Any, torch.Tensor]] = {}
        self._scopes: dict[int, tuple[str, str | None]] = {}
        self._sync = False
        self.routes = Routes(self._storages.id_of)
        self._answer: tuple[Any, Callable[[], tuple[torch.Tensor, ...]]] | None = None
        self._own: set[int] = set()  # storages on the CPU that the program made while it was captured

    @property
    def waits(self) -> bool:
        """Whether the host has waited for the device since the last operator."""
        return self._sync

    def wait(self) -> None:
        """The host waits for the device here."""
        self._sync = True

    # -- tensors ------------------------------------------------------------------------------------------------

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The meta twin of a real tensor: always the same one."""
        found = self._twins.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._twins[id(tensor)] = (weakref.ref(tensor), meta)
        self.adopt(meta, "inputs")
        if not tensor.dtype.is_floating_point or tensor.numel() == 1:
            self.known.note(meta, tensor)
        return meta

    def adopt(self, tensor: torch.Tensor, category: Category, name: str = "") -> int:
        """Note a storage that existed before the iteration."""
        return self._storages.adopt(tensor, category, name)

    def mark(self, tensor: torch.Tensor | None, category: Category) -> None:
        """Say what a storage made during the iteration is for."""
        if tensor is not None and self.active:
            self._storages.mark(tensor, category)

    @property
    def storages(self) -> dict[int, Storage]:
        """Every storage so far, by its number."""
        return self._storages.by_id

    def spec(self, tensor: torch.Tensor) -> TensorSpec:
        """A tensor as data."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        count = 1
        for size, step in zip(shape, stride, strict=True):
            count *= size if step != 0 else min(size, 1)
        dtype = DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        return TensorSpec(
            self._storages.id_of(tensor), shape, stride, dtype, int(count * DTYPE_BYTES.get(dtype, tensor.itemsize))
        )

    # -- dispatch -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator on meta tensors and write it down."""
        kwargs = kwargs or {}
        if self._answer is not None and self._answer[0] is func:
            return self._answered(func, self._answer[1])
        signature = signature_of(func)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if tensors and self._on_the_host(signature, args, kwargs, tensors):
            # The host's own small arithmetic: done for real, no kernel of the device.
            made = func(*args, **kwargs)
            self._own.update(
                t.untyped_storage()._cdata for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)
            )
            return made
        if signature.short == "_local_scalar_dense":
            return self._scalar(tensors[0])
        special, counted = _SPECIAL.get(signature.short), self.functions
        answer = special(self, func, args, kwargs) if special is not None else NotImplemented
        if answer is not NotImplemented:
            return answer
        self.functions = counted  # in backward a function mode sees what is asked of tensors here, too
        args, kwargs = self._on_meta(args, kwargs)
        try:
            out = func(*args, **kwargs)
        except NotImplementedError as e:
            raise self.cannot(signature.name, e) from e
        if signature.short == "convolution":
            out = _cudnn_layout(args, out)
        outs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self._look_at(signature, args, kwargs, outs)
        if signature.writes_named:
            for t in signature.written(args, kwargs):
                self.known.spoil(t)
        self.known.follow(func, args, kwargs, outs)
        if self.active and not signature.silent:
            self._write(signature, args, kwargs, outs)
        return out

    def _look_at(self, signature: Signature, args: Any, kwargs: Any, outs: list[torch.Tensor]) -> None:
        """Refuse what has no place in memory, and follow what masks are full of; it is no call of the program's."""
        counted = self.functions
        odd = next((t.layout for t in outs if t.layout != torch.strided), None)
        if odd is not None:
            raise _not_dense(signature.name, "nested" if odd == torch.jagged else "sparse")
        self.routes.follow(signature.short, args, kwargs, outs)
        self.functions = counted

    def as_operator(
        self, call: Callable[[], tuple[Any, tuple[Any, ...]]], run: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """What `run` emits and returns, seen as one operator (its `call`) by dispatch modes entered after this one.

        Selective checkpointing is such a mode: it keeps the result of an operator, and hands it out again instead of
        running it. Without one, `run` is simply run.
        """
        if _get_current_dispatch_mode() is self:
            return run()
        func, args = call()
        before, self._answer = self._answer, (func, run)
        try:
            found: tuple[torch.Tensor, ...] = func(*args)
        finally:
            self._answer = before
        return found[:2]

    def _answered(self, func: Any, run: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[Any, ...]:
        """The result of `run`, and empty ones for what else the operator returns: random seeds, sizes."""
        made = run()
        rest = func._schema.returns[len(made) :]
        with paused(self):
            return (*made, *(torch.empty(0, device="meta") if str(r.type) == "Tensor" else 0 for r in rest))

    def _on_the_host(self, signature: Signature, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> bool:
        """Whether an operator is small arithmetic of the program on the CPU, and writes into nothing of the user's."""
        if any(t.device.type != "cpu" or t.numel() > MAX_KNOWN_INTS for t in tensors) or self._moves_off_cpu(kwargs):
            return False
        written = signature.written(args, kwargs) if signature.writes_named else ()
        return all(t.untyped_storage()._cdata in self._own for t in written)

    @staticmethod
    def _moves_off_cpu(kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "meta"

    def on_meta(self, leaf: Any) -> Any:
        """A tensor's meta twin; anything else as it is."""
        return self.twin(leaf) if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" else leaf

    def _on_meta(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return pytree.tree_map(self.on_meta, (args, kwargs))  # type: ignore[no-any-return]

    def _write(self, signature: Signature, args: Any, kwargs: Any, outs: list[torch.Tensor]) -> None:
        reads, outs = signature.moved(args, kwargs, outs)
        if signature.short == "_safe_softmax":
            self._safe_softmax(args, outs)
            return
        kind = "view" if signature.is_view(reads, outs) else signature.kind
        ours = signature.name.startswith("tessera.")
        params = costing.params_of_ours(signature.short, args) if ours else {}
        params = params or costing.params_of(signature.short, args, kwargs)
        if not signature.modelled and kind != "view":
            params = {**params, "unmodelled": True}
        self.emit(signature.name, kind, reads, outs, params)

    def _safe_softmax(self, args: Any, outs: list[torch.Tensor]) -> None:
        """On a GPU: softmax, then rows that are all -inf are found and set to zero."""
        scores, params = args[0], {"dim": args[1]}
        flags = torch.empty_like(outs[0], dtype=torch.bool)
        rows = torch.empty((*flags.shape[:-1], 1), dtype=torch.bool, device="meta")
        values = torch.empty_like(outs[0])
        self.emit("aten._softmax", "softmax", [scores], [values], params)
        self.emit("aten.isneginf", "elementwise", [scores], [flags], {})
        self.emit("aten.all", "reduce", [flags], [rows], {"dim": -1})
        self.emit("aten.where", "elementwise", [rows, values], outs, {})

    def emit(
        self,
        name: str,
        kind: str,
        reads: list[torch.Tensor],
        outs: list[torch.Tensor],
        params: dict[str, Any],
        kernels: int | None = None,
    ) -> None:
        """Append an operator."""
        if not self.active:
            return
        phase, (scope, node) = self._where()
        inputs = tuple(self.spec(t) for t in reads)
        outputs = tuple(self.spec(t) for t in outs)
        work = costing.work_of(name, kind, inputs, outputs, params, self._tf32(kind))
        if work.params.get("complex"):
            self.assumptions[f"complex products run as real {work.precision}, four multiply-adds for each"] = None
        self.ops.append(
            Op(
                len(self.ops), name, kind, scope, phase, inputs, outputs, work.flops, work.precision, work.unit,
                work.kernels if kernels is None else kernels, work.params, node, self.modules, self.functions,
                self._sync, _saved_tensors_hooks(False) is not None,
            )
        )  # fmt: skip
        self.modules = self.functions = 0
        self._sync = False

    def _tf32(self, kind: str) -> bool:
        """Whether fp32 runs as TF32 here and now: programs turn torch's switches while they run."""
        return kind in _SWITCHES and (self._always_tf32 or switched_to_tf32(kind))

    # -- where we are -------------------------------------------------------------------------------------------

    def _where(self) -> tuple[Phase, tuple[str, str | None]]:
        """Phase, and the module (or fx node) this belongs to: in backward that of the forward operator."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return "backward", self._scopes.get(node._sequence_nr(), ("", None))
        here = (self.scope(), self.node)
        if torch.is_grad_enabled():
            # The node just made for this operator; one without a node of its own must not claim the one before.
            self._scopes.setdefault(torch._C._autograd._get_sequence_nr() - 1, here)
        return self.phase, here

    # -- values -------------------------------------------------------------------------------------------------

    def _scalar(self, tensor: torch.Tensor) -> Any:
        """`item()`, `bool()`, `int()` of a tensor: the host waits for the device."""
        self._sync = True
        value = self.known.value(tensor)
        if value is not None:
            return value.item()
        maker = self.made_by(tensor)
        line = _user_line()
        if maker == "any" and self.routes.density(tensor):
            return True  # somebody chose it
        if tensor.dtype == torch.bool and maker in (*_TAKEN_TRUE, *_TAKEN_FALSE):
            answer = maker in _TAKEN_TRUE
            self.assumptions[f"{line}: {maker}() is taken to be {answer}"] = None
            return answer
        if tensor.dtype.is_floating_point:
            self.assumptions[f"{line}: the value of a float is taken to be 1.0"] = None
            return 1.0
        raise DataDependent(
            f"the program asks for the value of a tensor at {line}",
            why="capture computes nothing, so a value that depends on the data (not only on shapes) does not exist",
            fix="give real integer inputs (masks, lengths, ids), not meta ones, pass the part without the branch, "
            "or measure the model instead: tessera measure",
        )

    def made_by(self, tensor: torch.Tensor) -> str:
        """The short name of the operator that wrote a tensor last, or ""."""
        sid = self._storages.seen(tensor)
        for op in reversed(self.ops):
            if any(t.storage == sid for t in op.outputs):
                return op.name.rpartition(".")[2]
        return ""

    def assume(self, what: str) -> None:
        """Note what had to be assumed at the user's line."""
        self.assumptions[f"{_user_line()}: {what}"] = None

    def cannot(self, name: str, error: Exception | None = None) -> CaptureError:
        """The error of an operator that needs values which do not exist, or that torch has no meta form of."""
        why = "the size of its result depends on values, which do not exist while it is captured"
        give = "give masks, lengths and ids as real tensors (made with device='cpu'), "
        return DataDependent(
            f"{name} at {_user_line()} cannot be captured",
            why=why if error is None else f"torch has no meta form of it ({_one_line(error)})",
            fix=f"{'' if error else give}pass the part of the model without it, or measure it: tessera measure",
        )


def _cudnn_layout(args: Any, out: torch.Tensor) -> torch.Tensor:
    """CuDNN answers channels-last where the input or the weight is; the meta kernel always answers contiguous."""
    if out.dim() != 4:
        return out
    if any(suggest_memory_format(t) == torch.channels_last for t in args[:2]):
        return torch.empty(out.shape, dtype=out.dtype, device="meta", memory_format=torch.channels_last)
    return out


NOT_THE_USERS = ("/torch/", "/tessera/graph/", "/tessera/estimate/")


def _not_dense(name: str, layout: str) -> CaptureError:
    return CaptureError(
        f"{name} at {_user_line()} makes a {layout} tensor, which cannot be captured",
        why="how many elements it holds depends on values, and its kernels have no time",
        fix="leave that part out of what is predicted, give dense tensors (of nn.Embedding: sparse=False), or measure "
        "the model instead: tessera measure",
    )


def _one_line(error: Exception) -> str:
    """The first sentence of an error: torch's go on with what to do about it when one compiles."""
    return str(error).strip().partition("\n")[0].partition(". ")[0][:200]


def _user_line() -> str:
    """file:line of the innermost frame that is the user's: not torch's, not ours."""
    frame: FrameType | None = sys._getframe(1)
    inner = None
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(place in path for place in NOT_THE_USERS) and not path.startswith("<"):
            inner = frame
            break
        frame = frame.f_back
    return f"{inner.f_code.co_filename}:{inner.f_lineno}" if inner else "an unknown line"


@contextlib.contextmanager
def paused(recorder: Recorder) -> Iterator[None]:
    """Run operators without writing them down: what happens once, not every iteration."""
    before, recorder.active = recorder.active, False
    counted = recorder.modules, recorder.functions
    try:
        yield
    finally:
        recorder.active = before
        recorder.modules, recorder.functions = counted
