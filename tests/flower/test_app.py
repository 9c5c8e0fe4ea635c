"""The Flower app that users are given."""

import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from fedcir import __version__
from fedcir.errors import InputError
from fedcir.flower.local_federation import write_app
from fedcir.flower.server_app import DeploymentSettings
from fedcir.flower.site_policy import Policy, PrivacyRules, read_policy
from fedcir.flower.transport import ROUND_TIMEOUT, SITES, WAIT_SECONDS

ROOT = Path(__file__).parents[2]


def test_the_app_in_the_repository_is_the_one_that_is_written(tmp_path: Path) -> None:
    write_app(tmp_path / "new")
    written = (tmp_path / "new" / "pyproject.toml").read_bytes()
    assert written == (ROOT / "deploy" / "pyproject.toml").read_bytes()


def test_an_app_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="already exists"):
        write_app(tmp_path)
    assert (tmp_path / "pyproject.toml").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("page", "name", "language"),
    [("deploy-server.md", "nginx.conf", "nginx"), ("deploy-site.md", "policy.toml", "toml")],
)
def test_the_pages_show_the_files_that_lie_in_deploy(page: str, name: str, language: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert f"```{language}\n{(ROOT / 'deploy' / name).read_text(encoding='utf-8')}```\n" in text


def test_the_docs_name_the_wheel_that_make_builds() -> None:
    """No registry has fedcir, so a site gets it as a file."""
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert set(re.findall(r"fedcir-\S*?\.whl", text)) == {f"fedcir-{__version__}-py3-none-any.whl"}
    for page in ("deploy.md", "deploy-server.md", "deploy-site.md"):
        lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
        installs = [line for line in lines if line.startswith("$ pip install 'fedcir[")]
        assert not installs, "that asks a registry for it"


def test_the_sample_policy_is_one_and_names_every_rule() -> None:
    path = ROOT / "deploy" / "policy.toml"
    read_policy(str(path)).check_names(["model/head.weight"])
    text = path.read_text(encoding="utf-8")
    rules = [rule.name for rule in (*fields(Policy), *fields(PrivacyRules)) if rule.name != "privacy"]
    assert [name for name in rules if f"\n{name} = " not in text and f"\n# {name} = " not in text] == []
    table = text.partition("# [privacy]\n")[2].splitlines()
    PrivacyRules(**tomllib.loads("\n".join(line.removeprefix("# ") for line in table)))


def test_its_settings_are_all_that_the_server_knows_and_their_defaults_are_the_servers() -> None:
    given = tomllib.loads((ROOT / "deploy" / "pyproject.toml").read_text(encoding="utf-8"))
    config = given["tool"]["flwr"]["app"]["config"]
    assert DeploymentSettings.from_run_config(config) == DeploymentSettings.from_run_config({})
    assert set(config) == {
        *("config", "preset", "set", "out", "resume", "from-round", "sites", "wait", "timeout", "new-keys", "report")
    }


def test_flower_builds_it(tmp_path: Path) -> None:
    write_app(tmp_path / "app")
    flwr = Path(sys.executable).parent / "flwr"
    done = subprocess.run(
        [flwr, "build", "--app", tmp_path / "app"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("*.fab"))


def test_the_app_names_the_patience_that_a_run_has_by_itself(tmp_path: Path) -> None:
    write_app(tmp_path / "new")
    config = tomllib.loads((tmp_path / "new" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert (config["sites"], config["wait"], config["timeout"]) == (SITES, WAIT_SECONDS, ROUND_TIMEOUT)
