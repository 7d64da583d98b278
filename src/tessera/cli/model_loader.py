"""Load a model by what the user types: a torchvision name, `timm:NAME`, `hf:CONFIG`, or `module:function`.

Everything is built on the meta device, so that a configuration of 70 billion parameters takes seconds and no memory.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dist.model_shape import read_config
from ..errors import ArgumentError, MissingExtra, TesseraError, did_you_mean, needs_extra

if TYPE_CHECKING:
    from ..serving.served_model import ServedModel

_PACKAGE = Path(__file__).resolve().parents[1]
FORMS = "a torchvision name (resnet18), timm:NAME, hf:CONFIG.json, hf:'{...}', or mymodule:make_model"
DEFAULT_SEQ = 128
_SIZES = {"inception_v3": (3, 299, 299)}
_VIDEO = (3, 16, 112, 112)
# Kinds that need a text and an image.
_BOTH = frozenset(
    {"clip", "siglip", "siglip2", "chinese_clip", "altclip", "metaclip_2", "groupvit", "clipseg", "blip", "align"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on the meta device, its name, and one sample of inputs; `note` says what was not taken as given."""

    name: str
    model: Any
    inputs: Any
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShape:
    """What the user typed about the inputs: the shape of one sample, the length of a sequence."""

    input: tuple[int, ...] | None = None
    seq: int | None = None


def load_model(spec: str, shape: InputShape, *, training: bool = False) -> LoadedModel:
    """Load the model of a specification, with one sample of inputs."""
    if (known := find_language_model(spec)) is not None:
        raise ArgumentError(
            f"{spec} is a language model, which is predicted as it is served",
            why="one forward pass needs its configuration, and nothing is downloaded",
            fix=f"tessera predict {known.name} --serve; for a forward pass: tessera predict hf:config.json",
        )
    with needs_extra("torch", "torch", "tessera predict"):
        import torch as torch
    if spec.partition(":")[0].endswith(".py"):
        raise _script_error(spec)
    if spec.startswith("hf:") or spec.endswith(".json"):
        return _load_transformers(spec.removeprefix("hf:"), shape, training)
    if spec.startswith("timm:"):
        return _load_timm(spec.removeprefix("timm:"), shape)
    if ":" in spec:
        return _load_own(spec, shape)
    return _load_torchvision(spec, shape)


def find_language_model(spec: str) -> ServedModel | None:
    """Return the sizes of a language model given by its public name; None where it is not the name of one."""
    from ..serving.served_model import read_served_model

    if ":" in spec or spec.endswith((".py", ".json")):
        return None
    try:
        return read_served_model(spec)
    except TesseraError:
        return None


def _script_error(spec: str) -> ArgumentError:
    """Return the error for a script as the model: it shows how to name the model in it."""
    path, _, name = spec.partition(":")
    module = ".".join(Path(path.removesuffix(".py")).parts)
    return ArgumentError(
        f"{path} is a script, not a model",
        why="a prediction does not run scripts: it needs the model and its inputs",
        fix=f"tessera predict {module}:{name or 'make_model'}, a function that returns (module, inputs)",
    )


# -- torchvision and timm -------------------------------------------------------------------------------------------


def import_package(name: str, purpose: str) -> Any:
    """Import a package of models, with stubs for torchvision's compiled operators if they do not load.

    They do not when torchvision was built for another torch; timm and transformers import torchvision too.
    """
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise MissingExtra(name, "models", purpose) from e
    except RuntimeError as e:
        if "torchvision::nms" not in str(e):
            raise
    import torch

    for operator in ("nms", "qnms"):  # never called here, but the import needs them
        torch.library.define(f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor")
    return importlib.import_module(name)


def _load_torchvision(name: str, shape: InputShape) -> LoadedModel:
    models = import_package("torchvision", "a model given by its torchvision name").models
    names = models.list_models()
    if name not in names:
        from ..serving.served_model import list_models

        raise _unknown_model(f"torchvision has no model {name!r}", name, [*names, *list_models()])
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    off: dict[str, Any] = {"weights": None, "weights_backbone": None, "init_weights": False}
    options = {k: v for k, v in off.items() if k in parameters or (k == "init_weights" and name in _INIT)}
    model = _build_on_meta(lambda: models.get_model(name, **options))
    video = name in models.list_models(models.video)
    return LoadedModel(
        name=name, model=model, inputs=_make_image(shape.input or _SIZES.get(name, _VIDEO if video else None))
    )


_INIT = ("googlenet", "inception_v3")  # their builders hide the switch for a slow initialisation in **kwargs


def _load_timm(name: str, shape: InputShape) -> LoadedModel:
    timm = import_package("timm", "a model given as timm:NAME")
    if not timm.is_model(name):
        raise _unknown_model(f"timm has no model {name!r}", name, timm.list_models())
    model = _build_on_meta(lambda: timm.create_model(name, pretrained=False))
    config = getattr(model, "pretrained_cfg", None) or {}
    return LoadedModel(name=name, model=model, inputs=_make_image(shape.input or config.get("input_size")))


def _make_image(size: Iterable[int] | None) -> Any:
    import torch

    return torch.empty((1, *(size or (3, 224, 224))), device="meta")


def _build_on_meta(build: Callable[[], Any]) -> Any:
    """Return the result of `build` on the meta device; only its parameters are there if `build` needs values."""
    import torch

    from ..graph.intercept import StayOnMeta

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weights and initialisation: there are no values here
        try:
            with torch.device("meta"), StayOnMeta():
                return build()
        except (NotImplementedError, RuntimeError) as e:
            if "meta" not in str(e).lower():  # of a sparse tensor: SparseMeta
                raise
        with _parameters_on_meta(), StayOnMeta():
            return build()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device as soon as it is registered: only one is in memory at a time."""
    from torch import nn

    register = nn.Module.register_parameter

    def register_on_meta(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _unknown_model(what: str, name: str, names: list[str]) -> ArgumentError:
    near = difflib.get_close_matches(name.lower(), names, n=4, cutoff=0.5)
    return ArgumentError(
        f"{what}{did_you_mean(name, names)}",
        why=f"similar names: {', '.join(near)}" if near else None,
        fix=f"give {FORMS}",
    )


# -- transformers ---------------------------------------------------------------------------------------------------


def _load_transformers(text: str, shape: InputShape, training: bool) -> LoadedModel:
    settings = dict(read_config(text))
    transformers = import_package("transformers", "a model given as hf:CONFIG")
    transformers.logging.set_verbosity_error()  # it warns about values and weights that are not set
    with contextlib.suppress(MissingExtra):
        import_package("torchvision", "")  # some transformers classes import it when they are first named
    kind = settings.pop("model_type", None)
    kinds = list(transformers.models.auto.configuration_auto.CONFIG_MAPPING.keys())
    if kind not in kinds:
        unknown = f"transformers has no model_type {kind!r}{did_you_mean(str(kind), kinds)}"
        raise ArgumentError(
            "the configuration has no model_type" if kind is None else unknown,
            fix='give the configuration a "model_type", such as "llama", and if possible "architectures"',
        )
    names = settings.get("architectures") or []
    build = _find_architecture(transformers, names[0]) if names else transformers.AutoModel.from_config
    try:
        config = transformers.AutoConfig.for_model(kind, **settings)
        model = _build_on_meta(lambda: _build_in_dtype(build, config))
    except Exception as e:  # transformers rejects the configuration
        raise ArgumentError(
            f"transformers cannot build a {kind} from this configuration",
            why=f"{type(e).__name__}: {' '.join(str(e).split())[:200]}",
            fix="compare with the config.json of a model of that kind",
        ) from e
    inputs = _make_inputs(model, config, shape)
    if training:
        inputs |= _make_labels(model, inputs)
    title = names[0] if names else type(model).__name__
    return LoadedModel(name=title, model=model, inputs=inputs, note=_note_quantization(settings))


def _note_quantization(settings: Mapping[str, Any]) -> str | None:
    """What is said of weights that a configuration stores in another format than the model's own."""
    from ..serving.served_model import read_weights

    stored, unknown = read_weights(settings.get("quantization_config") or {})
    if stored is None and unknown is None:
        return None
    told = f"quantization_config ({stored or unknown}) is not used"
    asked = "fp8" if stored == "fp8" else f"{stored}wo"
    return f"{told}; --precision {asked} or --serve takes such weights" if stored else told


def _find_architecture(transformers: Any, name: str) -> Any:
    architecture = getattr(transformers, name, None)
    if not (inspect.isclass(architecture) and hasattr(architecture, "forward")):
        raise ArgumentError(
            f"transformers has no architecture {name!r}{did_you_mean(name, dir(transformers))}",
            fix='give "architectures" a model class, e.g. ["LlamaForCausalLM"]',
        )
    return architecture


def _build_in_dtype(build: Callable[[Any], Any], config: Any) -> Any:
    """Return the model with its floats in the configuration's dtype, as it would be loaded."""
    import torch

    dtype = config.dtype if hasattr(config, "dtype") else getattr(config, "torch_dtype", None)  # its name before 4.56
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        return build(config)
    finally:
        torch.set_default_dtype(before)


def _make_inputs(model: Any, config: Any, shape: InputShape) -> dict[str, Any]:
    import torch

    seq = shape.seq or min(DEFAULT_SEQ, _find_longest(config))
    words = torch.empty((1, seq), dtype=torch.int64, device="meta")
    main = str(getattr(model, "main_input_name", "input_ids"))
    both = getattr(config, "model_type", "") in _BOTH
    inputs: dict[str, Any] = {}
    if main == "input_ids" or both:
        inputs["input_ids"] = words
    if main == "pixel_values" or both:
        inputs["pixel_values"] = _make_pixels(config, shape)
    if not inputs:  # sound and other signals: one sample of the shape the user gives
        if shape.input is None:
            raise ArgumentError(f"the shape of {main} of {type(model).__name__} is unknown", fix="give --input 80x3000")
        inputs[main] = torch.empty((1, *shape.input), device="meta")
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = words
    return inputs


def _find_longest(config: Any) -> float:
    """Return how many tokens the text of a model may have: 77 for CLIP; infinity where its configuration sets none."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else float("inf")


def _make_pixels(config: Any, shape: InputShape) -> Any:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return _make_image(shape.input or (getattr(vision, "num_channels", 3) or 3, height, width))


def _make_labels(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return labels for training, if the model computes its loss from them; otherwise the loss is a cross-entropy."""
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


def _load_own(spec: str, shape: InputShape) -> LoadedModel:
    from torch import nn

    module, _, name = spec.partition(":")
    target = _find_attribute(_import_own(module), module, name)
    result = target if isinstance(target, nn.Module) else _call_own(target, spec)
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not callable(model):
        raise ArgumentError(
            f"{spec} returned {type(model).__name__}, not a model", fix="return an nn.Module, or (module, inputs)"
        )
    note = None
    if inputs is None or shape != InputShape():
        own, inputs = inputs, _inputs_of_shape(spec, shape)
        note = None if own is None else _describe_replacement(spec, own, inputs)
    title = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", name)
    return LoadedModel(name=title, model=model, inputs=inputs, note=note)


def _describe_replacement(spec: str, own: Any, now: Any) -> str:
    from torch.utils import _pytree as pytree

    shapes = ["x".join(map(str, t.shape)) for t in pytree.tree_leaves(own) if hasattr(t, "shape")]
    lost = f" ({', '.join(shapes[:3])}{', ...' if len(shapes) > 3 else ''})" if shapes else ""
    option = "--input" if now.is_floating_point() else "--seq"
    return f"{option} replaces the inputs that {spec} returns{lost}; the batch is 1 unless --batch is given"


def _import_own(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name not in (name, name.partition(".")[0]):
            raise _own_error(name, e) from e
        files = [path.stem for path in Path().glob("*.py")]
        raise ArgumentError(
            f"there is no module {name!r} in {here}{did_you_mean(name, [*files, 'hf', 'timm'])}", fix=f"give {FORMS}"
        ) from e
    except SystemExit as e:
        raise ArgumentError(
            f"{name} ends the program when it is imported",
            why=f"exit code {e.code}: it parses arguments (argparse), or runs, outside of any function",
            fix='move that below `if __name__ == "__main__":`',
        ) from e
    except Exception as e:  # the user's own code
        raise _own_error(name, e) from e


def _find_attribute(module: Any, where: str, name: str) -> Any:
    value = getattr(module, name, None)
    if value is None:
        names = [n for n in vars(module) if not n.startswith("_")]
        raise ArgumentError(
            f"{where} has no {name!r}{did_you_mean(name, names)}",
            fix="name an nn.Module, or a function that returns one or (module, inputs)",
        )
    return value


def _call_own(build: Any, spec: str) -> Any:
    try:
        return _build_on_meta(build)
    except TesseraError:
        raise
    except Exception as e:
        # NotImplementedError, RuntimeError, ValueError or TypeError, by what was asked of a tensor without values
        if "meta" not in str(e).lower():
            raise _own_error(f"{spec}()", e) from e
        raise ArgumentError(
            f"{spec}() computes something, instead of only returning a model",
            why=f"at {_find_line(e)}; it runs without values (on meta tensors), to build the model and its inputs only",
            fix="return an nn.Module, or (module, inputs); in Python, tessera.predict takes a model that needed values",
        ) from e


def _own_error(what: str, e: Exception) -> TesseraError:
    said = str(e).strip().splitlines() or ["no message"]  # torch's dispatcher lists each of its backends
    return TesseraError(
        f"{what} raised {type(e).__name__}: {said[0]}",
        why=f"at {_find_line(e)}",
        fix="run it again with --debug to see the traceback",
    )


def _find_line(e: Exception) -> str:
    """Return the innermost line of the user's own code; of a package's where there is none."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(e.__traceback__)]
    own = [line for line in lines if "site-packages" not in line[0] and not Path(line[0]).is_relative_to(_PACKAGE)]
    return ":".join(map(str, (own or lines)[-1])) if lines else "an unknown line"


def _inputs_of_shape(spec: str, shape: InputShape) -> Any:
    import torch

    if shape.input is not None:
        return _make_image(shape.input)
    if shape.seq is not None:
        return torch.empty((1, shape.seq), dtype=torch.int64, device="meta")
    raise ArgumentError(
        f"{spec} returns a model without inputs",
        fix="return (module, inputs) from it, or give --input 3x224x224 (floats) or --seq 128 (token ids)",
    )
