"""CONTRIBUTING's "Add an engine", done from a folder of somebody else's: no file of Kvasir is touched."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from messages import installed
from tests.support.homework import RUBRIC
from tests.support.processes import ROOT, SIMULATED_MODEL, Cluster, environment, run

ANSWER = "The answer is 42."
ENTRY = """
from engines.base import Capabilities
from engines.entry import EngineEntry, EngineOptions


class CannedEntry(EngineEntry):
    def check(self, options: EngineOptions) -> tuple[str, str]:
        return f"says {options.weights!r}", ""


ENGINE = CannedEntry(
    name="canned",
    module="kvasir_canned.engine",
    capabilities=Capabilities.text_only(),
    weights="TEXT",
    weights_type="text",
    weights_text="What it answers",
    note="says the same each time",
)
"""
ENGINE = """
import json
import random

from engines.base import Answer, EngineInfo, TokenizedPrompt
from engines.entry import EngineOptions
from engines.simulated.schema_text import json_text
from kvasir_canned.entry import ENGINE


def open_engine(options: EngineOptions) -> "Canned":
    return Canned(options)


class Canned:
    def __init__(self, options: EngineOptions) -> None:
        self._text = options.weights
        context = options.context or 32768
        self.info = EngineInfo("canned", "cpu", context, options.slots, "", "", None, ENGINE.capabilities)

    def tokenize(self, prompt, clock):
        return TokenizedPrompt((), 0)

    def count_tokens(self, text):
        return len(text) // 4

    def decode_text(self, prompt, sampling, on_text=None, stop=None):
        schema = sampling.json_schema
        text = json_text(json.loads(schema), random.Random(0)) if schema else self._text
        return Answer(text, (), 5, "stop", 1, 0.0, 0.0)

    def close(self):
        pass
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Where pip would have put the wheel."""
    files = {
        "kvasir_canned/__init__.py": "",
        "kvasir_canned/entry.py": ENTRY,
        "kvasir_canned/engine.py": ENGINE,
        "kvasir_canned-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: kvasir-canned\nVersion: 1.2\n",
        "kvasir_canned-1.2.dist-info/entry_points.txt": "[kvasir.engines]\ncanned = kvasir_canned.entry:ENGINE\n",
    }
    for name, text in files.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return tmp_path / "site"


class ClusterWithSite(Cluster):
    """Its processes find what is installed in `site`, too."""

    site: Path

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"PYTHONPATH": f"{self.site}{os.pathsep}{ROOT}"}


def test_an_engine_in_a_wheel_of_its_own_grades_a_class(
    site: Path, tmp_path: Path, broker_url: str, store_url: str, model_name: str
) -> None:
    (tmp_path / "rubric.yaml").write_text(RUBRIC, "utf-8")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/ann.py").write_text("x = sum(range(4))\n", "utf-8")
    with ClusterWithSite(tmp_path, broker_url, store_url, {model_name: SIMULATED_MODEL}) as cluster:
        cluster.site = site
        # Given settings that name it: a text is no path
        text = cluster.config.read_text("utf-8").replace('"simulated"', '"canned"')
        cluster.config.write_text(text.replace('weights.simulated = "sim:scale=0"', f'weights.canned = "{ANSWER}"'))
        # When two workers serve with it
        cluster.worker("prefill", model_name)
        decode = cluster.worker("decode", model_name)
        # Then it answers, and grades
        asked = cluster.run("ask", "What is the answer?", "--model", model_name)
        graded = cluster.run("grade", "work", "--rubric", "rubric.yaml", "--out", "out", "--quiet")
        described, engines = cluster.run("config"), cluster.run("engines", "--json")
        assert decode.registration.engine == "canned"
        over_cluster = cluster.run("doctor", "--json")

    assert (asked.code, asked.stdout.strip()) == (0, ANSWER), asked.stderr
    assert graded.code == 0, graded.stderr
    assert json.loads((tmp_path / "out/grades.json").read_text("utf-8"))["grades"][0]["state"] == "graded"
    assert [line.split()[1:5] for line in described.stdout.splitlines() if ".weights.canned" in line] == [
        ANSWER.split()
    ], described.stdout
    (row,) = [row for row in engines.json() if row["engine"] == "canned"]
    assert (row["installed"], row["weights"], row["note"]) == (True, "TEXT", "says the same each time")
    (finding,) = [row for row in over_cluster.json() if row["subject"] == model_name]
    cause = "no KV transfer, the decoder does every prompt: the canned engine can't give out a KV cache"
    assert cause in finding["what"]
    assert finding["todo"] == "choose an engine that transfers KV: kvasir engines"


def test_doctor_and_grade_find_it_in_one_process(site: Path, tmp_path: Path) -> None:
    config = tmp_path / "kvasir.toml"
    config.write_text(f'[grading]\ncode_model = "m"\nfeedback_model = "m"\n[models.m.weights]\ncanned = "{ANSWER}"\n')
    (tmp_path / "rubric.yaml").write_text(RUBRIC, "utf-8")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/ann.py").write_text("x = sum(range(4))\n", "utf-8")
    env = environment(tmp_path) | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}

    doctor = run("doctor", "--json", env=env, cwd=tmp_path)
    graded = run("grade", "work", "--rubric", "rubric.yaml", "--quiet", env=env, cwd=tmp_path)

    (finding,) = [row for row in doctor.json() if row["subject"] == "m"]
    assert (finding["level"], finding["what"]) == ("ok", f"says {ANSWER!r}")
    assert graded.code == 0, graded.stderr
    # And a machine that runs it is sent the wheel
    code = "from messages.installed import engine_requirement; print(engine_requirement('canned'))"
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "kvasir-canned==1.2", done.stderr
    # And without the wheel the setting is no setting
    refused = run("config", env=environment(tmp_path), cwd=tmp_path)
    assert refused.code == 2
    assert "canned" in refused.stderr


def test_an_entry_that_can_not_be_imported_is_one_sentence(site: Path, tmp_path: Path) -> None:
    (site / "kvasir_canned/entry.py").write_text("import no_such_package\n", "utf-8")
    env = environment(tmp_path) | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}

    refused = run("engines", env=env, cwd=tmp_path)

    assert refused.code == 2
    assert "engine 'canned' is installed, but kvasir_canned.entry:ENGINE can't be imported" in refused.stderr


def test_a_checkout_has_the_engines_that_its_wheel_would_have() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    own = project["entry-points"][installed.GROUP]
    assert sorted(own) == sorted(path.parent.name for path in (ROOT / "engines").glob("*/entry.py"))
    assert set(own) <= set(installed.engine_names())
    assert {installed.engine_requirement(name) for name in own} == {""}
