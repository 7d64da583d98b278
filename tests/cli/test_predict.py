"""`tessera predict` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.cli import model_loader
from tessera.cli.main import main
from tessera.errors import ArgumentError, MissingExtra

OWN = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), torch.randn(4, 64)

def just():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

def words():
    return nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))

class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8 + int(torch.linspace(0, 3, 4)[-1].item()))

    def forward(self, x):
        return self.linear(x)

def huge():
    return nn.Linear(200_000, 200_000), torch.empty(1, 200_000)

net = just()
number = 3

def boom():
    raise ValueError("broken on purpose")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the current folder; its name is new each time, as imports are remembered."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def predicted(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["predict", *args])
    return int(ended.value.code or 0)


def test_one_point_is_a_full_report(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert predicted(f"{own}:make", "--on", "a100", "--precision", "bf16", "--top", "2") == 0
    out = capsys.readouterr().out
    assert "Sequential on NVIDIA A100" in out
    assert "bf16, infer, eager, batch 4" in out
    for words in ("Compute (", "Memory ", "Static ", "Top consumers", "per sample", "Opportunities", "next"):
        assert words in out


def test_several_points_are_a_table(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--on", "a100,h200", "--precision", "bf16,fp8", "--batch", "1,64")
    assert predicted(f"{own}:make", *arguments) == 0
    out = capsys.readouterr().out
    assert "6 of 8 combinations are possible" in out
    assert "a100 has no fp8 units" in out
    assert "least energy" in out


def test_json_is_for_machines(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert predicted(f"{own}:make", "--json", "--no-opportunities") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["summary"]["total_energy_j"] > 0
    assert data["report"]["prediction"]["batch"] == 4
    assert "opportunities" not in data
    assert predicted(f"{own}:make", "--json", "--batch", "1,2") == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in data["rows"]] == [1, 2]


def test_html_is_written_and_said(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.html"
    assert predicted(f"{own}:make", "--batch", "1,8", "--html", str(file)) == 0
    assert "<svg" in file.read_text()
    assert f"wrote {file}" in capsys.readouterr().err
    assert predicted(f"{own}:make", "--html", str(file), "--no-opportunities") == 0
    assert "Top consumers" in file.read_text()
    assert predicted(f"{own}:make", "--html", str(tmp_path / "no" / "where.html")) == 2
    assert "cannot write" in capsys.readouterr().err


def test_training_counts_steps(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--mode", "train", "--optimizer", "adamw", "--launch", "graph", "--state", "burst", "--no-opportunities")
    assert predicted(f"{own}:make", *options) == 0
    out = capsys.readouterr().out
    assert "per step" in out
    assert "train, graph" in out


def test_inputs_may_be_given(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ("--no-opportunities", "--top", "0")
    assert predicted(f"{own}:just", "--input", "64", *quick) == 0
    assert predicted(f"{own}:net", "--input", "64", *quick) == 0
    assert predicted(f"{own}:words", "--seq", "32", *quick) == 0
    assert "per token" in capsys.readouterr().out
    assert predicted(f"{own}:just") == 2
    assert "--input 3x224x224" in capsys.readouterr().err


def test_inputs_that_are_replaced_are_named(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ("--json", "--no-opportunities")
    assert predicted(f"{own}:make", "--input", "64", *quick) == 0
    said = capsys.readouterr()
    lost = f"the inputs that {own}:make returns (4x64)"
    assert said.err == f"note: --input replaces {lost}; the batch is 1 unless --batch is given\n"
    assert json.loads(said.out)["report"]["prediction"]["batch"] == 1
    assert predicted(f"{own}:make", *quick) == predicted(f"{own}:just", "--input", "64", *quick) == 0
    assert capsys.readouterr().err == ""  # nothing was replaced


def test_a_model_that_asks_for_values_while_it_is_built(own: str) -> None:
    assert predicted(f"{own}:Asks", "--input", "8", "--no-opportunities") == 0


def test_what_does_not_fit_is_an_error_alone_and_a_row_among_others(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predicted(f"{own}:huge", "--on", "l4", "--no-opportunities") == 1
    assert "needs" in capsys.readouterr().err
    assert predicted(f"{own}:huge", "--on", "l4,b200", "--precision", "bf16") == 0
    assert "does not fit" in capsys.readouterr().out
    assert predicted(f"{own}:huge", "--on", "l4,t4", "--precision", "fp16") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("{own}:mak",), 2, "did you mean 'make'"),
        (("{own}x:make",), 2, "did you mean '{own}'"),
        (("{own}:number",), 1, "int"),
        (("{own}:boom",), 1, "ValueError: broken on purpose"),
        (("{own}:make", "--on", "a1000"), 2, "did you mean 'a100'"),
        (("{own}:make", "--precision", "bf17"), 2, "did you mean 'bf16'"),
        (("{own}:make", "--on", "a100", "--precision", "fp8"), 1, "no fp8 units"),
        (("{own}:make", "--batch", "none"), 2, "--batch"),
        (("{own}:make", "--batch", "0"), 2, "--batch"),
        (("{own}:make", "--input", "3by3"), 2, "--input"),
        (("{own}:make", "--on", ","), 2, "is empty"),
        (("{own}:make", "--mode", "training"), 2, "--mode"),
        (("{own}:make", "--optimizer", "adamw"), 2, "--mode train"),
        (("{own}:make", "--optimizer", "sgd"), 2, "--mode train"),
        ((), 2, "MODEL"),
        (("hf:nowhere.json",), 2, "nothing is downloaded"),
        (("hf:{{",), 2, "not JSON"),
        (("hf:[1]",), 2, "nothing is downloaded"),
    ],
)
def test_mistakes(
    own: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, said: str
) -> None:
    assert predicted(*(word.format(own=own) for word in arguments)) == code
    err = capsys.readouterr().err
    assert said.format(own=own) in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("cnn.py", "cnn:make_model"), ("examples/train.py:job", "examples.train:job"), ("./cnn.py", "cnn:make_model")],
)
def test_a_script_is_told_how_to_name_its_model(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert predicted(typed, "--on", "h200") == 2
    said = capsys.readouterr().err
    assert "is a script, not a model" in said and f"tessera predict {meant}, " in " ".join(said.split())


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom tessera.cli.main import main\n"
        "try: main(['predict', '--help'])\nexcept SystemExit: pass\n"
        "print('LOADED', sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "LOADED []" in out.stdout
    assert "tessera predict resnet18" in out.stdout


def test_the_next_command_is_what_was_typed_with_one_change(own: str) -> None:
    command = [sys.executable, "-m", "tessera", "predict", f"{own}:make", "--on", "h200", "--batch=1,64"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"tessera predict {own}:make --on h200 --batch 64" in out.stdout
    assert out.stderr == "", "no progress where nobody looks"


def test_progress_shows_on_a_terminal_only(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert predicted(f"{own}:make", "--on", "a100,h200", "--batch", "1,2,4") == 0


@pytest.mark.parametrize("name", ["torchvision", "timm", "transformers"])
def test_a_missing_package_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=name) as error:
        model_loader.import_package(name, "a model")
    assert "[models]" in (error.value.fix or "")


# -- with the packages of models, where they are installed ----------------------------------------------------------


def has(name: str) -> None:
    try:
        model_loader.import_package(name, "a test")
    except MissingExtra:
        pytest.skip(f"{name} is not installed")


def test_torchvision_by_name() -> None:
    has("torchvision")
    loaded = model_loader.load_model("resnet18", model_loader.InputShape())
    assert {p.device.type for p in loaded.model.parameters()} == {"meta"}
    assert tuple(loaded.inputs.shape) == (1, 3, 224, 224)
    assert tuple(model_loader.load_model("inception_v3", model_loader.InputShape()).inputs.shape) == (1, 3, 299, 299)
    assert {
        p.device.type for p in model_loader.load_model("regnet_x_400mf", model_loader.InputShape()).model.parameters()
    } == {"meta"}
    with pytest.raises(ArgumentError, match="did you mean 'resnet18'"):
        model_loader.load_model("resnet81", model_loader.InputShape())


def test_timm_by_name() -> None:
    has("timm")
    loaded = model_loader.load_model("timm:vit_tiny_patch16_224", model_loader.InputShape())
    assert {p.device.type for p in loaded.model.parameters()} == {"meta"}
    with pytest.raises(ArgumentError, match="no model"):
        model_loader.load_model("timm:vit_tinny_patch16_224", model_loader.InputShape())


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "dtype": "bfloat16",
}  # fmt: skip


def test_transformers_by_configuration(tmp_path: Path) -> None:
    has("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    for spec in (f"hf:{file}", f"hf:{json.dumps(LLAMA)}"):
        loaded = model_loader.load_model(spec, model_loader.InputShape(seq=16))
        assert {p.device.type for p in loaded.model.parameters()} == {"meta"}
        assert {str(p.dtype) for p in loaded.model.parameters()} == {"torch.bfloat16"}
        assert tuple(loaded.inputs["input_ids"].shape) == (1, 16)
        assert loaded.name == "LlamaForCausalLM"
    assert "labels" in model_loader.load_model(f"hf:{file}", model_loader.InputShape(), training=True).inputs
    assert model_loader.load_model(str(file), model_loader.InputShape()).name == "LlamaForCausalLM"
    with pytest.raises(ArgumentError, match=r"^the configuration has no model_type\n"):
        model_loader.load_model("hf:{}", model_loader.InputShape())
    for wrong, near in (({"model_type": "lama"}, "llama"), ({**LLAMA, "architectures": ["LLamaForCausalLM"]}, "Llama")):
        with pytest.raises(ArgumentError, match=f"did you mean '{near}"):
            model_loader.load_model(f"hf:{json.dumps(wrong)}", model_loader.InputShape())


@pytest.mark.parametrize("kind", ["clip", "groupvit"])
def test_a_text_is_no_longer_than_its_model_takes(kind: str) -> None:
    has("transformers")
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 77}
    config = f"hf:{json.dumps({'model_type': kind, 'text_config': small})}"
    inputs = model_loader.load_model(config, model_loader.InputShape()).inputs
    assert tuple(inputs["input_ids"].shape) == (1, 77) and tuple(inputs["pixel_values"].shape) == (1, 3, 224, 224)
    assert model_loader.load_model(config, model_loader.InputShape(seq=16)).inputs["input_ids"].shape[1] == 16
    assert (
        model_loader.load_model(f"hf:{json.dumps(LLAMA)}", model_loader.InputShape()).inputs["input_ids"].numel() == 128
    )


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"quant_method": "fp8"}, "quantization_config (fp8) is not used; --precision fp8 or --serve takes"),
        (
            {"quant_method": "awq", "bits": 4},
            "quantization_config (int4) is not used; --precision int4wo",
        ),
        ({"quant_method": "aqlm"}, "quantization_config (aqlm) is not used"),
    ],
)
def test_quantized_weights_of_a_configuration_are_said_not_to_be_used(method: dict[str, object], told: str) -> None:
    has("transformers")
    quantized = json.dumps(LLAMA | {"quantization_config": method})
    note = model_loader.load_model(f"hf:{quantized}", model_loader.InputShape(seq=16)).note
    assert note is not None and note.startswith(told)
    assert model_loader.load_model(f"hf:{json.dumps(LLAMA)}", model_loader.InputShape(seq=16)).note is None


@pytest.mark.parametrize("asked", ["sum().item()", "detach().numpy()"])
def test_a_function_that_computes_is_told_to_return_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    code = f"import torch\ndef main():\n    m = torch.nn.Linear(4, 4)\n    print(m(torch.randn(8, 4)).{asked})\n"
    monkeypatch.delitem(sys.modules, "computes_something", raising=False)
    (tmp_path / "computes_something.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert predicted("computes_something:main", "--on", "h200") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "computes something, instead of only returning a model" in said and "return an nn.Module" in said
    assert "computes_something.py:4" in said.replace(" ", "")


def test_a_model_with_a_sparse_tensor_is_built_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "multiplies_sparse.py").write_text("""
import torch
class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
        at = torch.randint(0, 64, (2, 100))
        self.register_buffer("edges", torch.sparse_coo_tensor(at, torch.randn(100), (64, 64)).coalesce())
    def forward(self, x):
        return torch.sparse.mm(self.edges, x)
def make():
    return Graph(), torch.empty(64, 8)
""")
    monkeypatch.chdir(tmp_path)
    assert predicted("multiplies_sparse:make") == 0
    assert "index_add" in capsys.readouterr().out


@pytest.mark.parametrize(
    "code",
    [
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n    "
        "return torch.nn.Linear(4, 4).to(device), torch.randn(2, 4).to(device)",
        "return torch.nn.Linear(4, 4).half().cuda().eval(), torch.randn(2, 4).half().cuda()",
        "return torch.nn.Linear(4, 4, device='cuda:0'), torch.randn(2, 4, device=torch.device('cuda'))",
        "return torch.nn.Linear(4, 4).cuda().cpu(), torch.randn(2, 4).cpu()",
    ],
)
def test_a_function_may_put_its_model_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    monkeypatch.delitem(sys.modules, "puts_on_gpu", raising=False)
    (tmp_path / "puts_on_gpu.py").write_text(f"import torch\ndef make():\n    {code}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert predicted("puts_on_gpu:make", "--on", "h200", "--no-opportunities") == 0
    assert "Linear on NVIDIA H200" in capsys.readouterr().out


def test_a_long_message_of_a_models_own_code_is_cut_to_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tells_all.py").write_text("def make():\n    raise ValueError('short\\n' + 80 * 'backend\\n')\n")
    monkeypatch.chdir(tmp_path)
    assert predicted("tells_all:make") == 1
    said = capsys.readouterr().err
    assert "tells_all:make() raised ValueError: short\n" in said and "backend" not in said


def test_a_module_that_parses_arguments_when_imported_is_told_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parses_at_once.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--typo'])\n")
    monkeypatch.chdir(tmp_path)
    assert predicted("parses_at_once:make") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "ends the program when it is imported" in said and "__main__" in said
