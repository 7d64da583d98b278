"""Recurrent layers as cuDNN runs them: a whole stack of layers is one operator, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from .record import Recorder

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Recurrent functions of torch by the products of one step."""


class _Recurrent(torch.autograd.Function):
    """A whole recurrent layer, as cuDNN runs it."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, params: dict[str, Any], out_shape: Any, *tensors: torch.Tensor) -> Any:
        x = tensors[0]
        states = [torch.empty_like(t) for t in tensors[1 : 1 + params["states"]]]
        out = torch.empty(out_shape, dtype=x.dtype, device="meta")
        recorder.emit("tessera.rnn", "rnn", list(tensors), [out, *states], params)
        ctx.recorder, ctx.params = recorder, params
        ctx.save_for_backward(*tensors, out)
        return (out, *states)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, out = ctx.saved_tensors
        outs = [torch.empty_like(t, device="meta") for t in tensors]
        given = [g for g in grads if g is not None]
        ctx.recorder.emit(
            "tessera.rnn_backward", "rnn", [*given, *tensors, out], outs, {**ctx.params, "backward": True}
        )
        return None, None, None, *outs


def recurrent(recorder: Recorder, cell: str, *args: Any) -> Any:
    """`torch.lstm`, `torch.gru`, `torch.rnn_tanh`: padded input, or packed (data, batch sizes)."""
    packed = isinstance(args[1], torch.Tensor) and args[1].dtype == torch.int64
    x, rest = args[0], args[2:] if packed else args[1:]
    states = list(rest[0]) if cell == "lstm" else [rest[0]]
    weights, _bias, layers, _dropout, _train, bidirectional = rest[1:7]
    batch_first = bool(rest[7]) if len(rest) > 7 else False
    directions = 2 if bidirectional else 1
    hidden = states[-1].shape[-1]  # of an LSTM the cell's: what it puts out may be projected to fewer
    width = states[0].shape[-1] * directions
    if packed:
        steps, batch = len(args[1]), max(1, x.shape[0] // max(1, len(args[1])))
        out_shape: list[int] = [x.shape[0], width]
    else:
        batch, steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
        out_shape = [*x.shape[:2], width]
    params = {
        "gates": GATES[cell], "cell": cell, "hidden": hidden, "input": x.shape[-1], "layers": int(layers),
        "directions": directions, "steps": steps, "batch": batch, "states": len(states), "out": states[0].shape[-1],
    }  # fmt: skip
    tensors = [t if t.device.type == "meta" else recorder.twin(t) for t in (x, *states, *weights)]
    return _Recurrent.apply(recorder, params, out_shape, *tensors)
