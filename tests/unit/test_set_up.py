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


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_script", REPOSITORY / "deploy" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script() -> ModuleType:
    return loaded("setup")


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, on a machine with an empty PATH, where no command is really run."""
    module = loaded("browser")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(module.VARIABLE, raising=False)
    monkeypatch.setattr(module, "run", lambda command: pytest.fail(f"ran {command}"))
    return module


def program(folder: Path, name: str) -> str:
    file = folder / name
    file.write_text("#!/bin/sh\n", encoding="utf-8")
    file.chmod(0o755)
    return str(file)


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


def test_the_browser_of_the_tests_is_the_one_that_is_named_or_the_first_on_the_path(
    browser: ModuleType, tmp_path: Path
) -> None:
    assert browser.find({}) is None
    chrome = program(tmp_path, "google-chrome")
    assert browser.find({}) == chrome
    chromium = program(tmp_path, "chromium")
    assert browser.find({}) == chromium
    assert browser.find({"CHROMIUM": chrome}) == chrome
    assert browser.main() == 0


def test_a_name_of_no_browser_is_one_line(
    browser: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHROMIUM", "/no/such/browser")
    assert browser.main() == 1
    assert capsys.readouterr().err == "browser: CHROMIUM names /no/such/browser, which is no program\n"


def test_root_on_debian_gets_a_browser(browser: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...]) -> None:
        ran.append(command)
        if "install" in command:
            program(tmp_path, "chromium")

    program(tmp_path, "apt-get")
    monkeypatch.setattr(browser, "run", run)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert browser.main() == 0
    assert ran == [("apt-get", "update"), ("apt-get", "install", "-y", "chromium")]
    assert browser.main() == 0
    assert len(ran) == 2, "it is there"


def test_where_no_browser_can_be_installed_one_line_says_what_to_do(
    browser: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path, "apt-get")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert browser.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("browser: no Chromium here: install it (Debian, as root: apt-get install chromium)")


def test_an_install_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded("browser")
    with pytest.raises(module.BrowserError, match=r"`ls /no/such/folder` failed: .*No such file"):
        module.run(("ls", "/no/such/folder"))
