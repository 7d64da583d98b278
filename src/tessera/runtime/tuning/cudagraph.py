"""A function captured as one CUDA graph: launched once, however many kernels it has.

What it returns lives in the graph's memory and is overwritten by the next call, as with torch.compile's
reduce-overhead. Tensor arguments are copied into the graph's own; all else must stay as it was when captured.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ...rewrite import cudagraph
from ...rewrite.state import State
from .capturable import Capturable
from .found import Reach
from .lever import NotHere


class Captured:
    """Captures at the first call, replays at all others; another shape or another plain argument is captured anew.

    A call does the function's work once, the first one too: what warming up did to weights, optimizers and random
    numbers is put back before the capture, which itself runs nothing.
    """

    def __init__(self, call: Callable[..., Any], reach: Reach) -> None:
        import torch

        if not torch.cuda.is_available():
            raise NotHere("CUDA graphs need a CUDA device")
        self._torch = torch
        self._call = call
        self._reach = reach
        self._optimizers = Capturable(reach)
        self._graphs: dict[Any, tuple[Any, list[Any], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._optimizers.ready:
            return self._call(*args, **kwargs)
        if self._optimizers.rates_changed():
            self._graphs.clear()
        leaves, spec = self._torch.utils._pytree.tree_flatten((args, kwargs))
        key = (spec, tuple(map(cudagraph.make_key, leaves)), self._optimizers.settings())
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = self._capture(leaves, spec)
        graph, static, result = found
        for mine, given in zip(static, leaves, strict=True):
            if self._torch.is_tensor(mine) and mine.data_ptr() != given.data_ptr():
                mine.copy_(given, non_blocking=True)
        graph.replay()
        return result

    def _capture(self, leaves: list[Any], spec: Any) -> tuple[Any, list[Any], Any]:
        static = [self._static(leaf) for leaf in leaves]
        args, kwargs = self._torch.utils._pytree.tree_unflatten(static, spec)
        call = functools.partial(self._call, *args, **kwargs)
        with self._optimizers.held():
            state, before = State(self._reach), (self._optimizers.settings(), self._optimizers.rates())
            with self._uncounted():
                try:
                    with warnings.catch_warnings():  # it is not captured yet: we know
                        warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
                        cudagraph.warm_up(call)
                    if (self._optimizers.settings(), self._optimizers.rates()) != before:
                        raise NotHere("it changes the optimizer's settings, which a graph would not")
                finally:
                    state.restore()
            graph, result = self._recorded(call, state)
        return graph, static, result

    @contextlib.contextmanager
    def _uncounted(self) -> Iterator[None]:
        """For what leaves the weights as they were: copies that saw a change would be made anew by each replay."""
        kept = self._torch.autograd._unsafe_preserve_version_counter
        with contextlib.ExitStack() as stack:
            for tensor in (t for m in self._reach.modules for t in (*m.parameters(), *m.buffers())):
                if not tensor.is_inference():
                    stack.enter_context(kept(tensor))
            yield

    def _recorded(self, call: Callable[[], Any], state: State) -> tuple[Any, Any]:
        try:
            return cudagraph.record_graph(call)
        except RuntimeError as exc:
            state.restore()  # gradients may have been set to the failed graph's memory
            first = exc.__context__ if isinstance(exc.__context__, RuntimeError) else exc  # the second is that it ended
            raise NotHere(f"it cannot be captured: {(str(first).splitlines() or ['no message'])[0]}") from exc

    def _static(self, leaf: Any) -> Any:
        if not self._torch.is_tensor(leaf):
            return leaf
        if not leaf.is_cuda:
            raise NotHere("an argument is a tensor in host memory, which a graph would read only once")
        if leaf.requires_grad:
            raise NotHere("an argument requires a gradient, which the graph's copy of it would get")
        return leaf.clone()

    def release(self) -> None:
        """Give the graphs' memory back, and the optimizers as they were."""
        self._graphs.clear()
        self._optimizers.release()
