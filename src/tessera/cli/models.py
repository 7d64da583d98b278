"""A model from what a user types: a torchvision name, `timm:NAME`, `hf:CONFIG`, or `module:function` of their own.

Everything is built on the meta device, so that a configuration of 70 billion parameters takes seconds and no memory.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, MissingExtra, TesseraError, did_you_mean

FORMS = "a torchvision name (resnet18), timm:NAME, hf:CONFIG.json, hf:'{...}', or mymodule:make_model"
DEFAULT_SEQ = 128
_SIZES = {"inception_v3": (3, 299, 299)}
_VIDEO = (3, 16, 112, 112)
_BOTH = frozenset({"clip", "siglip", "siglip2", "chinese_clip", "altclip", "metaclip_2"})  # need a text and an image


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model on the meta device, one sample of inputs for it, and what to call it; `note` says what was put aside."""

    name: str
    model: Any
    inputs: Any
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the user said of the inputs: the shape of one sample, the length of a sequence."""

    input: tuple[int, ...] | None = None
    seq: int | None = None


def load(spec: str, shape: Shape, *, training: bool = False) -> Loaded:
    """The model of a specification, with one sample of inputs."""
    try:
        import torch as torch
    except ImportError as e:
        raise MissingExtra("torch", "torch", "tessera predict") from e
    if spec.partition(":")[0].endswith(".py"):
        raise _script(spec)
    if spec.startswith("hf:"):
        return _hugging_face(spec.removeprefix("hf:"), shape, training)
    if spec.startswith("timm:"):
        return _timm(spec.removeprefix("timm:"), shape)
    if ":" in spec:
        return _own(spec, shape)
    return _vision(spec, shape)


def _script(spec: str) -> ArgumentError:
    """Whoever names a script is told how to name what is in it."""
    path, _, name = spec.partition(":")
    module = ".".join(Path(path.removesuffix(".py")).parts)
    return ArgumentError(
        f"{path} is a script, not a model",
        why="a prediction runs nothing: it needs the model itself and its inputs",
        fix=f"tessera predict {module}:{name or 'make_model'}, a function that returns (module, inputs)",
    )


# -- torchvision and timm -------------------------------------------------------------------------------------------


def package(name: str, purpose: str) -> Any:
    """A package of models; where torchvision's compiled operators do not load, stubs stand in for them.

    That is so for a wheel of torchvision beside another build of torch; timm and transformers import it too.
    """
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise MissingExtra(name, "models", purpose) from e
    except RuntimeError as e:
        if "torchvision::nms" not in str(e):
            raise
    import torch

    for operator in ("nms", "qnms"):  # nothing here calls them, but the package asks for them when it is imported
        torch.library.define(f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor")
    return importlib.import_module(name)


def _vision(name: str, shape: Shape) -> Loaded:
    models = package("torchvision", "a model given by its torchvision name").models
    known = models.list_models()
    if name not in known:
        raise _unknown(f"no model {name!r} in torchvision", name, known)
    asked = inspect.signature(models.get_model_builder(name)).parameters
    off: dict[str, Any] = {"weights": None, "weights_backbone": None, "init_weights": False}
    given = {key: value for key, value in off.items() if key in asked or (key == "init_weights" and name in _INIT)}
    model = _on_meta(lambda: models.get_model(name, **given))
    video = name in models.list_models(models.video)
    return Loaded(name=name, model=model, inputs=_image(shape.input or _SIZES.get(name, _VIDEO if video else None)))


_INIT = ("googlenet", "inception_v3")  # their builders hide the switch for a slow initialisation in **kwargs


def _timm(name: str, shape: Shape) -> Loaded:
    timm = package("timm", "a model given as timm:NAME")
    if not timm.is_model(name):
        raise _unknown(f"no model {name!r} in timm", name, timm.list_models())
    model = _on_meta(lambda: timm.create_model(name, pretrained=False))
    config = getattr(model, "pretrained_cfg", None) or {}
    return Loaded(name=name, model=model, inputs=_image(shape.input or config.get("input_size")))


def _image(size: Iterable[int] | None) -> Any:
    import torch

    return torch.empty((1, *(size or (3, 224, 224))), device="meta")


def _on_meta(build: Callable[[], Any]) -> Any:
    """What `build` makes, on the meta device; where it asks for values meanwhile, only its parameters are."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weights and initialisation: nothing here has values
        try:
            with torch.device("meta"):
                return build()
        except (NotImplementedError, RuntimeError) as e:
            if "meta" not in str(e):
                raise
        with _parameters_on_meta():
            return build()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter goes to the meta device as soon as it is registered: one of them is in memory at a time."""
    from torch import nn

    register = nn.Module.register_parameter

    def registered(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _unknown(what: str, name: str, known: Iterable[str]) -> ArgumentError:
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, n=4, cutoff=0.5)
    return ArgumentError(
        f"{what}{did_you_mean(name, names)}",
        why=f"near it: {', '.join(near)}" if near else None,
        fix=f"MODEL is {FORMS}",
    )


# -- transformers ---------------------------------------------------------------------------------------------------


def _hugging_face(text: str, shape: Shape, training: bool) -> Loaded:
    given = dict(_config_of(text))
    transformers = package("transformers", "a model given as hf:CONFIG")
    transformers.logging.set_verbosity_error()  # it warns of values nobody set, and of weights nobody loads
    with contextlib.suppress(MissingExtra):
        package("torchvision", "")  # some of its classes import it when they are first named
    kind = given.pop("model_type", None)
    known = list(transformers.models.auto.configuration_auto.CONFIG_MAPPING.keys())
    if kind not in known:
        raise ArgumentError(
            f"no model_type {kind!r} in transformers{did_you_mean(str(kind), known)}",
            fix='the configuration needs "model_type", such as "llama", and best "architectures" too',
        )
    names = given.get("architectures") or []
    build = _architecture(transformers, names[0]) if names else transformers.AutoModel.from_config
    try:
        config = transformers.AutoConfig.for_model(kind, **given)
        model = _on_meta(lambda: _in_dtype(build, config))
    except Exception as e:  # whatever transformers has against the user's figures
        said = " ".join(str(e).split())
        raise ArgumentError(
            f"transformers makes no {kind} of this configuration", why=f"{type(e).__name__}: {said[:200]}",
            fix="compare with the config.json of a model of that kind",
        ) from e  # fmt: skip
    inputs = _hf_inputs(model, config, shape)
    if training:
        inputs |= _labels(model, config, inputs)
    return Loaded(name=names[0] if names else type(model).__name__, model=model, inputs=inputs)


def _config_of(text: str) -> Mapping[str, Any]:
    """The JSON object itself, or that of a file."""
    try:
        source = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        found = json.loads(source)
    except OSError as e:
        raise ArgumentError(
            f"cannot read {text!r}",
            why=e.strerror,
            fix="hf: takes a file config.json or the JSON itself; nothing is downloaded",
        ) from e
    except ValueError as e:
        raise ArgumentError(f"hf:{text[:40]} is not JSON", why=str(e), fix='hf:\'{"model_type": "llama"}\'') from e
    if not isinstance(found, dict):
        raise ArgumentError("a configuration is a JSON object", fix='hf:\'{"model_type": "llama"}\'')
    return found


def _architecture(transformers: Any, name: str) -> Any:
    found = getattr(transformers, name, None)
    if not (inspect.isclass(found) and hasattr(found, "forward")):
        raise ArgumentError(
            f"no architecture {name!r} in transformers{did_you_mean(name, dir(transformers))}",
            fix='"architectures" names a model class, e.g. ["LlamaForCausalLM"]',
        )
    return found


def _in_dtype(build: Callable[[Any], Any], config: Any) -> Any:
    """The model with its floats in the configuration's dtype, as it would be loaded."""
    import torch

    dtype = config.dtype if hasattr(config, "dtype") else getattr(config, "torch_dtype", None)  # its name before 4.56
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        return build(config)
    finally:
        torch.set_default_dtype(before)


def _hf_inputs(model: Any, config: Any, shape: Shape) -> dict[str, Any]:
    import torch

    seq = shape.seq or DEFAULT_SEQ
    words = torch.empty((1, seq), dtype=torch.int64, device="meta")
    main = str(getattr(model, "main_input_name", "input_ids"))
    both = getattr(config, "model_type", "") in _BOTH
    inputs: dict[str, Any] = {}
    if main == "input_ids" or both:
        inputs["input_ids"] = words
    if main == "pixel_values" or both:
        inputs["pixel_values"] = _pixels(config, shape)
    if not inputs:  # sound and other signals: one sample as the user gives it
        if shape.input is None:
            raise ArgumentError(f"{type(model).__name__} takes {main}, whose shape is not known", fix="--input 80x3000")
        inputs[main] = torch.empty((1, *shape.input), device="meta")
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = words
    return inputs


def _pixels(config: Any, shape: Shape) -> Any:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return _image(shape.input or (getattr(vision, "num_channels", 3) or 3, height, width))


def _labels(model: Any, config: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Labels for training, where the model makes a loss of them; otherwise the output's cross-entropy is taken."""
    import torch

    if "labels" not in inspect.signature(model.forward).parameters:
        return {}
    title = type(model).__name__
    if title.endswith(("SequenceClassification", "ImageClassification")):
        return {"labels": torch.empty((1,), dtype=torch.int64, device="meta")}
    words = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if words is None or not title.endswith(("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration")):
        return {}
    return {"labels": torch.empty_like(words)}


# -- the user's own -------------------------------------------------------------------------------------------------


def _own(spec: str, shape: Shape) -> Loaded:
    from torch import nn

    module, _, name = spec.partition(":")
    found = _attribute(_imported(module), module, name)
    made = found if isinstance(found, nn.Module) else _called(found, spec)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not callable(model):
        raise ArgumentError(
            f"{spec} gave {type(model).__name__}, not a model", fix="return an nn.Module, or (module, inputs)"
        )
    note = None
    if inputs is None or shape != Shape():
        own, inputs = inputs, _given_inputs(spec, shape)
        note = None if own is None else _replaced(spec, own, inputs)
    title = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", name)
    return Loaded(name=title, model=model, inputs=inputs, note=note)


def _replaced(spec: str, own: Any, now: Any) -> str:
    from torch.utils import _pytree as pytree

    shapes = ["x".join(map(str, t.shape)) for t in pytree.tree_leaves(own) if hasattr(t, "shape")]
    lost = f" ({', '.join(shapes[:3])}{', ...' if len(shapes) > 3 else ''})" if shapes else ""
    option = "--input" if now.is_floating_point() else "--seq"
    return f"{option} replaces the inputs that {spec} gives{lost}, their batch too: it is 1 unless --batch says"


def _imported(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name not in (name, name.partition(".")[0]):
            raise _raised(name, e) from e
        files = [path.stem for path in Path().glob("*.py")]
        raise ArgumentError(
            f"no module {name!r} in {here}{did_you_mean(name, [*files, 'hf', 'timm'])}", fix=f"MODEL is {FORMS}"
        ) from e
    except Exception as e:  # the user's own code: whatever it raises is theirs to see
        raise _raised(name, e) from e


def _attribute(module: Any, where: str, name: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        names = [n for n in vars(module) if not n.startswith("_")]
        raise ArgumentError(
            f"no {name!r} in {where}{did_you_mean(name, names)}",
            fix="name a module, or a function that returns one, or (module, inputs)",
        )
    return found


def _called(build: Any, spec: str) -> Any:
    try:
        return _on_meta(build)
    except TesseraError:
        raise
    except Exception as e:
        raise _raised(f"{spec}()", e) from e


def _raised(what: str, e: Exception) -> TesseraError:
    trace = e.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "an unknown line"
    return TesseraError(f"{what} raised {type(e).__name__}: {e}", why=f"at {line}", fix="--debug shows the traceback")


def _given_inputs(spec: str, shape: Shape) -> Any:
    import torch

    if shape.input is not None:
        return _image(shape.input)
    if shape.seq is not None:
        return torch.empty((1, shape.seq), dtype=torch.int64, device="meta")
    raise ArgumentError(
        f"{spec} gives a model but no inputs",
        fix="return (module, inputs) from it, or give --input 3x224x224 (floats) or --seq 128 (token ids)",
    )
