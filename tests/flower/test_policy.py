"""What a site's policy lets through, what the server hears of a refusal, and what the audit logs of both sides hold."""

import json
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from grid import MemoryGrid, run_of_flower, site  # noqa: F401
from PIL import Image

from fedcir.algorithms import make_algorithm, resolve_config
from fedcir.config import Config, ConfigRequest, DataConfig, config_from_tables, merge_tables, parse_assignment
from fedcir.errors import InputError, RunError
from fedcir.experiments import starter
from fedcir.flower.server_app import DeploymentSettings, open_deployment
from fedcir.flower.site_data import keyed_digest
from fedcir.flower.site_manifest import SiteDescription
from fedcir.flower.site_policy import Policy, PolicyError, PrivacyRules, read_policy
from fedcir.flower.wire import TaskHeader
from fedcir.types import RoundRecord
from fedcir.validation import build_dataclass

LOG = "; the site's log tells more"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site's images: ten of each of three classes, of which two are for testing."""
    root = tmp_path_factory.mktemp("pictures")
    for number, label in enumerate(("cat", "dog", "fox")):
        (root / label).mkdir()
        for image in range(10):
            pixels = np.random.default_rng(10 * number + image).integers(60 * number, 60 * number + 40, (12, 12, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(root / label / f"patient-{image}.png")
    return root


def config(*assignments: str) -> Config:
    tables: dict[str, Any] = {
        "data": {"name": "folders", "image_size": 12},
        "model": {"width": 2},
        "local": {"steps": 1, "batch_size": 4},
        "server": {"rounds": 2, "eval_every": 2},
        "algorithm": {"name": "fedavg"},
    }
    for assignment in assignments:
        tables = merge_tables(tables, parse_assignment(assignment))
    return config_from_tables(tables)


def node(pictures: Path, folder: Path, name: str, policy: str | None = None) -> Any:
    """A site of this name with a policy, its state in a folder of its own."""
    rules = {}
    if policy is not None:
        (folder / f"{name}.toml").write_text(policy, encoding="utf-8")
        rules = {"policy": str(folder / f"{name}.toml")}
    return site(domain=name, data_root=str(pictures), state=str(folder / name), device="cpu", **rules)


def ask(at: Any, settings: Config, classes: tuple[str, ...] = ()) -> Message:
    content = RecordDict({"config": ConfigRecord({"fedcir": TaskHeader(settings, {}, classes=classes).to_json()})})
    reply: Message = at(Message(content, 1, MessageType.QUERY))
    return reply


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text(encoding="utf-8").splitlines()]


def across(nodes: dict[int, Any], settings: Config, out: Path) -> list[RoundRecord]:
    with open_deployment(MemoryGrid(nodes), DeploymentSettings(settings, out, False, len(nodes), 0.0, 60.0)) as (
        session,
        rounds,
    ):
        for _ in rounds:
            pass
    return session.records


REFUSALS = {
    'algorithms = ["fedprox"]': "does not allow algorithm.name=fedavg",
    'models = ["resnet18"]': "does not allow model.name=cnn",
    "max_rounds = 1": "does not allow server.rounds=2",
    "max_steps = 2": "does not allow local.steps=3",
    "max_batch_size = 3": "does not allow local.batch_size=4",
    "max_image_size = 11": "does not allow data.image_size=12",
    'classes = ["cat", "fox"]': "does not allow the class dog",
    "allow = false": "takes part in no run",
    'veto = "/"': "takes part in no run",
    "min_per_class = 3": "asks for more images of each class than the site has",
    'never_send = ["model"]': "never sends model/",
    "min_steps = 4": "does not allow local.steps=3",
    "min_batch_size = 5": "does not allow local.batch_size=4",
    "[privacy]": "asks for privacy.clip and privacy.noise",
}
PRIVATE = ("privacy.clip=0.5", "privacy.noise=1", "model.norm=group")
PRIVACY_REFUSALS = {
    "min_noise = 1.5": ("privacy.place=client", "does not allow privacy.noise=1"),
    "max_clip = 0.4": ("privacy.place=client", "does not allow privacy.clip=0.5"),
    'place = "client"': ("privacy.place=server", "does not allow privacy.place=server"),
    "max_epsilon = 3": ("privacy.place=server", "does not allow privacy.place=server"),
    'unit = "client"': ("privacy.unit=example", "does not allow privacy.unit=example"),
}


@pytest.mark.parametrize("rule", ["max_steps = 100", "min_steps = 2"])
def test_a_policy_that_limits_steps_refuses_epochs(rule: str) -> None:
    with pytest.raises(PolicyError) as refused:
        read_policy_text(rule).check_header(TaskHeader(config("local.epochs=2"), {}))
    assert refused.value.public == "its policy does not allow local.epochs=2"
    read_policy_text("max_rounds = 300").check_header(TaskHeader(config("local.epochs=2"), {}))


@pytest.mark.parametrize(("rule", "case"), PRIVACY_REFUSALS.items())
def test_a_policy_requires_clipping_and_noise_and_says_who_adds_it(rule: str, case: tuple[str, str]) -> None:
    setting, message = case
    rules = read_policy_text(f"[privacy]\n{rule}")
    with pytest.raises(PolicyError) as refused:
        rules.check_header(TaskHeader(config(*PRIVATE, setting), {}))
    assert refused.value.public == f"its policy {message}"


@pytest.mark.parametrize(
    ("rules", "setting"),
    [
        ('min_noise = 1.0\nmax_clip = 0.5\nunit = "client"\nmax_epsilon = 9', "privacy.place=client"),
        ("min_noise = 1.0\nmax_epsilon = 9", "privacy.unit=example"),
        ('place = "server"', "privacy.place=server"),
    ],
)
def test_a_run_that_protects_as_much_as_a_policy_asks_for_is_allowed(rules: str, setting: str) -> None:
    read_policy_text(f"[privacy]\n{rules}").check_header(TaskHeader(config(*PRIVATE, setting), {}))


def read_policy_text(text: str) -> Policy:
    return build_dataclass(Policy, tomllib.loads(text), "policy")


def test_a_policy_cannot_count_the_noise_of_a_server() -> None:
    with pytest.raises(InputError, match="max_epsilon counts noise that the site adds"):
        PrivacyRules(place="server", max_epsilon=1.0)


def test_a_run_may_not_leave_fewer_images_to_train_on_than_a_step_must_have(pictures: Path, tmp_path: Path) -> None:
    at = node(pictures, tmp_path, "clinic", "min_batch_size = 4")
    reason = ask(at, config("data.train_per_domain=3")).error.reason
    assert reason == f"site 'clinic': its policy asks for more images to train on than the run leaves{LOG}"


SHIPPED = Path(__file__).parents[2] / "deploy" / "policy.toml"


@pytest.mark.parametrize("side", [16, 40, 64, 128, 500])
@pytest.mark.parametrize("count", [30, 60, 2_000, 20_000])
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("shift", [0.2, 1.5])
def test_the_shipped_policy_allows_what_init_picks(
    side: int, count: int, gpu: bool, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = starter.DatasetProfile({"day": count, "night": 2 * count}, 5, side, shift, 0.0, gpu=gpu)
    for package in ("json", "no_such_package"):  # with and without the pretrained encoder
        monkeypatch.setattr(starter, "PRETRAINED_PACKAGE", package)
        made = [f"{choice.setting}={json.dumps(choice.value)}" for choice in starter.choose_settings(look)]
        picked = resolve_config(ConfigRequest(assignments=["data.name=folders", *made]))
        method = make_algorithm(picked.algorithm)
        policy = read_policy(str(SHIPPED))
        policy.check_header(TaskHeader(picked, {}))
        policy.check_names(f"{group}/" for group in (*method.trains, *method.sends))


def test_deploy_check_tells_whether_a_policy_allows_the_settings_of_a_run(
    fedcir: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text('[data]\nname = "folders"\n[server]\nrounds = 250\n', encoding="utf-8")
    (tmp_path / "policy.toml").write_text(SHIPPED.read_text(encoding="utf-8"), encoding="utf-8")
    output = fedcir("deploy", "check", tmp_path / "run.toml", "--policy", tmp_path / "policy.toml")
    assert output.code == 0
    assert f"it allows the settings of {tmp_path / 'run.toml'}" in output.out
    (tmp_path / "policy.toml").write_text("max_rounds = 200\n", encoding="utf-8")
    output = fedcir("deploy", "check", tmp_path / "run.toml", "--policy", tmp_path / "policy.toml")
    assert output.code == 2
    assert "does not allow server.rounds=250: it allows at most 200" in output.out


@pytest.mark.parametrize(("rule", "message"), REFUSALS.items())
def test_what_the_policy_does_not_allow_is_refused_and_the_server_hears_one_line_of_it(
    pictures: Path, tmp_path: Path, rule: str, message: str
) -> None:
    reply = ask(node(pictures, tmp_path, "clinic", rule), config("local.steps=3"), ("cat", "dog"))
    assert reply.error.reason == f"site 'clinic': its policy {message}{LOG}"
    (noted,) = lines(tmp_path / "clinic")
    assert (noted["event"], noted["site"], noted["reason"]) == ("refused", "clinic", f"its policy {message}")


ALLOWED = """
algorithms = ["fedavg"]
models = ["cnn"]
classes = ["cat", "dog", "fox"]
max_rounds = 2
max_steps = 1
max_batch_size = 4
max_image_size = 12
min_per_class = 2
never_send = ["prototypes/"]
"""


def test_what_the_policy_allows_is_done(pictures: Path, tmp_path: Path) -> None:
    nodes = {number: node(pictures, tmp_path, name, ALLOWED) for number, name in enumerate(("a", "b"), 1)}
    records = across(nodes, config(), tmp_path / "run")
    assert [record.dropped for record in records] == [{}, {}]


def test_before_anything_is_opened_the_order_is_checked(tmp_path: Path) -> None:
    reply = ask(node(tmp_path / "nowhere", tmp_path, "clinic", "max_steps = 1"), config("local.steps=2"))
    assert reply.error.reason == f"site 'clinic': its policy does not allow local.steps=2{LOG}"


def test_a_site_names_only_the_classes_that_its_policy_allows(pictures: Path, tmp_path: Path) -> None:
    reply = ask(node(pictures, tmp_path, "clinic", 'classes = ["cat", "dog", "owl"]'), config())
    message = SiteDescription.from_message(reply)
    assert message.classes == ("cat", "dog")
    assert (message.train, message.test) == (16, 4)


@pytest.mark.parametrize("text", ["max_stepz = 1", "max_steps = 0", "max_steps = true", "a = [", None])
def test_a_policy_that_cannot_be_read_lets_nothing_through(pictures: Path, tmp_path: Path, text: str | None) -> None:
    at = node(pictures, tmp_path, "clinic", text or "")
    if text is None:
        (tmp_path / "clinic.toml").unlink()
    assert ask(at, config()).error.reason == f"site 'clinic': its policy cannot be read{LOG}"


def test_a_server_that_orders_more_rounds_than_it_said_is_refused() -> None:
    policy = Policy(max_rounds=5)
    policy.check_header(TaskHeader(config("server.rounds=5"), {}, round=5))
    with pytest.raises(InputError, match=r"does not allow server.rounds=6: it allows at most 5"):
        policy.check_header(TaskHeader(config("server.rounds=5"), {}, round=6))


def test_the_default_image_size_counts_too() -> None:
    tables = config_from_tables({"data": {"name": "folders"}})
    with pytest.raises(InputError, match=r"does not allow data.image_size=128"):
        Policy(max_image_size=64).check_header(TaskHeader(tables, {}))


def test_a_veto_ends_a_sites_part_in_a_run_that_goes_on_and_both_logs_say_so(
    pictures: Path, tmp_path: Path, state: Path
) -> None:
    veto = tmp_path / "stop"
    grid = MemoryGrid({1: node(pictures, tmp_path, "a"), 2: node(pictures, tmp_path, "b", f'veto = "{veto}"')})
    with open_deployment(grid, DeploymentSettings(config(), tmp_path / "run", False, 2, 0.0, 60.0)) as (
        session,
        rounds,
    ):
        next(rounds)
        veto.touch()
        next(rounds)
    assert [record.dropped for record in session.records] == [{}, {"1": f"its policy takes part in no run{LOG}"}]
    assert [line["event"] for line in lines(tmp_path / "b")] == ["introduced", "trained", "refused", "refused"]
    messages = [line for line in lines(state) if line["event"] == "dropped"]
    assert [(line["round"], line["site"], line["reason"]) for line in messages] == [
        (2, "b", f"its policy takes part in no run{LOG}")
    ]


def test_tensors_that_never_leave_are_held_back_with_the_whole_reply(pictures: Path, tmp_path: Path) -> None:
    nodes = {1: node(pictures, tmp_path, "a"), 2: node(pictures, tmp_path, "b", 'never_send = ["model/head."]')}
    records = across(nodes, config(), tmp_path / "run")
    assert [record.dropped for record in records] == [{"1": f"its policy never sends model/head.weight{LOG}"}] * 2
    assert [line["event"] for line in lines(tmp_path / "b")] == ["introduced", "refused", "refused", "tested"]


def test_a_message_that_asks_to_test_and_to_train_is_judged_and_noted_as_two(pictures: Path, tmp_path: Path) -> None:
    nodes = {1: node(pictures, tmp_path, "a"), 2: node(pictures, tmp_path, "b", 'never_send = ["model/head."]')}
    records = across(nodes, config("server.eval_every=1"), tmp_path / "run")
    assert [record.dropped for record in records] == [{"1": f"its policy never sends model/head.weight{LOG}"}] * 2
    assert [len(record.accuracy or ()) for record in records] == [2, 2]
    noted = {name: [(line["event"], line.get("round")) for line in lines(tmp_path / name)[1:]] for name in "ab"}
    assert noted["a"] == [("trained", 1), ("tested", 1), ("trained", 2), ("tested", 2)]
    assert noted["b"] == [("refused", "1"), ("tested", 1), ("refused", "2"), ("tested", 2)]


def test_the_logs_hold_what_was_sent_by_group_and_bytes_and_no_name_of_an_image(
    pictures: Path, tmp_path: Path, state: Path
) -> None:
    nodes = {number: node(pictures, tmp_path, name) for number, name in enumerate(("a", "b"), 1)}
    records = across(nodes, config("algorithm.name=fedproto"), tmp_path / "run")
    noted = lines(tmp_path / "a")
    assert [line["event"] for line in noted] == ["introduced", "trained", "trained", "tested"]
    assert [line.get("bytes") for line in noted[1:]] == [{"prototypes": records[0].bytes_up // 2}] * 2 + [{}]
    assert [line["round"] for line in noted[1:]] == [1, 2, 2]
    assert len({line["run"] for line in (*noted, *lines(state))}) == 1
    assert [line["event"] for line in lines(state)] == ["began", "joined", "joined", "round", "round", "ended"]
    for folder in (tmp_path / "a", state):
        assert stat.S_IMODE((folder / "audit.jsonl").stat().st_mode) == 0o600
        assert "patient" not in (folder / "audit.jsonl").read_text(encoding="utf-8")


def test_the_servers_log_holds_nodes_that_are_refused_and_runs_that_stop(
    pictures: Path, tmp_path: Path, state: Path
) -> None:
    with pytest.raises(RunError):
        across({7: node(pictures, tmp_path, "a", "allow = false")}, config(), tmp_path / "run")
    began, refused, stopped = lines(state)
    assert (began["event"], refused["event"], stopped["event"]) == ("began", "refused", "stopped")
    assert (refused["node"], refused["reason"]) == ("7", f"site 'a': its policy takes part in no run{LOG}")
    assert stopped["reason"].startswith("0 of 1 sites are connected")


def test_a_log_that_cannot_be_written_lets_nothing_leave(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "clinic" / "audit.jsonl").mkdir(parents=True)
    reason = ask(node(pictures, tmp_path, "clinic"), config()).error.reason
    assert reason == f"site 'clinic': it cannot write to its state folder{LOG}"


def test_the_digest_of_a_sites_data_is_the_same_again_but_not_at_a_site_with_another_secret(
    pictures: Path, tmp_path: Path
) -> None:
    def content(name: str) -> str:
        return SiteDescription.from_message(ask(node(pictures, tmp_path, name), config())).content

    first = content("a")
    assert content("a") == first
    assert content("b") != first
    assert stat.S_IMODE((tmp_path / "a" / "secret").stat().st_mode) == 0o600
    assert len((tmp_path / "a" / "secret").read_bytes()) == 32
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["audit.jsonl", "secret"]


def test_other_data_have_another_digest(tmp_path: Path) -> None:
    assert keyed_digest(tmp_path, "x") == keyed_digest(tmp_path, "x") != keyed_digest(tmp_path, "y")


def test_a_policy_tells_its_rules_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('max_steps = 50\nmodels = ["cnn"]\n', encoding="utf-8")
    policy = read_policy(str(tmp_path / "policy.toml"))
    assert str(policy) == 'allow = true, models = ["cnn"], max_steps = 50'
    private = Policy(privacy=PrivacyRules(min_noise=1.0, max_epsilon=8.0))
    message = 'privacy.place = "client", privacy.min_noise = 1.0, privacy.max_epsilon = 8.0'
    assert str(private) == f"allow = true, {message}"


def test_a_limit_of_image_sizes_does_not_concern_tables() -> None:
    policy = Policy(max_image_size=64)
    policy.check_header(TaskHeader(Config(DataConfig("csv", target="ill")), {}))
    with pytest.raises(PolicyError, match=r"data\.image_size=128"):
        policy.check_header(TaskHeader(Config(DataConfig("folders")), {}))
