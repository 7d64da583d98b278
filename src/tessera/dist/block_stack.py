"""The structure of a module: its stack of like blocks, and the matrices of a block that are split in pairs.

Nothing is run. Names decide where sizes are ambiguous (a square matrix may come first or last in its pair).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ..errors import ArgumentError

# Names of projections back to the hidden size, used if the matrix is square: Llama, GPT-2, ViT, BERT, diffusers.
_BACK = re.compile(r"(^|\.)((([oc]|out|down|attn)_)?(proj|lin)|wo|w2|o|fc2|dense|to_out|out|output)(\.\d+)?$")
_ATTENTION = re.compile(r"attn|attention|qkv|(^|[._])[qkv](_|$)|(^|[._])w[qkv]$|query|key|value", re.IGNORECASE)
_READS = re.compile(r"^w?[qkv](_|$)|query|key|value|_[qkv]$", re.IGNORECASE)
# In these matrices, queries, keys and values of a head are together (GPT-NeoX, BLOOM, Falcon), so the matrix can be cut
# as it is.
_BY_HEADS = "query_key_value"
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPair:
    """Matrices of one block that are split together: `columns` read the hidden state, `row` projects back to it.

    `parts` are the widths inside a column that holds several matrices (queries, keys and values; or a gate and its
    values).
    """

    kind: Literal["attention", "mlp"]
    columns: tuple[str, ...]
    row: str
    parts: tuple[int, ...] = ()
    heads: int | None = None
    key_heads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStack:
    """Where the equal blocks of a module are, and what the model has before and after them."""

    path: str
    blocks: Any
    embedding: str | None
    head: str | None
    tied: bool

    def __len__(self) -> int:
        return len(self.blocks)

    def named_blocks(self) -> list[tuple[str, nn.Module]]:
        """Return the blocks with their full names."""
        prefix = f"{self.path}." if self.path else ""
        return [(prefix + name, block) for name, block in self.blocks.named_children()]


def find_stack(module: nn.Module) -> BlockStack | None:
    """Return the container whose like children hold the most parameters; None if nothing is repeated.

    A sequence of unlike children is taken if no like children hold half as much.
    """
    found: list[tuple[float, str, nn.Module]] = []
    for path, container in module.named_modules():
        blocks = list(container.children())
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and len(blocks) > 1:
            are_like = len({type(b) for b in blocks}) == 1
            size = sum(p.numel() for p in container.parameters())
            if size and (are_like or isinstance(container, nn.Sequential)):
                found.append((size if are_like else size / 2, path, container))
    if not found:
        return None
    _, path, container = max(found, key=lambda f: f[0])
    embedding, head, tied = _find_ends(module, path)
    return BlockStack(path=path, blocks=container, embedding=embedding, head=head, tied=tied)


def _find_ends(module: nn.Module, path: str) -> tuple[str | None, str | None, bool]:
    """Return the names of the word embedding (the widest vocabulary) and of the projection to that vocabulary."""
    outside = [(n, m) for n, m in module.named_modules() if not path or not n.startswith(f"{path}.")]
    embeddings = {n: m for n, m in outside if isinstance(m, nn.Embedding)}
    heads = {n: m for n, m in outside if isinstance(m, nn.Linear) and path}
    for name, words in embeddings.items():
        for head, matrix in heads.items():
            if matrix.weight is words.weight:
                return name, head, True
    counts = {n: m.num_embeddings for n, m in embeddings.items()}
    both = [(n, h) for n, m in embeddings.items() for h, x in heads.items() if x.out_features == m.num_embeddings]
    if both:
        return *both[0], False
    return max(counts, key=counts.__getitem__, default=None), None if embeddings or not heads else [*heads][-1], False


def is_matrix(module: nn.Module) -> bool:
    """Return whether a module is a Linear, or transformers' Conv1D of GPT-2, a Linear with its matrix transposed."""
    return isinstance(module, nn.Linear) or (
        type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")
    )


def width_of(module: Any) -> tuple[int, int]:
    """Return (inputs, outputs) of a matrix."""
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (module.nx, module.nf)


def find_pairs(block: nn.Module) -> list[MatrixPair]:
    """Return the pairs of a block, from its matrices' sizes and names. Experts are skipped."""
    matrices = {n: m for n, m in block.named_modules() if is_matrix(m) and not _is_of_expert(n, block)}
    hidden = find_hidden(block)
    found: list[tuple[str, list[str], str]] = []
    waiting: tuple[str, list[str]] | None = None  # columns whose row matrix is in the next container, as in BERT
    for container, names in _group_by_container(block, matrices):
        columns: list[str] = []
        early = None  # a row matrix that is declared before its columns, as in Phi-3
        for name in names:
            inside, out = width_of(matrices[name])
            is_end = bool(columns) and name == names[-1] and not _READS.search(name.rpartition(".")[2])
            is_square_back = inside == hidden and (_BACK.search(name) or is_end)
            if not (out == hidden and (inside != hidden or is_square_back)):
                columns += [name] if inside == hidden else []
            elif not columns:
                early = name
            else:
                # Meta's Llama names the gate w1, the projection back w2 and the values w3, in this order.
                last = names[-1]
                if len(columns) == 1 and width_of(matrices[last]) == (hidden, inside) and last not in (name, *columns):
                    columns.append(last)
                found.append((container, columns, name))
                columns = []
        if early is not None and (columns or waiting):
            found.append((container, columns, early) if columns or not waiting else (*waiting, early))
            columns = []
        waiting = (container, columns) if columns else None
    pairs = [_make_pair(block, container, columns, row, matrices) for container, columns, row in found]
    return [pair for pair in pairs if pair is not None]


def find_hidden(block: nn.Module) -> int:
    """Return the size that most matrices of a block read or write."""
    sizes = Counter(size for m in block.modules() if is_matrix(m) for size in width_of(m))
    return sizes.most_common(1)[0][0] if sizes else 0


def _group_by_container(block: nn.Module, matrices: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Group matrices by the module that calls them: their parent, or the parent of the list that holds them."""
    groups: dict[str, list[str]] = {}
    for name in matrices:
        parent = name.rpartition(".")[0]
        while parent:
            holder = block.get_submodule(parent)
            is_caller = isinstance(holder, nn.Sequential) and sum(map(is_matrix, holder.children())) > 1
            if is_caller or not isinstance(holder, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                break
            parent = parent.rpartition(".")[0]
        groups.setdefault(parent, []).append(name)
    yield from groups.items()


def _make_pair(
    block: nn.Module, container: str, columns: list[str], row: str, matrices: dict[str, Any]
) -> MatrixPair | None:
    inner = width_of(matrices[row])[0]
    outs = [width_of(matrices[name])[1] for name in columns]
    is_attention = bool(_ATTENTION.search(f"{container}.{'.'.join(columns)}"))
    if not is_attention:
        if len(columns) == 1 and outs[0] == 2 * inner:
            return MatrixPair(kind="mlp", columns=tuple(columns), row=row, parts=(inner, inner))
        return MatrixPair(kind="mlp", columns=tuple(columns), row=row) if set(outs) == {inner} else None
    owner = block.get_submodule(container) if container else block
    heads, key_heads = _read_heads(owner, inner)
    if len(columns) == 1 and not columns[0].endswith(_BY_HEADS):
        keys = (outs[0] - inner) // 2
        if keys < 1 or (outs[0] - inner) % 2 or not heads or (keys * heads) % inner:
            return None
        parts = (inner, keys, keys)
        return MatrixPair(
            kind="attention", columns=tuple(columns), row=row, parts=parts, heads=heads, key_heads=keys * heads // inner
        )
    if heads and inner % heads == 0 and len(columns) == 3:
        key_heads = min(outs) * heads // inner
    return MatrixPair(kind="attention", columns=tuple(columns), row=row, heads=heads, key_heads=key_heads)


def _read_heads(owner: nn.Module, inner: int) -> tuple[int | None, int | None]:
    """Return the heads of queries and of keys, from the attributes of an attention or its configuration."""
    sources = [owner, getattr(owner, "config", None), getattr(owner, "cfg", None), getattr(owner, "args", None)]
    heads = read_first(sources, _HEADS)
    size = read_first(sources, ("head_dim", "head_size", "d_head"))
    if heads is None and size and inner % size == 0:
        heads = inner // size
    return heads, read_first(sources, _KEY_HEADS) or heads


def read_first(sources: list[Any], names: tuple[str, ...]) -> int | None:
    """Return the first whole number that one of the objects or mappings has under one of the names."""
    for source in sources:
        for name in names:
            value = source.get(name) if isinstance(source, dict) else getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def find_experts(block: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the list of like MLPs, or the module with stacked matrices, of a block's experts; None without experts."""
    for name, part in block.named_modules():
        if re.search(r"(^|\.)experts$", name) or (isinstance(part, nn.ModuleList) and "expert" in name):
            return name, part
    return None


def _is_of_expert(name: str, block: nn.Module) -> bool:
    experts = find_experts(block)
    return experts is not None and name.startswith(f"{experts[0]}.")


def require_stack(module: nn.Module, purpose: str) -> BlockStack:
    """Return the stack of a module, or raise an error that says what was looked for."""
    stack = find_stack(module)
    if stack is None:
        raise ArgumentError(
            f"{type(module).__name__} has no stack of blocks, which {purpose} needs",
            why="looked for an nn.ModuleList or nn.Sequential with at least two children of one class",
            fix="put the repeated layers into an nn.ModuleList",
        )
    return stack
