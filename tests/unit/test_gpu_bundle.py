"""tools/gpu-bundle on wheels made here: pieces, their digests, refusals, thinning, and imports."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import random
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moerl.config import Config, load_config, resolve
from moerl.core.errors import ConfigError
from moerl.launch import bundle_check
from moerl.launch.train import _checked
from moerl.planning.dry_run import describe
from moerl.planning.estimates import model_shapes
from moerl.runtime.run_dir import RunDir
from tools import fat_binaries, gpu_bundle, gpu_bundle_hook, gpu_bundle_join, gpu_bundle_parts
from tools.gpu_bundle import Options, Packed, Unit
from tools.gpu_bundle_join import Refusal

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = Options((90,), "bf16", 0)
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
NOISE = random.Random(0).randbytes(700_000)  # which no compressor makes smaller
LARGE = bytes(9 << 20) + NOISE  # two units, and a hole


def wheel(folder: Path, name: str, files: dict[str, bytes], programs: str = "") -> Path:
    about = f"{name}-1.0.dist-info"
    files = {**files, f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\n".encode()}
    files |= {f"{about}/entry_points.txt": programs.encode()} if programs else {}
    made = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return made


class Made(NamedTuple):
    out: Path
    manifest: dict[str, Any]
    wheels: list[Path]

    @property
    def folder(self) -> Path:
        return self.out / "pieces"

    @property
    def pieces(self) -> list[Path]:
        return gpu_bundle_join.pieces_of([self.folder])


def bundle(out: Path, wheels: list[Path], **changed: Any) -> Made:
    """Of two wheels and our own files, in pieces of at most a MiB, for this Python."""
    out.mkdir(exist_ok=True)
    packed = [gpu_bundle.pack_own(out, None, OPTIONS)]
    packed += [gpu_bundle.pack(one, out, OPTIONS, 1) for one in wheels]
    groups = gpu_bundle_parts.left_out(["cuda"], transformer_engine=False)
    about = gpu_bundle.manifest(groups, packed, OPTIONS) | {"python": HERE} | changed
    gpu_bundle.write_bundle(out / "pieces", about, packed, 1)
    return Made(out, gpu_bundle_join.read_manifest(out / "pieces/bundle.json"), wheels)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("bundle")
    patch = pytest.MonkeyPatch()
    patch.setattr(gpu_bundle, "SITE", f"lib/python{HERE}/site-packages")
    files = {"alpha/__init__.py": b"def main(): print('alpha ran')\n", "alpha/x.pyx": b"source"}
    files["alpha/noise.bin"] = NOISE
    files["alpha-1.0.data/scripts/tool"] = b"#!/bin/sh\n"
    wheels = [
        wheel(folder, "alpha", files, "[console_scripts]\nalpha = alpha:main\n"),
        wheel(folder, "beta", {"sglang/__init__.py": b"", "beta/large.bin": LARGE}),
    ]
    yield bundle(folder / "out", wheels)
    patch.undo()


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(Refusal) as raised:
        action()
    return str(raised.value)


# --- pieces --------------------------------------------------------------------------------------
def test_pieces_have_at_most_their_size_and_their_digest(made: Made) -> None:
    assert len(made.pieces) > 1
    for file in made.pieces:
        assert file.stat().st_size <= 1 << 20
        sha = hashlib.sha256(file.read_bytes()).hexdigest()
        assert made.manifest["pieces"][file.name]["sha256"] == sha
        with tarfile.open(file) as archive:  # as any program that knows tar.xz
            assert archive.getnames()
    gpu_bundle_join.check(made.manifest, made.folder)


def test_a_second_call_compresses_nothing(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bundle.lzma, "compress", lambda *_, **__: pytest.fail("compressed"))
    again = [gpu_bundle.pack(one, made.out, OPTIONS, 1) for one in made.wheels]
    assert all(isinstance(one, Packed) for one in again)
    changed = Options((100,), "bf16", 0)
    with pytest.raises(pytest.fail.Exception, match="compressed"):  # control: other cards
        gpu_bundle.pack(made.wheels[0], made.out, changed, 1)


def test_an_interrupted_wheel_goes_on_at_its_unit(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.out / "packed", tmp_path / "packed")
    (about,) = tmp_path.glob("packed/beta-*/about.json")
    about.unlink()
    kept, lost = sorted(about.parent.glob("*.xz"))[:2]
    lost.unlink()
    stamp = kept.stat().st_mtime_ns
    found = gpu_bundle.pack(made.wheels[1], tmp_path, OPTIONS, 1)
    assert lost.exists()
    assert kept.stat().st_mtime_ns == stamp
    assert len(found.units) == 2


def test_units_fill_the_first_piece_with_room() -> None:
    units = [Unit(Path(), str(n), n, 0) for n in (3, 9, 5, 7)]
    pieces = gpu_bundle.share(units, 10)
    assert [[unit.packed for unit in piece] for piece in pieces] == [[9], [7, 3], [5]]
    assert "--piece-mib" in refused(lambda: gpu_bundle.share(units, 8))


def test_wheels_that_differ_in_a_file_are_refused(tmp_path: Path) -> None:
    first = wheel(tmp_path, "one", {"shared.py": b"1"})
    second = wheel(tmp_path, "two", {"shared.py": b"2"})
    dropped = gpu_bundle_parts.patterns([90])
    assert "differ in shared.py" in refused(
        lambda: gpu_bundle.check_paths([first, second], dropped)
    )
    gpu_bundle.check_paths([first, wheel(tmp_path, "two", {"shared.py": b"1"})], dropped)


def test_kernels_that_were_compiled_before_go_along(tmp_path: Path) -> None:
    (tmp_path / "kernels/jit").mkdir(parents=True)
    pack = partial(gpu_bundle.pack_own, tmp_path, tmp_path / "kernels", OPTIONS)
    assert "holds no kernels" in refused(pack)
    (tmp_path / "kernels/jit/one.so").write_bytes(b"code")
    (unit,) = pack().units
    with tarfile.open(unit.file) as archive:
        assert "cuda/kernels/jit/one.so" in archive.getnames()


# --- joined --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def joined(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From the last piece to the first, by the script that travels."""
    env = tmp_path_factory.mktemp("joined") / "env"
    for piece in reversed(made.pieces[1:]):
        join(made, "add", str(piece), "--env", str(env))
    left = join(made, "missing", "--env", str(env)).stdout.split()
    assert left == [made.pieces[0].name]
    done = join(made, "finish", str(made.folder), "--env", str(env), "--project", str(ROOT))
    assert "is whole" in done.stdout
    return env


def join(made: Made, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(made.folder / "join.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_an_empty_folder_becomes_an_environment(made: Made, joined: Path) -> None:
    site = joined / f"lib/python{HERE}/site-packages"
    assert (site / "beta/large.bin").read_bytes() == LARGE
    assert not (site / "alpha/x.pyx").exists()
    assert (joined / "bin/tool").stat().st_mode & 0o111
    assert subprocess.check_output([joined / "bin/alpha"], text=True) == "alpha ran\n"
    script = "import moerl, sys; print(moerl.__file__, sys.prefix)"
    said = subprocess.check_output([joined / "bin/python", "-c", script], text=True, cwd="/")
    assert said.split() == [str(ROOT / "moerl/__init__.py"), str(joined)]


def test_what_was_left_out_is_refused_by_name(joined: Path) -> None:
    """A question is still answered with no; control: an unknown module has Python's sentence."""
    lines = ["import importlib.util, sys", "assert importlib.util.find_spec('scipy') is None"]
    lines += ["for name in ('scipy', 'sglang.multimodal_gen', 'flash_attn.cute', 'unknown'):"]
    lines += ["    try: __import__(name)", "    except ModuleNotFoundError as e: print(e, e.name)"]
    out = subprocess.check_output([joined / "bin/python", "-c", "\n".join(lines)], text=True)
    scipy, images, flash, unknown = out.splitlines()
    option = "`tools/gpu-bundle make OUT --with numbers` brings it"
    assert scipy == (
        f"No module named 'scipy': scipy was left out of this GPU bundle; {option} scipy"
    )
    assert "sglang.multimodal_gen (generation of images) is in no GPU bundle" in images
    assert "flash-attn-4 was left out" in flash
    assert unknown == "No module named 'unknown' unknown"


def test_a_finished_environment_may_be_finished_again(made: Made, joined: Path) -> None:
    done = join(made, "finish", str(made.folder), "--env", str(joined), "--project", str(ROOT))
    assert "was there already" in done.stdout


# --- refusals, before anything is written --------------------------------------------------------
def copied(made: Made, folder: Path) -> Made:
    shutil.copytree(made.folder, folder / "pieces")
    return Made(folder, made.manifest, made.wheels)


def test_a_lost_piece_is_named(made: Made, tmp_path: Path) -> None:
    here = copied(made, tmp_path)
    lost = here.pieces[0]
    lost.unlink()
    words = ("finish", str(here.folder), "--env", str(tmp_path / "env"), "--project", str(ROOT))
    assert f"1 pieces are missing: {lost.name}" in join(here, *words, code=1).stderr
    assert lost.name in refused(lambda: gpu_bundle_join.check(here.manifest, here.folder))


def test_one_changed_byte_is_named_and_nothing_is_written(made: Made, tmp_path: Path) -> None:
    here = copied(made, tmp_path)
    data = bytearray(here.pieces[1].read_bytes())
    data[len(data) // 2] ^= 1
    here.pieces[1].write_bytes(data)
    done = join(here, "add", str(here.folder), "--env", str(tmp_path / "env"), code=1)
    assert f"{here.pieces[1]} is damaged (its digest differs)" in done.stderr
    assert not (tmp_path / "env").exists()
    here.pieces[1].write_bytes(data[:100])
    assert "100 of" in refused(lambda: gpu_bundle_join.check(here.manifest, here.folder))


def test_a_piece_of_another_bundle_is_refused(made: Made, tmp_path: Path) -> None:
    other = bundle(tmp_path / "other", [wheel(tmp_path, "gamma", {"gamma.py": b""})])
    said = refused(lambda: gpu_bundle_join.add(made.manifest, tmp_path / "env", other.pieces))
    assert "is of bundle" in said
    assert not (tmp_path / "env").exists()
    gpu_bundle_join.add(other.manifest, tmp_path / "env", other.pieces)
    said = refused(lambda: gpu_bundle_join.add(made.manifest, tmp_path / "env", made.pieces))
    assert "name another folder with --env" in said


def test_a_folder_with_something_else_is_refused(made: Made, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    said = refused(lambda: gpu_bundle_join.add(made.manifest, tmp_path, made.pieces))
    assert "is no environment of a bundle" in said
    assert [one.name for one in tmp_path.iterdir()] == ["mine.txt"]


def test_a_full_disk_is_refused(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=70 << 20)
    monkeypatch.setattr(gpu_bundle_join.shutil, "disk_usage", lambda _: usage)
    said = refused(lambda: gpu_bundle_join.add(made.manifest, tmp_path / "env", made.pieces))
    assert "0.07 GB are free" in said
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"python": "3.99"}, "the bundle is for 3.99: call join.py with python3.99"),
        ({"glibc": "9.9"}, "the bundle needs glibc 9.9"),
    ],
)
def test_another_machine_is_refused(
    made: Made, tmp_path: Path, changed: dict[str, str], sentence: str
) -> None:
    manifest = made.manifest | changed
    said = refused(lambda: gpu_bundle_join.add(manifest, tmp_path / "env", made.pieces))
    assert sentence in said
    assert not (tmp_path / "env").exists()


def test_a_damaged_manifest_is_refused(made: Made, tmp_path: Path) -> None:
    file = tmp_path / "bundle.json"
    assert "is missing" in refused(lambda: gpu_bundle_join.read_manifest(file))
    file.write_text(json.dumps(made.manifest | {"glibc": "2.0"}))
    assert "is damaged" in refused(lambda: gpu_bundle_join.read_manifest(file))
    file.write_text(json.dumps(made.manifest)[:-9])
    assert "is damaged" in refused(lambda: gpu_bundle_join.read_manifest(file))


def test_a_project_with_another_lock_is_refused(made: Made, tmp_path: Path) -> None:
    (tmp_path / "moerl").mkdir()
    (tmp_path / "moerl/__init__.py").touch()
    said = refused(lambda: gpu_bundle_join.check_project(made.manifest, tmp_path))
    assert "is not the folder of moerl's files" in said
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/gpu.lock").write_text("torch==1.0\n")
    said = refused(lambda: gpu_bundle_join.check_project(made.manifest, tmp_path))
    assert "was made for another" in said


def test_a_wheel_of_another_build_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "transformer_engine_torch-2.20.2-cp311-cp311-linux_x86_64.whl"
    file.touch()
    assert "cp312" in refused(lambda: gpu_bundle.check_wheel(file))


# --- the machine's part --------------------------------------------------------------------------
def machine(folder: Path, cudnn: str) -> list[Path]:
    """NVIDIA's packages as pip unpacks them."""
    (folder / "nvidia/cu13/lib").mkdir(parents=True)
    (folder / "nvidia/cu13/lib/libcublas.so.13").touch()
    (folder / "nvidia/cudnn").mkdir()
    (folder / "nvidia/nccl").mkdir()
    (folder / f"nvidia_cudnn_cu13-{cudnn}.dist-info").mkdir()
    (folder / "nvidia_nccl_cu13-1.0.dist-info").mkdir()
    return [folder / "nvidia"]


@pytest.mark.parametrize(("cudnn", "is_switched"), [("9.24.0.43", False), ("9.19.0.56", True)])
def test_libraries_of_the_machine_are_linked(
    cudnn: str, is_switched: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundle's own NCCL stays; torch's switch is set only where cuDNN differs."""
    site = tmp_path / "env/site"
    (site / "nvidia/nccl/lib").mkdir(parents=True)
    (site / "nvidia_nccl_cu13-2.30.7.dist-info").mkdir()
    gpu_bundle_join.link_machine(machine(tmp_path / "there", cudnn), site)
    assert (site / "nvidia/cu13/lib/libcublas.so.13").exists()
    assert not (site / "nvidia/nccl").is_symlink()
    assert not (site / "nvidia_nccl_cu13-1.0.dist-info").exists()
    groups = gpu_bundle_parts.left_out([], transformer_engine=True)
    manifest = gpu_bundle.manifest(groups, [], OPTIONS) | {"id": "", "plan": ""}
    differing = list(gpu_bundle_join.differences(manifest, site))
    assert ("nvidia-cudnn-cu13" in {name for name, _, _ in differing}) == is_switched
    gpu_bundle_join.write_about(manifest, tmp_path / "env", differing)
    about = json.loads((tmp_path / "env/gpu-bundle.json").read_text())
    name = "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK"
    assert about["environment"] == ({name: "1"} if is_switched else {})
    assert (name in capsys.readouterr().out) == is_switched


def test_a_python_without_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bundle_join.importlib.util, "find_spec", lambda _: None)
    said = refused(lambda: gpu_bundle_join.find_machine({"machine": {"nvidia-cublas": "1"}}))
    assert "`--with cuda`" in said
    assert gpu_bundle_join.find_machine({"machine": {}}) == []


def test_a_card_that_the_bundle_was_not_made_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = {"python": HERE, "architectures": [80, 90]}
    for capability, named in ((80, False), (86, False), (90, False), (100, True), (75, True)):
        monkeypatch.setattr(gpu_bundle_join, "cards", lambda c=capability: [c])
        said = "\n".join(gpu_bundle_join.lacks(manifest, tmp_path))
        assert ("the bundle was made with --arch 80 90" in said) == named


# --- settings ------------------------------------------------------------------------------------
@pytest.fixture
def about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a bundle without any option, in this environment."""
    groups = gpu_bundle_parts.left_out([], transformer_engine=False)
    facts = gpu_bundle.manifest(groups, [], OPTIONS)
    (tmp_path / "gpu-bundle.json").write_text(json.dumps(facts))
    monkeypatch.setattr(bundle_check.sys, "prefix", str(tmp_path))
    return tmp_path / "gpu-bundle.json"


def checked(*words: str) -> Config:
    local = "trainer.transformer_impl=local"
    config = resolve(load_config("quickstart", ["cluster=gpu1", local, *words]))
    bundle_check.check_bundle(config, model_shapes(config))
    return config


@pytest.mark.usefixtures("about")
def test_a_setting_that_needs_a_left_out_package_is_refused() -> None:
    checked()
    with pytest.raises(ConfigError, match=r"^task.name = 'reasoning_gym' .*--with reasoning-gym"):
        checked("task.name=reasoning_gym", "task.dataset=chain_sum")
    with pytest.raises(ConfigError, match=r"^task.name = 'hf_dataset' .*--with tables"):
        checked("task.name=hf_dataset", "task.path=/data")


@pytest.mark.usefixtures("about")
def test_transformer_engine_is_wanted_on_gpus_alone() -> None:
    for word in ("auto", "transformer_engine"):
        with pytest.raises(ConfigError, match=r"WHEEL` brings it, or set .*=local"):
            checked(f"trainer.transformer_impl={word}")
    checked("trainer.transformer_impl=local")
    config = resolve(load_config("quickstart", ["cluster=laptop"]))
    bundle_check.check_bundle(config, model_shapes(config))


@pytest.mark.usefixtures("about")
@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("engine.dtype=float32", "engine.dtype"),
        ("model.tiny.head_dim=32", "model.path"),
        ("engine.args.kv_cache_dtype=fp8_e4m3", "engine.args.kv_cache_dtype"),
    ],
)
def test_attention_that_was_zeroed_is_refused(word: str, field: str) -> None:
    """Control: another backend has kernels of its own."""
    with pytest.raises(ConfigError, match=rf"^{field} .*--attention all"):
        checked(word)
    checked(word, "engine.args.attention_backend=triton")


@pytest.mark.usefixtures("about")
def test_the_dry_run_and_a_start_refuse_before_a_process_begins(tmp_path: Path) -> None:
    words = ["cluster=gpu1", "task.name=reasoning_gym", "task.dataset=chain_sum"]
    words += ["trainer.transformer_impl=local"]
    shapes = model_shapes(resolve(load_config("quickstart", [])))
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    (tmp_path / "model.safetensors").touch()
    config = load_config("quickstart", [*words, f"model.path={tmp_path}"])
    run = RunDir(tmp_path / "run")
    for start in (
        lambda: describe(resolve(config), []),
        lambda: _checked(config, run, reset_optimizer=False),
    ):
        with pytest.raises(ConfigError, match="--with reasoning-gym"):
            start()


def test_an_environment_without_a_bundle_refuses_nothing(about: Path) -> None:
    about.unlink()
    checked("engine.dtype=float32")


# --- what is left out ----------------------------------------------------------------------------
def test_the_tables_name_distributions_of_the_lock() -> None:
    lock = gpu_bundle_parts.locked(ROOT / "requirements/gpu.lock")
    names = [name for group in gpu_bundle_parts.GROUPS for name in group.modules]
    assert len(names) == len({*names})
    assert {*names, *gpu_bundle_parts.TRANSFORMER_ENGINE.modules} <= {*lock}
    wanted = gpu_bundle.wanted([], transformer_engine=False)
    assert {"torch", "sglang", "nvidia-nccl-cu13", "pytest"} <= {*wanted}
    assert not {*wanted} & {*names, *gpu_bundle_parts.TRANSFORMER_ENGINE.modules}
    everything = gpu_bundle.wanted(["all"], transformer_engine=True)
    assert {*lock} - {*everything} == {"transformer-engine-torch"}  # the wheel that is given


def test_modules_are_those_of_the_distributions_that_are_installed_here() -> None:
    owners = importlib.metadata.packages_distributions()
    rows = [row for group in gpu_bundle_parts.GROUPS for row in group.modules.items()]
    seen = [
        (name, module)
        for name, modules in rows
        for module in modules
        if module in owners and "." not in module
    ]
    assert len(seen) > 3
    for name, module in seen:
        assert name in [re.sub(r"[-_.]+", "-", one).lower() for one in owners[module]]


def test_the_page_has_the_tables() -> None:
    """Each row of the code, and no other."""
    page = (ROOT / "docs/gpu-bundle.md").read_text(encoding="utf-8")
    shown = page.split("## What is left out")[1].split("\n## ")[0].splitlines()
    rows = [line for line in shown if line.startswith("| `")]
    assert rows == [*gpu_bundle_parts.table(), *gpu_bundle_parts.dropped_table()]


def test_files_for_other_cards_stay_where_they_are_asked_for() -> None:
    of_90, of_both = gpu_bundle_parts.patterns([90]), gpu_bundle_parts.patterns([90, 100])
    name = "sgl_kernel/sm100/common_ops.so"
    assert of_90.search(name)
    assert not of_both.search(name)
    assert not of_90.search("sgl_kernel/sm90/common_ops.so")
    assert gpu_bundle_parts.patterns([100]).search("sgl_kernel/sm90/common_ops.so")


def test_a_refusal_without_a_caller_that_imports_is_silent() -> None:
    finder = gpu_bundle_hook.Refusing({"absent_here": "left out"})
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    try:
        assert importlib.util.find_spec("absent_here") is None
        with pytest.raises(ModuleNotFoundError, match="left out"):
            importlib.import_module("absent_here")
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]


# --- fat binaries --------------------------------------------------------------------------------
def entry(kind: int, arch: int, body: bytes, flags: int = 0) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(body)).ljust(28, b"\0")
    return (header + struct.pack("<I8xQ", arch, flags)).ljust(64, b"\0") + body


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    body += bytes(-len(body) % 8)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(*containers: bytes) -> bytes:
    """A file with a section of GPU code and one of names."""
    code, names = b"".join(containers), b"\0.nv_fatbin\0.shstrtab\0"
    begin = 64
    table = begin + len(code) + len(names)
    header = b"\x7fELF\x02\x01\x01".ljust(0x28, b"\0") + struct.pack("<Q10xHHH", table, 64, 3, 2)
    sections = [(0, 0, 0, 0), (1, 1, begin, len(code)), (12, 3, begin + len(code), len(names))]
    rows = [struct.pack("<II16xQQ", *one).ljust(64, b"\0") for one in sections]
    return header + code + names + b"".join(rows)


CUBIN_80, CUBIN_90, PTX_90 = (
    entry(kind, arch, name * 8)
    for kind, arch, name in ((2, 80, b"cubin-80"), (2, 90, b"cubin-90"), (1, 90, b"ptx-90!!"))
)


def thinned(path: Path, data: bytes, *cards: int, **options: bool) -> bytes:
    path.write_bytes(data)
    fat_binaries.thin(path, cards, **options)
    return path.read_bytes()


def test_code_of_other_cards_becomes_zeros_in_place(tmp_path: Path) -> None:
    data = elf(container(CUBIN_80, CUBIN_90, PTX_90), container(CUBIN_80, PTX_90))
    found = thinned(tmp_path / "x.so", data, 90)
    assert len(found) == len(data)
    assert b"cubin-80" not in found
    assert found.count(b"cubin-90") == 8
    assert found.count(b"ptx-90!!") == 8  # of the container that has no code for the card
    gone = entry(2, 80, bytes(64))
    same = container(gone, CUBIN_90, entry(1, 90, bytes(64))), container(gone, PTX_90)
    assert found == elf(*same)
    both = thinned(tmp_path / "y.so", data, 86, 90)  # 8.6 runs code for 8.0
    assert both.count(b"cubin-80") == 16


def test_attention_in_bf16_is_told_by_the_names_of_kernels(tmp_path: Path) -> None:
    name = b".text._Z3runCollectiveMainloopLi%bENS_10bfloat16_t%b\0"
    kept = entry(2, 90, name % (b"64", b""))
    wide = entry(2, 90, name % (b"256", b""))
    eight = entry(2, 90, name % (b"64", b"float_e4m3"))
    other = entry(2, 90, b".text._Z7combine\0")
    data = elf(*(container(one) for one in (kept, wide, eight, other)))
    found = thinned(tmp_path / "x.so", data, 90, bf16_attention=True)
    assert found.count(b"_Z3run") == 1
    assert b"_Z7combine" in found
    assert thinned(tmp_path / "x.so", data, 90) == data  # control


def test_damaged_sections_are_refused_and_other_files_left(tmp_path: Path) -> None:
    cut = container(CUBIN_90)[:-8]  # of its section's end
    with pytest.raises(fat_binaries.DamagedError, match="behind its section"):
        thinned(tmp_path / "x.so", elf(cut), 90)
    broken = bytearray(container(CUBIN_90))
    struct.pack_into("<Q", broken, 16 + 8, 1 << 40)
    with pytest.raises(fat_binaries.DamagedError, match="behind its container"):
        thinned(tmp_path / "x.so", elf(bytes(broken)), 90)
    assert thinned(tmp_path / "text", b"no ELF file at all", 90) == b"no ELF file at all"
