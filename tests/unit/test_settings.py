"""A configuration is read completely, and one that cannot be used says in one line what to mend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from batch_pipeline import settings as configuration
from batch_pipeline.errors import SettingsError
from batch_pipeline.models import ENDPOINTS, Kubernetes, Model, Prices, Shared
from batch_pipeline.settings import Settings, load

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "batch-pipeline.example.toml"
DEMO = REPOSITORY / "batch-pipeline.toml"
GOOD_MODEL = '[models.m]\nsource = "weights"\ncontext_length = 10\n'


def write(folder: Path, text: str) -> Path:
    file = folder / "batch-pipeline.toml"
    file.write_text(text, encoding="utf-8")
    return file


def sections() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    for field in msgspec.structs.fields(Settings):
        if field.name != "models":
            yield field.name, field.type
    yield "models", Model
    yield "prices", Prices
    yield "shared", Shared
    yield "kubernetes", Kubernetes


def section_of_example(name: str) -> str:
    """Return the lines of a table of the example; `models` and the tables inside of it are those of its model."""
    inner = ("prices", "shared", "kubernetes")
    headers = {"models": r'\[models\."[^"]+"\]', **{n: rf'\[models\."[^"]+"\.{n}\]' for n in inner}}
    header = headers.get(name, rf"\[{name}\]")
    found = re.search(rf"^{header}.*?(?=^\[|\Z)", EXAMPLE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found.group()


@pytest.mark.parametrize(("name", "section"), list(sections()))
def test_example_shows_every_field_and_no_other(name: str, section: type[msgspec.Struct]) -> None:
    shown = re.findall(r"^(?:# )?([a-z0-9_]+) = ", section_of_example(name), re.MULTILINE)
    tables = {"prices", "shared", "kubernetes"} if section is Model else set()
    assert sorted(shown) == sorted({field.name for field in msgspec.structs.fields(section)} - tables)


def test_example_says_the_defaults(tmp_path: Path) -> None:
    example = load(EXAMPLE, environment={})
    nothing = load(write(tmp_path, ""), environment={})
    [model] = example.models.values()
    assert model == Model(source=model.source, context_length=model.context_length)
    elsewhere = msgspec.json.encode(msgspec.structs.replace(example, models={})).decode()
    assert elsewhere.replace(str(REPOSITORY), str(tmp_path)) == msgspec.json.encode(nothing).decode()


def test_example_with_its_optional_fields_switched_on_is_valid(tmp_path: Path) -> None:
    text = re.sub(r"^# ([a-z0-9_]+ = )", r"\1", EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    settings = load(write(tmp_path, text), environment={})
    assert (settings.store.access_key_id, settings.store.secret_access_key) == ("...", "...")
    assert [model.engine_url for model in settings.models.values()] == ["http://127.0.0.1:8000"]


def test_demo_configuration_runs_the_small_model_on_the_embedded_store() -> None:
    settings = load(DEMO, environment={})
    assert settings.store.endpoint_url == f"http://127.0.0.1:{settings.embedded.s3_port}"
    assert settings.store.access_key_id
    model = settings.models["smollm2-135m"]
    assert model.source == str(REPOSITORY / "var" / "models" / "smollm2-135m")
    assert model.context_length == 2048
    assert str(model.prices.cost(1_000_000, 1_000_000)) == "0.03"


def test_relative_paths_are_relative_to_the_file_and_absolute_ones_stay(tmp_path: Path) -> None:
    relative = load(write(tmp_path, GOOD_MODEL), environment={})
    assert relative.ledger.url == f"sqlite:///{tmp_path}/var/ledger.sqlite"
    assert relative.embedded.data_dir == str(tmp_path / "var")
    assert relative.intake.scratch_dir == str(tmp_path / "var" / "scratch")
    assert relative.models["m"].source == str(tmp_path / "weights")
    absolute = load(
        write(tmp_path, '[ledger]\nurl = "sqlite:////data/l"\n[embedded]\ndata_dir = "/data"'), environment={}
    )
    assert absolute.ledger.url == "sqlite:////data/l"
    assert absolute.embedded.data_dir == "/data"
    elsewhere = load(write(tmp_path, '[ledger]\nurl = "postgresql+psycopg://u@h/d"'), environment={})
    assert elsewhere.ledger.url == "postgresql+psycopg://u@h/d"


def test_empty_endpoint_is_aws_itself(tmp_path: Path) -> None:
    assert load(write(tmp_path, '[store]\nendpoint_url = ""'), environment={}).store.endpoint_url is None


def test_file_is_found_by_variable_by_default_name_or_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named.toml"
    named.write_text('[store]\nbucket = "named"', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load(environment={}).store.bucket == "batch-pipeline"
    write(tmp_path, '[store]\nbucket = "found"')
    assert load(environment={}).store.bucket == "found"
    assert load(environment={configuration.CONFIG_VARIABLE: str(named)}).store.bucket == "named"


def test_variables_override_fields_of_every_type(tmp_path: Path) -> None:
    settings = load(
        write(tmp_path, GOOD_MODEL + '[store]\nbucket = "from-file"'),
        environment={
            "BATCH_PIPELINE__STORE__BUCKET": "results",
            "BATCH_PIPELINE__WORKER__LEASES": "8",
            "BATCH_PIPELINE__WORKER__LEASE_SECONDS": "90.5",
            "BATCH_PIPELINE__MODELS__M__ENGINE_ARGUMENTS": '["--dtype", "float32"]',
            "BATCH_PIPELINE__MODELS__M__ENGINE_ENVIRONMENT": '{A = "1"}',
            "PATH": "/bin",
        },
    )
    assert settings.store.bucket == "results"
    assert (settings.worker.leases, settings.worker.lease_seconds) == (8, 90.5)
    assert settings.models["m"].engine_arguments == ["--dtype", "float32"]
    assert settings.models["m"].engine_environment == {"A": "1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[store", r"not valid TOML: .*at end of document"),
        ("[store]\nbuckets = 1", r"store\.buckets: no such field; is bucket meant\?"),
        ("[stores]\n", r"stores: no such field; is store meant\?"),
        ("[store]\nbucket = 1", r"Expected `str`, got `int`.*\$\.store\.bucket"),
        ("store = 1", r"Expected `object`, got `int`.*\$\.store"),
        ('[worker]\nleases = "many"', r"Expected `int`, got `str`.*\$\.worker\.leases"),
        ("[worker]\nleases = 2.5", r"Expected `int`, got `float`.*\$\.worker\.leases"),
        ("[worker]\nleases = 0", r"worker\.leases must be above 0, not 0"),
        ("[intake]\nchunk_requests = -1", r"intake\.chunk_requests must be above 0, not -1"),
        ("[worker]\nheartbeat_seconds = 40.0", r"heartbeat_seconds must be at most half of worker\.lease_seconds"),
        ("[models.m]\ncontext_length = 10", r"missing required field `source`.*\$\.models"),
        ('[models.m]\nsource = "w"', r"missing required field `context_length`.*\$\.models"),
        (GOOD_MODEL.replace("10", "0"), r"models\.m\.context_length must be at least 1"),
        (GOOD_MODEL.replace("models.m", 'models."my model"'), r"models\.my model: a model's name has 1 to 64 letters"),
        (GOOD_MODEL + "pool_limit = 0", r"models\.m\.pool_limit must be at least 1"),
        (GOOD_MODEL + "max_in_flight = 0", r"models\.m\.max_in_flight must be at least 1"),
        (GOOD_MODEL + "endpoints = []", r"models\.m\.endpoints is empty: name at least one of /v1/chat/completions"),
        (
            GOOD_MODEL + 'endpoints = ["/v1/images"]',
            r"models\.m\.endpoints: '/v1/images' is not one of " + ENDPOINTS[0],
        ),
        (GOOD_MODEL + 'engine_url = "localhost:8000"', r"models\.m\.engine_url must start with http:// or https://"),
        (GOOD_MODEL + "prices = {batch_discount = 50}", r"models\.m\.prices\.batch_discount must be between 0 and 1"),
        (GOOD_MODEL + "prices = {input_per_million = -1}", r"models\.m\.prices\.input_per_million must be 0 or more"),
        (GOOD_MODEL + "prices = {output_per_million = nan}", r"models\.m\.prices\.output_per_million must be 0 or"),
        (GOOD_MODEL + "shared = {live_traffic = true}", r"shared\.live_traffic needs the model's engine_url"),
        (GOOD_MODEL + "shared = {kv_cache_mark = 80}", r"shared\.kv_cache_mark must be above 0 and at most 1"),
        (GOOD_MODEL + "shared = {probe_seconds = 0}", r"models\.m\.shared\.probe_seconds must be above 0, not 0"),
        (GOOD_MODEL + "shared = {least_in_flight = 65}", r"least_in_flight must be from 1 to the model's"),
        ("[worker]\nlease_seconds = nan", r"worker\.lease_seconds must be above 0, not nan"),
        ('[store]\nendpoint_url = "s3.example.com"', r"store\.endpoint_url must be http:// or https://"),
        ('[store]\nendpoint_url = "http://object_store:8333"', r"store\.endpoint_url must be .*without _"),
        (
            GOOD_MODEL.replace("models.m", 'models."m.1"') + GOOD_MODEL.replace("models.m", "models.m-1"),
            r"models: 'm\.1' and 'm-1' would share the Dagster job gpu_worker_m_1: rename one",
        ),
        ("[worker]\nlease_seconds = inf", r"worker\.lease_seconds must be above 0, not inf"),
        ("[embedded]\ndagster_port = 0", r"embedded\.dagster_port must be above 0"),
        ("[embedded]\ndagster_port = 99999", r"embedded\.dagster_port must be from 1 to 65535, not 99999"),
        ("[embedded]\ns3_port = 60000", r"embedded\.s3_port must be from 1 to 55535"),
        ('[embedded]\ndata_dir = ""', r"embedded\.data_dir is empty"),
        ("[api]\nport = 70000", r"api\.port must be from 1 to 65535"),
        ('[api]\nhost = ""', r"api\.host is empty"),
        ('[store]\nbucket = ""', r"store\.bucket: a bucket's name has 3 to 63"),
        ('[store]\nbucket = "Bad_Bucket/.."', r"store\.bucket: a bucket's name has 3 to 63"),
        ('[store]\nendpoint_url = "http://127.0.0.1:99999"', r"store\.endpoint_url must be"),
        ('[ledger]\nurl = "mysql://x/y"', r"ledger\.url must be sqlite:///FILE or postgresql"),
        ('[ledger]\nurl = "sqlite://"', r"ledger\.url must be sqlite:///FILE or postgresql"),
        (
            "[intake]\ndefault_window_seconds = 5",
            r"intake\.default_window_seconds must lie between .* 5 is not between",
        ),
        ("[intake]\nmin_window_seconds = 700000", r"intake\.default_window_seconds must lie between"),
        (GOOD_MODEL + "price = {}", r"models\..*\.price: no such field; is prices meant\?"),
    ],
)
def test_wrong_file_is_one_line_that_names_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SettingsError, match=message) as raised:
        load(file, environment={})
    assert str(raised.value).startswith(f"{file}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("BATCH_PIPELINE__WORKER__LEASES", "many", r"\$\.worker\.leases"),
        ("BATCH_PIPELINE__WORKER__LEASE", "3", r"worker\.lease: no such field; is leases meant\?"),
        ("BATCH_PIPELINE__WORKER", "3", r"\$\.worker"),
        ("BATCH_PIPELINE__STORE__BUCKET__NAME", "x", r"bucket is not a table"),
        ("BATCH_PIPELINE__MODELS__M__ENGINE_ARGUMENTS", "[--dtype]", r"not a TOML value"),
        ("BATCH_PIPELINE__WORKER__LEASES", "0", r"worker\.leases must be above 0"),
    ],
)
def test_wrong_variable_is_named(tmp_path: Path, variable: str, value: str, message: str) -> None:
    file = write(tmp_path, GOOD_MODEL + '[store]\nbucket = "b"')
    with pytest.raises(SettingsError, match=message) as raised:
        load(file, environment={variable: value})
    assert variable in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_file_is_named_where_it_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml: no such file"):
        load(tmp_path / "absent.toml", environment={})
    with pytest.raises(SettingsError, match=r"absent\.toml: no such file; set BATCH_PIPELINE_CONFIG"):
        load(environment={configuration.CONFIG_VARIABLE: str(tmp_path / "absent.toml")})


def test_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "batch-pipeline.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=r"batch-pipeline\.toml: not valid TOML"):
        load(file, environment={})
