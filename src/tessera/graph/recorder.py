"""A dispatch mode that records every operator torch dispatches and computes nothing.

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
from . import flops
from .ir import DTYPE_BYTES, Op, Phase, TensorSpec
from .signature import Signature, signature_of
from .special_ops import HANDLERS
from .tracking import MAX_KNOWN_INTS, KnownValues, MaskDensities, StorageTracker

# Number formats that we name differently from torch.
_DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), "fp8"),
}

# Yes-or-no questions about tensors without values, by the answer we assume.
_ASSUMED_TRUE, _ASSUMED_FALSE = (
    ("all", "eq", "isfinite", "equal", "_is_all_true"),
    ("any", "logical_not", "_is_any_true"),
)

# Torch's switches for fp32 by kind of operator. Older versions have one for cuBLAS and one for cuDNN.
_SWITCHES = {"gemm": "matmul", "conv": "conv", "rnn": "rnn"}
_switch: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)

# The current hooks on tensors that autograd saves (a checkpoint sets them around a block); None without any.
_saved_tensors_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _tracing: None
)

# Directories whose code is not the user's.
_LIBRARIES = ("/torch/", "/tessera/graph/", "/tessera/estimate/")


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a number format: "bf16", "fp8", "int64"."""
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def uses_tf32(kind: str) -> bool:
    """Whether torch's switches now let fp32 operators of a kind run as TF32."""
    if _switch is not None:
        return _switch("cuda", _SWITCHES[kind]) == "tf32"
    return bool(torch._C._get_cublas_allow_tf32() if kind == "gemm" else torch._C._get_cudnn_allow_tf32())


class Recorder(TorchDispatchMode):
    """Records the operators of one iteration. With `active` off it runs them on meta without recording.

    `functions` counts what the function mode sees. In backward and in intercepted calls that includes each attribute
    that this code reads from a tensor (`tensor.dtype`). The host model was fitted to those counts
    (benchmarks/fit/fit_ops.py): code here that reads more or fewer attributes changes predictions.
    """

    def __init__(self, *, always_tf32: bool = False) -> None:
        super().__init__()
        self._always_tf32 = always_tf32
        self.ops: list[Op] = []
        self.storages = StorageTracker(self.ops)
        self.assumptions: dict[str, None] = {}
        self.known = KnownValues()
        self.active = True
        self.scope: Callable[[], str] = lambda: ""
        self.node: str | None = None
        self.modules = 0
        self.functions = 0
        self.phase: Phase = "forward"
        self._twins: dict[int, tuple[Any, torch.Tensor]] = {}
        self._scopes: dict[int, tuple[str, str | None]] = {}
        self.host_waits = False  # since the last operator
        self.masks = MaskDensities(self.storages)
        self._answer: tuple[Any, Callable[[], tuple[torch.Tensor, ...]]] | None = None
        self._own: set[int] = set()  # storages on the CPU that the program made while it was captured

    def wait(self) -> None:
        """Note that the host waits for the device here."""
        self.host_waits = True

    # -- tensors ------------------------------------------------------------------------------------------------

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The meta twin of a real tensor: always the same one."""
        twin = self._twins.get(id(tensor))
        if twin is not None and twin[0]() is tensor:
            return twin[1]
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            raise layout_error(f"{user_line()} uses", tensor.layout)
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._twins[id(tensor)] = (weakref.ref(tensor), meta)
        self.storages.adopt(meta, "inputs")
        if not tensor.dtype.is_floating_point or tensor.numel() == 1:
            self.known.note(meta, tensor)
        return meta

    def find_storage(self, tensor: torch.Tensor) -> int | None:
        """The number of the storage of a tensor or of its twin; None where no operator has seen it."""
        if tensor.device.type != "meta":
            twin = self._twins.get(id(tensor))
            if twin is None or twin[0]() is not tensor:
                return None
            tensor = twin[1]
        return self.storages.find(tensor)

    def on_meta(self, leaf: Any) -> Any:
        """A tensor's meta twin; anything else as it is."""
        return self.twin(leaf) if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" else leaf

    def spec(self, tensor: torch.Tensor) -> TensorSpec:
        """A tensor as data."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        count = 1
        for size, step in zip(shape, stride, strict=True):
            count *= size if step != 0 else min(size, 1)
        dtype = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        nbytes = int(count * DTYPE_BYTES.get(dtype, tensor.itemsize))
        return TensorSpec(self.storages.id_of(tensor), shape, stride, dtype, nbytes)

    def note_counts(self, short: str, args: Any, outs: list[torch.Tensor]) -> None:
        """Remember how many tokens each expert gets, where an operator counts them."""
        functions = self.functions
        counts = self.masks.count_chosen(short, args, outs)
        if counts is not None and self.known.value(outs[0]) is None:
            self.assume("tokens are spread evenly over the experts")
            self.known.note(outs[0], counts)
        self.functions = functions

    # -- dispatch -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator on meta tensors and record it."""
        kwargs = kwargs or {}
        if self._answer is not None and self._answer[0] is func:
            return self._run_answer(func, self._answer[1])
        signature = signature_of(func)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if tensors and self._on_the_host(signature, args, kwargs, tensors):
            # The host's own small arithmetic: done for real, no kernel of the device.
            out = func(*args, **kwargs)
            self._own.update(t.untyped_storage()._cdata for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out
        if signature.short == "_local_scalar_dense":
            return self._scalar(tensors[0])
        if signature.name.startswith("quantized."):
            raise _cpu_only(signature.name)
        handler, functions = HANDLERS.get(signature.short), self.functions
        answer = handler(self, func, args, kwargs) if handler is not None else NotImplemented
        if answer is not NotImplemented:
            return answer
        self.functions = functions  # in backward the function mode also counts what we ask of tensors here
        args, kwargs = pytree.tree_map(self.on_meta, (args, kwargs))
        try:
            out = func(*args, **kwargs)
        except NotImplementedError as e:
            if func._schema.returns or not signature.writes:
                raise self.needs_values(signature.name, e) from e
            out = None  # it only writes into its arguments (a fused optimizer)
        if signature.short == "convolution":
            out = _cudnn_layout(args, out)
        elif signature.kind == "elementwise" and not signature.writes:
            out = _iterator_layout(out)
        outs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        functions = self.functions
        _check_layouts(signature.name, outs)
        self.masks.follow(signature.short, args, kwargs, outs)
        self.functions = functions
        if signature.writes_named:
            for t in signature.find_written(args, kwargs):
                self.known.forget(t)
        self.known.follow(func, args, kwargs, outs)
        self.note_counts(signature.short, args, outs)
        if self.active and not signature.silent:
            self._record(signature, args, kwargs, outs)
        return out

    def as_operator(
        self, call: Callable[[], tuple[Any, tuple[Any, ...]]], run: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """Call `run`, and let dispatch modes entered after this one see it as one operator (its `call`).

        Selective checkpointing is such a mode: it keeps the result of an operator, and returns it again instead of
        running it. Without one, this only calls `run`.
        """
        if _get_current_dispatch_mode() is self:
            return run()
        func, args = call()
        before, self._answer = self._answer, (func, run)
        try:
            outs: tuple[torch.Tensor, ...] = func(*args)
        finally:
            self._answer = before
        return outs[:2]

    def _run_answer(self, func: Any, run: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[Any, ...]:
        """The result of `run`, and empty values for what else the operator returns: random seeds, sizes."""
        outs = run()
        rest = func._schema.returns[len(outs) :]
        with pause(self):
            return (*outs, *(torch.empty(0, device="meta") if str(r.type) == "Tensor" else 0 for r in rest))

    def _on_the_host(self, signature: Signature, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> bool:
        """Whether an operator is small arithmetic of the program on the CPU, and writes to no tensor of the user's."""
        if any(t.device.type != "cpu" or t.numel() > MAX_KNOWN_INTS for t in tensors):
            return False
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            return False
        written = signature.find_written(args, kwargs) if signature.writes_named else ()
        return all(t.untyped_storage()._cdata in self._own for t in written)

    def _record(self, signature: Signature, args: Any, kwargs: Any, outs: list[torch.Tensor]) -> None:
        reads, outs = signature.find_moved(args, kwargs, outs)
        if signature.short == "_safe_softmax":
            self._record_safe_softmax(args, outs)
            return
        kind = "view" if signature.is_view(reads, outs) else signature.kind
        ours = signature.name.startswith("tessera.")
        params = flops.params_of_ours(signature.short, args) if ours else {}
        params = params or flops.params_of(signature.short, args, kwargs)
        if not signature.modelled and kind != "view":
            params = {**params, "unmodelled": True}
        if params.get("accumulate"):
            params = {**params, "longest_run": self.known.count_longest_run(args[1])}
        self.emit(signature.name, kind, reads, outs, params)

    def _record_safe_softmax(self, args: Any, outs: list[torch.Tensor]) -> None:
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
        self, name: str, kind: str, reads: list[torch.Tensor], outs: list[torch.Tensor], params: dict[str, Any]
    ) -> None:
        """Append an operator."""
        if not self.active:
            return
        phase, (scope, node) = self._where()
        inputs = tuple(self.spec(t) for t in reads)
        outputs = tuple(self.spec(t) for t in outs)
        work = flops.work_of(name, kind, inputs, outputs, params, self._tf32(kind))
        if work.params.get("complex"):
            self.assumptions[f"complex products run as real {work.precision}, four multiply-adds for each"] = None
        self.ops.append(
            Op(
                index=len(self.ops),
                name=name,
                kind=kind,
                scope=scope,
                phase=phase,
                inputs=inputs,
                outputs=outputs,
                flops=work.flops,
                precision=work.precision,
                unit=work.unit,
                kernels=work.kernels,
                params=work.params,
                node=node,
                host_modules=self.modules,
                host_functions=self.functions,
                sync=self.host_waits,
                hooked=_saved_tensors_hooks(False) is not None,
            )
        )
        self.modules = self.functions = 0
        self.host_waits = False

    def _tf32(self, kind: str) -> bool:
        """Whether fp32 runs as TF32 now: programs turn torch's switches while they run."""
        return kind in _SWITCHES and (self._always_tf32 or uses_tf32(kind))

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
        self.wait()
        value = self.known.value(tensor)
        if value is not None:
            return value.item()
        maker = self.made_by(tensor)
        line = user_line()
        if maker == "any" and self.masks.density(tensor):
            return True  # some token chose it
        if tensor.dtype == torch.bool and maker in (*_ASSUMED_TRUE, *_ASSUMED_FALSE):
            answer = maker in _ASSUMED_TRUE
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
        storage = self.storages.find(tensor)
        for op in reversed(self.ops):
            if any(t.storage == storage for t in op.outputs):
                return op.name.rpartition(".")[2]
        return ""

    def assume(self, what: str) -> None:
        """Note an assumption made at the user's line."""
        self.assumptions[f"{user_line()}: {what}"] = None

    def needs_values(self, name: str, error: Exception | None = None) -> CaptureError:
        """The error of an operator that needs values which do not exist, or that torch cannot run on meta tensors."""
        why = "the size of its result depends on values, which do not exist while it is captured"
        give = "give masks, lengths and ids as real tensors (made with device='cpu'), "
        return DataDependent(
            f"{name} at {user_line()} cannot be captured",
            # Only the first sentence: torch goes on with advice about compiling.
            why=why if error is None else f"torch has no meta form of it ({first_line(error).partition('. ')[0]})",
            fix=f"{'' if error else give}pass the part of the model without it, or measure it: tessera measure",
        )


def _cpu_only(name: str) -> CaptureError:
    return CaptureError(
        f"{name} at {user_line()} has no kernel for a GPU",
        why="torch.ao's eager quantisation (quantize_dynamic, convert) runs on CPUs only",
        fix="predict the model that was quantised: precision='int8' runs its products in int8, 'int8wo' stores its "
        "weights in int8; or measure it on the CPU: tessera measure",
    )


def _cudnn_layout(args: Any, out: torch.Tensor) -> torch.Tensor:
    """CuDNN answers channels-last if the input or the weight is; the meta kernel always answers contiguous."""
    if out.dim() != 4:
        return out
    if any(suggest_memory_format(t) == torch.channels_last for t in args[:2]):
        return torch.empty(out.shape, dtype=out.dtype, device="meta", memory_format=torch.channels_last)
    return out


def _iterator_layout(out: Any) -> Any:
    """Contiguous strides for a result that is contiguous because its planes are points, as torch's kernels give it.

    Meta kernels keep the strides of channels-last ones, and all that follows would be channels-last.
    """
    if not isinstance(out, torch.Tensor) or out.dim() != 4 or out.stride(3) == 1 or not out.is_contiguous():
        return out
    return torch.empty(out.shape, dtype=out.dtype, device="meta")


def _check_layouts(name: str, outs: list[torch.Tensor]) -> None:
    """Refuse tensors without a fixed place in memory."""
    odd = next((t.layout for t in outs if t.layout != torch.strided), None)
    if odd is not None:
        raise layout_error(f"{name} at {user_line()} makes", odd)


def layout_error(who: str, layout: torch.layout) -> CaptureError:
    """Return the error for a sparse or nested tensor; `who` begins the sentence: "an input is"."""
    return CaptureError(
        f"{who} a {'nested' if layout == torch.jagged else 'sparse'} tensor, which cannot be captured",
        why="how many elements it holds depends on values, and the time of its kernels is not modelled",
        fix="leave that part out of what is predicted, use dense tensors (for nn.Embedding: sparse=False), or "
        "measure the model instead: tessera measure",
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters."""
    return (str(error).strip().splitlines() or ["no message"])[0][:200]


def is_user_code(path: str) -> bool:
    """Whether a file is the user's: not torch's, not ours."""
    return not any(place in path for place in _LIBRARIES)


def user_line() -> str:
    """file:line of the innermost frame of the user's code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if is_user_code(path) and not path.startswith("<"):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


@contextlib.contextmanager
def pause(recorder: Recorder) -> Iterator[None]:
    """Run operators without recording them: what happens once, not every iteration."""
    before, recorder.active = recorder.active, False
    counts = recorder.modules, recorder.functions
    try:
        yield
    finally:
        recorder.active = before
        recorder.modules, recorder.functions = counts
