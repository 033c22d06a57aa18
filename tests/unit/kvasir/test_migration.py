"""docs/how-to/migration.md: each feature of the earlier system has a row that names what is there today, or why not."""

import re
from pathlib import Path

import pytest

from kvasir.cli import kvasir
from monitoring.dashboards.panels import PANELS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/how-to/migration.md"
TEXT = PAGE.read_text("utf-8")
FEATURES = TEXT.partition("## Feature by feature")[2]
ROWS = [
    cells
    for line in FEATURES.splitlines()
    if line.startswith("| ") and len(cells := [cell.strip() for cell in line.strip("|").split(" | ")]) == 2 and cells[1]
][1:]  # without the heading
_LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
DECLINED = "*declined, because* "
SETTINGS = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/reference/configuration.md").read_text("utf-8"), re.MULTILINE))

# What the earlier documents name: their files, their calls, and what they promise.
EARLIER = """
model_config.py MODEL_SETTINGS config_current.json deploy_to_machines.sh start_dgx_servers.sh start_mac_servers.sh
stop_all_servers.sh prefill_server_dgx.py decode_server_mac.py prefill_server_ollama.py decode_server_ollama.py
qwen_server.py /api/tags context base64 prefix streaming vLLM TensorRT tensor FP4 FP8 Q8 encoder-decoder images warm-up
tokenizers leaks /prefill /decode REST /v1/completions /health /status ConnectX-7 RDMA Thunderbolt failover degradation
timeouts retry balancing check_status.py test_system.py monitor_logs.sh monitor_dashboard.py model_status_display.py p95
GPU CPU power cost uptime error parallel DisaggregatedClient DisaggregatedInference generate_with_ollama
unified_model_interface.py translation connect_web_interface.py Streamlit PDF gradebook rubric_elements corrections
pooling pipeline benchmarks batch QUICKSTART
"""


@pytest.mark.parametrize(("feature", "today"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_a_row_names_what_is_there_or_why_it_is_not(feature: str, today: str) -> None:
    assert today.startswith(DECLINED) or any(_found(today)), f"{feature}: {today}"


@pytest.mark.parametrize("name", EARLIER.split())
def test_what_the_earlier_documents_name_has_a_row(name: str) -> None:
    assert any(name in feature for feature, _today in ROWS), name


@pytest.mark.parametrize("written", sorted(set(re.findall(r"`kvasir( [^`]*)`", TEXT))))
def test_a_command_exists_with_its_options(written: str) -> None:
    words = written.split()
    command = kvasir.commands.get(words[0])
    assert command is not None, f"kvasir{written}"
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options
    choices = {choice for parameter in command.params for choice in getattr(parameter.type, "choices", ())}
    assert words[0] != "deploy" or {word for word in words[1:] if not word.startswith("--")} <= choices


@pytest.mark.parametrize("link", sorted(set(re.findall(_LINK, TEXT))))
def test_a_page_that_is_named_exists(link: str) -> None:
    assert (PAGE.parent / link).exists()


def test_a_panel_that_is_named_exists() -> None:
    quoted = set(re.findall(r'panels? "([^"]+)"(?: and "([^"]+)")?', TEXT))
    titles = {title for pair in quoted for title in pair if title}
    assert titles
    assert titles <= {panel.title for panel in PANELS}


def _found(today: str) -> list[str]:
    """For each thing that a cell names: a command, a page, a module, a setting."""
    words = re.findall(r"`([^`]+)`", today)
    modules = [word for word in words if re.fullmatch(r"(kvasir|benchmarks)\.(?!toml)\w+", word)]
    places = [ROOT / module.replace(".", "/") for module in modules]
    assert all(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places), modules
    return [word for word in words if word.startswith("kvasir ") or word in SETTINGS] + modules + _LINK.findall(today)
