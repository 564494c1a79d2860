"""What `make setup` installs is complete, and what it does not need to do it does not do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("set_up_script", REPOSITORY / "deploy" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pinned() -> dict[str, Version]:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def declared() -> list[Requirement]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [project["optional-dependencies"][extra] for extra in ("cpu", "embedded", "dev")]
    return [Requirement(line) for lines in [project["dependencies"], *extras] for line in lines]


def test_every_declared_dependency_is_pinned_at_a_version_that_is_allowed() -> None:
    pins = pinned()
    missing = [str(need) for need in declared() if canonicalize_name(need.name) not in pins]
    assert missing == []
    wrong = [
        f"{need} is pinned at {pins[canonicalize_name(need.name)]}"
        for need in declared()
        if pins[canonicalize_name(need.name)] not in need.specifier
    ]
    assert wrong == []


def test_torch_is_the_build_for_the_cpu_of_the_pinned_version(script: ModuleType) -> None:
    build = Version(script.TORCH.removeprefix("torch=="))
    assert build.local == "cpu"
    assert Version(build.public) == pinned()["torch"]


def test_nothing_is_pinned_that_breaks_text_models() -> None:
    assert {"torchvision", "torchaudio", "torchcodec"}.isdisjoint(pinned())


def test_set_up_does_nothing_where_nothing_changed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = tmp_path / "stamp"
    stamp.write_text(script.fingerprint(), encoding="utf-8")
    monkeypatch.setattr(script, "STAMP", stamp)
    monkeypatch.setattr(script, "models_are_there", lambda: True)
    monkeypatch.setattr(script, "logged", lambda command: pytest.fail(f"ran {command}"))
    script.set_up(force=False)


def test_failed_install_shows_the_end_of_its_output(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "LOG", tmp_path / "setup.log")
    monkeypatch.setattr(script, "PYTHON", Path(sys.executable))
    with pytest.raises(script.SetUpError, match=r"(?s)`pip install no/such/file\.whl` failed:.*no/such/file\.whl"):
        script.must_pip("install", "no/such/file.whl")


def test_wrong_python_is_one_line(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "WANTED_PYTHON", (3, 99))
    with pytest.raises(script.SetUpError, match=r"^needs Python 3\.11, but .* is 3\.11.*make PYTHON=[^\n]*$"):
        script.check_python()


def test_environment_made_elsewhere_is_not_trusted(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (environment / "bin" / "pip").write_text("#!/elsewhere/.venv/bin/python\n", encoding="utf-8")
    monkeypatch.setattr(script, "ENVIRONMENT", environment)
    monkeypatch.setattr(script, "PYTHON", environment / "bin" / "python")
    assert not script.is_usable()


def test_torch_comes_from_its_own_index_only_where_the_configured_one_lacks_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(first_works: bool) -> list[tuple[str, ...]]:
        asked: list[tuple[str, ...]] = []

        def pip(*words: str) -> bool:
            asked.append(words)
            return first_works or len(asked) > 1

        monkeypatch.setattr(script, "pip", pip)
        script.install_packages()
        return [words for words in asked if script.TORCH in words]

    [plain] = installed(first_works=True)
    assert "--index-url" not in plain
    [_, own] = installed(first_works=False)
    assert own[-2:] == ("--index-url", script.TORCH_CPU_INDEX)
