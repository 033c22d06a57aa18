"""Settings: what wins, where it came from, what is refused, and that no password is ever shown."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.registry import EngineOptions, open_engine
from infra.config import urls
from infra.config.settings import Settings, describe, load_settings, mask
from infra.config.sources import user_config_dir
from messages.errors import ConfigError
from messages.installed import engine_names
from messages.urls import put_hosts

EXAMPLE = Path(__file__).parents[3] / "examples" / "kvasir.toml"
Load = Callable[..., Settings]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads from folders of the test's own: `here` is ./kvasir.toml, `user` the one in the user's folder."""
    cwd, user_dir = tmp_path / "cwd", tmp_path / "user"
    cwd.mkdir()
    user_dir.mkdir()

    def run(here: str = "", user: str = "", config: str = "", environ: dict[str, str] | None = None, **flags: Any):
        for folder, text in ((cwd, here), (user_dir, user)):
            if text:
                (folder / "kvasir.toml").write_text(text, "utf-8")
        chosen = tmp_path / "chosen.toml"
        if config:
            chosen.write_text(config, "utf-8")
        return load_settings(flags, chosen if config else None, environ or {}, cwd, user_dir)

    return run


def named(model: str) -> str:
    return f'[grading]\ncode_model = "{model}"\n'


def test_without_any_source_everything_is_local_and_default(load: Load) -> None:
    settings = load()
    assert (settings.services.broker, settings.services.store) == ("", "")
    assert settings.broker_url_with_secret() == settings.store_url_with_secret() == ""
    assert (settings.grading.temperature, settings.grading.top_p) == (0.2, 0.9)
    assert settings.origin("services.broker") == "default"


def test_each_source_beats_the_next(load: Load) -> None:
    sources = [
        ("code_model", "of-flag"),
        ("environ", {"KVASIR_CODE_MODEL": "of-variable"}),
        ("config", named("of-config")),
        ("here", named("of-here")),
        ("user", named("of-user")),
    ]
    seen = []
    for nearest in range(4):
        settings = load(**dict(sources[nearest:]))
        seen.append((settings.grading.code_model, settings.origin("grading.code_model").rsplit("/", 1)[-1]))
    assert seen == [
        ("of-flag", "--code-model"),
        ("of-variable", "KVASIR_CODE_MODEL"),
        ("of-config", "chosen.toml line 2"),
        ("of-here", "kvasir.toml line 2"),
    ]


def test_the_users_file_is_the_last_before_the_default(load: Load) -> None:
    settings = load(user=named("of-user"))
    assert settings.grading.code_model == "of-user"
    assert settings.origin("grading.code_model").endswith("user/kvasir.toml line 2")


def test_precedence_is_decided_for_each_value_by_itself(load: Load) -> None:
    settings = load(
        here='[models.m]\ncontext = 100\nweights.mlx = "a"\n',
        user='[models.m]\ncontext = 200\nslots = 2\nweights.llamacpp = "b"\n[models.other]\n',
    )
    model = settings.model("m")
    assert (model.context, model.slots, set(model.weights)) == (100, 2, {"mlx", "llamacpp"})
    assert set(settings.models) == {"m", "other"}


def test_kvasir_config_names_a_file_and_the_flag_beats_it(load: Load, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(named("of-other"))
    assert load(environ={"KVASIR_CONFIG": str(other)}).grading.code_model == "of-other"
    assert load(environ={"KVASIR_CONFIG": str(other)}, config=named("chosen")).grading.code_model == "chosen"


def test_an_empty_variable_and_a_none_flag_count_as_not_given(load: Load) -> None:
    settings = load(here=named("of-here"), environ={"KVASIR_CODE_MODEL": ""}, code_model=None)
    assert settings.grading.code_model == "of-here"


def test_local_switches_a_configured_cluster_off(load: Load) -> None:
    settings = load(here='[services]\nbroker = "amqp://u:pw@host"\n', broker="local")
    assert settings.broker_url_with_secret() == ""
    assert settings.origin("services.broker") == "--broker"


def test_a_report_notice_comes_from_the_file_and_has_no_variable(load: Load) -> None:
    settings = load(here='[grading]\nnotice = "Made-up grades"\n', environ={"KVASIR_NOTICE": "x"})
    assert settings.grading.notice == "Made-up grades"


def test_nested_flags_configure_a_model_without_a_file(load: Load, tmp_path: Path) -> None:
    settings = load(models={"m": {"engine": None, "weights": {"llamacpp": "m.gguf"}}}, code_model="m")
    assert settings.code_model().weights_for() == ("llamacpp", str(tmp_path / "cwd" / "m.gguf"))
    assert settings.origin("models.m.weights.llamacpp") == "--weights"


# Models


def test_weights_are_relative_to_their_file_unless_absolute_or_with_a_scheme(load: Load, tmp_path: Path) -> None:
    text = """[models.m]
    weights = { llamacpp = "w/m.gguf", mlx = "/abs/m", ollama = "http://h:11434", transformers = "~/m" }
    [models."s:1"]
    weights.simulated = "sim:fast"
    weights.ollama = "the answer is 42"
    """
    settings = load(config=text)
    weights = settings.model("m").weights
    assert weights["llamacpp"] == str(tmp_path / "w" / "m.gguf")
    assert (weights["mlx"], weights["ollama"]) == ("/abs/m", "http://h:11434")
    assert weights["transformers"] == str(Path.home() / "m")
    assert settings.model("s:1").weights_for("simulated") == ("simulated", "sim:fast")
    assert settings.model("s:1").weights["ollama"] == "the answer is 42"  # its engine takes no paths


def test_a_hub_name_is_left_alone_where_nothing_lies_at_that_path(load: Load, tmp_path: Path) -> None:
    (tmp_path / "org" / "here").mkdir(parents=True)
    weights = {"mlx": "org/name", "transformers": "org/name?dtype=f32", "vllm": "org/here", "llamacpp": "org/name"}
    lines = "".join(f'{engine} = "{place}"\n' for engine, place in weights.items())
    model = load(config=f"[models.m.weights]\n{lines}").model("m")
    folder = tmp_path / "org"
    assert dict(model.weights) == weights | {"vllm": str(folder / "here"), "llamacpp": str(folder / "name")}
    elsewhere = load(config='[models.m]\nweights.mlx = "./org/name"\n').model("m")
    assert elsewhere.weights["mlx"] == str(folder / "name")


@pytest.mark.parametrize(
    "address", ["http://[x]:8000/v1/m", "http://[::1/v1/m", "https://h:many/v1/m", "http://h:70000"]
)
def test_an_address_of_weights_that_can_not_be_read_is_refused_wherever_it_stands(load: Load, address: str) -> None:
    with pytest.raises(ConfigError, match=r"weights\.openai must be an address whose host and port can be read"):
        load(config=f'[models.m]\nweights.openai = "{address}"\n')
    for engine in engine_names():
        with pytest.raises(ConfigError):  # where it may need a package that isn't here, too
            open_engine(engine, EngineOptions(address))


def test_a_model_inherits_sampling_from_grading_unless_it_has_its_own(load: Load) -> None:
    text = "[grading]\ntemperature = 0.5\ntop_p = 1\n[models.m]\ntemperature = 0\n"
    settings = load(here=text)
    assert (settings.model("m").temperature, settings.model("m").top_p) == (0.0, 1.0)
    assert settings.origin("models.m.top_p").endswith("line 3")


def test_a_nearer_grading_value_beats_a_models_own(load: Load) -> None:
    settings = load(here="[models.m]\ntemperature = 0\n", environ={"KVASIR_TEMPERATURE": "0.7"})
    assert settings.model("m").temperature == 0.7
    assert settings.origin("models.m.temperature") == "KVASIR_TEMPERATURE"


def test_an_unconfigured_model_is_refused_with_the_nearest_one(load: Load) -> None:
    settings = load(here='[models."qwen3-coder:30b"]\n')
    with pytest.raises(ConfigError, match="did you mean 'qwen3-coder:30b'"):
        settings.model("qwen3-code:30b")
    with pytest.raises(ConfigError, match="not configured; add a table"):
        load_settings(environ={}, cwd=Path("/"), user_dir=Path("/nowhere")).model("m")


def test_a_grading_model_must_be_named_and_configured(load: Load) -> None:
    settings = load(here=named("m-typo") + "[models.m-type]\n")
    with pytest.raises(ConfigError, match=r"kvasir.toml line 2: .*did you mean 'm-type'"):
        settings.code_model()
    with pytest.raises(ConfigError, match="pass --feedback-model"):
        settings.feedback_model()


def test_weights_for_asks_for_an_engine_where_it_is_not_settled(load: Load) -> None:
    model = load(here='[models.m]\nweights = { mlx = "a", llamacpp = "b" }\n').model("m")
    with pytest.raises(ConfigError, match="llamacpp, mlx; set engine"):
        model.weights_for()
    with pytest.raises(ConfigError, match="no weights for ollama"):
        model.weights_for("ollama")


# Refusals

REFUSED = [
    (
        "[grading]\ncode_modle = 'm'\n",
        "line 2: grading.code_modle is no setting of Kvasir; did you mean 'code_model'",
    ),
    ("[servces]\n", "line 1: servces is no setting.*did you mean 'services'"),
    ("\n[models.m]\ncontxt = 1\n", "line 3: models.m.contxt .*'context'"),
    ("[models.m]\nweights.llamacp = 'x'\n", "line 2: .*did you mean 'llamacpp'"),
    ("[models.m]\ncontext = '4k'\n", "line 2: models.m.context must be a whole number"),
    ("[models.m]\ncontext = true\n", "line 2: models.m.context must be a whole number"),
    ("[models.m]\nsame_weights = ['mlx', 'mxl']\n", "same_weights must be one of"),
    ("[models.m]\nsame_weights = 'mlx'\n", "must be a list of engines"),
    ("[models.'a b']\n", "line 1: the name in models must be a model name"),
    ("[models]\nm = 5\n", "line 2: models.m must be a table, not int"),
    ("grading = 5\n", "line 1: grading must be a table"),
    ('[models.m]\nweights = "m.gguf"\n', "m.weights must be a table such as { llamacpp = 'FILE.gguf' }, not str"),
    ("[grading]\ncode_model = 'a b'\n", "must be a model name"),
    ("[grading]\ntemperature = nan\n", "temperature must be a number"),
    ("[services]\nbroker = 'http://host:15672'\n", r"line 2: services.broker must be amqp://… or amqps://… .*another"),
    ("[services]\nbroker = 'host'\n", "no protocol"),
    ("[services]\nbroker = 'amqp://'\n", "no host"),
    ("[services]\nbroker = 'amqp://a:5672,:5673/'\n", "no host"),
    ("[services]\nbroker = 'amqp://u@a:5672,b:x/'\n", "host or port can't be read"),
    ("[machines.a]\nstore_hosts = 'fast; slow'\n", "must be hosts with commas"),
    ("[services]\nbroker = 'amqp://host:0'\n", "port 0"),
    ("[services]\nstore = 'unix://'\n", "names no socket"),
    ("[services]\nstore = 'redis://host/abc'\n", "its database, after the '/', must be a number"),
    ("[services]\nbroker_password = 'pw'\n", "did you mean 'broker_password_file'"),
    ("[machines.a]\nplatform = 'mac'\n", "line 2: machines.a.platform must be one of"),
    ("[machines.a]\nhost = '-oProxyCommand=x'\n", "must be a host name"),
    ("[machines.a]\nroles = [{ role = 'prefil' }]\n", "roles, entry 1.* must be one of"),
    ("[machines.a]\nroles = [{ role = 'decode', modl = 'm' }]\n", "'modl' is no setting of a role; did you mean"),
    ("[machines.a]\nroles = [{ role = 'decode', model = 'm' }]\n", "a decode worker needs 'engine'"),
    ("[models.m]\n[machines.a]\nroles = [{ role = 'decode', model = 'n', engine = 'mlx' }]\n", "line 3: model 'n' is"),
    ("[machines.a]\nrates.m.prefil = 5\n", "did you mean 'prefill'"),
    ("[models.m]\nname = 'n'\n", "line 2: models.m.name is no setting"),
    ("[services]\nbroker_secret = 'pw'\n", "line 2: services.broker_secret is no setting"),
    ("[machines.a]\nroles = [{ model = 'm' }]\n", "line 2: .*roles, entry 1, role must be one of app"),
    ("[machines.a]\nroles = [{ role = 'store' }, 5]\n", "roles, entry 2 must be a table"),
    (f"[grading]\nnotice = 0x{'f' * 5000}\n", "notice must not be a number with thousands of digits"),
    ("[grading\n", r"is not valid TOML: .*line 1"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_a_mistake_in_a_file_is_refused_with_file_line_and_key(load: Load, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(here=text)
    assert "kvasir.toml" in str(caught.value)


def test_help_waits_for_no_checks_of_settings_and_no_templates() -> None:
    load_all = "import sys, kvasir.cli; list(kvasir.cli.kvasir.commands.values())"
    tell = f"{load_all}; print({{'pydantic', 'jinja2'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_mistake_in_a_variable_or_flag_names_it(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"KVASIR_TEMPERATURE: .*must be a number, not 'hot'"):
        load(environ={"KVASIR_TEMPERATURE": "hot"})
    with pytest.raises(ConfigError, match=r"--top-p: .*must be from 0 to 1"):
        load(top_p=2)
    with pytest.raises(ConfigError, match="--brokr: brokr is no setting"):
        load(brokr="x")


def test_a_variable_that_resembles_ours_is_a_typo_and_any_other_is_not_ours(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"KVASIR_BROKR_URL: .*did you mean KVASIR_BROKER_URL"):
        load(environ={"KVASIR_BROKR_URL": "amqp://h"})
    load(environ={"KVASIR_TEST_BROKER_URL": "x", "KVASIR_BROKER_PORT": "x", "KVASIR_HOME": "x"})


def test_a_missing_or_unreadable_file_is_refused_by_name(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: there is no file .*nowhere.toml"):
        load_settings(config=tmp_path / "nowhere.toml", environ={})
    with pytest.raises(ConfigError, match="KVASIR_CONFIG: there is no file"):
        load(environ={"KVASIR_CONFIG": "nowhere.toml"})
    (tmp_path / "latin1.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin1.toml is not UTF-8"):
        load_settings(config=tmp_path / "latin1.toml", environ={})


# Passwords

SECRET = "hunter2"


def assert_hidden(settings: Settings) -> None:
    shown = repr(settings) + str(describe(settings)) + str(dataclasses.asdict(settings.services))
    assert SECRET not in shown
    assert "***" in shown


def test_a_password_in_a_url_works_and_is_never_shown(load: Load) -> None:
    settings = load(
        here=f'[services]\nbroker = "amqp://u:{SECRET}@host:5672/v"\nstore = "unix://:{SECRET}@/run/r.sock"\n'
    )
    assert settings.broker_url_with_secret() == f"amqp://u:{SECRET}@host:5672/v"
    assert settings.store_url_with_secret() == f"unix://:{SECRET}@/run/r.sock"
    assert settings.services.broker == "amqp://u@host:5672/v"
    assert_hidden(settings)
    rows = {name: (value, origin) for name, value, origin in describe(settings)}
    assert rows["services.broker"][0] == "amqp://u:***@host:5672/v"
    assert rows["services.broker_password"][0] == "***"


def test_a_password_file_is_read_when_needed_relative_to_its_toml(load: Load, tmp_path: Path) -> None:
    text = '[services]\nbroker = "amqp://u@host"\nbroker_password_file = "pw"\n'
    settings = load(config=text)  # the file need not exist to load
    with pytest.raises(ConfigError, match=r"chosen.toml line 3: can't read the password file .*No such file"):
        settings.broker_url_with_secret()
    (tmp_path / "pw").write_text("a/b@c\n")
    assert settings.broker_url_with_secret() == "amqp://u:a%2Fb%40c@host"
    (tmp_path / "pw").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        settings.broker_url_with_secret()


def test_a_path_may_be_the_files_own_folder(load: Load, tmp_path: Path) -> None:
    settings = load(config='[models.m]\nweights.transformers = "."\n[services]\nbroker_password_file = "."\n')
    assert settings.models["m"].weights == {"transformers": str(tmp_path)}
    assert settings.services.broker_secret is None or settings.services.broker_secret.file == tmp_path


def test_the_nearest_password_wins(load: Load, tmp_path: Path) -> None:
    (tmp_path / "cwd" / "pw").write_text("of-file")
    text = '[services]\nbroker = "amqp://u:of-url@host"\nbroker_password_file = "pw"\n'
    environ = {"KVASIR_BROKER_PASSWORD": SECRET, "KVASIR_BROKER_URL": "amqp://u:of-variable@host"}
    assert load(here=text).broker_url_with_secret() == "amqp://u:of-file@host"
    del environ["KVASIR_BROKER_PASSWORD"]
    assert load(here=text, environ=environ).broker_url_with_secret() == "amqp://u:of-variable@host"
    environ["KVASIR_BROKER_PASSWORD"] = SECRET
    settings = load(here=text, environ=environ)
    assert settings.broker_url_with_secret() == f"amqp://u:{SECRET}@host"
    assert settings.origin("services.broker_password") == "KVASIR_BROKER_PASSWORD"
    assert_hidden(settings)


def test_redis_takes_a_password_without_a_user_and_amqp_does_not(load: Load) -> None:
    environ = {"KVASIR_BROKER_PASSWORD": SECRET, "KVASIR_STORE_PASSWORD": SECRET}
    settings = load(environ=environ, broker="amqp://host", store="redis://host:6379/0")
    assert settings.store_url_with_secret() == f"redis://:{SECRET}@host:6379/0"
    with pytest.raises(ConfigError, match="names no user") as caught:
        settings.broker_url_with_secret()
    assert SECRET not in str(caught.value)


def test_a_password_on_the_command_line_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"--broker: .*KVASIR_BROKER_PASSWORD") as caught:
        load(broker=f"amqp://u:{SECRET}@host")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"amqp://u:{SECRET}/x@host",  # unescaped: urlsplit takes it for a port, and would quote it
        f"amqp://u:{SECRET}@host:port",
        f"http://u:{SECRET}@host",
        f"amqp://u:x@{SECRET}#@ho st",
        f"redis://host?password={SECRET}",
    ],
)
def test_no_error_shows_the_password_of_a_bad_url(load: Load, url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ={"KVASIR_BROKER_URL": url})
    assert "hunter" not in f"{caught.value!r} {caught.value.__cause__!r}"
    assert caught.value.__suppress_context__


def test_mask_leaves_a_url_without_password_alone() -> None:
    for url in ("amqp://u@host:5672/v", "redis://host:6379/0?db=1", "unix:///run/redis.sock", "local", ""):
        assert mask(url) == url


# Machines, and the shipped example


def test_the_example_describes_the_teams_four_machines() -> None:
    settings = load_settings(config=EXAMPLE, environ={}, cwd=Path("/"), user_dir=Path("/nowhere"))
    assert settings.code_model().name == "qwen3-coder:30b"
    assert settings.feedback_model().weights_for()[1] == str(EXAMPLE.parent / "models/gpt-oss-120b-mxfp4.gguf")
    work = {name: [(r.role, r.model) for r in m.roles if r.model] for name, m in settings.machines.items()}
    assert work == {
        "spark1": [("worker", "gpt-oss:120b"), ("prefill", "qwen3-coder:30b")],
        "spark2": [("worker", "gpt-oss:120b"), ("prefill", "qwen3-coder:30b")],
        "mac1": [("decode", "gpt-oss:120b")],
        "mac2": [("decode", "qwen3-coder:30b")],
    }
    mac1 = settings.machines["mac1"]
    assert mac1.memory_gb == 512
    assert next(role for role in mac1.roles if role.role == "store").memory_gb == 128
    assert settings.machines["mac2"].rates["qwen3-coder:30b"].decode == 65


def test_describe_lists_every_value_with_its_origin() -> None:
    settings = load_settings(config=EXAMPLE, environ={}, cwd=Path("/"), user_dir=Path("/nowhere"))
    rows = {name: (value, origin) for name, value, origin in describe(settings)}
    assert rows["services.broker"][0] == "amqp://kvasir:***@169.254.150.101:5672/"
    roles = "worker gpt-oss:120b by llamacpp, prefill qwen3-coder:30b by llamacpp"
    assert rows["machines.spark1.roles"][0] == roles
    assert rows["models.qwen3-coder:30b.threads"] == ("(the engine's choice)", "default")
    assert rows["machines.spark1.rates.qwen3-coder:30b.decode"] == ("(not known)", "default")
    assert rows["models.gpt-oss:120b.slots"][0] == "4"
    line = int(rows["machines.mac2.rates.qwen3-coder:30b.decode"][1].rsplit(" ", 1)[1])
    assert EXAMPLE.read_text().split("\n")[line - 1] == 'rates."qwen3-coder:30b".decode = 65'


def test_the_users_folder_follows_xdg_and_needs_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_config_dir({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/kvasir")
    assert user_config_dir({}) is None
    monkeypatch.setattr("sys.platform", "linux")
    assert user_config_dir({"XDG_CONFIG_HOME": "relative", "HOME": "/h"}) == Path("/h/.config/kvasir")
    monkeypatch.setattr("sys.platform", "darwin")
    assert user_config_dir({"HOME": "/h"}) == Path("/h/Library/Application Support/kvasir")


# Certificates


def test_a_ca_file_belongs_to_a_url_with_tls_and_is_found_from_its_source(load: Load, tmp_path: Path) -> None:
    assert {name: value for name, value, _ in describe(load())}["services.store_ca_file"] == "(the system's)"
    ca_file = tmp_path / "cwd" / "my ca.pem"
    ca_file.write_text("a certificate")
    services = '[services]\nbroker = "amqps://u@host"\nstore = "rediss://host/0?db=1"\n'
    settings = load(here=services + 'broker_ca_file = "my ca.pem"\nstore_ca_file = "my ca.pem"\n')

    assert settings.broker_ca_file() == str(ca_file)
    assert settings.store_url_with_secret().startswith("rediss://host/0?db=1&ssl_ca_certs=")
    assert settings.store_url_with_secret().endswith("/my%20ca.pem")
    rows = {name: value for name, value, _ in describe(settings)}
    assert rows["services.broker_ca_file"] == str(ca_file)


def test_a_ca_file_that_is_of_no_use_is_named(load: Load) -> None:
    missing = load(here='[services]\nbroker = "amqps://u@host"\nbroker_ca_file = "none.pem"\n')
    with pytest.raises(ConfigError, match=r"kvasir.toml line 3: can't read the CA file .*none\.pem"):
        missing.broker_ca_file()
    plain = load(here='[services]\nstore = "redis://host"\nstore_ca_file = "none.pem"\n')
    with pytest.raises(ConfigError, match="the store's URL does not begin with rediss://"):
        plain.store_url_with_secret()


def test_several_hosts_of_a_service_share_everything_else() -> None:
    url = "amqps://u:a,b@fast:5671,[::1]:5672,slow/v?heartbeat=5"
    assert urls.addresses(url) == [
        f"amqps://u:a,b@{host}/v?heartbeat=5" for host in ("fast:5671", "[::1]:5672", "slow")
    ]
    assert urls.take_password(url) == ("amqps://u@fast:5671,[::1]:5672,slow/v?heartbeat=5", "a,b")
    assert put_hosts(url, "other:1") == "amqps://u:a,b@other:1/v?heartbeat=5"
    assert urls.addresses("unix:///run/a,b.sock") == ["unix:///run/a,b.sock"]
