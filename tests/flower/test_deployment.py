"""Real SuperLinks and SuperNodes on loopback, with TLS and authentication; and Flower's simulation engine."""

import importlib
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from federations import APP, RestartableFederation, Simulation, kill_tree, log_of, ssh_fingerprint
from PIL import Image
from proxy import proxy, status
from safetensors.torch import load_file

import fedcir
from fedcir.config import config_from_tables, merge_tables, parse_assignment
from fedcir.flower.certificates import make_certificates, make_node_key
from fedcir.flower.local_federation import CONNECTION, LocalFederation
from fedcir.flower.site_check import SiteSetup, check_site
from fedcir.runtime.run_folder import IMAGE_HASHES, RunFolder
from fedcir.runtime.simulation import open_run

pytestmark = pytest.mark.slow  # SuperLinks, SuperNodes and Ray take a minute of CPU time to start

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_app"
METHODS = ["fedcir", "fedsr"]
OTHERS = ["fedavg", "fedgen", "fedprox", "fedproc", "fedreg", "fedalign"]
ROUNDS = "server.rounds=2 server.eval_every=2"


@pytest.fixture(scope="module")
def federation(two_domains: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    folder = tmp_path_factory.mktemp("flower")
    nodes = [
        {"partition-id": number, "data-root": str(two_domains), "state": str(folder / f"state-{number}")}
        for number in range(2)
    ]
    with LocalFederation(folder, nodes) as running:
        yield running


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    folder = tmp_path_factory.mktemp("simulation")
    with Simulation(folder, []) as running:
        yield running


@pytest.fixture(scope="module")
def two_domains(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of the three domains: as many as there are nodes."""
    root = tmp_path_factory.mktemp("two")
    for domain in ("east", "west"):
        (root / f"{domain}.npz").symlink_to(shared_data / f"{domain}.npz")
    return root


@pytest.fixture(scope="module")
def two_sites(shared_data: Path, two_domains: Path, settings: str) -> str:
    """The settings of a run on the two domains."""
    return settings.replace(str(shared_data), str(two_domains)) + " " + ROUNDS


def in_process(settings: str, method: str, out: Path) -> RunFolder:
    """The same run in this process."""
    tables: dict[str, Any] = {"algorithm": {"name": method}}
    for assignment in settings.split():
        tables = merge_tables(tables, parse_assignment(assignment))
    with open_run(config_from_tables(tables), out) as (_, rounds):
        for _ in rounds:
            pass
    return RunFolder(out)


def told(folder: RunFolder) -> list[dict[str, Any]]:
    """Every round's line, without the seconds."""
    lines = (folder.path / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


def assert_same_run(one: RunFolder, other: RunFolder) -> None:
    assert one.finished
    assert told(one) == told(other)
    assert (one.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()
    costs = [folder.summary()["cost"] for folder in (one, other)]
    assert all(costs[0][name] == costs[1][name] for name in ("bytes_down", "bytes_up", "flops"))


def until(done: Callable[[], bool], log: Callable[[], str], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, log()
        time.sleep(0.2)


def test_on_flower_a_run_is_bit_for_bit_what_it_is_in_process_though_its_server_was_killed(
    federation: LocalFederation, two_sites: str, tmp_path: Path
) -> None:
    settings = {"set": two_sites, "out": str(tmp_path / "flower"), "algorithms": " ".join(METHODS)}
    first = federation.submit("methods", settings, APP)
    second = RunFolder(tmp_path / "flower" / METHODS[1])
    until(lambda: first.poll() is not None or len(second.records()) >= 1, lambda: log_of(federation, "methods"))
    assert federation.superlink is not None
    family = psutil.Process(federation.superlink.pid).children(recursive=True)
    servers = [process for process in family if any("flwr-serverapp" in word for word in _words(process))]
    assert servers, log_of(federation, "methods")
    for server in servers:
        server.send_signal(signal.SIGKILL)
    kill_tree(first)
    rest = " ".join(METHODS[1:])
    assert federation.submit("rest", {**settings, "algorithms": rest, "resume": True}, APP).wait() == 0
    for method in METHODS:
        assert (tmp_path / "flower" / method / "summary.json").is_file(), log_of(federation, "rest")
        assert_same_run(RunFolder(tmp_path / "flower" / method), in_process(two_sites, method, tmp_path / method))


def test_in_flowers_simulation_too(simulation: LocalFederation, two_sites: str, tmp_path: Path) -> None:
    settings = {"set": two_sites, "out": str(tmp_path / "flower"), "algorithms": " ".join(METHODS)}
    simulation.submit("methods", settings, APP).wait()
    for method in METHODS:
        assert (tmp_path / "flower" / method / "summary.json").is_file(), log_of(simulation, "methods")
        assert_same_run(RunFolder(tmp_path / "flower" / method), in_process(two_sites, method, tmp_path / method))


def test_the_command_of_the_examples_readme_learns_and_is_bit_for_bit_what_train_gives(
    simulation: LocalFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "flower_app")
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    (command,) = [line.removeprefix("$ ") for line in readme.splitlines() if line.startswith("$ flwr run")]
    done = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path / "flower_app",
        env=simulation.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (tmp_path / "flower_app" / "model.safetensors").is_file(), done.stdout + done.stderr
    arrays = load_file(tmp_path / "flower_app" / "model.safetensors")
    monkeypatch.syspath_prepend(EXAMPLE)
    app = importlib.import_module("app")
    torch.manual_seed(0)
    sites = [(app.data(site, 64), app.data(site, 40)) for site in range(2)]
    result = fedcir.train(sites, algorithm="fedcir", encoder=app.encoder(), num_classes=2, rounds=3, lr=0.05, workers=1)
    state = result.model.state_dict()
    assert arrays.keys() == {f"model/{name}" for name in state}
    assert all(torch.equal(arrays[f"model/{name}"], tensor) for name, tensor in state.items())
    assert "'accuracy': 1.0" in done.stdout + done.stderr


def test_all_other_methods_too(
    federation: LocalFederation, simulation: LocalFederation, two_sites: str, tmp_path: Path
) -> None:
    for name, flower in (("deployed", federation), ("simulated", simulation)):
        settings = {"set": two_sites, "out": str(tmp_path / name), "algorithms": " ".join(OTHERS)}
        flower.submit("others", settings, APP).wait()
        for method in OTHERS:
            assert (tmp_path / name / method / "summary.json").is_file(), log_of(flower, "others")
            other = in_process(two_sites, method, tmp_path / f"{name}-{method}")
            assert_same_run(RunFolder(tmp_path / name / method), other)


def test_a_superlink_that_was_killed_starts_again_on_its_database_and_the_run_goes_on(
    two_domains: Path, two_sites: str, tmp_path: Path
) -> None:
    nodes = [
        {"partition-id": number, "data-root": str(two_domains), "state": str(tmp_path / f"state-{number}")}
        for number in range(2)
    ]
    settings = {"set": two_sites, "out": str(tmp_path / "flower"), "algorithms": "fedsr", "resume": True}
    with RestartableFederation(tmp_path / "federation", nodes) as federation:
        first = federation.submit("first", settings, APP)
        folder = RunFolder(tmp_path / "flower" / "fedsr")
        until(lambda: len(folder.records()) >= 1, lambda: log_of(federation, "first"))
        assert federation.superlink is not None
        kill_tree(federation.superlink)
        kill_tree(first)
        federation.start_superlink()
        federation.submit("second", settings, APP).wait()
        assert folder.finished, log_of(federation, "second")
    assert_same_run(folder, in_process(two_sites, "fedsr", tmp_path / "fedsr"))


def test_a_node_of_another_ca_or_with_an_unknown_key_or_without_tls_is_refused(
    federation: LocalFederation, tmp_path: Path
) -> None:
    make_certificates(["127.0.0.1"], tmp_path / "other")
    make_node_key(tmp_path / "unknown.key")
    known = len(federation.nodes)
    federation.nodes += [{"partition-id": 0}] * 3
    give_up = ("--max-retries", 1)
    stranger = ["--auth-supernode-private-key", tmp_path / "unknown.key"]
    federation.start_supernode(known, "--root-certificates", tmp_path / "other" / "ca.crt", *stranger, *give_up)
    federation.start_supernode(known + 1, *stranger, *give_up)
    federation.start_supernode(known + 2, "--insecure", *give_up)
    try:
        for number in range(known, known + 3):
            log = partial(log_of, federation, f"supernode-{number}")
            until(lambda log=log: _refused(log()), log)  # type: ignore[misc]
            assert "SuperNode ID" not in log()  # what one that is let in says
        assert "SuperNode ID" in log_of(federation, "supernode-0")
    finally:
        for number in range(known, known + 3):
            kill_tree(federation.supernodes.pop(number))
        del federation.nodes[known:]


# It waits 20 s; test_sites.py does the same on a clock of its own, without Flower's log and status.
def test_a_run_whose_sites_cannot_open_their_data_says_so_at_once_and_ends_with_one_line_and_as_failed(
    federation: LocalFederation, two_domains: Path, two_sites: str, tmp_path: Path
) -> None:
    settings = {"set": two_sites, "out": str(tmp_path / "out"), "wait": 20.0}
    away = two_domains.rename(two_domains.with_name("away"))
    try:
        federation.submit("refused", settings).wait()
    finally:
        away.rename(two_domains)
    log = log_of(federation, "refused")
    messages = [line for line in log.splitlines() if "its data-root is not a folder; the site's log tells more" in line]
    assert [line.count("cannot take part: site") for line in messages] == [1, 1, 0]
    message, _, after = log.partition("fedcir stopped: 0 of 2 sites are connected after 20 s (none); ")
    assert "Traceback" not in message + after
    assert after.splitlines()[0].endswith("Start or fix the others, or lower `sites`")
    assert not "".join(after.splitlines()[1:]).strip()
    runs = json.loads(federation.flwr("list", "--format", "json", CONNECTION).stdout)["runs"]
    assert runs[0]["status"] == "finished:failed"
    assert not (tmp_path / "out").exists()


def test_a_check_at_a_site_tells_whether_the_superlink_knows_its_key_and_no_node_appears(
    federation: LocalFederation, tmp_path: Path
) -> None:
    certs, known = federation.folder / "certs", federation.folder / "nodes" / "0.key"
    make_node_key(tmp_path / "unknown.key")
    setup = SiteSetup(root_certificates=certs / "ca.crt", superlink=federation.address, key=known)
    assert {result.name: result.ok for result in check_site(setup)} == {
        **{"data": None, "policy": None, "certificates": True, "connection": True},
        **{"TLS": True, "key": True, "registration": True},
    }
    before = federation.flwr("supernode", "list", "--format", "json", CONNECTION).stdout
    *_, last = check_site(replace(setup, key=tmp_path / "unknown.key"))
    assert (last.name, last.ok) == ("registration", False)
    assert "register its .pub file with `flwr supernode register`" in last.message
    after = federation.flwr("supernode", "list", "--format", "json", CONNECTION).stdout
    nodes = [{node["node-id"] for node in json.loads(listed)["nodes"]} for listed in (before, after)]
    assert nodes[0] == nodes[1]
    assert len(nodes[0]) == 2


def test_through_the_proxy_a_site_reaches_its_part_of_the_superlink_and_nobody_the_control_api(
    federation: LocalFederation, tmp_path: Path
) -> None:
    ca, key = federation.folder / "certs" / "ca.crt", federation.folder / "nodes" / "0.key"
    hidden = ["/v1/control/list-runs", "/v1/control/start-run", "/v1/runtime/", "/docs", "/"]
    hidden += ["/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "//v1/control/list-runs"]
    hidden += ["/v1/fleet/..%2fcontrol/list-runs", "/v1/fleet/./../control/list-runs", "/v1/./control/list-runs"]
    with proxy(federation, tmp_path) as port:
        setup = SiteSetup(root_certificates=ca, superlink=f"127.0.0.1:{port}", key=key)
        actual = {result.name: result.message for result in check_site(setup) if result.ok}
        assert actual.get("registration") == "the SuperLink knows the key", (tmp_path / "error.log").read_text()
        assert {path: status(federation, port, path) for path in hidden} == dict.fromkeys(hidden, 404)
    assert status(federation, federation.port, "/v1/control/list-runs") not in (401, 403, 404)  # it asks for no key


# test_checked_replies.py does the same with nodes in memory.
def test_the_round_goes_on_without_a_site_that_dies_or_sends_what_it_should_not(tmp_path: Path) -> None:
    roots = {name: _pictures(tmp_path / "data" / name, number) for number, name in enumerate(("bonn", "kyiv", "oslo"))}
    (roots["oslo"] / "lying").rename(roots["oslo"] / "laying")  # a class that no other site has
    nodes = [{"domain": name, "data-root": str(root), "state": str(tmp_path / name)} for name, root in roots.items()]
    nodes[1]["faults"] = "1:nan 3:rename"
    settings = {
        "set": "data.name=folders data.image_size=8 model.width=4 local.steps=2 server.rounds=6 server.eval_every=6",
        "out": str(tmp_path / "out"),
        "algorithms": "fedcir",
        "sites": 3,
        "report": True,
        "timeout": 65.0,  # longer than Flower takes a dead node for a living one, which it does not let come back
    }
    with LocalFederation(tmp_path / "flower", nodes) as federation:
        run = federation.submit("faults", settings, APP)
        folder = RunFolder(tmp_path / "out" / "fedcir")
        until(lambda: len(folder.records()) >= 1, lambda: log_of(federation, "faults"))
        kill_tree(federation.supernodes[2])
        while run.poll() is None:  # as systemd would: for a minute Flower takes it for one that is there already
            if federation.supernodes[2].poll() is not None and len(folder.records()) >= 2:
                federation.start_supernode(2)
            time.sleep(4)  # as long as a start takes from the others
        text = log_of(federation, "faults")
        port = federation.port
    assert folder.finished, text
    dropped = [record.dropped for record in folder.records()]
    assert list(dropped[0]) == ["1"]
    assert "is not finite" in dropped[0]["1"]
    assert dropped[1] == {"2": "no reply in time"}
    assert dropped[2]["1"] == "model/encoder.backbone.convs.0.weight is missing"
    assert dropped[-1] == {}  # it has come back
    assert list(folder.summary()["final"]["accuracy"]) == ["bonn", "kyiv", "oslo"]
    assert "site 'oslo' has no image of 'lying'" in text
    assert "only site 'oslo' has 'laying': check that all sites spell it the same way" in text
    manifest = (folder.path / "manifest.json").read_text(encoding="utf-8")
    assert ".png" not in manifest  # no name of a file has left a site
    assert not (folder.path / IMAGE_HASHES).exists()  # and no hash of one
    keys = [ssh_fingerprint(tmp_path / "flower" / "nodes" / f"{number}.key.pub") for number in range(3)]
    assert [client["node_key"] for client in json.loads(manifest)["clients"]] == keys
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    assert "Not measured: fedcir ran across sites, which keep their images" in page
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return []


def _refused(log: str) -> bool:
    return any(sign in log for sign in ("Exit Code", "ERROR", "Error", "refused", "give up", "Giving up"))


def _pictures(root: Path, number: int) -> Path:
    """A site's own <class>/<image>."""
    rng = np.random.default_rng(number)
    for name in ("lying", "standing"):
        (root / name).mkdir(parents=True)
        for image in range(20):
            pixels = rng.integers(0, 60 + 40 * number, (8, 8, 3), dtype=np.uint8)
            pixels[3:5] += 60 if name == "lying" else 0
            pixels[:, 3:5] += 60 if name == "standing" else 0
            Image.fromarray(pixels).save(root / name / f"{image}.png")
    return root
