"""The command line: output, exit codes, and one sentence for every mistake."""

from __future__ import annotations

import json
import os
import pty
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergestream.storage import open_storage
from tests.conftest import RunCommand, Toys, files, save_model, toy_base, toy_expert


@pytest.fixture
def store(tmp_path: Path, toys: Toys, done: Callable[..., str]) -> Path:
    """A store with two experts, created by the command line."""
    done("init", tmp_path / "store", "--base", toys.base, "--alpha", "0.4")
    done("add", tmp_path / "store", *toys.experts[:2], "--quiet")
    return tmp_path / "store"


def python(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=env)


# --- speed -------------------------------------------------------------------------------------------------


def test_help_and_status_do_not_load_torch(store: Path) -> None:
    code = f"""
import sys
from mergestream.cli import main
for arguments in (["--help"], ["add", "--help"], ["status", {str(store)!r}], ["log", {str(store)!r}, "--json"]):
    try:
        assert main(arguments) == 0
    except SystemExit as exit:
        assert exit.code == 0
slow = {{"torch", "transformers", "numpy", "huggingface_hub", "rich"}} & sys.modules.keys()
assert not slow, slow
"""
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


def test_help_takes_little_cpu_time() -> None:
    """Measures CPU time, best of three, because the machine may be busy."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert python("-m", "mergestream", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 1


# --- what commands print -----------------------------------------------------------------------------------


def test_status_json_is_reproducible(store: Path, done: Callable[..., str], toys: Toys, tmp_path: Path) -> None:
    status = json.loads(done("status", store, "--json"))
    assert {key: status[key] for key in ("step", "method", "experts", "keep")} == {
        "step": 2,
        "method": "opcm",
        "experts": ["expert-1", "expert-2"],
        "keep": 1,
    }
    assert status["parameters"]["alpha"] == 0.4
    assert status["base"]["source"] == str(toys.base) and len(status["base"]["digest"]) == 32
    assert status["lambda"] > 1 and status["n"] == pytest.approx(status["distance"])
    assert status["counts"] == {"copied": 2, "embedding": 1, "linear": 6, "other": 4}
    assert {tensor["name"] for tensor in status["tensors"]} == toy_base().keys()
    assert all(tensor["role"] and tensor["rule"] for tensor in status["tensors"])

    done("init", tmp_path / "again", "--base", toys.base, "--alpha", "0.4")
    done("add", tmp_path / "again", *toys.experts[:2])
    assert json.loads(done("status", tmp_path / "again", "--json")) == status, "equal stores give equal JSON"


def test_init_is_advised_only_where_nothing_is(tmp_path: Path, toys: Toys, mergestream: RunCommand) -> None:
    assert "make one with: mergestream init" in mergestream("status", tmp_path / "new").err
    for command in ("status", "log", "verify"):
        assert mergestream(command, toys.base).err.endswith("is not a mergestream store; it has no manifest.json\n")


def test_a_report_has_a_known_format(tmp_path: Path, toys: Toys, mergestream: RunCommand) -> None:
    assert (
        mergestream("init", tmp_path / "store", "--base", toys.base)
        .out.splitlines()[-1]
        .startswith("next: mergestream add ")
    )
    refused = mergestream("report", tmp_path / "store", "-o", tmp_path / "report.pdf")
    assert refused.code == 2 and "is not a .html, .md or .json file" in refused.err
    assert not (tmp_path / "report.pdf").exists()


def test_an_empty_store_has_a_status_and_a_log(tmp_path: Path, toys: Toys, done: Callable[..., str]) -> None:
    done("init", tmp_path / "store", "--base", toys.base)
    status = json.loads(done("status", tmp_path / "store", "--json"))
    assert (status["step"], status["lambda"], status["n"], status["distance"]) == (0, None, None, 0.0)
    assert json.loads(done("log", tmp_path / "store", "--json")) == []
    assert "no experts yet" in done("log", tmp_path / "store")


def test_log_has_one_object_per_expert(store: Path, done: Callable[..., str], toys: Toys) -> None:
    log = json.loads(done("log", store, "--json"))
    assert [entry["name"] for entry in log] == ["expert-1", "expert-2"]
    for entry, expert in zip(log, toys.experts, strict=False):
        assert {"name", "source", "digest", "norm", "lambda", "kept", "time"} <= entry.keys()
        assert entry["source"] == str(expert)
        assert 0 < entry["kept"] <= 1 and entry["norm"] > 0
    assert log[0]["lambda"] == pytest.approx(1)
    assert "expert-2" in done("log", store)


def test_infinite_numbers_are_null_in_json(tmp_path: Path, toys: Toys, done: Callable[..., str]) -> None:
    done("init", tmp_path / "store", "--base", toys.base, "--method", "task_arithmetic", "--set", "scale=0")
    done("add", tmp_path / "store", toys.experts[0], "--json")
    for command in (("status",), ("log",)):
        printed = done(*command, tmp_path / "store", "--json")
        data = json.loads(printed, parse_constant=pytest.fail)
        assert (data if isinstance(data, dict) else data[0])["lambda"] is None
    assert "inf" not in done("log", tmp_path / "store")


def test_status_lists_every_tensor_with_its_rule(store: Path, done: Callable[..., str]) -> None:
    listed = done("status", store, "--tensors")
    for name in toy_base():
        assert name in listed
    assert "embedding" in listed and "integer tensor" in listed


def test_inspect_and_dry_run_agree_and_change_nothing(store: Path, done: Callable[..., str], toys: Toys) -> None:
    before = files(store)
    inspected = json.loads(done("inspect", store, toys.experts[2], "--json"))
    dry, other = json.loads(done("add", store, toys.experts[2], toys.experts[3], "--dry-run", "--json"))
    for facts in (inspected, dry):
        assert facts.pop("seconds") > 0
    assert inspected == dry and other["step"] == 3
    assert files(store) == before
    assert {"norm", "kept", "lambda", "distance", "fates", "memory", "disk", "tensors", "step"} <= inspected.keys()
    assert inspected["step"] == 3 and inspected["fates"] == {"copied": 2, "merged": 11}
    assert {"role", "fate", "norm", "kept", "protected"} <= inspected["tensors"]["layers.0.q.weight"].keys()
    text = done("inspect", store, toys.experts[2])
    assert (
        "would be step 3" in text
        and "time about " in text
        and "RAM" in text
        and "disk" in text
        and "layers.0.q.weight" in text
    )
    done("add", store, toys.experts[2])
    assert json.loads(done("log", store, "--json"))[2]["kept"] == inspected["kept"]


def test_add_takes_several_and_reports_each(tmp_path: Path, toys: Toys, done: Callable[..., str]) -> None:
    done("init", tmp_path / "store", "--base", toys.base)
    added = json.loads(done("add", tmp_path / "store", *toys.experts, "--json"))
    assert [entry["name"] for entry in added] == [f"expert-{n}" for n in (1, 2, 3, 4)]


def test_add_names_several_experts(
    tmp_path: Path, toys: Toys, done: Callable[..., str], mergestream: RunCommand
) -> None:
    done("init", tmp_path / "store", "--base", toys.base)
    equals = shutil.copytree(toys.experts[2], tmp_path / "lr=0.1" / "best")
    words = (f"legal={toys.experts[0]}", f"medical={toys.experts[1]}", equals)
    added = json.loads(done("add", tmp_path / "store", *words, "--json"))
    assert [entry["name"] for entry in added] == ["legal", "medical", "best"], "a path may contain ="
    assert [entry["source"] for entry in added] == [str(toys.experts[0]), str(toys.experts[1]), str(equals)]
    twice = mergestream("add", tmp_path / "store", f"legal={toys.experts[3]}")
    assert twice.code == 1 and "legal" in twice.err
    for wrong in (f"={toys.experts[3]}", "legal="):
        refused = mergestream("add", tmp_path / "store", wrong)
        assert refused.code in (1, 2) and (f"{wrong} does not exist" in refused.err) == (wrong == "legal=")


def test_an_existing_path_with_equals_is_not_split(
    tmp_path: Path, toys: Toys, done: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(toys.experts[0], "lr=0.1")
    done("init", "store", "--base", toys.base)
    (added,) = json.loads(done("add", "store", "lr=0.1", "--json"))
    assert added["name"] == "lr=0.1"


def test_a_failing_expert_leaves_those_before_it_committed(
    tmp_path: Path, toys: Toys, mergestream: RunCommand, done: Callable[..., str]
) -> None:
    done("init", tmp_path / "store", "--base", toys.base)
    bad = toy_expert(1)
    bad["layers.0.up.weight"][0, 0] = torch.inf  # which no header shows
    save_model(tmp_path / "bad", bad)
    result = mergestream("add", tmp_path / "store", toys.experts[0], tmp_path / "bad", toys.experts[1])
    assert result.code == 1 and "step 1: expert-1" in result.out
    result = mergestream("add", tmp_path / "store", toys.experts[1], tmp_path / "bad", "--json")
    absorbed, failed = json.loads(result.out)
    assert result.code == 1 and absorbed["name"] == "expert-2" and "NaN or Inf" in failed["error"]
    assert json.loads(done("status", tmp_path / "store", "--json"))["experts"] == ["expert-1", "expert-2"]


def test_standard_error_has_only_notes_without_a_terminal(tmp_path: Path, toys: Toys, mergestream: RunCommand) -> None:
    assert mergestream("init", tmp_path / "store", "--base", toys.base).err == ""
    assert mergestream("add", tmp_path / "store", toys.experts[0]).err == ""
    torch.manual_seed(9)
    unrelated = {name: torch.randn(t.shape).to(t.dtype) for name, t in toy_base().items()}
    save_model(tmp_path / "unrelated", unrelated)
    allowed = ("add", tmp_path / "store", tmp_path / "unrelated", "--allow-other-base")
    warned = mergestream(*allowed)
    assert warned.code == 0 and "note: " in warned.err and "not fine-tuned from this base" in warned.err
    assert mergestream("undo", tmp_path / "store").code == 0
    assert mergestream(*allowed, "--quiet").err == ""


def test_a_terminal_sees_progress_bars(tmp_path: Path, toys: Toys) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mergestream", "init", str(tmp_path / "store"), "--base", str(toys.base)]
    process = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, check=True)
    os.close(theirs)
    assert b"reading the base" in os.read(ours, 10_000) and b"reading" not in process.stdout
    os.close(ours)


def test_undo_verify_and_export(store: Path, done: Callable[..., str], tmp_path: Path) -> None:
    assert "expert-2 taken back" in done("undo", store)
    assert "all digests match" in done("verify", store)
    assert "1 expert merged by opcm" in done("export", store, tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_methods_are_listed_with_their_parameters(done: Callable[..., str]) -> None:
    listed = json.loads(done("methods", "--json"))
    assert {"opcm", "average", "task_arithmetic", "ties", "ema", "lawa", "magmax"} <= {m["name"] for m in listed}
    assert "--set alpha=0.5" in done("methods")


def test_base_option_relocates_the_base(
    tmp_path: Path, toys: Toys, mergestream: RunCommand, done: Callable[..., str]
) -> None:
    base = shutil.copytree(toys.base, tmp_path / "base")
    done("init", tmp_path / "store", "--base", base)
    moved = base.rename(tmp_path / "moved")
    assert "--base" in mergestream("add", tmp_path / "store", toys.experts[0]).err
    assert mergestream("add", tmp_path / "store", toys.experts[0], "--base", toys.experts[1]).code == 1
    done("add", tmp_path / "store", toys.experts[0], "--base", moved)
    done("verify", tmp_path / "store")
    assert json.loads(done("status", tmp_path / "store", "--json"))["base"]["source"] == str(moved)


def test_roles_are_overridden_by_globs(
    tmp_path: Path, toys: Toys, done: Callable[..., str], mergestream: RunCommand
) -> None:
    done("init", tmp_path / "store", "--base", toys.base, "--linear", "embed*", "--not-linear", "layers.0.*")
    status = json.loads(done("status", tmp_path / "store", "--json"))
    roles = {tensor["name"]: (tensor["role"], tensor["rule"]) for tensor in status["tensors"]}
    assert roles["embed_tokens.weight"] == ("linear", "--linear embed*")
    assert roles["layers.0.q.weight"] == ("other", "--not-linear layers.0.*")
    assert mergestream("init", tmp_path / "other", "--base", toys.base, "--linear", "nothing*").code == 2


# --- classifiers with heads of their own -------------------------------------------------------------------


def test_a_head_with_other_labels_loads_with_from_pretrained(tmp_path: Path, done: Callable[..., str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}

    def save(name: str, labels: int, base: Path | None = None) -> Path:
        torch.manual_seed(labels)
        config = transformers.BertConfig(**sizes, vocab_size=40, num_labels=labels)
        model = transformers.BertForSequenceClassification(config)
        if base:
            backbone = {n: t for n, t in load_file(base / "model.safetensors").items() if "classifier" not in n}
            model.load_state_dict({n: t + 0.01 * torch.randn(t.shape) for n, t in backbone.items()}, strict=False)
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    base = save("base", 2)
    done("init", tmp_path / "store", "--base", base, "--heads", "classifier.*")
    for name, labels in (("spam", 2), ("topics", 7)):
        done("add", tmp_path / "store", save(name, labels, base))
        done("export", tmp_path / "store", tmp_path / f"merged-{name}", "--task", name)
        out = tmp_path / f"merged-{name}"
        model, info = transformers.BertForSequenceClassification.from_pretrained(out, output_loading_info=True)
        assert not any(info.values()), info
        assert model.config.num_labels == labels
        head = load_file(tmp_path / name / "model.safetensors")["classifier.weight"]
        assert torch.equal(model.classifier.weight, head)
    done("verify", tmp_path / "store")


# --- mistakes ----------------------------------------------------------------------------------------------


@pytest.fixture
def junk(tmp_path: Path, toys: Toys) -> Path:
    """A directory of invalid experts."""
    place = tmp_path / "junk"
    place.mkdir()
    (place / "empty-directory").mkdir()
    (place / "empty.safetensors").touch()
    (place / "empty.bin").touch()
    (place / "text.txt").write_text("hello")
    (place / "text.safetensors").write_text("hello, this is no checkpoint at all")
    (place / "text.bin").write_text("hello")
    (place / "config-only").mkdir()
    (place / "config-only" / "config.json").write_text("{}")
    (place / "broken-config").mkdir()
    (place / "broken-config" / "config.json").write_text("{")
    save_model(place / "broken-config", toy_expert(1))
    whole = (toys.experts[0] / "model.safetensors").read_bytes()
    (place / "truncated.safetensors").write_bytes(whole[:-10])
    (place / "headless.safetensors").write_bytes(whole[:20])
    torch.save({"model": object()} | {"x": print}, place / "code.pt")
    torch.save(torch.ones(3), place / "tensor.pt")
    torch.save({"numbers": [1, 2]}, place / "lists.pt")
    save_model(place / "missing", {n: t for n, t in toy_expert(1).items() if n != "layers.0.q.weight"})
    save_model(place / "extra", toy_expert(1) | {"classifier.weight": torch.ones(2, 2)})
    save_model(place / "misshaped", toy_expert(1) | {"layers.0.q.weight": torch.ones(8, 9)})
    save_model(place / "grown", toy_expert(1) | {"embed_tokens.weight": torch.ones(26, 8)})
    save_model(place / "integers", toy_expert(1) | {"layers.0.q.weight": torch.ones(8, 8, dtype=torch.int32)})
    save_model(place / "only-integers", {"a": torch.ones(3, dtype=torch.int64)})
    save_model(place / "nan", toy_expert(1) | {"layers.0.q.weight": torch.full((8, 8), float("nan"))})
    (place / "unreadable").symlink_to(place / "nowhere")
    (place / "loop").symlink_to(place / "loop")
    (place / "index").mkdir()
    (place / "index" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret.safetensors"}}')
    os.mkfifo(place / "pipe.safetensors")
    return place


def assert_one_sentence(result: Any, code: int) -> None:
    assert result.code == code, result
    lines = result.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) > 20, result.err
    assert "Traceback" not in result.err and result.out == ""


def test_invalid_experts_are_refused_with_one_sentence(
    junk: Path, store: Path, mergestream: RunCommand, done: Callable[..., str], tmp_path: Path, toys: Toys
) -> None:
    before = files(store, ".json", ".safetensors")
    for path in [*sorted(junk.iterdir()), junk / "nowhere", junk / "text.txt" / "deeper", Path("/dev/null"), store]:
        assert_one_sentence(mergestream("add", store, path), 1)
        assert_one_sentence(mergestream("inspect", store, path), 1)
        assert_one_sentence(
            mergestream("merge", "--base", toys.base, path, toys.experts[0], "-o", tmp_path / "merged"), 1
        )
        assert_one_sentence(
            mergestream("merge", "--base", toys.base, "--method", "average", path, "-o", tmp_path / "merged"), 1
        )
        assert not (tmp_path / "merged").exists()
    assert files(store, ".json", ".safetensors") == before
    done("verify", store)


def test_invalid_bases_and_stores_are_refused_with_one_sentence(
    junk: Path, mergestream: RunCommand, tmp_path: Path, toys: Toys
) -> None:
    good_tensors = {"missing", "extra", "misshaped", "grown", "integers"}
    for path in [*sorted(junk.iterdir()), junk / "nowhere"]:
        if path.name not in good_tensors:
            result = mergestream("init", tmp_path / "store", "--base", path)
            assert_one_sentence(result, 1)
            assert not (tmp_path / "store").exists(), path
        for command in (("status",), ("log",), ("verify",), ("undo",), ("add",), ("export",), ("inspect",)):
            rest = {"add": (toys.base,), "inspect": (toys.base,), "export": (tmp_path / "out",)}.get(command[0], ())
            assert_one_sentence(mergestream(*command, path, *rest), 1)


def test_errors_name_file_and_tensor_and_say_what_to_do(junk: Path, store: Path, mergestream: RunCommand) -> None:
    for name, parts in {
        "missing": ("lacks tensor layers.0.q.weight", "--partial"),
        "extra": ("has tensor classifier.weight that the base does not have", "--heads", "--ignore"),
        "misshaped": ("tensor layers.0.q.weight in model.safetensors", "[8, 9]", "[8, 8]", "--ignore"),
        "grown": ("embed_tokens.weight in model.safetensors", "26 rows", "24", "--vocab base", "--vocab grow"),
        "integers": ("layers.0.q.weight", "I32"),
        "truncated.safetensors": ("truncated", "10 bytes are missing"),
        "code.pt": ("not executed", "safetensors"),
        "nan": ("layers.0.q.weight", "NaN or Inf", "nothing was merged"),
    }.items():
        error = mergestream("add", store, junk / name).err
        for part in parts:
            assert part in error, (name, error)


@pytest.mark.parametrize(
    "arguments",
    [
        ("unknown",),
        ("init",),
        ("init", "STORE"),
        ("init", "STORE", "--base", "BASE", "--method", "unknown"),
        ("init", "STORE", "--base", "BASE", "--alpha", "2"),
        ("init", "STORE", "--base", "BASE", "--alpha", "-1"),
        ("init", "STORE", "--base", "BASE", "--alpha", "nan"),
        ("init", "STORE", "--base", "BASE", "--alpha", "much"),
        ("init", "STORE", "--base", "BASE", "--set", "alpha"),
        ("init", "STORE", "--base", "BASE", "--set", "alpha=high"),
        ("init", "STORE", "--base", "BASE", "--set", "beta=1"),
        ("init", "STORE", "--base", "BASE", "--set", "projection=none"),
        ("init", "STORE", "--base", "BASE", "--method", "average", "--alpha", "0.5"),
        ("init", "STORE", "--base", "BASE", "--method", "task_arithmetic", "--set", "scale=inf"),
        ("init", "STORE", "--base", "BASE", "--method", "lawa", "--set", "window=0"),
        ("init", "STORE", "--base", "BASE", "--method", "lawa", "--set", "window=1.5"),
        ("init", "STORE", "--base", "BASE", "--keep", "-1"),
        ("init", "STORE", "--base", "BASE", "--keep", "some"),
        ("init", "STORE", "--base", "BASE", "--workers", "0"),
        ("init", "STORE", "--base", "BASE", "--workers", "-3"),
        ("init", "STORE", "--base", "BASE", "--linear", "mask"),
        ("init", "STORE", "--base", "BASE\udcff"),
        ("add", "MADE"),
        ("add", "MADE", "EXPERT", "--max-memory", "lots"),
        ("add", "MADE", "EXPERT", "--max-memory", "-1GB"),
        ("add", "MADE", "EXPERT", "--max-memory", "4"),
        ("add", "MADE", "EXPERT", "EXPERT", "--name", "one"),
        ("add", "MADE", "EXPERT", "--device", "abacus"),
        ("add", "MADE", "EXPERT", "--device", "cuda:99"),
        ("add", "MADE", "EXPERT", "--engine", "steam"),
        ("export", "MADE"),
        ("export", "MADE", "OUT", "--dtype", "int4"),
        ("export", "MADE", "OUT", "--max-shard-size", "big"),
        ("merge", "EXPERT", "-o", "OUT"),
        ("merge", "--base", "BASE", "-o", "OUT"),
        ("merge", "--base", "BASE", "EXPERT", "-o", "OUT", "--dtype", "float8"),
        ("init", "s3://key@bucket/store", "--base", "BASE"),
        ("init", "STORE", "--base", "gs://key@bucket/base"),
        ("add", "MADE", "s3://bucket/expert?token=x"),
        ("add", "az://bucket/store?sig=x", "EXPERT"),
        ("watch", "MADE", "s3://key@bucket/incoming"),
        ("export", "MADE", "s3://key:secret@bucket/out"),
        ("pull", "hf://org/name", "s3://bucket/store"),
        ("merge", "--base", "BASE", "EXPERT", "-o", "gs://bucket/out?token=x"),
        ("report", "MADE", "-o", "S3://bucket/report.html"),
        ("status", "abfss://bucket/store"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    arguments: Any, store: Path, tmp_path: Path, toys: Toys, mergestream: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"STORE": tmp_path / "new", "BASE": toys.base, "MADE": store, "EXPERT": toys.experts[2]}
    places["OUT"] = tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = mergestream(*(places.get(argument, argument) for argument in arguments))
    assert_one_sentence(result, 2)
    assert sorted(tmp_path.iterdir()) == before, "no file is created"
    assert "object storage" in result.err or not any("://" in argument for argument in arguments)


def test_a_tiny_memory_budget_is_refused(store: Path, toys: Toys, mergestream: RunCommand) -> None:
    for budget in ("0B", "1kB"):
        result = mergestream("add", store, toys.experts[2], "--max-memory", budget)
        assert_one_sentence(result, 1)
        assert "--max-memory" in result.err


def test_a_busy_store_is_exit_code_3(store: Path, toys: Toys, mergestream: RunCommand) -> None:
    with open_storage(store).writing("manifest.json"):
        for command in (("undo", store), ("add", store, toys.experts[2])):
            assert_one_sentence(mergestream(*command), 3)


def test_outputs_are_not_overwritten_by_accident(
    store: Path, done: Callable[..., str], mergestream: RunCommand, tmp_path: Path, toys: Toys
) -> None:
    done("export", store, tmp_path / "merged")
    assert_one_sentence(mergestream("export", store, tmp_path / "merged"), 1)
    (tmp_path / "merged" / "stale.bin").touch()
    done("export", store, tmp_path / "merged", "--overwrite")
    assert not (tmp_path / "merged" / "stale.bin").exists()
    (tmp_path / "file").touch()
    assert_one_sentence(mergestream("export", store, tmp_path / "file", "--overwrite"), 1)
    assert_one_sentence(mergestream("export", store, tmp_path / "file" / "deeper"), 1)


def test_an_export_never_replaces_its_inputs(
    tmp_path: Path, toys: Toys, done: Callable[..., str], mergestream: RunCommand
) -> None:
    base, expert = shutil.copytree(toys.base, tmp_path / "models" / "base"), toys.experts[0]
    done("init", tmp_path / "store", "--base", base)
    done("add", tmp_path / "store", expert)
    (tmp_path / "link").symlink_to(base)
    before = files(tmp_path)
    for out in (base, tmp_path / "store", tmp_path / "models", tmp_path, tmp_path / "link"):
        assert_one_sentence(mergestream("export", tmp_path / "store", out, "--overwrite"), 1)
    for method in ("opcm", "average"):
        for out in (base, tmp_path / "models", expert):
            command = ("merge", "--base", base, "--method", method, expert, "-o", out, "--overwrite")
            assert_one_sentence(mergestream(*command), 1)
    assert files(tmp_path) == before


AS_NOBODY = """
import contextlib, io, json, os, sys
from mergestream.cli import main
before, commands = map(json.loads, sys.argv[1:])
for arguments in before:
    assert main(arguments) == 0  # imports everything while it may be read
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
results = []
for arguments in commands:
    with contextlib.redirect_stderr(io.StringIO()) as err:
        results.append([main(arguments), err.getvalue()])
print(json.dumps(results))
"""


def as_json(commands: list[tuple[object, ...]]) -> str:
    return json.dumps([[str(part) for part in command] for command in commands])


def test_missing_permissions_give_one_sentence(toys: Toys, done: Callable[..., str], tmp_path: Path) -> None:
    """Runs as another user, because root may read everything."""
    place = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(toys.base.parent, place, dirs_exist_ok=True)
        done("init", place / "store", "--base", place / "base")
        place.chmod(0o755)
        (place / "closed").mkdir()
        for closed in (place / "closed", place / "expert-1" / "model.safetensors"):
            closed.chmod(0)
        for closed in (place, place / "store"):
            closed.chmod(0o555)
        commands: list[tuple[object, ...]] = [
            ("add", place / "store", place / "expert-1"),
            ("add", place / "store", place / "expert-2"),
            ("undo", place / "store"),
            ("init", place / "closed" / "store", "--base", place / "base"),
            ("init", place / "other", "--base", place / "base"),
            ("status", place / "closed"),
            ("merge", "--base", place / "base", "--method", "average", place / "expert-2", "-o", place / "out"),
            ("merge", "--base", place / "base", place / "expert-2", "-o", place / "out"),
        ]
        before: list[tuple[object, ...]] = [
            ("init", tmp_path / "store", "--base", toys.base),
            ("add", tmp_path / "store", *toys.experts),
            ("undo", tmp_path / "store"),
            ("merge", "--base", toys.base, "--method", "average", *toys.experts, "-o", tmp_path / "average"),
            ("merge", "--base", toys.base, *toys.experts, "-o", tmp_path / "opcm"),
        ]
        result = python("-c", AS_NOBODY, as_json(before), as_json(commands))
        assert result.returncode == 0, result.stderr
        for command, (code, err) in zip(commands, json.loads(result.stdout.splitlines()[-1]), strict=True):
            assert code == 1, command
            assert err.startswith("error: ") and err.count("\n") == 1 and str(place) in err, err
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", place], check=True)
        shutil.rmtree(place)


def test_a_closed_pipe_or_full_disk_gives_no_traceback(store: Path) -> None:
    for redirect, expected in (("| true", ""), ("> /dev/full", "error: No space left on device\n")):
        command = f"{sys.executable} -m mergestream status {store} --json {redirect}"
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert result.stderr == expected


def test_output_works_in_an_ascii_terminal(store: Path) -> None:
    result = python("-m", "mergestream", "log", store, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0 and "expert-1" in result.stdout


def test_ctrl_c_gives_one_sentence_and_exit_code_130(
    store: Path, toys: Toys, mergestream: RunCommand, monkeypatch: pytest.MonkeyPatch, done: Callable[..., str]
) -> None:
    from mergestream.merging.step import Step

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Step, "absorb", interrupted)
        assert_one_sentence(mergestream("add", store, toys.experts[2]), 130)
    done("verify", store)
    done("add", store, toys.experts[2])


# --- single files ------------------------------------------------------------------------------------------


def test_single_files_are_bases_and_experts(tmp_path: Path, done: Callable[..., str]) -> None:
    save_file(toy_base(), tmp_path / "base.safetensors")
    torch.save({"state_dict": toy_expert(1), "epoch": 3}, tmp_path / "spam.pt")
    save_file(toy_expert(2), tmp_path / "topics.safetensors")
    done("init", tmp_path / "store", "--base", tmp_path / "base.safetensors", "--method", "average")
    done("add", tmp_path / "store", tmp_path / "spam.pt", tmp_path / "topics.safetensors")
    assert json.loads(done("status", tmp_path / "store", "--json"))["experts"] == ["spam", "topics"]
    done("export", tmp_path / "store", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    mean = (toy_expert(1)["layers.0.q.weight"] + toy_expert(2)["layers.0.q.weight"]) / 2
    torch.testing.assert_close(merged["layers.0.q.weight"], mean)
