"""Kernel names for people: C++ templates cut to what distinguishes one kernel from the next.

`void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<...> >(...)`
becomes `vectorized_elementwise_kernel<8, CUDAFunctor_add<bf16>>`. Names that are not C++ (nvjet, cutlass, Triton,
`Memcpy HtoD (Pageable -> Device)`) stay as they are; `fit` cuts in the middle, because their ends differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

_LAMBDA = re.compile(r"(?:::)?\{lambda[^{}]*#(\d+)\}")
_LAMBDAS = re.compile(r"(?:(?:::)?\{lambda[^{}]*#\d+\}(?:::operator\(\)\([^()]*\)(?: const)?)?)+")
_OPERATOR = re.compile(r"::operator\(\)(?:\([^()]*\))?(?: const)?")
_TOKEN = re.compile(r"\s*(::|[<>,]|[^<>,:]+|:)")
_NUMBER = re.compile(r"-?\d+(?:ul|ull|u|l)?$")
_SUFFIX = re.compile(r"(?<=\d)(?:ull|ul|u|l)$")
# Parts that generated names (cuDNN's, xmma's) have around the part that differs: a prefix, knobs, the launch.
_GENERATED = re.compile(r"(?<=^cudnn_)generated_fort_native_|_knob_\d+|_cga\d+x\d+x\d+|_kernel\d+_\d+$|_execute_\w*$")

_LOADER = re.compile(r"enumerate\(DataLoader\)#_\w+\.__next__")
_OPTIMIZER = re.compile(r"Optimizer\.(\w+)#(\w+)\.\1")

_SPELLINGS = {
    "bf16": ("BFloat16", "__nv_bfloat16", "bfloat16_t"),
    "f16": ("Half", "__half", "half", "half_t"),
    "f32": ("float",),
    "f64": ("double",),
    "i64": ("long", "long long"),
    "i32": ("int",),
    "i16": ("short",),
    "i8": ("signed char", "char"),
    "u8": ("unsigned char",),
    "u32": ("unsigned int",),
    "u64": ("unsigned long", "unsigned long long"),
    "bool": ("bool",),
    "f8e4m3": ("Float8_e4m3fn",),
    "f8e5m2": ("Float8_e5m2",),
    "void": ("void",),
}
TYPES = {spelling: short for short, spellings in _SPELLINGS.items() for spelling in spellings}
"""Number types as short as in PyTorch's own shorthand."""
# Wrappers that all kernels of a kind have: the name is what they wrap.
_WRAPPERS = frozenset(
    {"gpu_kernel_impl_nocast", "gpu_kernel_impl", "func_wrapper_t", "ReduceOp", "Kernel", "Kernel2", "device_kernel"}
)
# Arguments that say how a kernel was compiled, not what it does.
_SILENT = re.compile(
    r"array|\w*OffsetCalculator|\w+WithCast|LoadWithoutCast|StoreWithoutCast|TensorList\w*|OpaqueType|\w*Policy\w*|"
    r"identity_decomposer_t|true|false|policy_hub|NullType|\w*TileState|\w*_iterator|VSMemHelper"
)


# In this order, because a flash-attention kernel contains matrix products, and a fused kernel is named after both.
_PATTERNS = {
    "communication": r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|nvshmem",
    "attention": r"flash|sdpa|attention|attn|fmha|\bmha_|dot_do_o",
    "convolution": r"conv(?!ert|_bn_eval_pass|j)|winograd|implicit_gemm|wgrad|dgrad|fprop",
    "matrix product": r"gemm|nvjet|cutlass|gemv|\bCijk_|matmul|splitK|::mm|::bmm|::addmm|linear",
    "normalisation, reduction": (r"norm(?!al(?!i))|GammaBeta|softmax|reduce|_red_|_per_|scan|sum|sort|topk|loss"),
    "elementwise": (
        r"elementwise|_poi_|multi_tensor|dropout|cat|copy|fill|distribution_|normal_|uniform_|bernoulli|random_|"
        r"exponential_|aten::rand|index|gather|scatter|adam|foreach|"
        r"aten::_?(?:add|sub|mul|div|pow|neg|exp|sqrt|tanh|gelu|relu|silu|where|to|zero|clone|contiguous|lerp)"
    ),
}
_CATEGORIES = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _PATTERNS.items()}
CATEGORIES = (*_CATEGORIES, "copies", "other")
"""What kernels do, roughly: for colours and for a first look at where the joules went."""


@lru_cache(maxsize=16384)
def category(name: str, kind: str = "kernel") -> str:
    """Return what a kernel does, by its name and kind."""
    if kind == "collective":
        return "communication"
    if kind in ("memcpy", "memset") or name.startswith(("Memcpy", "Memset")):
        return "copies"
    shown = short_name(name) if kind == "kernel" and not name.startswith("aten::") else name
    return next((name for name, pattern in _CATEGORIES.items() if pattern.search(shown)), "other")


@dataclass(slots=True)
class _Node:
    """A C++ name without its namespaces, and its template arguments."""

    base: str
    args: list[_Node] = field(default_factory=list)

    @property
    def is_number(self) -> bool:
        return bool(_NUMBER.match(self.base))

    @property
    def is_plain(self) -> bool:
        """Return whether this is a number type, a pointer to one, or empty."""
        bare = self.base.rstrip("*& ").removesuffix(" const")
        return not bare or (bare in TYPES and not self.args) or self.base.endswith("*")

    @property
    def is_telling(self) -> bool:
        return not (self.is_number or self.is_plain or _SILENT.fullmatch(self.base))


@lru_cache(maxsize=16384)
def short_name(name: str) -> str:
    """Return a kernel's name without namespaces, parameters and uninformative template arguments."""
    bare = name.strip().removeprefix("void ")
    if bare.startswith("_Z"):
        return _demangled(bare) or name
    if not ("::" in bare or "<" in bare or bare != name.strip()):
        return _GENERATED.sub("", name)
    tokens = _tokens(bare)
    try:
        node, rest = _parse(tokens, 0)
    except (IndexError, RecursionError):  # it is not C++, or the trace's writer cut it
        return name
    return _render(node, 0) if rest == len(tokens) and node.base.isidentifier() else name


def _demangled(name: str) -> str | None:
    """Return the identifier of a mangled C++ name (add_norm of `_ZN5aiter8add_normIfE...`), as in ROCm's traces."""
    at, found = 3 if name.startswith("_ZN") else 2, None
    while (digits := re.match(r"\d{1,4}", name[at:])) is not None:
        at += len(digits[0]) + int(digits[0])
        found = name[at - int(digits[0]) : at]
        found = None if found.startswith("_GLOBAL__N") else found
    return found if found and found.isidentifier() else None


def op_name(name: str) -> str:
    """Return an operator's name; autograd's prefix comes after it, unless that hides the name."""
    bare = name.removeprefix("autograd::engine::evaluate_function: ")
    return name if bare == name else f"{bare} (engine)"


def region_name(name: str) -> str:
    """Return a region's name; torch's own are shortened, because they repeat themselves and name internal classes."""
    in_main = " (no workers)" if "_SingleProcess" in name else ""  # a script's other loader often has workers
    bare = _LOADER.sub(f"DataLoader.__next__{in_main}", name)
    return _OPTIMIZER.sub(r"\2.\1", bare)


def printable(text: str) -> str:
    """Return a program's text without what a terminal would interpret: escapes, bells, line breaks."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def short(name: str, kind: str) -> str:
    """Return the name of a table row, by its kind; for a group, the names of its members."""
    name = printable(name)
    if kind == "group":
        return " + ".join(short_name(member) for member in name.split(" + "))
    if kind in ("region", "step"):
        return region_name(name)
    return short_name(name) if kind == "kernel" else op_name(name)


def fit(name: str, width: int) -> str:
    """Return a name in at most `width` characters: cut in the middle, because names differ at the ends."""
    name = printable(name)
    if len(name) <= width:
        return name
    if width <= 3:
        return name[:width]
    tail = (width - 1) * 3 // 5
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def fit_path(name: str, width: int) -> str:
    """Return a module's path in at most `width` characters: without its class, or else without its front."""
    name = printable(name)
    path = name if len(name) <= width else name.partition(" (")[0]
    return path if len(path) <= width else f"…{path[len(path) - width + 1 :]}"


def distinct(names: Iterable[str], kind: str = "kernel") -> dict[str, str]:
    """Return distinct short names of several kernels: those that would be equal are numbered."""
    shown: dict[str, str] = {}
    times: Counter[str] = Counter()
    for name in dict.fromkeys(names):
        text = short(name, kind)
        times[text] += 1
        shown[name] = text if times[text] == 1 else f"{text} ({times[text]})"
    return shown


def fit_all(names: Iterable[str], width: int, view: str = "") -> dict[str, str]:
    """Return distinct names of at most `width` characters: those that are cut to the same are numbered."""
    fit_one = fit_path if view == "modules" else fit
    shown: dict[str, str] = {}
    times: Counter[str] = Counter()
    for name in dict.fromkeys(names):
        cut = fit_one(name, width)
        times[cut] += 1
        tail = f" ({times[cut]})"
        shown[name] = cut if times[cut] == 1 else fit_one(name, max(width - len(tail), 1)) + tail
    return shown


# -- the parser -----------------------------------------------------------------------------------------------------


def _tokens(text: str) -> list[str]:
    text = text.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    text = _LAMBDAS.sub(_last_lambda, text)
    text = _without_parentheses(_OPERATOR.sub("", text))
    return [t.strip() for t in _TOKEN.findall(text) if t.strip()]


def _last_lambda(match: re.Match[str]) -> str:
    """Return the last of nested lambdas (one per dtype switch): its number, unless it is the first."""
    number = _LAMBDA.findall(match.group())[-1]
    return "" if number == "1" else f"#{number}"


def _without_parentheses(text: str) -> str:
    out, depth = [], 0
    for c in text:
        if c == "(":
            depth += 1
        elif c == ")":
            depth = max(0, depth - 1)
        elif depth == 0:
            out.append(c)
    return "".join(out)


def _parse(tokens: Sequence[str], at: int) -> tuple[_Node, int]:
    """Parse one name from a position: components between "::", each with its arguments; the last one counts."""
    node = _Node("")
    while at < len(tokens):
        token = tokens[at]
        if token in (",", ">"):
            break
        if token == "<":
            node.args, at = _arguments(tokens, at + 1)
        elif token == "::":
            at += 1
        elif token.startswith("#") and node.base:  # the number of a lambda, after its function's arguments
            node.base, at = node.base + token, at + 1
        elif node.args and token in ("const", "*", "&", "const*", "const&", "*const"):
            at += 1
        else:
            node, at = _Node(token), at + 1
    return node, at


def _arguments(tokens: Sequence[str], at: int) -> tuple[list[_Node], int]:
    nodes = []
    while tokens[at] != ">":
        if tokens[at] == ",":
            at += 1
            continue
        node, at = _parse(tokens, at)
        nodes.append(node)
    return nodes, at + 1


def _render(node: _Node, depth: int) -> str:
    telling = [a for a in node.args if a.is_telling]
    if node.base in _WRAPPERS and telling:
        return _render(telling[0], depth)
    base = TYPES.get(node.base, _SUFFIX.sub("", node.base) if node.is_number else node.base)
    if depth > 1 or not node.args:
        return base
    if base.endswith("traits"):  # a tile's traits: its sizes are what differs
        sizes = [_SUFFIX.sub("", a.base) for a in node.args if a.is_number]
        return f"{base}<{', '.join(sizes[:3])}>" if sizes else base
    shown = [_render(a, depth + 1) for a in telling[: 2 if depth == 0 else 1]]
    if not shown:
        types = [TYPES[a.base] for a in node.args if a.base in TYPES]
        shown = types[:1]
    if depth == 0 and node.args[0].is_number:
        shown = [_SUFFIX.sub("", node.args[0].base), *shown]
    return f"{base}<{', '.join(shown)}>" if shown else base
